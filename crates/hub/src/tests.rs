//! Fetching from a local server that speaks the hub's paths.

use std::collections::BTreeSet;
use std::fs;

use axum::http::header::AUTHORIZATION;
use rollflow_net::{Endpoint, Server};

#[path = "../../../tests/support/hub.rs"]
mod server;

use super::*;
use server::{COMMIT, TestHub, from_byte, sum};

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
