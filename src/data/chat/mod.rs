//! Conversations as text and tokens in the model's format, with a mask of the tokens that are
//! trained.

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
