//! Why an engine elsewhere did not do what it was asked.

use std::time::Duration;

/// What went wrong, and with which engine.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[error("{engine}{}: {fault}", attempt.as_ref().map(|id| format!(", sample {id}")).unwrap_or_default())]
pub struct RemoteError {
    /// Its kind and address.
    pub engine: String,
    /// The attempt's id, where it was about one.
    pub attempt: Option<Box<str>>,
    /// What happened.
    pub fault: Fault,
}

/// What can go wrong with an engine elsewhere.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum Fault {
    /// Not an address that can be asked.
    #[error("{url:?} is no address of an engine: {why}; write it as http://host:port")]
    Url {
        /// What was given.
        url: String,
        /// What is wrong with it.
        why: String,
    },
    /// Nobody listens there.
    #[error("cannot connect: {why}; check that the server runs and listens there (`rollflow engine status`)")]
    Unreachable {
        /// What the machine said.
        why: String,
    },
    /// The connection ended before the answer did.
    #[error("the connection broke: {why}; look for a crash in the server's log")]
    Broke {
        /// What happened.
        why: String,
    },
    /// It took too long.
    #[error("no answer to {what} within {seconds} s; look whether the server hangs, or raise the limit")]
    Late {
        /// What was asked.
        what: String,
        /// The limit.
        seconds: f64,
    },
    /// It has no room now, or stands still: to be asked again, and no failure.
    #[error("busy or paused (status {status})")]
    Busy {
        /// What it said.
        status: u16,
        /// How long it asks to be left alone.
        retry_after: Option<Duration>,
    },
    /// It refuses this request, and would refuse it again.
    #[error("{what} was refused with status {status}: {begins:?}; {advice}")]
    Refused {
        /// What was asked.
        what: String,
        /// The status.
        status: u16,
        /// How its page begins.
        begins: String,
        /// What to look at.
        advice: String,
    },
    /// It answered with an error of its own.
    #[error("{what} was answered with status {status}: {begins:?}; look into the server's log")]
    Failed {
        /// What was asked.
        what: String,
        /// The status.
        status: u16,
        /// How its page begins.
        begins: String,
    },
    /// It answered with something that makes no sense.
    #[error("{what} was answered with {why}: {begins:?}; check that the server is of the kind and version that the recipe says")]
    Nonsense {
        /// What was asked.
        what: String,
        /// What is wrong with it.
        why: String,
        /// How it begins.
        begins: String,
    },
    /// It can't do that.
    #[error("it has no way of {what}")]
    Unsupported {
        /// What.
        what: &'static str,
    },
}

impl RemoteError {
    /// About no attempt in particular.
    pub fn new(engine: impl Into<String>, fault: Fault) -> Self {
        RemoteError { engine: engine.into(), attempt: None, fault }
    }

    /// About this attempt.
    pub fn of_attempt(self, id: impl Into<String>) -> Self {
        RemoteError { attempt: Some(id.into().into()), ..self }
    }
}

impl Fault {
    /// What it is called in metrics.
    pub fn kind(&self) -> &'static str {
        match self {
            Fault::Url { .. } => "url",
            Fault::Unreachable { .. } => "unreachable",
            Fault::Broke { .. } => "broke",
            Fault::Late { .. } => "late",
            Fault::Busy { .. } => "busy",
            Fault::Refused { .. } => "refused",
            Fault::Failed { .. } => "failed",
            Fault::Nonsense { .. } => "nonsense",
            Fault::Unsupported { .. } => "unsupported",
        }
    }

    /// Whether the same request may succeed when it is made again, here or elsewhere.
    pub fn passes(&self) -> bool {
        !matches!(self, Fault::Url { .. } | Fault::Refused { .. } | Fault::Unsupported { .. })
    }
}
