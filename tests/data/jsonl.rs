//! JSON lines in and out: what is read, and how a bad line is named.

use std::fs;
use std::path::PathBuf;

use rollflow::data::jsonl::{load_prompts, load_samples, save_samples};
use rollflow::data::{ChatMessage, DataBuffer, PromptText, Sample};
use serde_json::json;
use tempfile::TempDir;

fn file(content: impl AsRef<[u8]>) -> (TempDir, PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("data.jsonl");
    fs::write(&path, content).unwrap();
    (folder, path)
}

/// The message, without the temporary folder's name.
fn complaint(content: impl AsRef<[u8]>) -> String {
    let (folder, path) = file(content);
    let error = load_prompts(&path, "prompt", Some("answer"), None).unwrap_err().to_string();
    error.replace(&folder.path().display().to_string(), "")
}

#[test]
fn byte_order_mark_windows_line_ends_and_blank_lines_are_passed_over() {
    let (_folder, path) = file("\u{feff}{\"prompt\":\"a\",\"answer\":1}\r\n\r\n  \n{\"prompt\":\"é漢\",\"answer\":\"x\"}");
    let prompts = load_prompts(&path, "prompt", Some("answer"), None).unwrap();
    let read: Vec<_> = prompts.iter().map(|prompt| (prompt.text.render(), prompt.answer().unwrap())).collect();
    assert_eq!(read, [("a".to_owned(), "1"), ("é漢".to_owned(), "x")]);
}

#[test]
fn keys_are_chosen_and_other_fields_become_metadata() {
    let (_folder, path) = file(r#"{"q":[{"role":"user","content":"1+1?"}],"level":3,"a":true,"tags":["x"]}"#);
    let prompt = load_prompts(&path, "q", Some("a"), None).unwrap().remove(0);
    assert!(matches!(&prompt.text, PromptText::Chat(turns) if turns[0].content == "1+1?"));
    assert_eq!(json!(prompt.metadata), json!({"level": 3, "tags": ["x"], "answer": "true"}));
    let without = load_prompts(&path, "q", None, None).unwrap().remove(0);
    assert_eq!(without.answer(), None);
}

#[test]
fn limit_counts_records_and_reads_no_further() {
    let (_folder, path) = file("\n{\"prompt\":\"a\",\"answer\":\"\"}\n\n{\"prompt\":\"b\",\"answer\":\"\"}\nnot read\n");
    assert_eq!(load_prompts(&path, "prompt", Some("answer"), Some(2)).unwrap().len(), 2);
    let none = load_prompts(&path, "prompt", Some("answer"), Some(0)).unwrap();
    assert!(DataBuffer::new(none, 0).is_err());
}

#[test]
fn a_bad_line_names_file_line_and_what_was_expected() {
    let bad = [
        complaint("{\"prompt\":\"a\",\"answer\":\"b\"}\n\n{\"prompt\": \"a\""),
        complaint("[1, 2]"),
        complaint(r#"{"question":"a","answer":"b"}"#),
        complaint(r#"{"prompt":7,"answer":"b"}"#),
        complaint(r#"{"prompt":[{"role":"user"}],"answer":"b"}"#),
        complaint(r#"{"prompt":[],"answer":"b"}"#),
        complaint(r#"{"prompt":"a","solution":"b"}"#),
        complaint(r#"{"prompt":"a","answer":null}"#),
        complaint(b"{\"prompt\":\"\xff\"}"),
    ];
    insta::assert_snapshot!(bad.join("\n"));
}

#[test]
fn a_missing_file_is_named() {
    let error = load_prompts("no/such.jsonl".as_ref(), "prompt", None, None).unwrap_err().to_string();
    assert!(error.starts_with("cannot read no/such.jsonl:"), "{error}");
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
