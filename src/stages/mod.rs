//! What stands on the graph: one folder a role, one file an implementation, each a thin shell around `data`, `algo`, `engine` and
//! `train`.
//!
//! In the order of a pipeline: [`source`] → [`generate`] → [`reward`] → [`filter`] → [`pairs`] → [`reference`](mod@reference) → [`batch`]
//! → [`train`] → [`sync`] → [`evaluate`] → [`sink`], with [`Admission`](crate::rollout::Admission) deciding when a prompt may enter.

pub mod batch;
pub mod evaluate;
pub mod filter;
pub mod generate;
pub mod pairs;
#[cfg(feature = "torch")]
mod policy;
pub mod reference;
pub mod reward;
#[cfg(feature = "torch")]
mod score_model;
pub mod sink;
pub mod source;
pub mod sync;
pub mod train;

#[cfg(feature = "torch")]
pub use policy::{Policy, PolicyError, tokenizer_folder};
#[cfg(feature = "torch")]
pub use score_model::{ScoreModel, ScoreModelError, TextError, TextReader};
