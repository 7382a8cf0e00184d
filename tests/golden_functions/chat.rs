//! Conversations as transformers' `apply_chat_template` writes them, with what the template's blocks say is the assistant's.

use std::path::{Path, PathBuf};

use rollflow::data::chat::ChatTemplate;
use rollflow::data::{ChatMessage, DataError};
use serde_json::Value;

use crate::case::Case;

/// The template's file, among the cases.
fn template(name: &str) -> PathBuf {
    let folder = std::env::var_os("ROLLFLOW_GOLDEN").map_or_else(|| PathBuf::from("tests/golden"), PathBuf::from);
    folder.join("chat_templates").join(name).with_extension("jinja")
}

pub fn render(case: &Case) -> Result<(), String> {
    case.only("inputs", &["messages", "tools", "add_generation_prompt", "variables"])?;
    case.only("expected", &["text", "generation_spans", "error"])?;
    let (inputs, expected) = (&case.value["inputs"], &case.value["expected"]);
    let file = template(case.value["template"].as_str().ok_or("no template is named")?);
    let variables = inputs["variables"].as_object().cloned().unwrap_or_default();
    let chat = ChatTemplate::from_file(&file).map_err(|error| error.to_string())?;
    let chat = variables.into_iter().fold(chat, |chat, (name, value)| chat.with(&name, value));
    let messages: Vec<ChatMessage> = serde_json::from_value(inputs["messages"].clone()).map_err(|error| error.to_string())?;
    let tools = inputs["tools"].as_array().cloned().unwrap_or_default();
    let add_generation_prompt = inputs["add_generation_prompt"].as_bool().ok_or("add_generation_prompt is missing")?;
    let render = || chat.render(&messages, &tools, add_generation_prompt);
    if let Some(error) = expected.get("error") {
        return refused(&file, render(), error.as_str().unwrap_or_default());
    }
    let same = |found: String| match expected["text"] == found.as_str() {
        true => Ok(()),
        false => Err(format!("{} became\n{found:?}, expected\n{}", case.name, expected["text"])),
    };
    same(render().map_err(|error| error.to_string())?)?;
    let Some(spans) = expected.get("generation_spans") else { return Ok(()) };
    let (text, found) = chat.render_marked(&messages, &tools, add_generation_prompt).map_err(|error| error.to_string())?;
    let characters = |byte: usize| text[..byte].chars().count();
    let found: Vec<Value> = found.iter().map(|span| vec![characters(span.start), characters(span.end)].into()).collect();
    if *spans != Value::Array(found.clone()) {
        return Err(format!("the assistant's stretches are {found:?}, expected {spans}"));
    }
    same(text)
}

/// What a template refuses is refused in its words, and what it can't work with is an error too; both name its line.
fn refused(file: &Path, found: Result<String, DataError>, error: &str) -> Result<(), String> {
    let named = |place: &str| {
        let line = place.strip_prefix(&*file.to_string_lossy()).and_then(|rest| rest.strip_prefix(':')?.parse::<usize>().ok());
        line.is_some_and(|line| line > 0)
    };
    match (found, error.strip_prefix("TemplateError: ")) {
        (Err(DataError::Refused { place, message }), Some(said)) if message == said && named(&place) => Ok(()),
        (Err(DataError::Invalid { place, .. }), None) if named(&place) => Ok(()),
        (found, _) => Err(format!("expected {error:?}, found {found:?}")),
    }
}
