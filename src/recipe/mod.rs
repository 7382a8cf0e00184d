//! A recipe (TOML) as a typed, checked [`Plan`]: plain data with every default filled in and the numbers that follow from it.
//!
//! [`load`] finds everything that is wrong at once: unknown keys (with the nearest name), wrong types, values out of range and keys
//! that contradict each other, each with file, line and column and what to do. Every key is declared once, in [`plan`] and its
//! sections; the reader, the resolved recipe and docs/recipes.md follow from the declaration.

pub mod advantage;
mod algorithm;
pub mod chat;
mod checks;
pub mod correction;
pub mod critic;
pub mod data;
mod declare;
mod derive;
mod document;
pub mod engine;
pub mod environment;
mod error;
pub mod eval;
pub mod generate;
pub mod kl;
mod load;
pub mod lora;
pub mod loss;
#[cfg(feature = "torch")]
mod memory;
pub mod model;
#[cfg(feature = "torch")]
mod model_limits;
pub mod pairs;
mod params;
pub mod plan;
pub mod presets;
mod reference;
pub mod reference_policy;
mod render;
pub mod reward;
mod schema;
mod secrets;
mod section;
mod setting;
pub mod task;
pub mod timeline;
pub mod train;

pub use algorithm::create_algorithm_config;
pub use derive::Machine;
pub use error::{Place, RecipeError, RecipeErrors};
pub use load::{Complaint, load, load_with, parse, parse_with, variables};
#[cfg(feature = "torch")]
pub use memory::{MemoryPart, MemoryPlan};
pub use params::{Custom, Params, ParamsError};
pub use plan::{Pipeline, Plan};
pub use reference::reference;
pub use render::{check_text, check_text_on, facts};
pub use schema::schema;
pub use secrets::masked;
pub use section::NoKeys;
pub use timeline::Timeline;
