//! Engines on servers, and rollouts of several turns.
#![allow(clippy::unwrap_used, reason = "a panic is how a test fails")]

mod agents;
#[cfg(unix)]
mod agents_elsewhere;
mod demonstrations;
mod engines;
#[path = "../../examples/environments/mod.rs"]
mod environments;
mod speaker;
#[path = "../support/mod.rs"]
mod support;
mod tools;
