//! The routes, and what waits behind them.

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
use tokio::sync::mpsc::{UnboundedSender, unbounded_channel};
use tokio::sync::{oneshot, watch};

use super::protocol::{self, Ask, Chunks, Form, Said};
use super::{Event, Rollouts};
use crate::data::ChatMessage;
use crate::env::ToolSpec;

/// Longest request, in bytes.
const LONGEST: usize = 64 << 20;
/// What is said to whoever asks for another rollout than those under way.
const NONE: &str = "there is no such rollout, or it is over";

pub fn routes(rollouts: Arc<Rollouts>, model: String) -> Router {
    let model: Arc<str> = model.into();
    let (chat_rollouts, chat_model) = (rollouts.clone(), model.clone());
    let chat = move |Path(id): Path<String>, body: Bytes| async move {
        let (messages, tools, form) = match protocol::chat(&body) {
            Ok(request) => request,
            Err(why) => return refused(StatusCode::BAD_REQUEST, "invalid_request_error", &why),
        };
        let asked = Asked { messages, text: false, tools, form };
        answered(&chat_rollouts, &id, &chat_model, asked).await.unwrap_or_else(|refusal| refusal)
    };
    let completion_model = model.clone();
    let completion = move |Path(id): Path<String>, body: Bytes| async move {
        let (prompt, form) = match protocol::completion(&body) {
            Ok(request) => request,
            Err(why) => return refused(StatusCode::BAD_REQUEST, "invalid_request_error", &why),
        };
        let asked = Asked { messages: vec![ChatMessage::new("user", prompt)], text: true, tools: Vec::new(), form };
        answered(&rollouts, &id, &completion_model, asked).await.unwrap_or_else(|refusal| refusal)
    };
    let models = move || async move { page(StatusCode::OK, &protocol::models(&model)) };
    Router::new()
        .route("/r/{rollout}/v1/chat/completions", routing::post(chat))
        .route("/r/{rollout}/v1/completions", routing::post(completion))
        .route("/r/{rollout}/v1/models", routing::get(models.clone()))
        .route("/v1/models", routing::get(models))
        .layer(DefaultBodyLimit::max(LONGEST))
}

/// A request, read.
struct Asked {
    messages: Vec<ChatMessage>,
    text: bool,
    tools: Vec<ToolSpec>,
    form: Form,
}

/// What the model says at last.
type Reply = oneshot::Receiver<Result<Said, String>>;

/// Hands a request to its rollout and gives what the model says. The rollout's own deadlines bound the wait.
async fn answered(rollouts: &Rollouts, id: &str, model: &str, asked: Asked) -> Result<Response, Response> {
    let Asked { messages, text, tools, form } = asked;
    let (reply, mut said) = oneshot::channel();
    // Whether a turn is words or a call is known at its end: where there are tools, nothing of it is told before.
    let (so_far, mut heard) = watch::channel(String::new());
    let so_far = Some(so_far).filter(|_| form.stream && tools.is_empty());
    let rollout = rollouts.all().get(id).cloned().ok_or_else(gone)?;
    rollout.send(Event::Asks(Ask { messages, text, tools, so_far, reply })).map_err(|_| gone())?;
    if !form.stream {
        let said = whole(said.await).map_err(over)?;
        let answer = if text { protocol::completion_page(model, &said) } else { protocol::chat_page(model, &said) };
        return Ok(page(StatusCode::OK, &answer));
    }
    // A refusal is a status: the stream begins with the first that is said.
    let all = tokio::select! {
        biased;
        all = &mut said => Some(whole(all).map_err(over)?),
        Ok(()) = heard.changed() => None,
    };
    let mut chunks = Chunks::new(model, !text, form);
    let (events, body) = unbounded_channel();
    tell(&events, chunks.begin());
    match all {
        Some(all) => tell(&events, chunks.end(&all)),
        None => drop(tokio::spawn(stream(said, heard, chunks, events))),
    }
    let mut body = body;
    let pieces = poll_fn(move |context| body.poll_recv(context).map(|piece| piece.map(Ok::<Bytes, Infallible>)));
    let body = Body::from_stream(pieces);
    Ok(([(CONTENT_TYPE, "text/event-stream"), (CACHE_CONTROL, "no-cache")], body).into_response())
}

/// Tells what is new whenever there is more, until all is said or nobody listens any more. A rollout that ends meanwhile breaks the stream off.
async fn stream(mut said: Reply, mut heard: watch::Receiver<String>, mut chunks: Chunks, events: UnboundedSender<Bytes>) {
    loop {
        let so_far = heard.borrow_and_update().clone();
        tell(&events, chunks.more(&so_far));
        tokio::select! {
            biased;
            all = &mut said => {
                if let Ok(Ok(all)) = all {
                    tell(&events, chunks.end(&all));
                }
                return;
            }
            () = events.closed() => return,
            Ok(()) = heard.changed() => {}
        }
    }
}

fn tell(events: &UnboundedSender<Bytes>, text: String) {
    if !text.is_empty() {
        // Who has stopped listening is noticed by who says it all.
        drop(events.send(text.into()));
    }
}

/// All that was said, or why nothing will be.
fn whole(said: Result<Result<Said, String>, oneshot::error::RecvError>) -> Result<Said, String> {
    said.unwrap_or_else(|_| Err(NONE.to_owned()))
}

fn over(why: String) -> Response {
    refused(StatusCode::GONE, "rollout_over", &why)
}

fn gone() -> Response {
    over(NONE.to_owned())
}

fn page(status: StatusCode, page: &Value) -> Response {
    (status, [(CONTENT_TYPE, "application/json")], page.to_string()).into_response()
}

fn refused(status: StatusCode, kind: &str, why: &str) -> Response {
    page(status, &protocol::error(kind, why))
}
