//! Limits and timeouts of a fleet.

use std::time::Duration;

/// Limits and timeouts of a fleet.
#[derive(Clone, Debug)]
pub struct FleetConfig {
    /// Most samples at a time on one engine; fewer while it reports that it is busy. Default: 256.
    pub per_engine: usize,
    /// Longest time without a token of a sample, in full for an engine that does not stream.
    /// Default: 120 s.
    pub stall_timeout: Duration,
    /// Longest time of one attempt. Default: 1 hour.
    pub attempt_timeout: Duration,
    /// Longest time without a token of any engine, in addition to `stall_timeout` while one is at
    /// work. Default: 300 s.
    pub fleet_timeout: Duration,
    /// Failed attempts in a row, without a token, before a sample is given up. Default: 5.
    pub retries: u32,
    /// Pause before the first retry, reduced by up to half at random. It doubles up to 10 s.
    /// Default: 250 ms.
    pub pause: Duration,
    /// Samples given up in a row before the run fails. Default: 64.
    pub max_refused: usize,
    /// If true, prefix caches are separated by version, so that new weights need no flush (law V5).
    /// Default: true.
    pub cache_by_version: bool,
    /// Number of token ids. Default: no limit.
    pub vocabulary: usize,
    /// Longest wait for tokens in a step. Default: 20 ms.
    pub step: Duration,
}

impl Default for FleetConfig {
    fn default() -> Self {
        FleetConfig {
            per_engine: 256,
            stall_timeout: Duration::from_secs(120),
            attempt_timeout: Duration::from_secs(3600),
            fleet_timeout: Duration::from_secs(300),
            retries: 5,
            pause: Duration::from_millis(250),
            max_refused: 64,
            cache_by_version: true,
            vocabulary: u32::MAX as usize,
            step: Duration::from_millis(20),
        }
    }
}
