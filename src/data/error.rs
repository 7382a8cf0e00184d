//! Errors of data: files, records, conversations, samples and streams.

use std::fmt::Display;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Data that can't be found, read, written or used.
#[derive(Debug, thiserror::Error)]
pub enum DataError {
    /// No file, folder or data set has this name.
    #[error("{0}")]
    NotFound(String),
    /// A data set of the hub that could not be fetched.
    #[error(transparent)]
    Hub(#[from] crate::hub::HubError),
    /// A folder without the subset, split or file that was asked for.
    #[error("{}: {}", .0.display(), .1)]
    Layout(PathBuf, String),
    /// A file that can't be read.
    #[error("cannot read {}: {}; check the path, which is relative to the folder the command runs in", .0.display(), .1)]
    Read(PathBuf, #[source] io::Error),
    /// A file that can't be written.
    #[error("cannot write {}: {}; check that its folder exists and has room", .0.display(), .1)]
    Write(PathBuf, #[source] io::Error),
    /// A file, or a line of it, and what is wrong there.
    #[error("{0}: {1}")]
    Invalid(String, String),
    /// A split or slice that makes no sense.
    #[error("`{0}` is no split: {1}; write a name, as in \"train\", or a slice of one: \"train[:10%]\", \"train[100:200]\"")]
    Split(String, String),
    /// A chat template that is wrong, or can't work with the conversation.
    #[error("{file}:{line}: {problem}")]
    Template {
        /// The file, or where else the template stands.
        file: String,
        /// The template's line, from 1.
        line: usize,
        /// Description of the error, and the text of that line.
        problem: String,
    },
    /// A chat template that refuses the conversation, by `raise_exception`.
    #[error("{file}:{line}: the chat template refuses this conversation: {message}")]
    Refused {
        /// The file, or where else the template stands.
        file: String,
        /// The template's line, from 1.
        line: usize,
        /// Message of the template.
        message: String,
    },
    /// A chat template that is too large, or takes too much to render.
    #[error(
        "{file}: the chat template exceeds its limit of {limit} {of}; give another template (`template` in [chat]), or raise the limit in Rust \
         (`ChatTemplate::limited`)"
    )]
    Limit {
        /// The file, or where else the template stands.
        file: String,
        /// Limited quantity.
        of: &'static str,
        /// Largest allowed value.
        limit: u64,
    },
    /// A chat template that was found to be wrong when the model was loaded.
    #[error("{0}")]
    BrokenTemplate(Arc<DataError>),
    /// Anything else that can't be used as asked: the text says what, and why.
    #[error("{0}")]
    Unusable(String),
}

impl DataError {
    pub(crate) fn read(file: &Path) -> impl Fn(io::Error) -> DataError + use<> {
        let file = file.to_owned();
        move |source| DataError::Read(file.clone(), source)
    }

    pub(crate) fn write(file: &Path) -> impl Fn(io::Error) -> DataError + use<> {
        let file = file.to_owned();
        move |source| DataError::Write(file.clone(), source)
    }

    pub(crate) fn invalid(file: &Path, problem: impl Display) -> DataError {
        DataError::Invalid(file.display().to_string(), problem.to_string())
    }

    /// An error in line `line`, from 1; in a Parquet file, in that row.
    pub(crate) fn in_line(file: &Path, line: usize, problem: impl Display) -> DataError {
        DataError::Invalid(format!("{}:{line}", file.display()), problem.to_string())
    }
}
