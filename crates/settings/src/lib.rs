//! Typed configuration sections, declared next to the types that they configure.
//!
//! A declaration gives a section's fields, defaults, ranges, old names and help once. From it
//! follow the Rust type with its `Default`, the reader with errors that name file, line and key,
//! the writer of resolved recipes, the JSON schema and the reference.

pub mod declare;
pub mod document;
pub mod error;
pub mod keys;
pub mod params;
pub mod renames;
pub mod section;
pub mod setting;

#[doc(hidden)]
pub use {serde, serde_json};

pub use error::{Place, Problem, RecipeError, RecipeErrors};
pub use params::{Custom, Params, ParamsError};
pub use section::NoKeys;
