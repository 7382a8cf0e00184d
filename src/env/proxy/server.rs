//! Routes of the proxy, and streaming of responses.

use std::convert::Infallible;
use std::sync::Arc;

use axum::body::{Body, Bytes};
use axum::extract::{DefaultBodyLimit, Path};
use axum::http::StatusCode;
use axum::http::header::{CACHE_CONTROL, CONTENT_TYPE};
use axum::response::{IntoResponse, Response};
use axum::{Router, routing};
use futures_util::stream::poll_fn;
use serde_json::Value;
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};
use tokio::sync::oneshot;

use super::protocol::{self, Chunks, ModelRequest, ModelTurn};
use super::{Event, Rollouts, Waiting};

/// Longest request, in bytes.
const LONGEST: usize = 64 << 20;
/// Error for a rollout that is not running.
const NOT_RUNNING: &str = "there is no such rollout, or it is over";

pub fn routes(rollouts: Arc<Rollouts>, model: Arc<str>) -> Router {
    let turns = |text: bool| {
        let (rollouts, model) = (rollouts.clone(), model.clone());
        routing::post(move |Path(id): Path<String>, body: Bytes| async move {
            match protocol::request(&body, text) {
                Ok(request) => answered(&rollouts, &id, &model, request).await.unwrap_or_else(over),
                Err(why) => refused(StatusCode::BAD_REQUEST, "invalid_request_error", &why),
            }
        })
    };
    let (chat, completion) = (turns(false), turns(true));
    let models = move || async move { page(StatusCode::OK, &protocol::models(&model)) };
    Router::new()
        .route("/r/{rollout}/v1/chat/completions", chat)
        .route("/r/{rollout}/v1/completions", completion)
        .route("/r/{rollout}/v1/models", routing::get(models.clone()))
        .route("/v1/models", routing::get(models))
        .layer(DefaultBodyLimit::max(LONGEST))
}

/// Channel of the model's turn.
type Reply = oneshot::Receiver<Result<ModelTurn, String>>;

/// Passes a request to its rollout and returns the model's turn, or why the rollout is over. Its
/// deadlines bound the wait.
async fn answered(rollouts: &Rollouts, id: &str, model: &str, request: ModelRequest) -> Result<Response, String> {
    let ModelRequest { text, stream, usage, .. } = request;
    let (reply, mut turn) = oneshot::channel();
    // With tools, a turn is not streamed: only its end shows whether it is text or a call.
    let (pieces, mut new_text) = unbounded_channel();
    let pieces = Some(pieces).filter(|_| stream && request.tools.is_empty());
    let rollout = rollouts.lock().get(id).cloned().ok_or(NOT_RUNNING)?;
    rollout.send(Event::Asks(Waiting { request, pieces, reply })).map_err(|_| NOT_RUNNING)?;
    if !stream {
        return Ok(page(StatusCode::OK, &protocol::page(model, text, &whole(turn.await)?)));
    }
    // An error must be a status, so the stream begins with the first text.
    let first = tokio::select! {
        biased;
        all = &mut turn => Err(whole(all)?),
        Some(first) = new_text.recv() => Ok(first),
    };
    let mut chunks = Chunks::new(model, text, usage);
    let (events, mut body) = unbounded_channel();
    send(&events, chunks.begin());
    match first {
        Err(all) => send(&events, chunks.end(&all)),
        Ok(first) => {
            send(&events, chunks.more(&first));
            drop(tokio::spawn(send_rest(turn, new_text, chunks, events)));
        }
    }
    let pieces = poll_fn(move |context| body.poll_recv(context).map(|piece| piece.map(Ok::<Bytes, Infallible>)));
    let body = Body::from_stream(pieces);
    Ok(([(CONTENT_TYPE, "text/event-stream"), (CACHE_CONTROL, "no-cache")], body).into_response())
}

/// Streams new text until the turn is complete or the client is gone. A rollout that ends breaks the
/// stream off.
async fn send_rest(mut turn: Reply, mut text: UnboundedReceiver<String>, mut chunks: Chunks, events: UnboundedSender<Bytes>) {
    loop {
        tokio::select! {
            biased;
            all = &mut turn => {
                if let Ok(Ok(all)) = all {
                    send(&events, chunks.end(&all));
                }
                return;
            }
            () = events.closed() => return,
            Some(new) = text.recv() => send(&events, chunks.more(&new)),
        }
    }
}

fn send(events: &UnboundedSender<Bytes>, text: String) {
    if !text.is_empty() {
        // `send_rest` notices a client that is gone.
        drop(events.send(text.into()));
    }
}

/// Returns the turn, or the reason why there is none.
fn whole(turn: Result<Result<ModelTurn, String>, oneshot::error::RecvError>) -> Result<ModelTurn, String> {
    turn.unwrap_or_else(|_| Err(NOT_RUNNING.to_owned()))
}

fn over(why: String) -> Response {
    refused(StatusCode::GONE, "rollout_over", &why)
}

fn page(status: StatusCode, page: &Value) -> Response {
    (status, [(CONTENT_TYPE, "application/json")], page.to_string()).into_response()
}

fn refused(status: StatusCode, kind: &str, why: &str) -> Response {
    page(status, &protocol::error(kind, why))
}
