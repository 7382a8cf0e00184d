//! Turns of conversations in the spellings that data sets have.

use serde_json::{Map, Value};

use super::Skip;
use super::columns::take;
use crate::data::ChatMessage;

/// A list of turns.
pub(super) fn read(value: Value) -> Result<Vec<ChatMessage>, Skip> {
    let Value::Array(turns) = value else { return Err("whose messages are no list".into()) };
    if turns.is_empty() {
        return Err("with an empty conversation".into());
    }
    turns.into_iter().map(turn).collect()
}

fn turn(value: Value) -> Result<ChatMessage, Skip> {
    let Value::Object(mut turn) = value else { return Err("with a turn that is no object".into()) };
    let role = match (take(&mut turn, "role"), take(&mut turn, "from")) {
        (Some(Value::String(role)), _) | (None, Some(Value::String(role))) => role,
        _ => return Err("with a turn of nobody".into()),
    };
    let role = role_of(&role).ok_or_else(|| format!("with a turn of the unknown role {role:?}"))?;
    let content = content(take(&mut turn, "content").or_else(|| take(&mut turn, "value")))?;
    turn.insert("role".to_owned(), role.into());
    turn.insert("content".to_owned(), content.into());
    serde_json::from_value(Value::Object(turn)).map_err(|_| "with a turn that makes no sense".into())
}

fn role_of(name: &str) -> Option<&'static str> {
    Some(match name {
        "system" | "developer" => "system",
        "user" | "human" | "prompter" => "user",
        "assistant" | "gpt" | "chatgpt" | "bot" | "model" | "function_call" => "assistant",
        "tool" | "function" | "function_response" | "observation" | "ipython" => "tool",
        _ => return None,
    })
}

/// Text, or parts of which all are text. A turn that only calls tools says nothing.
fn content(value: Option<Value>) -> Result<String, Skip> {
    match value {
        None => Ok(String::new()),
        Some(Value::String(text)) => Ok(text),
        Some(Value::Array(parts)) => {
            let texts = parts.iter().map(|part| part.as_str().or_else(|| part.get("text")?.as_str()));
            texts.collect::<Option<String>>().ok_or_else(|| "with a turn that is not text".into())
        }
        Some(_) => Err("with a turn that is not text".into()),
    }
}

/// Reads a reference completion: text, a number or truth value, or messages of which the
/// assistant's is the only or the last one.
pub(super) fn completion(value: Value) -> Result<String, Skip> {
    match value {
        Value::String(text) => Ok(text),
        Value::Number(_) | Value::Bool(_) => Ok(value.to_string()),
        list @ Value::Array(_) => match read(list)?.pop() {
            Some(turn) if turn.role == "assistant" => Ok(turn.content),
            _ => Err("whose completion does not end with the assistant".into()),
        },
        _ => Err("whose completion is not text".into()),
    }
}

/// With the field `system` as the first turn, unless there is one.
pub(super) fn with_system(turns: Vec<ChatMessage>, record: &mut Map<String, Value>) -> Vec<ChatMessage> {
    match take(record, "system") {
        Some(Value::String(text)) if !text.is_empty() && turns.iter().all(|turn| turn.role != "system") => {
            [said("system", text)].into_iter().chain(turns).collect()
        }
        _ => turns,
    }
}

/// A question under a system prompt.
pub(super) fn asked(system: String, question: String) -> Vec<ChatMessage> {
    vec![said("system", system), said("user", question)]
}

fn said(role: &str, content: String) -> ChatMessage {
    ChatMessage::new(role, content)
}
