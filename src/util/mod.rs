//! Small parts that every other folder may use and that know nothing of the project.

pub mod atomic_file;
#[cfg(unix)]
pub mod lock_file;

pub mod reading;
pub(crate) mod rng;
pub(crate) mod secrets;
pub mod untrusted;
