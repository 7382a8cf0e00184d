//! Turns of conversations in the spellings that data sets have.

use serde_json::Value;

use super::shape::take;
use crate::data::prompt::text_of;
use crate::data::{ChatMessage, Metadata, count_turns};

const ASSISTANT: &str = "assistant";

/// A list of turns.
pub(super) fn read(value: Value) -> Result<Vec<ChatMessage>, String> {
    let Value::Array(turns) = value else { return Err("whose messages are no list".into()) };
    if turns.is_empty() {
        return Err("with an empty conversation".into());
    }
    turns.into_iter().map(turn).collect()
}

fn turn(value: Value) -> Result<ChatMessage, String> {
    let Value::Object(mut more) = value else { return Err("with a turn that is no object".into()) };
    let role = match (take(&mut more, "role"), take(&mut more, "from")) {
        (Some(Value::String(role)), _) | (None, Some(Value::String(role))) => role,
        _ => return Err("with a turn without a role".into()),
    };
    let role = role_of(&role).ok_or_else(|| format!("with a turn of an unknown role: {role:?}"))?;
    // A turn that only calls tools says nothing.
    let content = take(&mut more, "content").or_else(|| take(&mut more, "value"));
    let content = content.map_or(Some(String::new()), |content| text_of(&content)).ok_or("with a turn that is not text")?;
    // Null, where it was not taken.
    ["role", "content"].iter().for_each(|field| drop(more.shift_remove(*field)));
    Ok(ChatMessage { role: role.to_owned(), content, more })
}

fn role_of(name: &str) -> Option<&'static str> {
    Some(match name {
        "system" | "developer" => "system",
        "user" | "human" | "prompter" => "user",
        "assistant" | "gpt" | "chatgpt" | "bot" | "model" | "function_call" => ASSISTANT,
        "tool" | "function" | "function_response" | "observation" | "ipython" => "tool",
        _ => return None,
    })
}

/// Reads a reference completion as turns, of which the last is the assistant's. Text, a number or a
/// truth value is one turn.
pub(super) fn completion(value: Value) -> Result<Vec<ChatMessage>, String> {
    let turns = match value {
        Value::String(text) => vec![said(text)],
        Value::Number(_) | Value::Bool(_) => vec![said(value.to_string())],
        list @ Value::Array(_) => read(list)?,
        _ => return Err("whose completion is not text".into()),
    };
    match turns.last() {
        Some(turn) if turn.role == ASSISTANT => Ok(turns),
        _ => Err("whose completion does not end with the assistant".into()),
    }
}

/// A turn of the assistant with this text.
fn said(text: String) -> ChatMessage {
    ChatMessage::new(ASSISTANT, text)
}

/// Text of a completion without reasoning and calls of tools. Turns up to the last one of the user
/// repeat the prompt.
pub(super) fn text_alone(mut completion: Vec<ChatMessage>) -> Result<String, String> {
    const MORE: [&str; 4] = ["tool_calls", "reasoning_content", "reasoning", "thinking"];
    let asked = completion.iter().rposition(|turn| ["system", "user"].contains(&&*turn.role)).map_or(0, |last| last + 1);
    let given = |value: &Value| match value {
        Value::Array(list) => !list.is_empty(),
        Value::String(text) => !text.is_empty(),
        value => !value.is_null(),
    };
    match (completion.pop(), completion.len() - asked) {
        (Some(turn), 0) if !MORE.iter().any(|field| turn.more.get(*field).is_some_and(given)) => Ok(turn.content),
        _ => Err("whose completion is more than one text".into()),
    }
}

/// With the field `system` as the first turn, unless there is one.
pub(super) fn with_system(turns: Vec<ChatMessage>, record: &mut Metadata) -> Vec<ChatMessage> {
    match take(record, "system") {
        Some(Value::String(text)) if !text.is_empty() && count_turns(&turns, Some("system")) == 0 => {
            [ChatMessage::new("system", text)].into_iter().chain(turns).collect()
        }
        _ => turns,
    }
}
