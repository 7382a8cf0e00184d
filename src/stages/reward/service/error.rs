//! Why a reward service gave no rewards, and what to do about it.

/// Why a reward service gave no rewards.
#[derive(Clone, Debug, thiserror::Error, PartialEq)]
pub enum ServiceError {
    /// Not an address that can be asked.
    #[error("{url:?} is no address of a reward service: {why}; write it as http://host:port/path")]
    Url {
        /// What was given.
        url: String,
        /// What is wrong with it.
        why: String,
    },
    /// Nobody listens there.
    #[error("cannot connect to {url}: {why}; check that the reward service runs and listens there")]
    Unreachable {
        /// The service.
        url: String,
        /// What the machine said.
        why: String,
    },
    /// The connection ended before the answer did.
    #[error("the connection to {url} broke: {why}; look for a crash in the reward service's log")]
    Broke {
        /// The service.
        url: String,
        /// What happened.
        why: String,
    },
    /// It took too long.
    #[error("{url} did not answer within {seconds} s; look whether the reward service hangs, or raise its timeout")]
    Late {
        /// The service.
        url: String,
        /// The limit.
        seconds: f64,
    },
    /// It was busy for longer than it is waited for.
    #[error(
        "{url} said {status} for {seconds:.1} s; give the reward service more workers, ask it less at once (concurrency), or raise patience"
    )]
    Busy {
        /// The service.
        url: String,
        /// What it said.
        status: u16,
        /// How long it was waited for.
        seconds: f64,
    },
    /// It answered with an error.
    #[error("{url} answered with status {status}: {begins:?}; {}", advice(*.status))]
    Status {
        /// The service.
        url: String,
        /// What it said.
        status: u16,
        /// How its page begins.
        begins: String,
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

fn advice(status: u16) -> &'static str {
    match status {
        300..=399 => "redirects are not followed: give the address where the service itself is",
        404 | 405 => "check the path, and that the service takes POST there",
        401 | 403 => "check the token that token_env names",
        400..=499 => "the service refuses such requests: look into its log",
        _ => "look into the service's log",
    }
}

impl ServiceError {
    /// Whether the same request may well succeed later.
    pub(super) fn may_pass(&self) -> bool {
        match self {
            ServiceError::Url { .. } | ServiceError::Question { .. } | ServiceError::Busy { .. } => false,
            ServiceError::Status { status, .. } => *status >= 500 || *status == 408,
            _ => true,
        }
    }
}
