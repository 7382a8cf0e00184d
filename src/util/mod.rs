//! Small utilities for all other folders: files, locks, keyed random numbers, secrets, untrusted
//! text.

pub mod atomic_file;
#[cfg(unix)]
pub mod lock_file;

pub mod reading;
pub(crate) mod rng;
pub(crate) mod secrets;
pub mod untrusted;
