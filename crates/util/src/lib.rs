//! Small utilities for all other crates of rollflow: files, locks, cores, memory, keyed random numbers,
//! secrets, untrusted text, causes of errors, deadlines.

pub mod atomic_file;
pub mod causes;
pub mod cores;
pub mod lock_file;
pub mod memory;
pub mod reading;
pub mod rng;
pub mod secrets;
pub mod untrusted;

use std::time::{Duration, Instant};

/// The instant after `limit` from now; in a year if the clock cannot say it.
pub fn deadline(limit: Duration) -> Instant {
    let now = Instant::now();
    now.checked_add(limit).unwrap_or(now + Duration::from_secs(365 * 24 * 3600))
}
