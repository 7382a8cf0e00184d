//! Errors of model folders.

use std::fmt;
use std::path::PathBuf;

/// A model that can't be read, written or used.
#[derive(Debug, thiserror::Error)]
pub enum ModelError {
    /// Neither a folder, nor a model of the hub that could be fetched.
    #[error(transparent)]
    Hub(#[from] crate::hub::HubError),
    /// The file system refused.
    #[error("{}: {source}", path.display())]
    Io {
        /// The file or folder.
        path: PathBuf,
        /// Cause.
        source: std::io::Error,
    },
    /// A file that is no JSON object.
    #[error("{}: not a JSON object: {reason}", path.display())]
    Json {
        /// The file.
        path: PathBuf,
        /// The parser's message.
        reason: String,
    },
    /// A key that the family needs.
    #[error("{}: key `{key}` is missing; a {family} model needs it", path.display())]
    MissingKey {
        /// The file.
        path: PathBuf,
        /// The key.
        key: String,
        /// The model's family, or `language` while it isn't known.
        family: &'static str,
    },
    /// A key whose value has the wrong type or range.
    #[error("{}: key `{key}` is {found}; expected {expected}", path.display())]
    BadKey {
        /// The file.
        path: PathBuf,
        /// The key.
        key: String,
        /// Value, as JSON.
        found: String,
        /// Expected values.
        expected: String,
    },
    /// A value that transformers understands and this library does not.
    #[error("{}: `{key}` = {found} is not supported; supported: {supported}", path.display())]
    Unsupported {
        /// The file.
        path: PathBuf,
        /// The key.
        key: String,
        /// Value, as JSON.
        found: String,
        /// Supported values.
        supported: String,
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
    /// A file that is not valid safetensors.
    #[error("{}: not a readable safetensors file: {reason}", path.display())]
    Safetensors {
        /// The file.
        path: PathBuf,
        /// The parser's message.
        reason: String,
    },
    /// Something to adapt that isn't there.
    #[error(
        "adapters can't be put on {target}; they go on {known}, one or more, or \"all-linear\" for all, with a rank from 1 to 65536"
    )]
    Target {
        /// Requested target.
        target: String,
        /// Valid targets.
        known: String,
    },
    /// Adapters without their base model.
    #[error(
        "{}: its adapters belong to the model {base:?}, which is no folder here; put it there, or name its folder as base_model_name_or_path", path.display()
    )]
    NoBase {
        /// The adapters' configuration.
        path: PathBuf,
        /// Base model that the configuration names.
        base: String,
    },
    /// Adapters of another kind than those that are to be trained.
    #[error("{}: its adapters have {found}, and those asked for {asked}; ask for the same, or merge them into the model first", path.display())]
    OtherAdapter {
        /// The folder.
        path: PathBuf,
        /// Adapters in the folder.
        found: String,
        /// Requested adapters.
        asked: String,
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
    /// Returns true if there are no problems.
    pub fn is_empty(&self) -> bool {
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
