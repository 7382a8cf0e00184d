//! Conversations as the text and the tokens that a model was made to read, and which of those tokens it learns from.

mod error;
pub(crate) mod folder;
mod json;
mod limits;
mod marks;
mod template;
mod tokens;

pub use error::ChatError;
pub use limits::TemplateLimits;
pub use template::{ChatInput, ChatTemplate};
pub use tokens::{TokenizedConversation, compute_loss_mask, tokenize_conversation, tokenize_last_turn};
