//! Recipes, documents, logs and metrics.
#![allow(clippy::unwrap_used, reason = "a panic is how a test fails")]

mod aliases;
mod documents;
mod layers;
mod logs;
mod metrics;
#[cfg(target_os = "linux")]
mod metrics_memory;
mod no_statics;
mod plans;
mod recipe_errors;
mod recipe_keys;
#[path = "../support/mod.rs"]
mod support;
