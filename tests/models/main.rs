//! Models: folders, adapters, formats, devices and memory.
#![cfg(feature = "torch")]
#![allow(clippy::unwrap_used, reason = "a panic is how a test fails")]

mod adapter_folders;
mod configurations;
mod devices;
mod expert_adapters;
mod experts;
mod gpt_oss;
mod gpu;
mod lora;
#[cfg(target_os = "linux")]
mod memory;
mod model_folders;
mod packed_rows;
mod parts;
mod precision;
mod quantised;
mod score_models;
mod stand_in;
#[path = "../tiny/mod.rs"]
mod tiny;
