//! rollflow: RL post-training of language models as a pipelined dataflow.
//!
//! Prompts flow through generator, reward, filter and batcher to a trainer whose new weights flow
//! back, over bounded channels, so that generation overlaps training. [`flow`] is the dataflow engine,
//! without language-model concepts. The other modules put data types, losses, models and engines on it.
#![deny(missing_docs)]

pub mod algo;
pub mod data;
pub mod engine;
pub mod env;
pub mod flow;
pub mod judge;
#[cfg(feature = "torch")]
pub mod model;
/// Number formats and folders of models; models themselves need the feature `torch`.
#[cfg(not(feature = "torch"))]
pub mod model {
    mod dtype;
    mod folder_files;
    pub use dtype::Dtype;
    pub use folder_files::holds_adapter;
}
pub mod observe;
pub mod ranks;
pub mod recipe;
pub mod rollout;
#[cfg(all(feature = "torch", unix))]
pub mod serve;
pub mod stages;
pub mod train;

#[doc(inline)]
pub use rollflow_hub as hub;
#[doc(inline)]
pub use rollflow_net as net;
#[doc(inline)]
pub use rollflow_python as python;
#[cfg(unix)]
#[doc(inline)]
pub use rollflow_sandbox as sandbox;
use rollflow_settings as settings;
#[doc(inline)]
pub use rollflow_util as util;
#[doc(inline)]
pub use rollflow_weights as weights;

/// Names that a program needs to declare a pipeline.
pub mod prelude {
    pub use crate::algo::filters;
    pub use crate::algo::{Aggregation, CrossEntropy, GroupMean, Grpo, Loss, Schedule, is_correct};
    pub use crate::data::{Batch, Group, Prompt, Sample, Scored, Status, Tokenizer};
    pub use crate::engine::SamplingParams;
    pub use crate::flow::{Flow, Io, Message, Sink, Source, Stage, StageError, StageSpec, Until, map, weights};
    pub use crate::observe::Metrics;
    pub use crate::observe::logs::log_to_console;
    pub use crate::rollout::TrainingFlow;
    pub use crate::stages::batch::Batcher;
    pub use crate::stages::filter::Filter;
    pub use crate::stages::generate::Generator;
    pub use crate::stages::reference::Reference;
    pub use crate::stages::reward::Reward;
    pub use crate::stages::sink::RunLog;
    pub use crate::stages::source::{Prompts, Supervised};
    pub use crate::stages::sync::WeightSync;
    pub use crate::stages::train::{Trained, Trainer};
    pub use crate::train::TrainingBackend;
    #[cfg(feature = "torch")]
    pub use crate::train::{LocalBackend, LocalConfig, Policy};
}

/// Compiles the Rust code of documents that need tensors with the doc tests.
#[cfg(all(doctest, feature = "torch"))]
#[doc = include_str!("../README.md")]
#[doc = include_str!("../docs/how_to/library.md")]
#[doc = include_str!("../docs/how_to/lora.md")]
#[doc = include_str!("../docs/how_to/reward_models.md")]
#[doc = include_str!("../docs/rust/pipeline.md")]
#[doc = include_str!("../docs/rust/loss.md")]
#[doc = include_str!("../docs/rust/by_hand.md")]
pub struct TensorDocuments;

/// Compiles the Rust code of documents about processes with the doc tests.
#[cfg(all(doctest, unix))]
#[doc = include_str!("../docs/how_to/sandbox.md")]
#[doc = include_str!("../docs/how_to/environments.md")]
pub struct ProcessDocuments;

/// Compiles the Rust code of all other documents with the doc tests.
#[cfg(doctest)]
#[doc = include_str!("../docs/how_to/data.md")]
#[doc = include_str!("../docs/how_to/chat.md")]
#[doc = include_str!("../docs/how_to/phases.md")]
#[doc = include_str!("../docs/rust/stage.md")]
#[doc = include_str!("../docs/rust/engine.md")]
pub struct Documents;
