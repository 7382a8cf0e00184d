//! A prompt and its place in the stream.

use serde::{Deserialize, Serialize};

use super::Metadata;

/// One turn of a conversation.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct ChatMessage {
    /// `system`, `user`, `assistant` or `tool`.
    pub role: String,
    /// What was said.
    pub content: String,
}

/// A prompt as its author wrote it: text, or a conversation.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(untagged)]
pub enum PromptText {
    /// Plain text, tokenised as it is.
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
    /// The text itself; a conversation becomes `role: content` lines and an open `assistant:` turn.
    pub fn render(&self) -> String {
        match self {
            PromptText::Text(text) => text.clone(),
            PromptText::Chat(turns) => {
                let mut text = String::new();
                for turn in turns {
                    text += &format!("{}: {}\n", turn.role, turn.content);
                }
                text + "assistant: "
            }
        }
    }
}

/// A prompt that entered the pipeline.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Prompt {
    /// Its place in the whole stream, over all epochs, from 0. It names the group and keys the sampler's randomness (law N2).
    pub ordinal: u64,
    /// The pass over the data set that it belongs to, from 0.
    pub epoch: u64,
    /// What the author wrote.
    pub text: PromptText,
    /// Ground truth and whatever else the data set holds; reaches rewards and logs untouched.
    #[serde(default)]
    pub metadata: Metadata,
    /// The data set that it is from, where there may be several; empty otherwise.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub source: String,
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
}

/// A prompt with the completion that supervised training imitates.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pair {
    /// What is asked.
    pub prompt: PromptText,
    /// What is to be answered, without an end-of-text mark.
    pub completion: String,
}

/// A prompt with two answers, of which one is better: what a reward model learns from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RankedPair {
    /// What is asked.
    pub prompt: PromptText,
    /// The better answer, without an end-of-text mark.
    pub chosen: String,
    /// The worse one.
    pub rejected: String,
}

impl From<&Pair> for Prompt {
    /// The same question with its completion as the ground truth, `metadata["answer"]`.
    fn from(pair: &Pair) -> Self {
        let metadata = Metadata::from_iter([("answer".to_owned(), pair.completion.clone().into())]);
        Prompt { text: pair.prompt.clone(), metadata, ..Prompt::default() }
    }
}
