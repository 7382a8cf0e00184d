//! Fetching from a local server that speaks the hub's paths.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::net::TcpListener;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::body::{Body, Bytes};
use axum::extract::Request;
use axum::http::header::{AUTHORIZATION, CONTENT_LENGTH, ETAG, LOCATION, RANGE};
use axum::http::request::Parts;
use axum::http::{Method, StatusCode};
use axum::response::{IntoResponse, Response};
use futures_util::StreamExt;
use futures_util::stream::{iter, once};
use parking_lot::Mutex;
use sha2::{Digest, Sha256};

use super::*;
use crate::net::{Endpoint, Server};

const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";

type Log = Arc<Mutex<Vec<Parts>>>;

/// A hub in this process. Large files lie on a second server, as on the real one.
struct TestHub {
    asked: Log,
    large: Log,
    servers: [Server; 2],
}

fn sum(bytes: &[u8]) -> String {
    Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect()
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
fn from_byte(asked: &Parts) -> Option<usize> {
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
    /// one that begins with `short` the hub announces five bytes too many.
    fn new(files: &[(&str, &[u8])], cut: Option<usize>, gated: bool) -> Self {
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
            ([(ETAG, format!("\"{}\"", &sum(bytes)[..40]))], bytes.clone()).into_response()
        });
        TestHub { asked: log, large: large_log, servers: [hub, large] }
    }

    fn hub(&self, root: &Path) -> Hub {
        let url = format!("http://{}", self.servers[0].address());
        Hub::at(Endpoint::new(url).with_token("hunter2").unwrap(), Cache::at(root))
    }
}

const MODEL: [(&str, &[u8]); 6] = [
    ("config.json", b"{\"a\": 1}"),
    ("tokenizer.json", b"{}"),
    ("model.safetensors", b"0123456789weights"),
    ("pytorch_model.bin", b"not wanted"),
    ("README.md", b"not wanted"),
    ("onnx/model.onnx", b"not wanted"),
];

#[test]
fn a_model_is_fetched_on_first_use_into_the_layout_of_the_hubs_tools() {
    let (server, root) = (TestHub::new(&MODEL, None, false), tempfile::tempdir().unwrap());
    let hub = server.hub(root.path());
    let folder = hub.open(Path::new("org/thing")).unwrap();
    let home = root.path().join("models--org--thing");
    assert_eq!(folder, home.join("snapshots").join(COMMIT));
    assert_eq!(fs::read(folder.join("model.safetensors")).unwrap(), b"0123456789weights");
    assert_eq!(fs::read_to_string(home.join("refs/main")).unwrap(), COMMIT);
    let blob = Path::new("../../blobs").join(sum(b"0123456789weights"));
    assert_eq!(fs::read_link(folder.join("model.safetensors")).unwrap(), blob);
    let names = |folder: &Path| {
        let names = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
        names.collect::<BTreeSet<_>>().into_iter().collect::<Vec<_>>()
    };
    assert_eq!(names(&folder), ["config.json", "model.safetensors", "tokenizer.json"]);
    assert_eq!(names(&home.join("blobs")).len(), 3, "nothing unfinished is left");
    // The other host does not see the token; the hub does.
    assert!(server.large.lock().iter().all(|asked| !asked.headers.contains_key(AUTHORIZATION)));
    assert!(server.asked.lock().iter().all(|asked| asked.headers[AUTHORIZATION] == "Bearer hunter2"));
    // What is here is not asked for again, by any of its names.
    let before = server.asked.lock().len();
    for name in ["org/thing".to_owned(), "org/thing@main".to_owned(), format!("org/thing@{COMMIT}")] {
        assert_eq!(hub.open(Path::new(&name)).unwrap(), folder);
    }
    assert_eq!(server.asked.lock().len(), before);
}

#[test]
fn a_file_that_breaks_off_is_resumed_where_it_ended() {
    let (server, root) = (TestHub::new(&MODEL, Some(10), false), tempfile::tempdir().unwrap());
    let folder = server.hub(root.path()).open(Path::new("org/thing")).unwrap();
    assert_eq!(fs::read(folder.join("model.safetensors")).unwrap(), b"0123456789weights");
    let ranges: Vec<Option<usize>> = server.large.lock().iter().map(from_byte).collect();
    assert_eq!(ranges, [None, Some(10)]);
}

#[test]
fn a_file_that_is_shorter_than_announced_is_an_error_not_an_endless_download() {
    let files: [(&str, &[u8]); 2] = [("config.json", b"{}"), ("model.safetensors", b"short of weights")];
    let (server, root) = (TestHub::new(&files, None, false), tempfile::tempdir().unwrap());
    let error = server.hub(root.path()).open(Path::new("org/thing")).unwrap_err();
    assert!(matches!(&error, HubError::Damaged(file, _) if file == "model.safetensors"), "{error}");
}

#[test]
fn a_file_with_another_checksum_is_not_taken() {
    let (server, root) = (TestHub::new(&MODEL, None, false), tempfile::tempdir().unwrap());
    let blobs = root.path().join("models--org--thing/blobs");
    fs::create_dir_all(&blobs).unwrap();
    // What an interrupted download left was damaged.
    let part = blobs.join(format!("{}.incomplete", sum(b"0123456789weights")));
    fs::write(&part, b"XXXXX").unwrap();
    let error = server.hub(root.path()).open(Path::new("org/thing")).unwrap_err();
    assert!(matches!(&error, HubError::Damaged(file, _) if file == "model.safetensors"), "{error}");
    assert!(!root.path().join("models--org--thing/snapshots").exists());
    let folder = server.hub(root.path()).open(Path::new("org/thing")).unwrap();
    assert_eq!(fs::read(folder.join("model.safetensors")).unwrap(), b"0123456789weights");
}

