//! Requests and responses of agents, in the form of OpenAI's API.

use std::hash::{BuildHasher, RandomState};
use std::time::UNIX_EPOCH;

use serde_json::{Map, Value, json};

use crate::data::ChatMessage;
use crate::env::{Action, ToolCall, ToolResult, ToolSpec};

/// Fields of a message that a model reads; others are dropped.
const READ: [&str; 4] = ["name", "tool_call_id", "tool_calls", "reasoning_content"];

/// Request of an agent.
#[derive(Clone, Debug, Default)]
pub struct ModelRequest {
    /// The whole conversation, or a text to continue.
    pub messages: Vec<ChatMessage>,
    /// If true, it is a text.
    pub text: bool,
    pub tools: Vec<ToolSpec>,
    /// If true, the response is a stream.
    pub stream: bool,
    /// If true, a stream ends with the token counts; a page always has them.
    pub usage: bool,
}

/// One turn of the model.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ModelTurn {
    pub content: String,
    pub calls: Vec<ToolCall>,
    /// If true, the turn was truncated.
    pub truncated: bool,
    /// Tokens of the context; `sampled` are those of the turn.
    pub read: usize,
    pub sampled: usize,
}

impl ModelTurn {
    /// Converts a turn: to its calls alone if all are valid, else to its text.
    pub fn of(action: &Action, calls: Vec<Result<ToolCall, ToolResult>>) -> Self {
        let turn = ModelTurn { read: action.read, sampled: action.sampled, ..ModelTurn::default() };
        match calls.into_iter().collect::<Result<Vec<ToolCall>, _>>() {
            Ok(calls) if !calls.is_empty() => {
                // Ids are unique in the whole conversation.
                let unique = RandomState::new();
                let named = |(at, call): (usize, ToolCall)| ToolCall { id: format!("call_{:016x}", unique.hash_one(at)), ..call };
                ModelTurn { calls: calls.into_iter().enumerate().map(named).collect(), ..turn }
            }
            _ => ModelTurn { content: action.text.clone(), ..turn },
        }
    }

    /// Returns the turn as the agent repeats it in its next request.
    pub fn message(&self) -> ChatMessage {
        let message = ChatMessage::new("assistant", self.content.clone());
        if self.calls.is_empty() { message } else { message.with("tool_calls", self.calls.iter().map(call).collect::<Vec<_>>()) }
    }

    /// Returns true if a message of the agent's next request is this turn. Some agents leave out the text
    /// before calls.
    pub fn is_repeated_by(&self, message: &ChatMessage) -> bool {
        let calls_alone = || ModelTurn { content: String::new(), ..self.clone() };
        self.message() == *message || !self.calls.is_empty() && calls_alone().message() == *message
    }

    /// Calls of the turn, in OpenAI's form and with their places.
    #[cfg(feature = "torch")]
    pub fn called(&self) -> Vec<Value> {
        let with_place = |(at, call): (usize, &ToolCall)| {
            let mut call = call_as_text(call);
            call["index"] = at.into();
            call
        };
        self.calls.iter().enumerate().map(with_place).collect()
    }

    /// Word for the end of the turn.
    pub fn finish(&self) -> &'static str {
        match (self.truncated, self.calls.is_empty()) {
            (true, _) => "length",
            (false, true) => "stop",
            (false, false) => "tool_calls",
        }
    }

    fn usage(&self) -> Value {
        json!({ "prompt_tokens": self.read, "completion_tokens": self.sampled, "total_tokens": self.read + self.sampled })
    }
}

/// Writes a call for chat templates, with its arguments as an object.
fn call(call: &ToolCall) -> Value {
    written(call, Value::Object(call.arguments.clone()))
}

/// Writes a call for agents, with its arguments as text.
fn call_as_text(call: &ToolCall) -> Value {
    written(call, Value::Object(call.arguments.clone()).to_string().into())
}

fn written(call: &ToolCall, arguments: Value) -> Value {
    json!({ "id": call.id, "type": "function", "function": { "name": call.name, "arguments": arguments } })
}

/// Reads a chat request, or the request to continue a `text`.
pub fn request(body: &[u8], text: bool) -> Result<ModelRequest, String> {
    let request: Map<String, Value> =
        serde_json::from_slice(body).map_err(|error| format!("the request is no JSON object: {error}"))?;
    if request.get("n").and_then(Value::as_u64).is_some_and(|n| n != 1) {
        return Err("`n` must be 1: a rollout has one answer to a question; ask again for another".to_owned());
    }
    let asks = |value: Option<&Value>| value.and_then(Value::as_bool).unwrap_or(false);
    let usage = asks(request.get("stream_options").and_then(|options| options.get("include_usage")));
    let (messages, tools) = if text { (prompt(&request)?, Vec::new()) } else { chat(&request)? };
    Ok(ModelRequest { messages, text, tools, stream: asks(request.get("stream")), usage })
}

/// Reads the messages and tools of a chat request.
pub fn chat(request: &Map<String, Value>) -> Result<(Vec<ChatMessage>, Vec<ToolSpec>), String> {
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
    Ok((messages, tools))
}

fn prompt(request: &Map<String, Value>) -> Result<Vec<ChatMessage>, String> {
    let prompt = match request.get("prompt") {
        Some(Value::Array(prompts)) if prompts.len() == 1 => prompts[0].as_str(),
        prompt => prompt.and_then(Value::as_str),
    };
    Ok(vec![ChatMessage::new("user", prompt.ok_or("`prompt` is one text")?)])
}

