//! `[net]`: how a run reaches servers, and who reaches its own; and the retry keys of sections that ask servers.

use std::path::PathBuf;
use std::time::{Duration, TryFromFloatSecsError};

use crate::net::RetryPolicy;
use crate::settings::declare::section;
use crate::settings::setting::NOT_NEGATIVE;

section! {
    /// Connections to servers, and the servers of this run.
    pub struct Net {
        /// PEM file of certificate authorities that are trusted in addition to the system's, for
        /// every `https://` address of the recipe and for downloads. The environment variable
        /// SSL_CERT_FILE replaces the system's.
        ca_file: Option<PathBuf> = None;
        /// Host names for this run's own servers (metrics, agents), in addition to `localhost` and
        /// numeric addresses. Requests with other host names are rejected, so that no web page can
        /// read them by a name of its own.
        allowed_hosts: Vec<String> = Vec::new();
    }
}

section! {
    /// Backoff between retries of a request.
    pub struct RetryPauses {
        /// First pause, in seconds, reduced by up to half at random. Each further pause is twice as
        /// long.
        pause: f64 = RetryPolicy::DEFAULT.pause.as_secs_f64(), NOT_NEGATIVE;
        /// Longest pause, in seconds, unless the server asks for more with `Retry-After`.
        max_pause: f64 = RetryPolicy::DEFAULT.max_pause.as_secs_f64(), NOT_NEGATIVE;
        /// Longest wait for a busy server (status 429 or 503), in seconds per attempt. Waiting
        /// costs no retry.
        #[formerly(patience)]
        busy_timeout: f64 = RetryPolicy::DEFAULT.busy_timeout.as_secs_f64(), NOT_NEGATIVE;
    }
}

impl RetryPauses {
    /// The policy with these pauses.
    ///
    /// # Errors
    /// If a number of seconds is too large for a clock.
    pub fn policy(&self, retries: u32) -> Result<RetryPolicy, TryFromFloatSecsError> {
        let seconds = Duration::try_from_secs_f64;
        let (pause, max_pause, busy_timeout) = (seconds(self.pause)?, seconds(self.max_pause)?, seconds(self.busy_timeout)?);
        Ok(RetryPolicy { retries, pause, max_pause, busy_timeout })
    }
}
