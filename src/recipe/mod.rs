//! A recipe (TOML) as a typed, checked [`Plan`]: plain data with every default filled in and the
//! numbers that follow from it.
//!
//! [`load`] reports every error: unknown keys (with the nearest name), wrong types, values out of
//! range and keys that contradict each other, each with file, line and column and advice. Every key
//! is declared once, in [`Plan`] and its sections; the reader, the resolved recipe and
//! docs/reference/recipe follow from the declaration.

mod chat;
mod checks;
mod data;
mod defaults;
mod derive;
mod environment;
mod eval;
mod fingerprint;
mod generate;
mod library_names;
mod load;
mod lora;
#[cfg(feature = "torch")]
mod memory;
mod model;
mod model_folder;
mod names;
mod plan;
mod practice;
mod presets;
mod reference;
mod reference_policy;
mod render;
mod reward;
mod secrets;
mod task;
mod timeline;
mod trackers;
mod train;
mod trainer;

pub use chat::{Ask, Chat, PLAIN};
pub use data::Source;
pub use defaults::Derived;
pub use derive::Machine;
pub use environment::{Environment, EnvironmentKind};
pub use eval::Eval;
pub use fingerprint::{data_fingerprints, folder_fingerprint, model_fingerprints};
pub use generate::{Filter, Generate};
pub use load::{Computes, load, load_with, parse, parse_with, variables, with_current_names};
pub use lora::{BaseFormat, Lora};
#[cfg(feature = "torch")]
pub use memory::{MemoryPart, MemoryPlan, Taken, beyond_one_process};
pub use model::{DeviceName, Model, ModelSource};
pub use model_folder::{FINAL, model_folder};
pub use plan::{Batching, Checkpointing, Fallback, FlowLimits, Mix, Net, OnStale, Pipeline, Plan};
pub use presets::{PRESETS, Preset};
pub use reference::{explain, pages, schema};
pub use reference_policy::{FixedPolicy, Reference, ReferencePolicy, ServedPolicy, SourcePolicy, Teacher, TinkerPolicy};
pub use render::{check_text, check_text_on, derived_text, facts};
pub use reward::{Composition, PartRule, Reward, RewardRule};
pub use task::{RewardModel, Sft, Task, TaskData};
pub use timeline::{Change, Timeline, may_change};
pub use trackers::{Mlflow, Tracker, Trackio, Wandb};
pub use train::{Critic, Optimization, Train};
pub use trainer::{TrainerBackend, TrainerPlace};

pub use crate::settings::{Custom, NoKeys, Params, ParamsError, Place, Problem, RecipeError, RecipeErrors};
pub use crate::util::secrets::masked;
