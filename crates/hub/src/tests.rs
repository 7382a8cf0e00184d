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
fn weights_in_parts_are_fetched_whatever_their_names_and_a_missing_part_is_an_error() {
    let index = |part: &str| format!("{{\"weight_map\": {{\"x\": \"{part}\"}}}}").into_bytes();
    let opened = |part: &str, named: &str| {
        let named = index(named);
        let files: [(&str, &[u8]); 6] = [
            ("config.json", b"{}"),
            ("tokenizer.json", b"{}"),
            ("model.safetensors.index.json", &named),
            ("additional_chat_templates/tool_use.jinja", b"{{ tools }}"),
            ("chat_template.json", b"{\"chat_template\": \"a\"}"),
            (part, b"weights"),
        ];
        let (server, root) = (TestHub::new(&files, None, false), tempfile::tempdir().unwrap());
        let folder = server.hub(root.path()).open(Path::new("org/thing"))?;
        assert_eq!(server.hub(root.path()).offline(true).open(Path::new("org/thing"))?, folder, "all of it is here");
        assert!(files.iter().all(|(name, bytes)| fs::read(folder.join(name)).unwrap() == *bytes), "{part}");
        Ok::<_, HubError>(())
    };
    for part in ["model-00001-of-00001.safetensors", "model.safetensors-00001-of-00001.safetensors"] {
        opened(part, part).unwrap();
    }
    let error = opened("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors").unwrap_err().to_string();
    assert!(error.starts_with("org/thing lacks model-00002-of-00002.safetensors"), "{error}");
}

#[test]
fn a_finished_part_of_a_file_without_a_length_is_fetched_again_and_not_taken_as_empty() {
    let config = b"unsized configuration";
    let files: [(&str, &[u8]); 3] = [("config.json", config), ("tokenizer.json", b"{}"), ("model.safetensors", b"weights")];
    let (server, root) = (TestHub::new(&files, None, false), tempfile::tempdir().unwrap());
    let blobs = root.path().join("models--org--thing/blobs");
    fs::create_dir_all(&blobs).unwrap();
    fs::write(blobs.join(format!("{}.incomplete", &sum(config)[..40])), config).unwrap();
    let folder = server.hub(root.path()).open(Path::new("org/thing")).unwrap();
    assert_eq!(fs::read(folder.join("config.json")).unwrap(), config);
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
        (gated.hub(root.path()), "org/thing", ["org/thing is gated: accept its terms at http://127.0.0.1", "HF_TOKEN"]),
        (hub, "./org/thing", ["does not exist", "relative to the folder"]),
    ] {
        let error = said(&hub, name);
        assert!(parts.iter().all(|part| error.contains(part)) && !error.contains("hunter2"), "{name}: {error}");
    }
    assert!(server.hub(root.path()).open(Path::new("org/old")).is_ok(), "a repository that was renamed");
    let fetched = gated.hub(root.path()).fetch(RepoKind::Dataset, "org/thing", |files| Ok(files.to_vec()));
    let error = fetched.unwrap_err().to_string();
    assert!(error.contains("/datasets/org/thing, then"), "{error}");
}

#[test]
fn a_hub_that_can_not_be_reached_is_an_error_that_is_remembered() {
    let root = tempfile::tempdir().unwrap();
    let url = "http://127.0.0.1:1";
    let hub = Hub::at(Endpoint::new(url), Cache::at(root.path()));
    let error = hub.open(Path::new("org/thing")).unwrap_err().to_string();
    assert!(error.starts_with(&format!("hub {url}: cannot connect")) && error.contains("HF_HUB_OFFLINE=1"), "{error}");
    assert!(matches!(hub.contact.get(), Some(Err(_))), "it is remembered");
    for name in ["org/thing", "org/other", "org/third", "org/fourth"] {
        assert_eq!(hub.clone().open(Path::new(name)).unwrap_err().to_string(), error);
    }
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
