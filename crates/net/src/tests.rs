//! The client against real TLS servers with certificates of their own.

use std::convert::Infallible;
use std::time::Duration;

use axum::body::{Body, Bytes};
use axum::{Router, routing};
use serde_json::json;

#[path = "../../../tests/support/tls.rs"]
mod tls;

use super::*;
use tls::{Authority, serve};

const GUARD: Duration = Duration::from_secs(60);

fn client(kind: &str, url: String, authority: &Authority) -> Client {
    Client::new(kind, Endpoint { ca_file: Some(authority.file.clone()), ..Endpoint::new(url) }).unwrap()
}

fn events() -> Body {
    let pieces =
        ["data: {\"a\": 1}\n\n", "data: two\n", "\ndata: [DONE]\n\n"].map(|piece| Ok::<_, Infallible>(Bytes::from(piece)));
    Body::from_stream(futures_util::stream::iter(pieces))
}

fn routes() -> Router {
    Router::new()
        .route("/echo", routing::post(|body: String| async { body }))
        .route("/events", routing::post(|| async { events() }).get(|| async { events() }))
}

#[tokio::test]
async fn a_server_whose_authority_is_named_is_trusted_for_pages_and_streams() {
    let folder = tempfile::tempdir().unwrap();
    let authority = Authority::new(folder.path());
    let address = serve(authority.acceptor(&["localhost"], &[]), routes()).await;
    let client = client("test", format!("https://localhost:{}", address.port()), &authority);
    assert_eq!(client.post("/echo", &json!({"x": [1, 2]}), GUARD).await.unwrap(), json!({"x": [1, 2]}));
    let mut stream = client.events("/events", &json!({}), GUARD).await.unwrap();
    assert_eq!(stream.next().await.unwrap().as_deref(), Some("{\"a\": 1}"));
    assert_eq!(stream.next().await.unwrap().as_deref(), Some("two"));
    assert_eq!(stream.next().await.unwrap(), None);
    let mut stream = client.get_events("/events", GUARD).await.unwrap();
    assert_eq!(stream.next().await.unwrap().as_deref(), Some("{\"a\": 1}"));
    assert!(client.get_bytes("/events", GUARD).await.unwrap().starts_with(b"data: {"));
}

#[tokio::test]
async fn http_2_is_spoken_where_the_server_offers_it() {
    let folder = tempfile::tempdir().unwrap();
    let authority = Authority::new(folder.path());
    let acceptor = authority.acceptor(&["localhost"], &["h2"]);
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    tokio::spawn(async move {
        let stream = acceptor.accept(listener.accept().await.unwrap().0).await.unwrap();
        let mut connection = h2::server::handshake(stream).await.unwrap();
        while let Some(Ok((_, mut respond))) = connection.accept().await {
            let mut body = respond.send_response(axum::http::Response::new(()), false).unwrap();
            body.send_data(Bytes::from_static(b"{\"http\": 2}"), true).unwrap();
        }
    });
    let client = client("test", format!("https://localhost:{port}"), &authority);
    for _ in 0..2 {
        assert_eq!(client.get("/x", GUARD).await.unwrap(), json!({"http": 2}));
    }
}

#[tokio::test]
async fn a_server_that_is_not_trusted_is_refused_with_its_host_the_reason_and_what_to_set() {
    let folder = tempfile::tempdir().unwrap();
    let (authority, elsewhere) = (Authority::new(folder.path()), tempfile::tempdir().unwrap());
    let other = Authority::new(elsewhere.path());
    let address = serve(authority.acceptor(&["localhost"], &[]), routes()).await;
    let ask = async |url, trusted| client("judge", url, trusted).get("/x", GUARD).await.unwrap_err();
    let error = ask(format!("https://localhost:{}", address.port()), &other).await;
    assert!(matches!(error.fault, Fault::Untrusted { .. }) && !error.fault.passes(), "{error:?}");
    let error = error.to_string();
    for part in [
        "judge https://localhost:",
        "certificate of localhost is not trusted",
        "no trusted authority",
        "net.ca_file",
        "SSL_CERT_FILE",
    ] {
        assert!(error.contains(part), "{part}: {error}");
    }
    let error = ask(format!("https://{address}"), &authority).await.to_string();
    assert!(error.contains("certificate of 127.0.0.1 is not trusted: it is for another name"), "{error}");
    // A server that speaks no TLS.
    let plain = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = plain.local_addr().unwrap().port();
    tokio::spawn(async move { axum::serve(plain, routes()).await });
    let error = ask(format!("https://localhost:{port}"), &authority).await.to_string();
    assert!(error.contains("cannot connect") && error.contains("write http://"), "{error}");
}

#[test]
fn a_file_of_authorities_that_can_not_be_used_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("ca.pem");
    for (content, why) in [(None, "No such file"), (Some("nonsense"), "no certificate"), (Some(""), "no certificate")] {
        if let Some(content) = content {
            std::fs::write(&file, content).unwrap();
        }
        let endpoint = Endpoint { ca_file: Some(file.clone()), ..Endpoint::new("https://judge") };
        let error = Client::new("judge", endpoint).unwrap_err().to_string();
        assert!(error.contains("ca.pem (net.ca_file)") && error.contains(why), "{error}");
    }
}

#[tokio::test]
async fn names_of_servers_show_no_secrets_of_their_addresses() {
    let client = Client::new("reward service", "http://127.0.0.1:1/hooks/0a1b2c3d4e5f6a7b8c9d0e1f/score?key=hunter2").unwrap();
    let error = client.post("", &json!({}), GUARD).await.unwrap_err().to_string();
    assert!(error.contains("http://127.0.0.1:1/hooks/…/score?key=…") && error.contains("cannot connect"), "{error}");
    assert!(!error.contains("0a1b2c") && !error.contains("hunter2"), "{error}");
}

#[test]
fn a_connection_outlives_the_runtime_that_asked_for_it() {
    let opened = std::sync::Arc::new(std::sync::atomic::AtomicUsize::new(0));
    let (counts, listener) = (opened.clone(), std::net::TcpListener::bind("127.0.0.1:0").unwrap());
    let url = format!("http://{}", listener.local_addr().unwrap());
    std::thread::spawn(move || {
        use std::io::{Read, Write};
        for stream in listener.incoming() {
            let (mut stream, counts) = (stream.unwrap(), counts.clone());
            std::thread::spawn(move || {
                counts.fetch_add(1, std::sync::atomic::Ordering::SeqCst);
                let mut read = [0; 4096];
                while stream.read(&mut read).is_ok_and(|size| size > 0) {
                    stream.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}").unwrap();
                }
            });
        }
    });
    let client = Client::new("test", url.as_str()).unwrap();
    for _ in 0..3 {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        assert_eq!(runtime.block_on(client.get("/x", GUARD)).unwrap(), json!({}));
    }
    assert_eq!(opened.load(std::sync::atomic::Ordering::SeqCst), 1);
}

/// The same request would be answered by the same page.
#[tokio::test]
async fn a_page_that_is_too_long_is_told_with_the_limit_and_not_asked_for_again() {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    tokio::spawn(async move { axum::serve(listener, routes()).await });
    let client = Client::new("teacher", Endpoint { longest_page: 1 << 20, ..Endpoint::new(url) }).unwrap();
    let body = |len| json!("x".repeat(len));
    assert!(client.post("/echo", &body(1 << 19), GUARD).await.is_ok());
    let error = client.post("/echo", &body(1 << 20), GUARD).await.unwrap_err();
    assert!(error.to_string().contains("POST /echo is longer than 1 MiB") && !error.fault.passes(), "{error}");
}