#[test]
fn what_can_not_be_fetched_says_why_and_what_to_do() {
    let root = tempfile::tempdir().unwrap();
    let (server, gated) = (TestHub::new(&MODEL, None, false), TestHub::new(&MODEL, None, true));
    let said = |hub: &Hub, name: &str| hub.open(Path::new(name)).unwrap_err().to_string();
    let hub = server.hub(root.path());
    for (hub, name, parts) in [
        (hub.clone(), "org/nothing", ["org/nothing is neither here nor on http://127.0.0.1", "check the name"]),
        (hub.clone(), "org/thing@v9", ["org/thing has no revision \"v9\"", "a branch, a tag or a commit"]),
        (hub.clone().offline(true), "org/thing", ["HF_HUB_OFFLINE is set", "hf download org/thing"]),
        (gated.hub(root.path()), "org/thing", ["org/thing is gated", "HF_TOKEN"]),
        (hub, "./org/thing", ["does not exist", "relative to the folder"]),
    ] {
        let error = said(&hub, name);
        assert!(parts.iter().all(|part| error.contains(part)) && !error.contains("hunter2"), "{name}: {error}");
    }
    assert!(server.hub(root.path()).open(Path::new("org/old")).is_ok(), "a repository that was renamed");
}

#[test]
fn of_a_data_set_only_the_files_of_its_subset_and_split_are_fetched() {
    use crate::data::source::DataSpec;
    let row = |number: usize| format!("{{\"question\": \"{number}+1\", \"answer\": \"2\"}}\n").into_bytes();
    let rows: Vec<Vec<u8>> = (0..4).map(row).collect();
    let files = [
        ("main/train-00000-of-00002.jsonl", &rows[0][..]),
        ("main/train-00001-of-00002.jsonl", &rows[1][..]),
        ("main/test-00000-of-00001.jsonl", &rows[2][..]),
        ("socratic/train-00000-of-00001.jsonl", &rows[3][..]),
        ("README.md", b"# about"),
    ];
    let (server, root) = (TestHub::new(&files, None, false), tempfile::tempdir().unwrap());
    let spec = |subset: Option<&str>, split: &str| DataSpec {
        hub: server.hub(root.path()),
        subset: subset.map(str::to_owned),
        split: split.to_owned(),
        ..DataSpec::new("org/thing")
    };
    let fetched = || {
        let asked = std::mem::take(&mut *server.asked.lock()).into_iter();
        let files = asked.filter(|asked| asked.method == Method::GET && asked.uri.path().contains("/resolve/"));
        files.map(|asked| asked.uri.path().to_owned()).collect::<Vec<_>>()
    };
    let unnamed = spec(None, "train").fetch().unwrap_err().to_string();
    assert!(unnamed.contains("org/thing has several subsets; name one of: main, socratic"), "{unnamed}");
    spec(Some("main"), "train[:50%]").fetch().unwrap();
    let resolve = |file: &str| format!("/datasets/org/thing/resolve/{COMMIT}/main/{file}");
    assert_eq!(fetched(), [resolve("train-00000-of-00002.jsonl"), resolve("train-00001-of-00002.jsonl")]);
    spec(Some("main"), "train").fetch().unwrap();
    assert!(server.asked.lock().is_empty(), "it is here");
    spec(Some("main"), "test").fetch().unwrap();
    assert_eq!(fetched(), [resolve("test-00000-of-00001.jsonl")]);
    for (subset, split, why) in [
        (Some("other"), "train", "has no subset \"other\"; it has: main, socratic"),
        (Some("main"), "validation", "has no split \"validation\"; it has: test, train"),
    ] {
        let error = spec(subset, split).fetch().unwrap_err().to_string();
        assert!(error.contains("org/thing") && error.contains(why), "{error}");
    }
    let offline = DataSpec { hub: server.hub(root.path()).offline(true), ..spec(Some("socratic"), "train") };
    assert!(offline.fetch().is_err());
    // A part that is missing is fetched again.
    let folder = root.path().join("datasets--org--thing/snapshots").join(COMMIT).join("main");
    fs::remove_file(folder.join("train-00001-of-00002.jsonl")).unwrap();
    spec(Some("main"), "train").fetch().unwrap();
    assert!(folder.join("train-00001-of-00002.jsonl").exists());
}

#[test]
fn the_environment_names_hub_token_and_cache() {
    let root = tempfile::tempdir().unwrap();
    fs::write(root.path().join("token"), "kept\n").unwrap();
    let home = root.path().to_str().unwrap().to_owned();
    let by =
        |set: &[(&str, &str)]| Hub::by(|name| set.iter().find(|(known, _)| *known == name).map(|(_, value)| value.to_string()));
    let hub = by(&[("HF_HOME", &home)]);
    assert_eq!(hub.cache().root(), root.path().join("hub"));
    assert_eq!(hub, Hub::at(Endpoint::new("https://huggingface.co").with_token("kept").unwrap(), hub.cache().clone()));
    let hub = by(&[("HF_HOME", &home), ("HF_TOKEN", "mine"), ("HF_ENDPOINT", "https://mirror"), ("HF_HUB_OFFLINE", "1")]);
    let expected = Hub::at(Endpoint::new("https://mirror").with_token("mine").unwrap(), hub.cache().clone());
    assert_eq!(hub, expected.offline(true));
}
