//! Why a server did not do what it was asked, and what to do about it.

use std::time::Duration;

use super::retry::{Outcome, Retryable};

/// A failed request, with the server's name.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[error("{server}{}: {fault}", about.as_ref().map(|about| format!(", {about}")).unwrap_or_default())]
pub struct RemoteError {
    /// The server's kind and address.
    pub server: String,
    /// The piece of work that the request was for, such as `sample p7-s0-a1`, if it was for one.
    pub about: Option<Box<str>>,
    /// Fault.
    pub fault: Fault,
}

impl RemoteError {
    /// An error of `server`, about no piece of work in particular.
    pub fn new(server: impl Into<String>, fault: Fault) -> Self {
        RemoteError { server: server.into(), about: None, fault }
    }

    /// Error about the sample with this id.
    pub fn of_sample(self, id: &str) -> Self {
        RemoteError { about: Some(format!("sample {id}").into()), ..self }
    }
}

/// The ways in which a request to a server can fail.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum Fault {
    /// The address cannot be used.
    #[error("{url:?} is not the address of a server: {why}; write it as http://host:port or https://host")]
    Url {
        /// Given address.
        url: String,
        /// Reason.
        why: String,
    },
    /// Certificates cannot be read, or the machine has none: file, reason and remedy.
    #[error("TLS cannot be set up: {0}")]
    Certificates(String),
    /// The server's certificate is not trusted.
    #[error("the certificate of {host} is not trusted: {why}; {advice}")]
    Untrusted {
        /// The host that the address names.
        host: String,
        /// Reason.
        why: String,
        /// Setting that solves it.
        advice: String,
    },
    /// The machine gives no threads for requests, with its own message.
    #[error("no threads for requests: {0}; look at the limits of this user (ulimit -u)")]
    Threads(String),
    /// No server accepts connections there, with the machine's own message.
    #[error("cannot connect: {0}; check that the server runs and listens there")]
    Unreachable(String),
    /// The connection ended before the answer did, for this reason.
    #[error("the connection broke: {0}; look for a crash in the server's log")]
    Broke(String),
    /// The request timed out.
    #[error("no answer to {what} within {seconds} s; check whether the server hangs, or raise the timeout")]
    Late {
        /// The request.
        what: String,
        /// The timeout, in seconds.
        seconds: f64,
    },
    /// The server has no room now, or is paused: to be retried, and no failure.
    #[error("busy or paused (status {status})")]
    Busy {
        /// The status.
        status: u16,
        /// The server's `Retry-After`.
        retry_after: Option<Duration>,
    },
    /// The server refuses this request, and would refuse it again.
    #[error("{what} was refused with status {status}: {begins:?}; {advice}")]
    Refused {
        /// The request.
        what: String,
        /// The status.
        status: u16,
        /// The beginning of the page.
        begins: String,
        /// Remedy.
        advice: String,
    },
    /// The server failed.
    #[error("{what} was answered with status {status}: {begins:?}; look into the server's log")]
    Failed {
        /// The request.
        what: String,
        /// The status.
        status: u16,
        /// The beginning of the page.
        begins: String,
    },
    /// The answer makes no sense.
    #[error("{what} was answered with {why}: {begins:?}; check that the server is of the kind and version that the recipe says")]
    Nonsense {
        /// The request.
        what: String,
        /// Reason.
        why: String,
        /// The beginning of the answer.
        begins: String,
    },
    /// The answer is longer than what is read of one, and would be again.
    #[error("the answer to {what} is longer than {} MiB, and no more is read; ask for less in one request", limit >> 20)]
    TooLong {
        /// The request.
        what: String,
        /// Longest answer, in bytes.
        limit: usize,
    },
    /// A file to be sent cannot be read, with the machine's own message.
    #[error("reading what is to be sent: {0}")]
    File(String),
    /// Tensors were not sent, with the reason of the library that sends them.
    #[error("the transfer of tensors failed in {0}")]
    Transfer(String),
    /// The server has no such function.
    #[error("it has no way of {0}")]
    Unsupported(&'static str),
}

impl Fault {
    /// The name that metrics use.
    pub fn kind(&self) -> &'static str {
        match self {
            Fault::Url { .. } => "url",
            Fault::Certificates(_) | Fault::Untrusted { .. } => "tls",
            Fault::Threads(_) => "threads",
            Fault::Unreachable(_) => "unreachable",
            Fault::Broke(_) => "broke",
            Fault::Late { .. } => "late",
            Fault::Busy { .. } => "busy",
            Fault::Refused { .. } => "refused",
            Fault::Failed { .. } => "failed",
            Fault::Nonsense { .. } | Fault::TooLong { .. } => "nonsense",
            Fault::File(_) => "file",
            Fault::Transfer(_) => "transfer",
            Fault::Unsupported(_) => "unsupported",
        }
    }

    /// Returns true if the same request may succeed later, here or on another server.
    pub fn passes(&self) -> bool {
        match self {
            Fault::Url { .. }
            | Fault::Certificates(_)
            | Fault::Untrusted { .. }
            | Fault::TooLong { .. }
            | Fault::File(_)
            | Fault::Unsupported(_) => false,
            // The server gave up waiting for the request, or will not take it this early.
            Fault::Refused { status, .. } => matches!(status, 408 | 425),
            _ => true,
        }
    }

    /// Meaning for a retry.
    pub fn outcome(&self) -> Outcome {
        match self {
            Fault::Busy { retry_after, .. } => Outcome::Busy { retry_after: *retry_after },
            fault if fault.passes() => Outcome::Failed,
            _ => Outcome::Final,
        }
    }
}

impl Retryable for RemoteError {
    fn outcome(&self) -> Outcome {
        self.fault.outcome()
    }
}
