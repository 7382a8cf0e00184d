//! Responses: pages, streams of events, and refusals.

use std::convert::Infallible;

use axum::body::{Body, Bytes};
use axum::http::header::{CACHE_CONTROL, CONTENT_TYPE, RETRY_AFTER, WWW_AUTHENTICATE};
use axum::http::{HeaderValue, StatusCode};
use axum::response::{IntoResponse, Response};
use futures_util::stream::unfold;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

use super::ticket::Ticket;
use crate::env::protocol;
use crate::util::untrusted;

/// Seconds after which a client may retry a request that found the server busy.
const RETRY_SECONDS: &str = "1";

/// Reason why a request is not served, as an HTTP response.
#[derive(Debug)]
pub(super) struct Refusal {
    status: u16,
    message: String,
}

impl Refusal {
    pub fn new(status: u16, message: impl Into<String>) -> Self {
        // It may quote the request.
        Refusal { status, message: untrusted::block_of(&message.into(), untrusted::LINE) }
    }

    /// Why.
    pub fn message(&self) -> &str {
        &self.message
    }

    /// A request that would be refused again.
    pub fn bad(message: impl Into<String>) -> Self {
        Refusal::new(400, message)
    }

    /// The page, and the event of a stream that has begun.
    pub fn page(&self) -> Value {
        let kind = match self.status {
            401 => "authentication_error",
            404 => "not_found_error",
            429 => "rate_limit_error",
            400..500 => "invalid_request_error",
            _ => "server_error",
        };
        let mut page = protocol::error(kind, &self.message);
        page["error"]["code"] = self.status.into();
        page
    }
}

impl IntoResponse for Refusal {
    fn into_response(self) -> Response {
        let status = StatusCode::from_u16(self.status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
        let mut response = (status, [(CONTENT_TYPE, "application/json")], self.page().to_string()).into_response();
        if matches!(self.status, 429 | 503) {
            response.headers_mut().insert(RETRY_AFTER, HeaderValue::from_static(RETRY_SECONDS));
        }
        if self.status == 401 {
            response.headers_mut().insert(WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
        }
        response
    }
}

/// Result of a route.
pub(super) type Reply = Result<Response, Refusal>;

/// Reads a request body. An empty body is an empty object.
pub(super) fn read<T: DeserializeOwned>(body: &Bytes) -> Result<T, Refusal> {
    let body: &[u8] = if body.is_empty() { b"{}" } else { body };
    serde_json::from_slice(body).map_err(|error| Refusal::bad(format!("the request can't be read: {error}")))
}

/// A JSON page.
pub(super) fn page(page: &Value) -> Response {
    ([(CONTENT_TYPE, "application/json")], page.to_string()).into_response()
}

/// Page of a control route that succeeded.
pub(super) fn success(message: &str) -> Response {
    page(&json!({ "success": true, "status": "ok", "message": message }))
}

/// Streams a request's completions. `write` makes the events of those with news, and with `None`
/// the last ones. Dropping the response cancels the request.
pub(super) fn stream(
    ticket: Ticket,
    write: impl FnMut(&mut Ticket, Option<&[usize]>) -> Result<String, Refusal> + Send + 'static,
) -> Response {
    let events = unfold(Some((ticket, write)), async |state| {
        let (mut ticket, mut write) = state?;
        let news = ticket.next().await;
        let events = match &news {
            Some(news) => write(&mut ticket, Some(news)),
            None => write(&mut ticket, None).map(|last| last + "data: [DONE]\n\n"),
        };
        Some(match events {
            Ok(events) => (Ok::<_, Infallible>(Bytes::from(events)), news.map(|_| (ticket, write))),
            Err(refusal) => (Ok(protocol::event(&refusal.page()).into()), None),
        })
    });
    ([(CONTENT_TYPE, "text/event-stream"), (CACHE_CONTROL, "no-cache")], Body::from_stream(events)).into_response()
}
