//! What agents ask and what they get, as OpenAI's API has it.

use std::hash::{BuildHasher, RandomState};
use std::time::UNIX_EPOCH;

use serde_json::{Map, Value, json};
use tokio::sync::oneshot;

use crate::data::ChatMessage;
use crate::env::{Called, ToolCall, ToolSpec};

/// Fields of a message that a model reads; whatever else libraries write into one is theirs.
const READ: [&str; 4] = ["name", "tool_call_id", "tool_calls", "reasoning_content"];

/// One request.
pub struct Ask {
    /// The whole conversation, or a text to go on from.
    pub messages: Vec<ChatMessage>,
    /// Whether it is a text.
    pub text: bool,
    pub tools: Vec<ToolSpec>,
    pub reply: oneshot::Sender<Result<Said, String>>,
}

/// What the model said.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Said {
    pub content: String,
    pub calls: Vec<ToolCall>,
}

impl Said {
    /// Text with calls in it, as agents get it: the calls, if all of them can be made; otherwise the text as it is.
    pub fn of(text: &str, calls: Vec<Called>) -> Self {
        match calls.into_iter().collect::<Result<Vec<ToolCall>, _>>() {
            Ok(calls) if !calls.is_empty() => {
                // What tells them apart in the whole conversation.
                let unique = RandomState::new();
                let named = |(at, call): (usize, ToolCall)| ToolCall { id: format!("call_{:016x}", unique.hash_one(at)), ..call };
                Said { content: String::new(), calls: calls.into_iter().enumerate().map(named).collect() }
            }
            _ => Said { content: text.to_owned(), calls: Vec::new() },
        }
    }

    /// As the agent shows it in its next request.
    pub fn message(&self) -> ChatMessage {
        let message = ChatMessage::new("assistant", self.content.clone());
        if self.calls.is_empty() { message } else { message.with("tool_calls", self.calls.iter().map(call).collect::<Vec<_>>()) }
    }

    fn finish(&self) -> &'static str {
        if self.calls.is_empty() { "stop" } else { "tool_calls" }
    }
}

/// A call with its arguments as an object, as templates read it.
fn call(call: &ToolCall) -> Value {
    json!({ "id": call.id, "type": "function", "function": { "name": call.name, "arguments": call.arguments } })
}

/// A call with its arguments as text, as agents read it.
fn call_as_text(call: &ToolCall) -> Value {
    let arguments = Value::Object(call.arguments.clone()).to_string();
    json!({ "id": call.id, "type": "function", "function": { "name": call.name, "arguments": arguments } })
}

/// Reads a request for a chat's next turn: messages, tools, and whether it wants a stream.
pub fn chat(body: &[u8]) -> Result<(Vec<ChatMessage>, Vec<ToolSpec>, bool), String> {
    let request = object(body)?;
    let messages = request.get("messages").and_then(Value::as_array).ok_or("`messages` is missing; it is a list")?;
    let messages = messages.iter().map(message).collect::<Result<Vec<_>, _>>()?;
    if messages.is_empty() {
        return Err("`messages` is empty".to_owned());
    }
    let tools = match request.get("tools") {
        None | Some(Value::Null) => Vec::new(),
        Some(Value::Array(tools)) => tools.iter().map(tool).collect::<Result<_, _>>()?,
        Some(_) => return Err("`tools` is a list".to_owned()),
    };
    Ok((messages, tools, streams(&request)?))
}

/// Reads a request to go on from a text.
pub fn completion(body: &[u8]) -> Result<(String, bool), String> {
    let request = object(body)?;
    let prompt = match request.get("prompt") {
        Some(Value::String(prompt)) => prompt.clone(),
        Some(Value::Array(prompts)) if prompts.len() == 1 && prompts[0].is_string() => {
            prompts[0].as_str().unwrap_or_default().to_owned()
        }
        _ => return Err("`prompt` is one text".to_owned()),
    };
    Ok((prompt, streams(&request)?))
}

fn object(body: &[u8]) -> Result<Map<String, Value>, String> {
    serde_json::from_slice(body).map_err(|error| format!("the request is no JSON object: {error}"))
}

