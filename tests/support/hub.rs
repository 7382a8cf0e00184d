//! A server that speaks the paths of the hub of models and data sets.

use std::collections::BTreeMap;
use std::net::TcpListener;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::body::{Body, Bytes};
use axum::extract::Request;
use axum::http::StatusCode;
use axum::http::header::{CONTENT_LENGTH, ETAG, LOCATION, RANGE};
use axum::http::request::Parts;
use axum::response::{IntoResponse, Response};
use futures_util::StreamExt;
use futures_util::stream::{iter, once};
use parking_lot::Mutex;
use sha2::{Digest, Sha256};

use super::{Cache, Endpoint, Hub, Server};

pub const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";

pub type Log = Arc<Mutex<Vec<Parts>>>;

/// A hub in this process. Large files lie on a second server, as on the real one.
pub struct TestHub {
    pub asked: Log,
    #[allow(dead_code, reason = "not every program looks at it")]
    pub large: Log,
    servers: [Server; 2],
}

pub fn sum(bytes: &[u8]) -> String {
    format!("{:x}", Sha256::digest(bytes))
}

fn serve(answer: impl Fn(&Parts) -> Response + Send + Sync + 'static) -> (Server, Log) {
    let log = Log::default();
    let (seen, answer) = (log.clone(), Arc::new(answer));
    let route = move |request: Request| {
        let asked = request.into_parts().0;
        let response = answer(&asked);
        seen.lock().push(asked);
        async move { response }
    };
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    (Server::start(listener, Router::new().fallback(route)).unwrap(), log)
}

/// The first byte that a request asks for.
pub fn from_byte(asked: &Parts) -> Option<usize> {
    asked.headers.get(RANGE)?.to_str().unwrap().strip_prefix("bytes=")?.strip_suffix('-')?.parse().ok()
}

/// Bytes of a file, of which the first `sent` come before the connection breaks.
fn broken_off(bytes: Vec<u8>, sent: usize) -> Response {
    let length = [(CONTENT_LENGTH, bytes.len().to_string())];
    let breaks = once(async {
        // The bytes before it are on their way.
        tokio::time::sleep(Duration::from_millis(100)).await;
        Err(std::io::Error::other("the connection breaks"))
    });
    (length, Body::from_stream(iter([Ok(Bytes::copy_from_slice(&bytes[..sent]))]).chain(breaks))).into_response()
}

impl TestHub {
    /// With these files of `org/thing`; the large ones break off after `cut` bytes the first time. Of
    /// one that begins with `short` the hub announces five bytes too many, of one that begins with
    /// `unsized` no length.
    pub fn new(files: &[(&str, &[u8])], cut: Option<usize>, gated: bool) -> Self {
        let files: BTreeMap<String, Vec<u8>> = files.iter().map(|(path, bytes)| (path.to_string(), bytes.to_vec())).collect();
        let (there, cut) = (files.clone(), Mutex::new(cut));
        let (large, large_log) = serve(move |asked| {
            let bytes = there[asked.uri.path().trim_start_matches("/blob/")].clone();
            match (cut.lock().take(), from_byte(asked)) {
                (Some(cut), _) => broken_off(bytes, cut),
                (None, Some(from)) => (StatusCode::PARTIAL_CONTENT, bytes[from..].to_vec()).into_response(),
                (None, None) => bytes.into_response(),
            }
        });
        let elsewhere = format!("http://{}/blob/", large.address());
        let (hub, log) = serve(move |asked| {
            let refuse = |status, code: &'static str| (status, [("x-error-code", code)]).into_response();
            let moved = |status, to: String| (status, [(LOCATION, to)]).into_response();
            match asked.uri.path() {
                "/api/models/org/thing/revision/main" | "/api/datasets/org/thing/revision/main" => {
                    let names: Vec<_> = files.keys().map(|name| serde_json::json!({ "rfilename": name })).collect();
                    return serde_json::json!({ "sha": COMMIT, "siblings": names }).to_string().into_response();
                }
                "/api/models/org/old/revision/main" => {
                    return moved(StatusCode::TEMPORARY_REDIRECT, "/api/models/org/thing/revision/main".to_owned());
                }
                path if path.starts_with("/api/") && path.contains("/org/thing/revision/") => {
                    return refuse(StatusCode::NOT_FOUND, "RevisionNotFound");
                }
                path if path.starts_with("/api/") => return refuse(StatusCode::UNAUTHORIZED, "RepoNotFound"),
                _ if gated => return refuse(StatusCode::UNAUTHORIZED, "GatedRepo"),
                _ => {}
            }
            let path = asked.uri.path().split_once(&format!("/resolve/{COMMIT}/")).unwrap().1;
            let bytes = &files[path];
            if path.ends_with(".safetensors") || path.ends_with(".parquet") {
                let size = bytes.len() + if bytes.starts_with(b"short") { 5 } else { 0 };
                let linked = [("x-linked-etag", format!("\"{}\"", sum(bytes))), ("x-linked-size", size.to_string())];
                return (linked, moved(StatusCode::FOUND, format!("{elsewhere}{path}"))).into_response();
            }
            let etag = [(ETAG, format!("\"{}\"", &sum(bytes)[..40]))];
            match bytes.starts_with(b"unsized") {
                true if from_byte(asked).is_some_and(|from| from >= bytes.len()) => {
                    StatusCode::RANGE_NOT_SATISFIABLE.into_response()
                }
                true => (etag, Body::from_stream(iter([Ok::<_, std::io::Error>(Bytes::from(bytes.clone()))]))).into_response(),
                false => (etag, bytes.clone()).into_response(),
            }
        });
        TestHub { asked: log, large: large_log, servers: [hub, large] }
    }

    pub fn hub(&self, root: &Path) -> Hub {
        let url = format!("http://{}", self.servers[0].address());
        Hub::at(Endpoint::new(url).with_token("hunter2").unwrap(), Cache::at(root))
    }
}
