//! Stages that evaluate weights during training: [`Evaluator`] samples completions of held-out prompts,
//! `PairEvaluator` scores held-out pairs. Neither delays the training of a run that is not in order.

#[cfg(feature = "torch")]
mod local;
#[cfg(feature = "torch")]
mod pairs;
mod remote;
mod stage;

#[cfg(feature = "torch")]
pub use pairs::PairEvaluator;
pub use stage::{AnswerLog, Evaluator};