fn streams(request: &Map<String, Value>) -> Result<bool, String> {
    if request.get("n").and_then(Value::as_u64).is_some_and(|n| n != 1) {
        return Err("`n` must be 1: a rollout has one answer to a question; ask again for another".to_owned());
    }
    Ok(request.get("stream").and_then(Value::as_bool).unwrap_or(false))
}

fn message(value: &Value) -> Result<ChatMessage, String> {
    let mut message: ChatMessage =
        serde_json::from_value(value.clone()).map_err(|error| format!("a message can't be read: {error}"))?;
    message.more.retain(|field, value| READ.contains(&field.as_str()) && !value.is_null() && *value != json!([]));
    if let Some(Value::Array(calls)) = message.more.get_mut("tool_calls") {
        for call in calls {
            let function = &mut call["function"];
            if let Some(text) = function["arguments"].as_str() {
                // Text that is no JSON stays as it is.
                function["arguments"] = serde_json::from_str(text).unwrap_or(Value::String(text.to_owned()));
            }
            *call = json!({ "id": call["id"], "type": "function", "function": { "name": call["function"]["name"], "arguments": call["function"]["arguments"] } });
        }
    }
    Ok(message)
}

fn tool(value: &Value) -> Result<ToolSpec, String> {
    let function = value.get("function").unwrap_or(value);
    serde_json::from_value(function.clone()).map_err(|error| format!("a tool can't be read: {error}"))
}

/// A chat's next turn.
pub fn chat_page(model: &str, said: &Said) -> Value {
    let mut message = json!({ "role": "assistant", "content": said.content });
    if !said.calls.is_empty() {
        message["content"] = Value::Null;
        message["tool_calls"] = said.calls.iter().map(call_as_text).collect();
    }
    let choice = json!({ "index": 0, "message": message, "logprobs": null, "finish_reason": said.finish() });
    head("chatcmpl", "chat.completion", model, choice)
}

/// The same as server-sent events.
pub fn chat_stream(model: &str, said: &Said) -> String {
    let mut deltas = vec![json!({ "role": "assistant", "content": "" })];
    deltas.extend(said.content.split_inclusive(' ').map(|piece| json!({ "content": piece })));
    for (at, call) in said.calls.iter().enumerate() {
        let mut begun = call_as_text(call);
        let arguments = begun["function"]["arguments"].take();
        (begun["index"], begun["function"]["arguments"]) = (at.into(), "".into());
        deltas.push(json!({ "tool_calls": [begun] }));
        deltas.push(json!({ "tool_calls": [{ "index": at, "function": { "arguments": arguments } }] }));
    }
    let choices = deltas.into_iter().map(|delta| json!({ "index": 0, "delta": delta, "finish_reason": null }));
    let end = json!({ "index": 0, "delta": {}, "finish_reason": said.finish() });
    events(choices.chain([end]).map(|choice| head("chatcmpl", "chat.completion.chunk", model, choice)))
}

/// What follows a text.
pub fn completion_page(model: &str, said: &Said) -> Value {
    let choice = json!({ "index": 0, "text": said.content, "logprobs": null, "finish_reason": "stop" });
    head("cmpl", "text_completion", model, choice)
}

/// The same as server-sent events.
pub fn completion_stream(model: &str, said: &Said) -> String {
    events([completion_page(model, said)].into_iter())
}

/// What can be asked for.
pub fn models(model: &str) -> Value {
    json!({ "object": "list", "data": [{ "id": model, "object": "model", "created": now(), "owned_by": "rollflow" }] })
}

/// Why not, as libraries expect it.
pub fn error(kind: &str, message: &str) -> Value {
    json!({ "error": { "message": message, "type": kind, "param": null, "code": null } })
}

fn events(pages: impl Iterator<Item = Value>) -> String {
    // One answer, one id.
    let mut id = None;
    let mut text = String::new();
    for mut page in pages {
        page["id"] = id.get_or_insert_with(|| page["id"].clone()).clone();
        text += &format!("data: {page}\n\n");
    }
    text + "data: [DONE]\n\n"
}

fn head(id: &str, object: &str, model: &str, choice: Value) -> Value {
    let id = format!("{id}-{:016x}", RandomState::new().hash_one(id));
    json!({ "id": id, "object": object, "created": now(), "model": model, "choices": [choice] })
}

fn now() -> u64 {
    UNIX_EPOCH.elapsed().unwrap_or_default().as_secs()
}
