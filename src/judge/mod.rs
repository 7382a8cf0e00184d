//! Rewards that another process computes: reward services, judge models and Python functions.
//!
//! A [`Service`] asks for the rewards of a group. It speaks the protocol of
//! `docs/reference/protocols.md` over HTTP or with Python processes of this run, or asks a language
//! model to grade each completion ([`JudgeConfig`]).

mod cache;
mod language_model;
mod protocol;
mod service;

use std::time::TryFromFloatSecsError;

pub use language_model::JudgeConfig;
pub use service::{Answers, HttpRule, Service};

use crate::net::{Outcome, RemoteError, Retryable};
use crate::python::PythonError;

/// Error of a reward service, or of its settings.
#[derive(Clone, Debug, thiserror::Error, PartialEq)]
pub enum ServiceError {
    /// A number of seconds that is no duration.
    #[error("the reward service's timeout or pauses: {0}")]
    Seconds(#[from] TryFromFloatSecsError),
    /// A key of a judge that is not usable, or a cache file that is not readable.
    #[error("the judge's {0}")]
    Judge(String),
    /// The request failed.
    #[error("{0}")]
    Http(#[from] RemoteError),
    /// The Python function failed.
    #[error("{0}")]
    Python(#[from] PythonError),
    /// The service was busy for longer than its `busy_timeout`.
    #[error(
        "{url} said {status} for {seconds:.1} s; give the reward service more workers, lower its concurrency, or raise busy_timeout"
    )]
    Busy {
        /// The service.
        url: String,
        /// HTTP status.
        status: u16,
        /// Seconds waited.
        seconds: f64,
    },
    /// The response contains no rewards.
    #[error(
        "{url} answered with {why}: {begins:?}; it must be {{\"rewards\": […]}} with one finite number a sample, in the order of the request"
    )]
    Answer {
        /// The service.
        url: String,
        /// Defect of the response.
        why: String,
        /// First characters of the response.
        begins: String,
    },
}

impl Retryable for ServiceError {
    fn outcome(&self) -> Outcome {
        match self {
            ServiceError::Http(error) => error.outcome(),
            ServiceError::Answer { .. } | ServiceError::Python(_) => Outcome::Failed,
            _ => Outcome::Final,
        }
    }
}
