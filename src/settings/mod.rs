//! Typed configuration sections, declared next to the types that they configure.
//!
//! A declaration gives a section's fields, defaults, ranges, old names and help once. From it
//! follow the Rust type with its `Default`, the reader with errors that name file, line and key,
//! the writer of resolved recipes, the JSON schema and the reference.

pub(crate) mod declare;
pub(crate) mod document;
pub(crate) mod error;
pub(crate) mod keys;
pub(crate) mod params;
pub(crate) mod remote;
pub(crate) mod renames;
pub(crate) mod section;
pub(crate) mod setting;

pub use error::{Place, Problem, RecipeError, RecipeErrors};
pub use params::{Custom, Params, ParamsError};
pub use section::NoKeys;
