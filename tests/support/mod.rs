//! Readers that tests use instead of the code under test, and what stands in for a model.
#![allow(dead_code, reason = "each test binary uses its part")]
#![allow(clippy::unwrap_used, reason = "a panic is how a test fails")]

pub mod backend;
pub mod exposition;
pub mod http;
pub mod rehearsal;
pub mod tfevents;
