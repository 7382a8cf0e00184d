//! Conversations: as text to look at, and what is in them.

use serde_json::Value;

use super::{ChatMessage, PromptText, Sample};

/// Turns, and the tools that the assistant may call in them.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Conversation {
    /// The turns.
    pub turns: Vec<ChatMessage>,
    /// JSON schemas of the tools.
    pub tools: Vec<Value>,
}

impl Conversation {
    /// The beginning up to each turn of the assistant, as the model was shown it, with that turn.
    pub fn beginnings(&self) -> impl Iterator<Item = &[ChatMessage]> {
        let said = |at: &usize| self.turns[*at].role == "assistant";
        (0..self.turns.len()).filter(said).map(|at| &self.turns[..=at])
    }
}

/// Format of [`conversation_to_text`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ConversationFormat {
    /// `role: content`, a turn after the other.
    #[default]
    Plain,
    /// A heading with the role above each turn.
    Markdown,
    /// A list of `{"role": …, "content": …}`, from which the same turns can be read again.
    Json,
}

/// The turns as text.
///
/// ```
/// use rollflow::data::{ChatMessage, ConversationFormat, conversation_to_text, count_turns, last_message};
///
/// let turns = [ChatMessage::new("user", "3+4?"), ChatMessage::new("assistant", "7"), ChatMessage::new("user", "Sure?")];
/// assert_eq!(conversation_to_text(&turns[..2], ConversationFormat::Plain), "user: 3+4?\nassistant: 7\n");
/// assert_eq!(conversation_to_text(&turns[..1], ConversationFormat::Markdown), "### user\n\n3+4?\n");
/// let json = conversation_to_text(&turns, ConversationFormat::Json);
/// assert_eq!(serde_json::from_str::<Vec<ChatMessage>>(&json).unwrap(), turns);
///
/// assert_eq!((count_turns(&turns, None), count_turns(&turns, Some("user"))), (3, 2));
/// assert_eq!(last_message(&turns, Some("assistant")).unwrap().content, "7");
/// assert_eq!(last_message(&turns, Some("tool")), None);
/// ```
pub fn conversation_to_text(turns: &[ChatMessage], format: ConversationFormat) -> String {
    match format {
        ConversationFormat::Plain => turns.iter().map(|turn| format!("{}: {}\n", turn.role, turn.content)).collect(),
        ConversationFormat::Markdown => {
            let written: Vec<String> = turns.iter().map(|turn| format!("### {}\n\n{}\n", turn.role, turn.content)).collect();
            written.join("\n")
        }
        ConversationFormat::Json => serde_json::to_string(turns).expect("roles and contents are text"),
    }
}

/// Turns of `role`, or all.
pub fn count_turns(turns: &[ChatMessage], role: Option<&str>) -> usize {
    turns.iter().filter(|turn| role.is_none_or(|role| turn.role == role)).count()
}

/// The last turn of `role`, or of anybody.
pub fn last_message<'a>(turns: &'a [ChatMessage], role: Option<&str>) -> Option<&'a ChatMessage> {
    turns.iter().rev().find(|turn| role.is_none_or(|role| turn.role == role))
}

impl Sample {
    /// The prompt's turns, a text being one of the user's, and the response as the assistant's.
    pub fn conversation(&self) -> Vec<ChatMessage> {
        let asked = match &self.prompt {
            PromptText::Text(text) => vec![ChatMessage::new("user", text)],
            PromptText::Chat(turns) => turns.clone(),
        };
        asked.into_iter().chain([ChatMessage::new("assistant", &self.response)]).collect()
    }
}
