//! A prompt and its place in the stream.

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::{Metadata, Partial, conversation_to_text};
use crate::flow::Message;

/// One turn of a conversation.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(try_from = "Metadata")]
pub struct ChatMessage {
    /// `system`, `user`, `assistant` or `tool`.
    pub role: String,
    /// Text of the turn. Read from text, from a list of text parts, or, for an assistant that only
    /// calls tools, from null or an absent field.
    pub content: String,
    /// Further fields of the turn that chat templates read: `tool_calls`, `tool_call_id`, `name`,
    /// `reasoning_content`.
    #[serde(flatten)]
    pub more: Metadata,
}

impl ChatMessage {
    /// A turn with nothing but words.
    pub fn new(role: impl Into<String>, content: impl Into<String>) -> Self {
        ChatMessage { role: role.into(), content: content.into(), more: Metadata::new() }
    }

    /// The turn with one more field, such as `tool_calls`.
    pub fn with(mut self, field: &str, value: impl Into<Value>) -> Self {
        self.more.insert(field.to_owned(), value.into());
        self
    }
}

impl TryFrom<Metadata> for ChatMessage {
    type Error = String;

    fn try_from(mut more: Metadata) -> Result<Self, String> {
        let Some(Value::String(role)) = more.shift_remove("role") else {
            return Err("a message needs a `role`, a text".to_owned());
        };
        let content = match more.shift_remove("content").unwrap_or_default() {
            Value::Null if role == "assistant" => String::new(),
            Value::Null => return Err(format!("a message of the role {role:?} has no content")),
            content => text_of(&content).ok_or("the content of a message must be text, or a list of parts that are text")?,
        };
        Ok(ChatMessage { role, content, more })
    }
}

/// A text, or the joined parts of a list of texts, as data sets spell contents.
pub(super) fn text_of(content: &Value) -> Option<String> {
    match content {
        Value::String(text) => Some(text.clone()),
        Value::Array(parts) => parts.iter().map(|part| part.as_str().or_else(|| part.get("text")?.as_str())).collect(),
        _ => None,
    }
}

/// A prompt as its author wrote it: text, or a conversation.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(untagged)]
pub enum PromptText {
    /// Plain text, tokenised unchanged.
    Text(String),
    /// A conversation, rendered before it is tokenised.
    Chat(Vec<ChatMessage>),
}

impl Default for PromptText {
    fn default() -> Self {
        PromptText::Text(String::new())
    }
}

impl From<&str> for PromptText {
    fn from(text: &str) -> Self {
        PromptText::Text(text.to_owned())
    }
}

impl From<String> for PromptText {
    fn from(text: String) -> Self {
        PromptText::Text(text)
    }
}

impl From<Vec<ChatMessage>> for PromptText {
    fn from(turns: Vec<ChatMessage>) -> Self {
        PromptText::Chat(turns)
    }
}

impl PromptText {
    /// Renders the prompt for display: a conversation becomes `role: content` lines and an open
    /// `assistant:` turn. Models read the result of
    /// [`Tokenizer::encode_prompt`](super::Tokenizer::encode_prompt).
    pub fn render(&self) -> String {
        match self {
            PromptText::Text(text) => text.clone(),
            PromptText::Chat(turns) => conversation_to_text(turns) + "assistant: ",
        }
    }
}

/// A prompt that entered the pipeline.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Prompt {
    /// Place in the whole stream, over all epochs, from 0. Names the group, and keys the sampler's
    /// randomness (law N2).
    pub ordinal: u64,
    /// The pass over the data set that it belongs to, from 0.
    pub epoch: u64,
    /// Text as the data set has it.
    pub text: PromptText,
    /// Ground truth and whatever else the data set holds; reaches rewards and logs untouched.
    #[serde(default)]
    pub metadata: Metadata,
    /// The data set that it is from, where there may be several; empty otherwise.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub source: String,
    /// Partial completions of a prompt that re-enters (law D7); empty otherwise. A generator takes
    /// them off the prompt.
    #[serde(default, skip_serializing_if = "Partial::is_empty")]
    pub partial: Partial,
}

impl Message for Prompt {
    /// Tokens of its partial completions: before it is tokenised, a prompt has none itself.
    fn tokens(&self) -> usize {
        self.partial.tokens()
    }

    fn label() -> String {
        "Prompt with its partial completions".to_owned()
    }
}

impl<T: Into<PromptText>> From<T> for Prompt {
    fn from(text: T) -> Self {
        Prompt { text: text.into(), ..Prompt::default() }
    }
}

impl Prompt {
    /// The data set's ground truth, `metadata["answer"]`, as text.
    pub fn answer(&self) -> Option<&str> {
        self.metadata.get("answer").and_then(|value| value.as_str())
    }

    /// JSON schemas of the tools that may be called, `metadata["tools"]`.
    pub fn tools(&self) -> &[Value] {
        self.metadata.get("tools").and_then(Value::as_array).map_or(&[], Vec::as_slice)
    }
}

/// A prompt with the completion that supervised training imitates.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Pair {
    /// Prompt.
    pub prompt: PromptText,
    /// Reference completion, without an end-of-text token.
    pub completion: String,
    /// JSON schemas of the tools that the assistant was offered.
    pub tools: Vec<Value>,
}

/// A prompt with two answers, of which one is better: what a reward model learns from.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct RankedPair {
    /// Prompt.
    pub prompt: PromptText,
    /// The better answer, without an end-of-text mark.
    pub chosen: String,
    /// The worse one.
    pub rejected: String,
    /// Difference by which a reward model's scores should be apart, TRL's `margin`; `None`: 0.
    pub margin: Option<f64>,
    /// JSON schemas of the tools that the assistant was offered. Reward models do not read them.
    pub tools: Vec<Value>,
}

impl From<&Pair> for Prompt {
    /// Makes a prompt whose ground truth, `metadata["answer"]`, is the completion.
    fn from(pair: &Pair) -> Self {
        let tools = Some(&pair.tools).filter(|tools| !tools.is_empty()).map(|tools| ("tools", tools.clone().into()));
        let fields = tools.into_iter().chain([("answer", pair.completion.clone().into())]);
        let metadata = fields.map(|(name, value)| (name.to_owned(), value)).collect();
        Prompt { text: pair.prompt.clone(), metadata, ..Prompt::default() }
    }
}
