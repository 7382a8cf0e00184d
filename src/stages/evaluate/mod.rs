//! Asking weights what they know, beside the training: prompts of their own, answered by one version, judged, counted.
//!
//! An [`Evaluation`] is one such sitting, by whatever drives an engine. [`Evaluator`] is the stage that holds one now and then while a run
//! trains, and never holds the run up. [`PairEvaluator`] judges held-out pairs instead.

mod answering;
mod evaluation;
#[cfg(feature = "torch")]
mod local;
#[cfg(feature = "torch")]
mod local_pairs;
mod pairs;
mod remote;
mod stage;
mod summary;

pub use evaluation::{Evaluation, EvaluationError, Exam, ExamJudge};
#[cfg(feature = "torch")]
pub use local_pairs::LocalPairJudge;
pub use pairs::{JudgedPairs, PairEvaluator, PairJudge};
pub use stage::{AnswerLog, Evaluator};
pub use summary::Summary;
