//! Errors of a recipe: every problem, each with its place and advice.

use std::fmt;

/// Place where a value was written.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Place {
    /// In a recipe file; line and column count from 1, columns in characters.
    File {
        /// The file, as it was named on the command line.
        file: String,
        /// The line.
        line: usize,
        /// The column.
        column: usize,
    },
    /// On the command line: `--set key=value`.
    Set(String),
    /// In an environment variable of this name.
    Variable(String),
    /// In Rust: the plan was built by code.
    Code,
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Place::File { file, line, column } => write!(f, "{file}:{line}:{column}"),
            Place::Set(argument) => write!(f, "--set {argument}"),
            Place::Variable(name) => write!(f, "${name}"),
            Place::Code => write!(f, "plan"),
        }
    }
}

/// One problem.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, thiserror::Error)]
#[error("{place}: {message}{}{help}", if help.is_empty() { "" } else { "\n    help: " })]
pub struct RecipeError {
    /// Place of the error.
    pub place: Place,
    /// Key, dotted from the top, such as `train.lr`; empty for the file as a whole.
    pub key: String,
    /// Description of the error.
    pub message: String,
    /// Advice.
    pub help: String,
}

/// Something wrong with a plan, before it is known where it was written.
#[derive(Clone, Debug, PartialEq)]
pub struct Problem {
    /// Key to change, dotted from the top.
    pub key: String,
    /// Other keys that it follows from: where one of them was unreadable, this problem is only an echo.
    pub from: Vec<&'static str>,
    /// Description of the error.
    pub message: String,
    /// Advice.
    pub help: String,
}

impl Problem {
    /// Creates a problem of `key`, with advice.
    pub fn of(key: impl Into<String>, message: impl Into<String>, help: impl Into<String>) -> Self {
        Problem { key: key.into(), from: Vec::new(), message: message.into(), help: help.into() }
    }

    /// The problem as an error at `place`.
    pub fn at(self, place: Place) -> RecipeError {
        let Problem { key, message, help, .. } = self;
        RecipeError { place, key, message, help }
    }
}

/// Everything that is wrong, in the order of the file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RecipeErrors(Vec<RecipeError>);

impl RecipeErrors {
    /// Sorts the problems, of which there is at least one.
    pub fn of(mut errors: Vec<RecipeError>) -> Self {
        errors.sort();
        RecipeErrors(errors)
    }

    /// `Ok` where there is no problem.
    pub fn unless_empty(errors: Vec<RecipeError>) -> Result<(), Self> {
        if errors.is_empty() { Ok(()) } else { Err(Self::of(errors)) }
    }

    /// The problems.
    pub fn iter(&self) -> impl Iterator<Item = &RecipeError> {
        self.0.iter()
    }
}

impl fmt::Display for RecipeErrors {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for error in &self.0 {
            writeln!(f, "{error}")?;
        }
        let count = self.0.len();
        write!(f, "{count} problem{} in the recipe", if count == 1 { "" } else { "s" })
    }
}

impl std::error::Error for RecipeErrors {}
