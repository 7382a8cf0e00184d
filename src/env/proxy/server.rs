//! The routes, and what waits behind them.

use std::sync::Arc;

use axum::body::Bytes;
use axum::extract::{DefaultBodyLimit, Path};
use axum::http::StatusCode;
use axum::http::header::CONTENT_TYPE;
use axum::response::{IntoResponse, Response};
use axum::{Router, routing};
use serde_json::Value;
use tokio::sync::oneshot;

use super::protocol::{self, Ask, Said};
use super::{Event, Rollouts};
use crate::data::ChatMessage;

/// Longest request, in bytes.
const LONGEST: usize = 64 << 20;

pub fn routes(rollouts: Arc<Rollouts>, model: String) -> Router {
    let model: Arc<str> = model.into();
    let (chat_rollouts, chat_model) = (rollouts.clone(), model.clone());
    let chat = move |Path(id): Path<String>, body: Bytes| async move {
        let (messages, tools, streams) = match protocol::chat(&body) {
            Ok(request) => request,
            Err(why) => return refused(StatusCode::BAD_REQUEST, "invalid_request_error", &why),
        };
        match asked(&chat_rollouts, &id, |reply| Ask { messages, text: false, tools, reply }).await {
            Ok(said) if streams => stream(protocol::chat_stream(&chat_model, &said)),
            Ok(said) => page(StatusCode::OK, &protocol::chat_page(&chat_model, &said)),
            Err(refusal) => refusal,
        }
    };
    let completion_model = model.clone();
    let completion = move |Path(id): Path<String>, body: Bytes| async move {
        let (prompt, streams) = match protocol::completion(&body) {
            Ok(request) => request,
            Err(why) => return refused(StatusCode::BAD_REQUEST, "invalid_request_error", &why),
        };
        let messages = vec![ChatMessage::new("user", prompt)];
        match asked(&rollouts, &id, |reply| Ask { messages, text: true, tools: Vec::new(), reply }).await {
            Ok(said) if streams => stream(protocol::completion_stream(&completion_model, &said)),
            Ok(said) => page(StatusCode::OK, &protocol::completion_page(&completion_model, &said)),
            Err(refusal) => refusal,
        }
    };
    let models = move || async move { page(StatusCode::OK, &protocol::models(&model)) };
    Router::new()
        .route("/r/{rollout}/v1/chat/completions", routing::post(chat))
        .route("/r/{rollout}/v1/completions", routing::post(completion))
        .route("/r/{rollout}/v1/models", routing::get(models.clone()))
        .route("/v1/models", routing::get(models))
        .layer(DefaultBodyLimit::max(LONGEST))
}

/// Hands a request to its rollout and waits for what the model says. The rollout's own deadlines bound the wait.
async fn asked(
    rollouts: &Rollouts,
    id: &str,
    ask: impl FnOnce(oneshot::Sender<Result<Said, String>>) -> Ask,
) -> Result<Said, Response> {
    let gone = || refused(StatusCode::GONE, "rollout_over", "there is no such rollout, or it is over");
    let (reply, said) = oneshot::channel();
    let rollout = rollouts.all().get(id).cloned().ok_or_else(gone)?;
    rollout.send(Event::Asks(ask(reply))).map_err(|_| gone())?;
    match said.await {
        Ok(Ok(said)) => Ok(said),
        Ok(Err(why)) => Err(refused(StatusCode::GONE, "rollout_over", &why)),
        Err(_) => Err(gone()),
    }
}

fn page(status: StatusCode, page: &Value) -> Response {
    (status, [(CONTENT_TYPE, "application/json")], page.to_string()).into_response()
}

fn stream(events: String) -> Response {
    ([(CONTENT_TYPE, "text/event-stream")], events).into_response()
}

fn refused(status: StatusCode, kind: &str, why: &str) -> Response {
    page(status, &protocol::error(kind, why))
}
