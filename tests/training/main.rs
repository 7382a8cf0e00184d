//! The local trainer: steps, losses, reference policies, critics and reward models.
#![cfg(feature = "torch")]
#![allow(clippy::unwrap_used, reason = "a panic is how a test fails")]

mod backend;
mod f16_range;
mod invariance;
mod learning;
#[path = "../support/objective.rs"]
mod objective;
mod objectives;
mod packing;
mod pairs;
mod ppo;
#[cfg(target_os = "linux")]
mod rank_bytes;
mod rank_threads;
mod ranks;
mod reference;
mod reward_models;
mod saving;
#[path = "../support/mod.rs"]
mod support;
mod synchronous;
mod tinker;
mod tinker_server;
#[path = "../tiny/mod.rs"]
mod tiny;
mod zero_advantage;
