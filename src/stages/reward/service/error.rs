//! Why a reward service gave no rewards, and what to do about it.

use crate::net::{Fault, Outcome, RemoteError, Retryable};

/// Why a reward service gave no rewards.
#[derive(Clone, Debug, thiserror::Error, PartialEq)]
pub enum ServiceError {
    /// The request failed.
    #[error("{0}")]
    Http(#[from] RemoteError),
    /// It was busy for longer than it is waited for.
    #[error(
        "{url} said {status} for {seconds:.1} s; give the reward service more workers, ask it less at once (concurrency), or raise busy_timeout"
    )]
    Busy {
        /// The service.
        url: String,
        /// What it said.
        status: u16,
        /// How long it was waited for.
        seconds: f64,
    },
    /// It answered with something else than rewards.
    #[error(
        "{url} answered with {why}: {begins:?}; it must be {{\"rewards\": […]}} with one finite number a sample, in the order of the request"
    )]
    Answer {
        /// The service.
        url: String,
        /// What is wrong with it.
        why: String,
        /// How it begins.
        begins: String,
    },
    /// Samples that JSON can't hold.
    #[error("the samples for {url} can't be written as JSON: {why}")]
    Question {
        /// The service.
        url: String,
        /// Why not.
        why: String,
    },
}

impl ServiceError {
    /// Returns true if another request may succeed although this one failed: the service answered
    /// it, or failed on what it was asked.
    pub(super) fn is_about_one(&self) -> bool {
        match self {
            ServiceError::Http(error) => match error.fault {
                Fault::Broke { .. } | Fault::Failed { .. } | Fault::Nonsense { .. } => true,
                Fault::Refused { status, .. } => status == 408,
                _ => false,
            },
            ServiceError::Answer { .. } => true,
            ServiceError::Busy { .. } | ServiceError::Question { .. } => false,
        }
    }
}

impl Retryable for ServiceError {
    fn outcome(&self) -> Outcome {
        match self {
            ServiceError::Http(error) => error.outcome(),
            ServiceError::Question { .. } | ServiceError::Busy { .. } => Outcome::Final,
            ServiceError::Answer { .. } => Outcome::Failed,
        }
    }
}
