//! Where the data comes from.

mod prompts;
mod supervised;

pub use prompts::Prompts;
pub use supervised::Supervised;
