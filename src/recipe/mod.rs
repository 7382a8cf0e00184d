//! A recipe (TOML) as a typed, checked [`Plan`]: plain data with every default filled in and the
//! numbers that follow from it.
//!
//! [`load`] reports every error: unknown keys (with the nearest name), wrong types, values out of
//! range and keys that contradict each other, each with file, line and column and advice. Every key
//! is declared once, in [`Plan`] and its sections; the reader, the resolved recipe and
//! docs/reference/recipe follow from the declaration.

pub mod chat;
mod checks;
pub mod critic;
mod data;
mod defaults;
mod derive;
pub mod environment;
pub mod eval;
mod explain;
pub mod generate;
mod load;
pub mod lora;
mod loss;
#[cfg(feature = "torch")]
mod memory;
pub mod model;
mod model_folder;
#[cfg(feature = "torch")]
mod model_limits;
mod net;
mod pin;
mod plan;
mod practice;
mod presets;
mod reference;
pub mod reference_policy;
mod render;
pub mod reward;
mod schema;
mod secrets;
pub mod task;
mod timeline;
pub mod train;

pub use data::{DataTask, RolloutsTask, Source, SourceColumns};
pub use defaults::Derived;
pub use derive::Machine;
pub use explain::explain;
pub use load::{Complaint, Loaded, load, load_explained, load_with, parse, parse_with, variables, with_current_names};
#[cfg(feature = "torch")]
pub use memory::MemoryPlan;
pub use model_folder::{FINAL, NoModel, model_folder};
pub use net::Net;
pub use plan::{Batching, Checkpointing, Fallback, FlowLimits, Observe, OnStale, Pipeline, Plan, Syncing};
pub use presets::{PRESETS, Preset};
pub use reference::pages;
pub use render::{check_text, check_text_on, derived_text, facts};
pub use schema::schema;
/// `text` with … instead of every secret, for messages, logs and pages.
pub fn masked(text: &str) -> String {
    crate::util::secrets::masked(text)
}
pub use timeline::{Change, Ramp, Shape, Timeline};

pub use crate::settings::{Custom, NoKeys, Params, ParamsError, Place, RecipeError, RecipeErrors};
