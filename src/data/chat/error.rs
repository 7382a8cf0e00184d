//! Errors of chat templates and of the conversations given to them.

use std::path::PathBuf;
use std::sync::Arc;

use crate::data::TokenizerError;

/// A conversation that can't become text or tokens.
#[derive(Debug, thiserror::Error)]
pub enum ChatError {
    /// The template is wrong, or is given something it can't work with.
    #[error("{file}:{line}: {problem}{}", quoted(source_line))]
    Template {
        /// The file, or where else the template stands.
        file: String,
        /// The template's line, from 1.
        line: usize,
        /// Description of the error.
        problem: String,
        /// Text of that line.
        source_line: String,
    },
    /// The template refuses the conversation, by `raise_exception`.
    #[error("{file}:{line}: the chat template refuses this conversation: {message}")]
    Refused {
        /// The file, or where else the template stands.
        file: String,
        /// The template's line, from 1.
        line: usize,
        /// Message of the template.
        message: String,
    },
    /// The template is too large, or rendering it takes too much.
    #[error(
        "{file}: the chat template exceeds its limit of {limit} {of}; give another template (`template` in [chat]), or raise the limit in Rust \
         (`ChatTemplate::limited`)"
    )]
    Limit {
        /// The file, or where else the template stands.
        file: String,
        /// Limited quantity.
        of: &'static str,
        /// Largest allowed value.
        limit: u64,
    },
    /// A file that holds no usable template.
    #[error("{}: {reason}", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// Description of the error.
        reason: String,
    },
    /// A template that was found to be wrong when the model was loaded.
    #[error("{0}")]
    Unusable(Arc<ChatError>),
    /// There is none.
    #[error(
        "the model has no chat template (no chat_template.jinja in its folder, no `chat_template` in tokenizer_config.json), so that a conversation \
         has no text; name a template file, or \"plain\" for `role: content` lines, as `template` in [chat]"
    )]
    NoTemplate,
    /// There are several, and none for this.
    #[error("{file}: there are templates {known}, but none called \"default\"; name a file with one template")]
    NoDefault {
        /// The file.
        file: String,
        /// Their names.
        known: String,
    },
    /// A day that none is.
    #[error("{given:?} is no date; write it as 2026-01-31 or 2026-01-31T09:30")]
    Date {
        /// Given value.
        given: String,
    },
    /// No turns.
    #[error("the conversation is empty; it needs at least one turn")]
    Empty,
    /// A final message that can't be continued.
    #[error("the final message can't be continued: {0}")]
    Continue(&'static str),
    /// The text of a turn cannot be separated from the text around it.
    #[error(
        "turn {turn} of the conversation can't be told from the text before it: {why}. So what the assistant said can't be marked. Give a template \
         with `{{% generation %}}` blocks around what the assistant says (`template` in [chat]), or train each turn in a sample of its own \
         (`turns = \"apart\"` in [sft])"
    )]
    NotAPrefix {
        /// The assistant's turn, from 1.
        turn: usize,
        /// Rendered and expected text.
        why: String,
    },
    /// Marks that don't survive the template.
    #[error(
        "{file}: what stands in `{{% generation %}}` blocks is changed after the block, so that it can't be found in the text"
    )]
    Marks {
        /// The file, or where else the template stands.
        file: String,
    },
    /// Nothing would be learned.
    #[error("the conversation has no turn of the assistant, so that there is nothing to learn from it")]
    NothingSaid,
    /// The text can't be tokenised.
    #[error(transparent)]
    Tokenizer(#[from] TokenizerError),
}

/// Appends the source line to a message, if there is one.
fn quoted(line: &str) -> String {
    match line.trim() {
        "" => String::new(),
        line if line.chars().count() <= 120 => format!("\n    {line}"),
        line => format!("\n    {}…", line.chars().take(120).collect::<String>()),
    }
}
