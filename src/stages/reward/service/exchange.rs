//! One request and its answer, over a connection of its own.
//!
//! A connection is not used twice: a service that closed an idle one would look like one that broke, and next to a reward that is worth a
//! process of its own a connection costs nothing.

use std::error::Error;
use std::pin::pin;
use std::time::Duration;

use http_body_util::{BodyExt, Full, Limited};
use hyper::body::Bytes;
use hyper::client::conn::http1::handshake;
use hyper::header::{AUTHORIZATION, CONNECTION, CONTENT_TYPE, HOST};
use hyper::{Request, StatusCode, Uri};
use hyper_util::rt::TokioIo;
use tokio::net::TcpStream;

use super::{ServiceError, Token};
use crate::engine::remote::http::{retry_after, told};

/// Longest answer that is read, in bytes.
const LONGEST: usize = 16 << 20;

/// An answer, whatever it says.
pub(super) struct Reply {
    pub(super) status: StatusCode,
    /// How long the service asks to be left alone.
    pub(super) retry_after: Option<Duration>,
    pub(super) body: Bytes,
}

/// Posts `body` as JSON. Ends within `limit`, whatever the service does. Cancel-safe: a dropped exchange closes its connection.
pub(super) async fn post(uri: &Uri, token: Option<&Token>, body: Vec<u8>, limit: Duration) -> Result<Reply, ServiceError> {
    let late = |_| ServiceError::Late { url: uri.to_string(), seconds: limit.as_secs_f64() };
    tokio::time::timeout(limit, exchange(uri, token, body)).await.map_err(late)?
}

async fn exchange(uri: &Uri, token: Option<&Token>, body: Vec<u8>) -> Result<Reply, ServiceError> {
    let url = || uri.to_string();
    let broke = |error: &dyn Error| ServiceError::Broke { url: url(), why: told(error) };
    let authority = uri.authority().map_or("", |authority| authority.as_str());
    // IPv6 addresses stand in brackets in a URL, and without them in a socket's address.
    let host = uri.host().unwrap_or_default().trim_matches(['[', ']']);
    let stream = TcpStream::connect((host, uri.port_u16().unwrap_or(80)))
        .await
        .map_err(|error| ServiceError::Unreachable { url: url(), why: error.to_string() })?;
    let (mut sender, connection) = handshake(TokioIo::new(stream)).await.map_err(|error| broke(&error))?;
    let mut request = Request::post(uri.path_and_query().map_or("/", |path| path.as_str()))
        .header(HOST, authority)
        .header(CONTENT_TYPE, "application/json")
        .header(CONNECTION, "close");
    if let Some(token) = token {
        request = request.header(AUTHORIZATION, token.header());
    }
    let request = request.body(Full::new(Bytes::from(body))).map_err(|error| broke(&error))?;
    let mut connection = pin!(connection);
    let mut reply = pin!(async {
        let response = sender.send_request(request).await.map_err(|error| broke(&error))?;
        let (status, retry_after) = (response.status(), retry_after(&response));
        let body = Limited::new(response.into_body(), LONGEST).collect().await.map_err(|error| broke(error.as_ref()))?;
        Ok(Reply { status, retry_after, body: body.to_bytes() })
    });
    tokio::select! {
        biased;
        reply = &mut reply => reply,
        // What it had to say has been said; the reply knows whether that was all.
        _ended = &mut connection => reply.await,
    }
}
