//! Errors of data: files, records, conversations, samples and streams.

use std::fmt::Display;
use std::io;
use std::path::{Path, PathBuf};

/// Data that can't be found, read, written or used.
#[derive(Debug, thiserror::Error)]
pub enum DataError {
    /// No file, folder, data set or split has this name.
    #[error("{0}")]
    NotFound(String),
    /// A data set of the hub that could not be fetched.
    #[error(transparent)]
    Hub(#[from] crate::hub::HubError),
    /// A folder without the subset, split or file that was asked for.
    #[error("{}: {problem}", folder.display())]
    Layout {
        /// The folder.
        folder: PathBuf,
        /// What is missing, and what there is.
        problem: String,
    },
    /// A file that can't be read.
    #[error("cannot read {}: {source}; check the path, which is relative to the folder the command runs in", file.display())]
    Read {
        /// The file.
        file: PathBuf,
        /// Cause.
        source: io::Error,
    },
    /// A file that can't be written.
    #[error("cannot write {}: {source}; check that its folder exists and has room", file.display())]
    Write {
        /// The file.
        file: PathBuf,
        /// Cause.
        source: io::Error,
    },
    /// A file, a chat template, or a line of one, that is wrong.
    #[error("{place}: {problem}")]
    Invalid {
        /// The file, or where else the text stands, and its line, if one is to blame: `train.jsonl:12`.
        place: String,
        /// What is wrong there.
        problem: String,
    },
    /// A chat template that refuses the conversation, by `raise_exception`.
    #[error("{place}: the chat template refuses this conversation: {message}")]
    Refused {
        /// The file and the line, as in [`DataError::Invalid`].
        place: String,
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
    /// Anything else that can't be used as asked: the text says what, and why.
    #[error("{0}")]
    Unusable(String),
}

impl DataError {
    pub(crate) fn read(file: &Path) -> impl Fn(io::Error) -> DataError + use<> {
        let file = file.to_owned();
        move |source| DataError::Read { file: file.clone(), source }
    }

    pub(crate) fn write(file: &Path) -> impl Fn(io::Error) -> DataError + use<> {
        let file = file.to_owned();
        move |source| DataError::Write { file: file.clone(), source }
    }

    pub(crate) fn invalid(file: &Path, problem: impl Display) -> DataError {
        DataError::Invalid { place: file.display().to_string(), problem: problem.to_string() }
    }

    /// An error in line `line`, from 1; in a Parquet file, in that row.
    pub(crate) fn in_line(file: &Path, line: usize, problem: impl Display) -> DataError {
        DataError::Invalid { place: format!("{}:{line}", file.display()), problem: problem.to_string() }
    }
}
