//! The local engine, weight sync, and real servers held against it.
#![cfg(feature = "torch")]
#![allow(clippy::unwrap_used, reason = "a panic is how a test fails")]

mod adaptive_slots;
mod conversations;
mod generating;
mod partial_rollouts;
mod pulled;
mod real_engines;
mod reuse;
mod routes;
mod sampling;
#[path = "../tiny/mod.rs"]
mod tiny;
mod weight_sync;
