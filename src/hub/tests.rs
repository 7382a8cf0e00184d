//! Fetching from a local server that speaks the hub's paths.

use std::collections::BTreeMap;
use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::{Arc, Mutex};

use sha2::{Digest, Sha256};

use super::*;
use crate::net::Endpoint;

const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";

/// A request, as far as the server reads it.
#[derive(Clone, Debug)]
struct Asked {
    method: String,
    path: String,
    range: Option<u64>,
    token: Option<String>,
}

/// A hub in this process. Large files lie on a second server, as on the real one.
struct Server {
    url: String,
    asked: Arc<Mutex<Vec<Asked>>>,
    large: Arc<Mutex<Vec<Asked>>>,
}

type Files = BTreeMap<String, Vec<u8>>;

fn sum(bytes: &[u8]) -> String {
    Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect()
}

fn listen(answer: impl Fn(&Asked, &mut TcpStream) + Send + 'static) -> (String, Arc<Mutex<Vec<Asked>>>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let all = Arc::<Mutex<Vec<Asked>>>::default();
    let seen = all.clone();
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let mut stream = stream.unwrap();
            let lines = BufReader::new(stream.try_clone().unwrap()).lines();
            let head: Vec<String> = lines.map_while(Result::ok).take_while(|line| !line.is_empty()).collect();
            let Some((method, rest)) = head.first().and_then(|line| line.split_once(' ')) else { continue };
            let header = |name: &str| {
                let found = head.iter().filter_map(|line| line.split_once(": ")).find(|(key, _)| key.eq_ignore_ascii_case(name));
                found.map(|(_, value)| value.to_owned())
            };
            let asked = Asked {
                method: method.to_owned(),
                path: rest.split(' ').next().unwrap().to_owned(),
                range: header("range").and_then(|range| range.strip_prefix("bytes=")?.strip_suffix('-')?.parse().ok()),
                token: header("authorization"),
            };
            seen.lock().unwrap().push(asked.clone());
            answer(&asked, &mut stream);
        }
    });
    (url, all)
}

fn reply(stream: &mut TcpStream, status: &str, headers: &str, body: &[u8]) {
    // A client that has gone hears no answer.
    write!(stream, "HTTP/1.1 {status}\r\nconnection: close\r\ncontent-length: {}\r\n{headers}\r\n", body.len()).ok();
    stream.write_all(body).ok();
}

impl Server {
    /// With these files of `org/thing`; the large ones break off after `cut` bytes the first time.
    fn new(files: &[(&str, &[u8])], cut: Option<usize>, gated: bool) -> Self {
        let files: Files = files.iter().map(|(path, bytes)| (path.to_string(), bytes.to_vec())).collect();
        let (there, cut) = (files.clone(), Mutex::new(cut));
        let (large_url, large) = listen(move |asked, stream| {
            let bytes = &there[asked.path.trim_start_matches("/blob/")];
            let from = asked.range.unwrap_or(0) as usize;
            let status = if asked.range.is_some() { "206 Partial Content" } else { "200 OK" };
            match cut.lock().unwrap().take() {
                Some(cut) => {
                    write!(stream, "HTTP/1.1 {status}\r\ncontent-length: {}\r\n\r\n", bytes.len() - from).unwrap();
                    stream.write_all(&bytes[from..cut]).unwrap();
                }
                None => reply(stream, status, "", &bytes[from..]),
            }
        });
        let (url, asked) = listen(move |asked, stream| {
            let names: Vec<_> = files.keys().map(|name| serde_json::json!({ "rfilename": name })).collect();
            let list = serde_json::json!({ "sha": COMMIT, "siblings": names }).to_string();
            let json = "content-type: application/json\r\n";
            match asked.path.as_str() {
                "/api/models/org/thing/revision/main" | "/api/datasets/org/thing/revision/main" => {
                    return reply(stream, "200 OK", json, list.as_bytes());
                }
                "/api/models/org/old/revision/main" => {
                    return reply(stream, "307 Temporary Redirect", "location: /api/models/org/thing/revision/main\r\n", b"");
                }
                path if path.starts_with("/api/") && path.contains("/org/thing/revision/") => {
                    return reply(stream, "404 Not Found", "x-error-code: RevisionNotFound\r\n", b"");
                }
                path if path.starts_with("/api/") => {
                    return reply(stream, "401 Unauthorized", "x-error-code: RepoNotFound\r\n", b"");
                }
                _ if gated => return reply(stream, "401 Unauthorized", "x-error-code: GatedRepo\r\n", b""),
                _ => {}
            }
            let path = asked.path.split_once(&format!("/resolve/{COMMIT}/")).unwrap().1;
            let bytes = &files[path];
            if path.ends_with(".safetensors") || path.ends_with(".parquet") {
                let (etag, size) = (sum(bytes), bytes.len());
                let head = format!("location: {large_url}/blob/{path}\r\nx-linked-etag: \"{etag}\"\r\nx-linked-size: {size}\r\n");
                return reply(stream, "302 Found", &head, b"");
            }
            let etag = format!("etag: \"{}\"\r\nx-repo-commit: {COMMIT}\r\n", &sum(bytes)[..40]);
            if asked.method == "HEAD" {
                write!(stream, "HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: {}\r\n{etag}\r\n", bytes.len()).ok();
            } else {
                reply(stream, "200 OK", &etag, bytes);
            }
        });
        Server { url, asked, large }
    }

