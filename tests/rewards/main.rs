//! Rewards: code in the sandbox, services, and what happens when they fail.
#![allow(clippy::unwrap_used, reason = "a panic is how a test fails")]

#[cfg(unix)]
mod python_environments;
#[cfg(unix)]
mod python_rewards;
mod reward_failures;
mod reward_service;
#[cfg(target_os = "linux")]
mod sandbox;
#[cfg(target_os = "linux")]
#[path = "../rollouts/speaker.rs"]
mod speaker;