fn message(value: &Value) -> Result<ChatMessage, String> {
    let mut message: ChatMessage =
        serde_json::from_value(value.clone()).map_err(|error| format!("a message can't be read: {error}"))?;
    message.more.retain(|field, value| READ.contains(&field.as_str()) && !value.is_null() && *value != json!([]));
    if let Some(calls) = message.more.get_mut("tool_calls") {
        let calls = calls.as_array_mut().ok_or("`tool_calls` is a list")?;
        for call in calls {
            let function = &call["function"];
            if !function.is_object() {
                return Err("each of `tool_calls` is an object with an object `function`".to_owned());
            }
            // Text that is no JSON stays unchanged.
            let parsed = function["arguments"].as_str().and_then(|text| serde_json::from_str(text).ok());
            let arguments = parsed.unwrap_or_else(|| function["arguments"].clone());
            *call =
                json!({ "id": call["id"], "type": "function", "function": { "name": function["name"], "arguments": arguments } });
        }
    }
    Ok(message)
}

fn tool(value: &Value) -> Result<ToolSpec, String> {
    let function = value.get("function").unwrap_or(value);
    serde_json::from_value(function.clone()).map_err(|error| format!("a tool can't be read: {error}"))
}

/// Writes the response to a request for a chat or a `text`.
pub fn page(model: &str, text: bool, turn: &ModelTurn) -> Value {
    let finish = turn.finish();
    if text {
        let choice = json!({ "index": 0, "text": turn.content, "logprobs": null, "finish_reason": finish });
        return with_usage(head("cmpl", "text_completion", model, json!([choice])), turn);
    }
    let mut message = json!({ "role": "assistant", "content": turn.content });
    if !turn.calls.is_empty() {
        message["content"] = Some(turn.content.as_str()).filter(|text| !text.is_empty()).into();
        message["tool_calls"] = turn.calls.iter().map(call_as_text).collect();
    }
    let choice = json!({ "index": 0, "message": message, "logprobs": null, "finish_reason": finish });
    with_usage(head("chatcmpl", "chat.completion", model, json!([choice])), turn)
}

fn with_usage(mut page: Value, turn: &ModelTurn) -> Value {
    page["usage"] = turn.usage();
    page
}

/// Chunks of a streamed response, as server-sent events.
pub struct Chunks {
    /// Common fields of all chunks.
    head: Value,
    text: bool,
    usage: bool,
    /// Text that was sent already.
    sent: String,
}

impl Chunks {
    /// Starts a response to a request for a chat or a `text`.
    pub fn new(model: &str, text: bool, usage: bool) -> Self {
        let (id, object) = if text { ("cmpl", "text_completion") } else { ("chatcmpl", "chat.completion.chunk") };
        let mut head = head(id, object, model, json!([]));
        if usage {
            head["usage"] = Value::Null;
        }
        Chunks { head, text, usage, sent: String::new() }
    }

    /// Writes the first chunk, with the role.
    pub fn begin(&self) -> String {
        if self.text { String::new() } else { self.delta(json!({ "role": "assistant", "content": "" })) }
    }

    /// Writes new text; nothing if it is empty.
    pub fn more(&mut self, new: &str) -> String {
        if new.is_empty() {
            return String::new();
        }
        let page = if self.text { self.choice("text", new.into(), None) } else { self.delta(json!({ "content": new })) };
        self.sent.push_str(new);
        page
    }

    /// Writes the rest of the turn, if it extends what was sent.
    pub fn end(&mut self, turn: &ModelTurn) -> String {
        let mut pages = self.more(turn.content.strip_prefix(&*self.sent).unwrap_or_default());
        for (at, call) in turn.calls.iter().enumerate() {
            let mut begun = call_as_text(call);
            let arguments = begun["function"]["arguments"].take();
            (begun["index"], begun["function"]["arguments"]) = (at.into(), "".into());
            pages += &self.delta(json!({ "tool_calls": [begun] }));
            pages += &self.delta(json!({ "tool_calls": [{ "index": at, "function": { "arguments": arguments } }] }));
        }
        let (part, empty) = if self.text { ("text", "".into()) } else { ("delta", json!({})) };
        pages += &self.choice(part, empty, Some(turn.finish()));
        if self.usage {
            pages += &event(&with_usage(self.head.clone(), turn));
        }
        pages + "data: [DONE]\n\n"
    }

    fn delta(&self, delta: Value) -> String {
        self.choice("delta", delta, None)
    }

    fn choice(&self, part: &str, value: Value, finish: Option<&str>) -> String {
        let mut page = self.head.clone();
        page["choices"] = json!([{ "index": 0, part: value, "logprobs": null, "finish_reason": finish }]);
        event(&page)
    }
}

/// Writes a server-sent event.
pub fn event(page: &Value) -> String {
    format!("data: {page}\n\n")
}

/// Writes the list of models.
pub fn models(model: &str) -> Value {
    json!({ "object": "list", "data": [{ "id": model, "object": "model", "created": now(), "owned_by": "rollflow" }] })
}

/// Writes an error.
pub fn error(kind: &str, message: &str) -> Value {
    json!({ "error": { "message": message, "type": kind, "param": null, "code": null } })
}

/// Makes an id that no other response has.
pub fn unique() -> String {
    format!("{:016x}", RandomState::new().hash_one(0))
}

/// Writes the fields that all responses share.
pub fn head(id: &str, object: &str, model: &str, choices: Value) -> Value {
    let id = format!("{id}-{}", unique());
    json!({ "id": id, "object": object, "created": now(), "model": model, "choices": choices })
}

fn now() -> u64 {
    UNIX_EPOCH.elapsed().unwrap_or_default().as_secs()
}
