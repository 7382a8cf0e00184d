//! Conversations as text to look at.

use super::ChatMessage;

/// The turns as lines `role: content`. As JSON, from which the same turns can be read again, serde
/// writes them.
///
/// ```
/// use rollflow::data::{ChatMessage, conversation_to_markdown, conversation_to_text};
/// use rollflow::data::{count_turns, last_message};
///
/// let turns = [("user", "3+4?"), ("assistant", "7"), ("user", "Sure?")];
/// let turns = turns.map(|(role, content)| ChatMessage::new(role, content));
/// assert_eq!(conversation_to_text(&turns[..2]), "user: 3+4?\nassistant: 7\n");
/// assert_eq!(conversation_to_markdown(&turns[..1]), "### user\n\n3+4?\n");
/// let json = serde_json::to_string(&turns)?;
/// assert_eq!(serde_json::from_str::<Vec<ChatMessage>>(&json)?, turns);
///
/// assert_eq!((count_turns(&turns, None), count_turns(&turns, Some("user"))), (3, 2));
/// assert_eq!(last_message(&turns, Some("assistant")).unwrap().content, "7");
/// assert_eq!(last_message(&turns, Some("tool")), None);
/// # Ok::<(), serde_json::Error>(())
/// ```
pub fn conversation_to_text(turns: &[ChatMessage]) -> String {
    turns.iter().map(|turn| format!("{}: {}\n", turn.role, turn.content)).collect()
}

/// The turns as Markdown: a heading with the role above each.
pub fn conversation_to_markdown(turns: &[ChatMessage]) -> String {
    let written: Vec<String> = turns.iter().map(|turn| format!("### {}\n\n{}\n", turn.role, turn.content)).collect();
    written.join("\n")
}

/// Turns of `role`, or all.
pub fn count_turns(turns: &[ChatMessage], role: Option<&str>) -> usize {
    turns.iter().filter(|turn| role.is_none_or(|role| turn.role == role)).count()
}

/// The last turn of `role`, or of any role.
pub fn last_message<'a>(turns: &'a [ChatMessage], role: Option<&str>) -> Option<&'a ChatMessage> {
    turns.iter().rev().find(|turn| role.is_none_or(|role| turn.role == role))
}
