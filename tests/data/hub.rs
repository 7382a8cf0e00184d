//! Data sets from a local server that speaks the hub's paths.

use std::fs;

use axum::http::Method;
use rollflow::data::source::DataSpec;
use rollflow::hub::{Cache, Hub};
use rollflow::net::{Endpoint, Server};

#[path = "../support/hub.rs"]
mod server;

use server::{COMMIT, TestHub};

#[test]
fn of_a_data_set_only_the_files_of_its_subset_and_split_are_fetched() {
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
