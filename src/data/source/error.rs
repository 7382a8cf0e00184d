//! Why a data set was not read.

use std::io;
use std::path::{Path, PathBuf};

use super::skips::Skips;

/// A data set that can't be found, read or used.
#[derive(Debug, thiserror::Error)]
pub enum DataError {
    /// A data set of the hub that is not in the cache.
    #[error("there is no data set `{name}` here; looked for {}. {help}", list(.looked))]
    Missing {
        /// Name that was given.
        name: String,
        /// Places that were searched.
        looked: Vec<PathBuf>,
        /// Advice on how to get it.
        help: String,
    },
    /// No file or folder has that name, and it is no id of the hub.
    #[error("file not found: {}; {help}", .name.display())]
    NoFile {
        /// Name that was given.
        name: PathBuf,
        /// Advice.
        help: &'static str,
    },
    /// A data set of the hub that could not be fetched.
    #[error(transparent)]
    Hub(#[from] crate::hub::HubError),
    /// A folder without the files that were asked for.
    #[error("{}: {problem}", .folder.display())]
    Layout {
        /// The folder.
        folder: PathBuf,
        /// Missing part, and the parts that exist.
        problem: String,
    },
    /// A file that can't be read.
    #[error("cannot read {}: {source}; check the path, which is relative to the folder the command runs in", .file.display())]
    File {
        /// Path of the file.
        file: PathBuf,
        /// Error of the system.
        source: io::Error,
    },
    /// A file of another kind than it seems.
    #[error("{}: {problem}", .file.display())]
    Format {
        /// Path of the file.
        file: PathBuf,
        /// Description of the error, and what was expected.
        problem: String,
    },
    /// One record.
    #[error("{}:{line}: {problem}{}", .file.display(), and(*.more))]
    Record {
        /// Path of the file.
        file: PathBuf,
        /// Line number, from 1; of a Parquet file the row.
        line: usize,
        /// Description of the error, and what was expected.
        problem: String,
        /// Number of further bad records nearby.
        more: usize,
    },
    /// A split or slice that makes no sense.
    #[error(
        "`{text}` is no split: {problem}; write a name, as in \"train\", or a slice of one: \"train[:10%]\", \"train[100:200]\""
    )]
    Split {
        /// Text that was given.
        text: String,
        /// Description of the error.
        problem: String,
    },
    /// Not one usable record.
    #[error("{name} holds nothing to use: {}", .skips.why_nothing(.fields))]
    Nothing {
        /// The data set.
        name: String,
        /// Dropped records, by reason.
        skips: Skips,
        /// Fields of its first record.
        fields: Vec<String>,
    },
    /// Data sets that can't be mixed as asked.
    #[error("{0}")]
    Mixture(String),
    /// A position that was saved over other data.
    #[error(transparent)]
    Position(#[from] crate::data::BufferError),
}

impl DataError {
    pub(super) fn file(file: &Path) -> impl Fn(io::Error) -> DataError + use<> {
        let file = file.to_owned();
        move |source| DataError::File { file: file.clone(), source }
    }

    pub(super) fn format(file: &Path, problem: impl Into<String>) -> DataError {
        DataError::Format { file: file.to_owned(), problem: problem.into() }
    }
}

fn list(paths: &[PathBuf]) -> String {
    paths.iter().map(|path| path.display().to_string()).collect::<Vec<_>>().join(", ")
}

fn and(more: usize) -> String {
    if more == 0 { String::new() } else { format!(" (and {more} more bad records close behind it)") }
}
