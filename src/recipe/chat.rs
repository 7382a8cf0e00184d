//! `[chat]`: conversion of conversations into tokens.

use crate::settings::declare::{choices, section};
use crate::settings::params::Params;

/// Value of `template` for one line per turn.
pub const PLAIN: &str = "plain";

section! {
    /// Conversion of conversations into tokens. It does not concern prompts and data that are plain
    /// text, unless `ask` makes them conversations.
    pub struct Chat {
        /// Presentation of plain-text prompts, and of pairs of prompt and completion.
        ask: Ask = Ask::default();
        /// System turn of conversations that have none.
        system: Option<String> = None;
        /// A file with a chat template, relative to where the command runs, or `"plain"` for `role:
        /// content` lines. Left out: the model's own.
        template: Option<String> = None;
        /// Further variables of the template, such as `{ enable_thinking = false }`.
        variables: Params = Params::default();
        /// Date for templates that write one, as `"2026-01-31"`. Left out: the day of the run,
        /// which then cannot be repeated exactly.
        date: Option<String> = None;
    }
}

choices! {
    /// Presentation of plain-text prompts.
    pub enum Ask {
        /// as in the run that trained the model. Any other model: `user` if it has a chat template
        /// or `template` names one, else `as_written`.
        "auto" => Auto,
        /// unchanged, for models that continue a text.
        "as_written" => AsWritten,
        /// as a user's turn of a conversation, for instruction models; the completion is the
        /// assistant's turn.
        "user" => User,
    }
}