    fn hub(&self, root: &Path) -> Hub {
        let endpoint = Endpoint::new(&self.url).with_token("hunter2").unwrap();
        Hub::at(endpoint, Cache::at(root))
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
    let (server, root) = (Server::new(&MODEL, None, false), tempfile::tempdir().unwrap());
    let hub = server.hub(root.path());
    let folder = open_from(&hub, Path::new("org/thing")).unwrap();
    let home = root.path().join("models--org--thing");
    assert_eq!(folder, home.join("snapshots").join(COMMIT));
    assert_eq!(fs::read(folder.join("model.safetensors")).unwrap(), b"0123456789weights");
    assert_eq!(fs::read_to_string(home.join("refs/main")).unwrap(), COMMIT);
    let blob = Path::new("../../blobs").join(sum(b"0123456789weights"));
    assert_eq!(fs::read_link(folder.join("model.safetensors")).unwrap(), blob);
    let names = |folder: &Path| {
        let mut names: Vec<_> =
            fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    };
    assert_eq!(names(&folder), ["config.json", "model.safetensors", "tokenizer.json"]);
    assert_eq!(names(&home.join("blobs")).len(), 3, "nothing unfinished is left");
    // The other host does not see the token; the hub does.
    assert!(server.large.lock().unwrap().iter().all(|asked| asked.token.is_none()));
    assert!(server.asked.lock().unwrap().iter().all(|asked| asked.token.as_deref() == Some("Bearer hunter2")));
    // What is here is not asked for again, by any of its names.
    let before = server.asked.lock().unwrap().len();
    for name in ["org/thing".to_owned(), "org/thing@main".to_owned(), format!("org/thing@{COMMIT}")] {
        assert_eq!(open_from(&hub, Path::new(&name)).unwrap(), folder);
    }
    assert_eq!(server.asked.lock().unwrap().len(), before);
}

#[test]
fn a_file_that_breaks_off_is_resumed_where_it_ended() {
    let (server, root) = (Server::new(&MODEL, Some(10), false), tempfile::tempdir().unwrap());
    let folder = open_from(&server.hub(root.path()), Path::new("org/thing")).unwrap();
    assert_eq!(fs::read(folder.join("model.safetensors")).unwrap(), b"0123456789weights");
    let ranges: Vec<Option<u64>> = server.large.lock().unwrap().iter().map(|asked| asked.range).collect();
    assert_eq!(ranges, [None, Some(10)]);
}

#[test]
fn a_file_with_another_checksum_is_not_taken() {
    let (server, root) = (Server::new(&MODEL, None, false), tempfile::tempdir().unwrap());
    let blobs = root.path().join("models--org--thing/blobs");
    fs::create_dir_all(&blobs).unwrap();
    // What an interrupted download left was damaged.
    let part = blobs.join(format!("{}.incomplete", sum(b"0123456789weights")));
    fs::write(&part, b"XXXXX").unwrap();
    let error = server.hub(root.path()).model("org/thing").unwrap_err();
    assert!(matches!(&error, HubError::Damaged { file, .. } if file == "model.safetensors"), "{error}");
    assert!(!root.path().join("models--org--thing/snapshots").exists());
    let folder = server.hub(root.path()).model("org/thing").unwrap();
    assert_eq!(fs::read(folder.join("model.safetensors")).unwrap(), b"0123456789weights");
}

#[test]
fn what_can_not_be_fetched_says_why_and_what_to_do() {
    let root = tempfile::tempdir().unwrap();
    let (server, gated) = (Server::new(&MODEL, None, false), Server::new(&MODEL, None, true));
    let said = |hub: &Hub, name: &str| open_from(hub, Path::new(name)).unwrap_err().to_string();
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
    assert!(server.hub(root.path()).model("org/old").is_ok(), "a repository that was renamed");
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
    let (server, root) = (Server::new(&files, None, false), tempfile::tempdir().unwrap());
    let spec = |subset: Option<&str>, split: &str| DataSpec {
        hub: server.hub(root.path()),
        subset: subset.map(str::to_owned),
        split: split.parse().unwrap(),
        ..DataSpec::new("org/thing")
    };
    let fetched = || {
        let mut files: Vec<String> =
            server.asked.lock().unwrap().drain(..).filter(|asked| asked.method == "GET").map(|asked| asked.path).collect();
        files.retain(|path| path.contains("/resolve/"));
        files
    };
    let unnamed = spec(None, "train").fetch().unwrap_err().to_string();
    assert!(unnamed.contains("org/thing has several subsets; name one of: main, socratic"), "{unnamed}");
    spec(Some("main"), "train[:50%]").fetch().unwrap();
    let resolve = |file: &str| format!("/datasets/org/thing/resolve/{COMMIT}/main/{file}");
    assert_eq!(fetched(), [resolve("train-00000-of-00002.jsonl"), resolve("train-00001-of-00002.jsonl")]);
    spec(Some("main"), "train").fetch().unwrap();
    assert!(server.asked.lock().unwrap().is_empty(), "it is here");
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
