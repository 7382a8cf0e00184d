//! Errors of models and their folders.

use std::fmt::{self, Display};
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
    /// A text that is empty, or longer than the context of the model that scores it.
    #[error(
        "prompt and answer are {tokens} tokens to the model that scores, which reads at least 1 and at most {most} (max_position_embeddings)"
    )]
    TextLength {
        /// Number of tokens.
        tokens: usize,
        /// Largest number of tokens.
        most: usize,
    },
    /// A file operation failed.
    #[error("{}: {source}", path.display())]
    Io {
        /// The file or folder.
        path: PathBuf,
        /// Cause.
        source: io::Error,
    },
    /// A file or folder with invalid or unsupported contents: no JSON, no safetensors, a key that is
    /// missing or has another value than supported, adapters without or with another base.
    #[error("{}: {reason}", path.display())]
    Malformed {
        /// The file or folder.
        path: PathBuf,
        /// Problem.
        reason: String,
    },
    /// A run that would take more memory than 64 bits can count.
    #[error("`{key}` is {value}: with it, the run takes more memory than any machine has; lower it")]
    Uncountable {
        /// The largest of the settings that count.
        key: &'static str,
        /// Value of the setting.
        value: usize,
    },
    /// A device that does not exist.
    #[error("{wanted} is not there: {found}")]
    NoDevice {
        /// Requested device.
        wanted: String,
        /// Devices that exist.
        found: String,
    },
    /// Projections that adapters cannot be put on.
    #[error(
        "adapters can't be put on {target}; they go on {known}, one or more, or \"all-linear\" for all, with a rank from 1 to 65536"
    )]
    Target {
        /// Requested target.
        target: String,
        /// Valid targets.
        known: String,
    },
    /// Tensors that don't make up the model of `config.json`: all problems together.
    #[error("{}: the tensors don't fit the configuration:{problems}", path.display())]
    Tensors {
        /// The folder.
        path: PathBuf,
        /// Problems.
        problems: TensorProblems,
    },
}

impl ModelError {
    /// For `map_err`: names the path.
    pub(crate) fn io(path: &Path) -> impl FnOnce(io::Error) -> Self {
        move |source| ModelError::Io { path: path.to_owned(), source }
    }

    pub(crate) fn malformed(path: &Path, reason: impl Display) -> Self {
        ModelError::Malformed { path: path.to_owned(), reason: reason.to_string() }
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
}

/// Every difference between the tensors a configuration needs and those a folder holds.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TensorProblems {
    /// Needed, not there.
    pub missing: Vec<String>,
    /// There, not needed.
    pub unexpected: Vec<String>,
    /// Unusable tensors, each as `name: reason`.
    pub unusable: Vec<String>,
}

impl TensorProblems {
    pub(super) fn is_empty(&self) -> bool {
        self.missing.is_empty() && self.unexpected.is_empty() && self.unusable.is_empty()
    }
}

/// Names of a kind that one message lists.
const SHOWN: usize = 50;

impl fmt::Display for TensorProblems {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (what, names) in [("missing", &self.missing), ("unexpected", &self.unexpected), ("unusable", &self.unusable)] {
            if !names.is_empty() {
                let shown = &names[..names.len().min(SHOWN)];
                let more = if names.len() > SHOWN { format!(" and {} more", names.len() - SHOWN) } else { String::new() };
                write!(f, "\n  {what} ({}): {}{more}", names.len(), shown.join(", "))?;
            }
        }
        Ok(())
    }
}
