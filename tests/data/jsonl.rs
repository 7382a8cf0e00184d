//! JSON lines in and out: what is read, and how a bad line is named.

use std::fs;
use std::path::PathBuf;

use rollflow::data::jsonl::{load_samples, save_samples};
use rollflow::data::{ChatMessage, Sample};
use serde_json::json;
use tempfile::TempDir;

fn file(content: impl AsRef<[u8]>) -> (TempDir, PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("data.jsonl");
    fs::write(&path, content).unwrap();
    (folder, path)
}

#[test]
fn byte_order_mark_windows_line_ends_and_blank_lines_are_passed_over() {
    let (_folder, path) = file("\u{feff}{\"prompt\":\"a\"}\r\n\r\n  \n{\"prompt\":\"é漢\"}");
    let read: Vec<_> = load_samples(&path).unwrap().iter().map(|sample| sample.prompt.render()).collect();
    assert_eq!(read, ["a", "é漢"]);
}

#[test]
fn samples_survive_the_round_trip() {
    let mut sample = Sample { prompt: "¿qué? 漢字 🦀\n\"\\".into(), response: "\u{2028}\0é".into(), ..Sample::default() };
    sample.tokens = vec![1, 2];
    sample.loss_mask = vec![0.0, 0.3];
    sample.metadata.insert("z".into(), json!({"nested": [1, null]}));
    sample.metadata.insert("a".into(), json!(0.1));
    let turn = ChatMessage::new("user", "¿qué?");
    let chat = Sample { prompt: vec![turn].into(), reward: Some(f64::NEG_INFINITY), ..sample.clone() };
    let samples = [chat, sample, Sample::default()];
    let (_folder, path) = file("what was there before");
    save_samples(&path, &samples).unwrap();
    assert_eq!(std::fs::read_to_string(&path).unwrap().lines().count(), 3, "one line a sample");
    assert_eq!(load_samples(&path).unwrap(), samples, "what was there before is gone");
    let error = save_samples("no/such/folder.jsonl".as_ref(), &samples).unwrap_err().to_string();
    assert!(error.starts_with("cannot write no/such/folder.jsonl:"), "{error}");
}

#[test]
fn samples_tolerate_missing_and_unknown_fields_but_no_contradiction() {
    let (_folder, path) = file(r#"{"prompt":"a","tokens":[5],"loss_mask":[1.0],"from_the_future":{}}"#);
    assert_eq!(load_samples(&path).unwrap()[0].tokens, [5]);
    let (_folder, path) = file("{}\n{\"tokens\":[5,6],\"loss_mask\":[1.0]}");
    let error = load_samples(&path).unwrap_err().to_string();
    assert!(error.contains(":2: ") && error.contains("1 entries for 2 tokens"), "{error}");
}
