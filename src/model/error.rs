//! Errors of models and their folders.

use std::fmt::Display;
use std::io;
use std::path::{Path, PathBuf};

use crate::data::DataError;

/// A model that can't be read, written or used.
#[derive(Debug, thiserror::Error)]
pub enum ModelError {
    /// Neither a folder, nor a model of the hub that could be fetched.
    #[error(transparent)]
    Hub(#[from] crate::hub::HubError),
    /// Error of the tokenizer or chat template, or a tokenizer that does not fit the model.
    #[error(transparent)]
    Data(#[from] DataError),
    /// A reward model or critic instead of a language model.
    #[error(
        "this model gives one number and no words (it is a sequence classifier), so that it can't be a policy; name the folder of a \
         language model"
    )]
    NotALanguageModel,
    /// A language model without a score head.
    #[error(
        "this model gives words and no score (it is no sequence classifier); train a reward model from it first (pipeline = \"reward_model\")"
    )]
    NotAScoreModel,
    /// A text of so many tokens that is empty, or longer than the context of the model that scores it.
    #[error(
        "prompt and answer are {0} tokens to the model that scores, which reads at least 1 and at most {1} (max_position_embeddings)"
    )]
    TextLength(usize, usize),
    /// A context for a model that has only one, of so many tokens.
    #[error("the model reads {0} tokens and rotates positions alike in all contexts; leave the context out")]
    FixedContext(usize),
    /// A context beyond the model's longest.
    #[error("a context of {0} tokens; the model's is from 1 to {1}")]
    Context(usize, usize),
    /// An operation on a file or folder failed. The message contains the cause; there is no other source.
    #[error("{path}: {1}", path = .0.display())]
    Io(PathBuf, io::Error),
    /// A file or folder with invalid or unsupported contents: no JSON, no safetensors, a key that is
    /// missing or has another value than supported, tensors that don't make up the model (all
    /// problems together), adapters without or with another base.
    #[error("{path}: {1}", path = .0.display())]
    Malformed(PathBuf, String),
    /// A tensor with finite numbers that f16 has no finite ones for.
    #[error("{0} has numbers beyond 65504, where f16 ends; write it in bf16, which has the range of f32")]
    BeyondF16(String),
    /// A run that would take more memory than 64 bits can count: the largest of the settings that
    /// count, and its value.
    #[error("`{0}` is {1}: with it, the run takes more memory than any machine has; lower it")]
    Uncountable(&'static str, usize),
    /// A device that does not exist, and those that do.
    #[error("{0} is not there: {1}")]
    NoDevice(String, String),
    /// A device that libtorch cannot compute on, and why.
    #[error("{0} cannot be used: {1}")]
    UnusableDevice(String, String),
    /// A projection that adapters cannot be put on, and the valid ones.
    #[error(
        "adapters can't be put on {0}; they can be put on {1}, one or more, or \"all-linear\" for all, with a rank from 1 to 65536"
    )]
    Target(String, String),
}

impl ModelError {
    /// For `map_err`: names the path.
    pub(crate) fn io(path: &Path) -> impl FnOnce(io::Error) -> Self {
        move |source| ModelError::Io(path.to_owned(), source)
    }

    pub(crate) fn malformed(path: &Path, reason: impl Display) -> Self {
        ModelError::Malformed(path.to_owned(), reason.to_string())
    }

    /// For `map_err`: a file that is not valid safetensors, or that cannot be written.
    pub(crate) fn safetensors(path: &Path) -> impl FnOnce(safetensors::SafeTensorError) -> Self {
        move |error| match error {
            safetensors::SafeTensorError::IoError(source) => ModelError::io(path)(source),
            other => ModelError::malformed(path, format!("not a readable safetensors file: {other}")),
        }
    }

    /// A key whose value has the wrong type or range.
    pub(crate) fn bad_key(path: &Path, key: &str, found: impl Display, expected: &str) -> Self {
        ModelError::malformed(path, format!("key `{key}` is {found}; expected {expected}"))
    }

    /// Fails if a tensor is missing, unexpected or unusable (`name: reason`).
    pub(super) fn check_tensors(path: &Path, [missing, unexpected, unusable]: [Vec<String>; 3]) -> Result<(), Self> {
        let listed = |(what, names): (&str, Vec<String>)| {
            let shown = &names[..names.len().min(SHOWN)];
            let more = if names.len() > SHOWN { format!(" and {} more", names.len() - SHOWN) } else { String::new() };
            (!names.is_empty()).then(|| format!("\n  {what} ({}): {}{more}", names.len(), shown.join(", ")))
        };
        let lists = [("missing", missing), ("unexpected", unexpected), ("unusable", unusable)];
        let problems: String = lists.into_iter().filter_map(listed).collect();
        match problems.is_empty() {
            true => Ok(()),
            false => Err(ModelError::malformed(path, format!("the tensors don't fit the configuration:{problems}"))),
        }
    }
}

/// Names of a kind that one message lists.
const SHOWN: usize = 50;
