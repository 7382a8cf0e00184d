//! Errors of batches, commands and checkpoints.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rollflow_tinker::TinkerError;

use super::NonFinitePolicy;
use crate::algo::{AdvantageError, Disagreement, LossError};
use crate::data::{DataError, REWARD_LIMIT};

/// A batch that cannot be trained on, a command that failed, or an unusable checkpoint.
#[derive(Clone, Debug, thiserror::Error)]
pub enum TrainError {
    /// A sample, by its name, whose reward is missing (NaN), not finite or too large (law N4).
    #[error("{0}: its reward is {1}; score it with a finite number of at most {limit:e} either way, or drop its group", limit = REWARD_LIMIT)]
    Reward(String, f64),
    /// Advantages could not be estimated.
    #[error(transparent)]
    Advantage(AdvantageError),
    /// A sample, by its name, that no reference policy scored.
    #[error(
        "{0} has no log-probabilities of the reference policy, which its reward pays for; let a stage `Reference` score it first"
    )]
    NoReference(String),
    /// A sample, by its name, that no teacher scored.
    #[error("{0} has no log-probabilities of a teacher; let a stage `Reference` that is `teaching` score it first")]
    NoTeacher(String),
    /// Columns of a sample are inconsistent.
    #[error(transparent)]
    Sample(Arc<DataError>),
    /// A number of a sample that is not finite (law N4): the sample's name, quantity and value.
    #[error("{0}: its {1} is {2}; it must be a finite number")]
    BadSample(String, &'static str, f64),
    /// A sample, by its name, whose experts are another model's, and how.
    #[error("{0}: {1}; generator and trainer need the same model")]
    Routes(String, String),
    /// No token of so many samples has a mask above zero.
    #[error("none of {0} samples has a token to train on; a loss mask above 0 marks them, and the first token never counts")]
    NothingToTrain(usize),
    /// A setting or argument out of range.
    #[error("{0}")]
    Setting(&'static str),
    /// A failure of another backend, in its words.
    #[error("{0}")]
    Custom(String),
    /// An earlier command failed: the first failure.
    #[error("the trainer refuses further work because an earlier command failed: {0}; load a checkpoint into a new backend")]
    Poisoned(Arc<TrainError>),
    /// NaN or infinity in a loss or gradient (law N4): the quantity, and its samples or tensors.
    #[error("{0} is not finite; it comes from {names}", names = .1.join(", "))]
    NonFinite(&'static str, Vec<String>),
    /// The loss rejected the batch.
    #[error(transparent)]
    Loss(#[from] LossError),
    /// `optim_step` without a gradient.
    #[error("optim_step came before any forward_backward: there is no gradient")]
    NoGradient,
    /// Weights of another model: the differing tensors, with both shapes.
    #[error("these weights are another model's; differing tensors: {}", .0.join(", "))]
    Shape(Vec<String>),
    /// An operation on a file or folder of a checkpoint failed.
    #[error("{path}: {1}", path = .0.display())]
    Io(PathBuf, #[source] Arc<io::Error>),
    /// A checkpoint's file or folder with invalid contents, and the problem.
    #[error("{path}: {1}", path = .0.display())]
    Malformed(PathBuf, String),
    /// A checkpoint, by its step, was not saved, and the cause.
    #[error(
        "the checkpoint of step {0} was not saved: {1}; checkpoints of earlier steps are complete: remove the cause and resume the run"
    )]
    NotSaved(u64, Arc<TrainError>),
    /// The start-up probe could not be scored.
    #[error("the start-up probe: {0}")]
    Probe(Arc<TrainError>),
    /// Trainer and generator disagree.
    #[error(transparent)]
    Disagreement(#[from] Disagreement),
    /// The tensor library failed.
    #[error("the tensor library failed: {0}")]
    Tensor(String),
    /// A rank, by its name, reported this error.
    #[error("{0}: {1}")]
    OnRank(String, String),
    /// The ranks of the run could not exchange numbers.
    #[error("{0}")]
    Ranks(String),
    /// A batch with an algorithm that other ranks cannot make.
    #[error("the algorithm `{0}` of a batch is not a recipe's, so that other ranks cannot make it; train in one process")]
    NoKey(String),
    /// A server that trains failed.
    #[error(transparent)]
    Tinker(Arc<TinkerError>),
    /// The backend's thread is gone.
    #[error("the trainer ended before it answered")]
    Ended,
}

impl TrainError {
    /// For `map_err`: names the path.
    pub fn io(path: &Path) -> impl FnOnce(io::Error) -> Self {
        let path = path.to_owned();
        move |source| TrainError::Io(path, Arc::new(source))
    }

    /// A file whose content is wrong.
    pub fn malformed(path: &Path, reason: impl ToString) -> Self {
        TrainError::Malformed(path.to_owned(), reason.to_string())
    }

    /// For `map_err`: names the checkpoint's file or folder.
    #[cfg(feature = "torch")]
    pub(crate) fn of_model(path: &Path) -> impl FnOnce(crate::model::ModelError) -> Self {
        use crate::model::ModelError;
        move |error| match error {
            ModelError::Io(path, source) => TrainError::io(&path)(source),
            ModelError::Malformed(path, reason) => TrainError::Malformed(path, reason),
            other => TrainError::malformed(path, other),
        }
    }
}

impl From<DataError> for TrainError {
    fn from(error: DataError) -> Self {
        TrainError::Sample(Arc::new(error))
    }
}

/// Law N4: the names in an error, or the reason to skip a step.
pub(super) fn given_up(policy: NonFinitePolicy, what: &'static str, names: Vec<String>) -> Result<String, TrainError> {
    let error = TrainError::NonFinite(what, shorten(names));
    match policy {
        NonFinitePolicy::Stop => Err(error),
        NonFinitePolicy::Skip => {
            tracing::warn!("skipping this step: {error}");
            Ok(error.to_string())
        }
    }
}

/// Names listed in one error; the rest is counted.
const NAMED: usize = 5;

/// The first few names, and how many more there are.
pub(super) fn shorten(mut names: Vec<String>) -> Vec<String> {
    let more = names.len().saturating_sub(NAMED);
    if more > 0 {
        names.truncate(NAMED);
        names.push(format!("{more} more"));
    }
    names
}
