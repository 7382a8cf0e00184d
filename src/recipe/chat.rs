//! `[chat]`: how conversations become what the model reads.

use crate::settings::declare::{choices, section};
use crate::settings::params::Params;

/// In place of a file: each turn a line.
pub const PLAIN: &str = "plain";

section! {
    /// How conversations become what the model reads. Prompts and data that are plain text know nothing of it, unless `ask` makes them conversations.
    pub struct Chat {
        /// How prompts that are plain text are asked, and pairs of prompt and completion imitated.
        ask: Ask = Ask::default();
        /// What the system says first, in conversations in which it says nothing.
        system: Option<String> = None;
        /// A file with a chat template, relative to where the command runs, or `"plain"` for `role: content` lines; without it, the model's own.
        template: Option<String> = None;
        /// What the template is told besides, such as `{ enable_thinking = false }`.
        variables: Params = Params::default();
        /// The day that a template writes which asks for it, as `"2026-01-31"`; without it, the day of the run, which then can't be repeated exactly.
        date: Option<String> = None;
    }
}

choices! {
    /// How prompts that are plain text are asked.
    pub enum Ask {
        /// as the run asked that made the model; of any other model as `user` where it has a chat template or `template` names one, else as `as_written`.
        "auto" => Auto,
        /// as they are written, for models that go on with a text.
        "as_written" => AsWritten,
        /// as what a user says in a conversation, for models that were taught to answer; the completion is the assistant's turn.
        "user" => User,
    }
}
