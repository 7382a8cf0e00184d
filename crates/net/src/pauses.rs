//! Keys of sections that name a server: its address, and the backoff between retries.

use std::time::{Duration, TryFromFloatSecsError};

use rollflow_settings::declare::section;
use rollflow_settings::setting::{Limit, NOT_NEGATIVE};

use super::{RetryPolicy, check_url};

/// Address of a server that a recipe names.
pub const URL: Limit<String> = Limit {
    text: "an address, as in http://127.0.0.1:9000/score or https://judge.example.com/score, without a password (`token_env` names a token)",
    holds: |url| check_url(url).is_ok(),
};

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
    /// Returns the retry policy with these pauses.
    ///
    /// # Errors
    /// If a number of seconds exceeds the range of a `Duration`.
    pub fn policy(&self, retries: u32) -> Result<RetryPolicy, TryFromFloatSecsError> {
        let seconds = Duration::try_from_secs_f64;
        let (pause, max_pause, busy_timeout) = (seconds(self.pause)?, seconds(self.max_pause)?, seconds(self.busy_timeout)?);
        Ok(RetryPolicy { retries, pause, max_pause, busy_timeout })
    }
}
