//! How patient a fleet is, and how much it asks at a time.

use std::time::Duration;

/// How a fleet treats its engines.
#[derive(Clone, Debug)]
pub struct FleetConfig {
    /// Most samples at a time on one engine; it gets fewer where it says that it is busy.
    pub per_engine: usize,
    /// Longest time without a token of a sample; of an engine that does not stream, without the whole of it.
    pub stall_timeout: Duration,
    /// Longest time for one attempt.
    pub attempt_timeout: Duration,
    /// Longest time without any token of any engine, beyond `stall_timeout` where one is at work.
    pub fleet_timeout: Duration,
    /// Failed attempts in a row, without any token, after which a sample is given up.
    pub retries: u32,
    /// The pause before the first retry; each further one is twice as long, ten seconds at most, less up to half of it by chance.
    pub pause: Duration,
    /// Samples in a row that may be given up before the run is.
    pub max_refused: usize,
    /// A sample of which nothing was heard for so long is named in a warning.
    pub warn: Duration,
    /// Whether engines keep what they remember of prompts apart by version (law V5), so that nothing need be flushed when weights change.
    pub cache_by_version: bool,
    /// Ids below this are tokens.
    pub vocabulary: usize,
    /// How long a step waits for tokens.
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
            warn: Duration::from_secs(30),
            cache_by_version: true,
            vocabulary: u32::MAX as usize,
            step: Duration::from_millis(20),
        }
    }
}
