//! Conversations as text and tokens in the model's format, with a mask of the tokens that are
//! trained.

mod json;
mod limits;
mod marks;
mod template;
mod tokens;

pub use template::ChatTemplate;
pub(crate) use template::special_tokens;
pub use tokens::{compute_loss_mask, tokenize_conversation, tokenize_last_turn};
pub(crate) use tokens::{render_from, tokenize_from};
