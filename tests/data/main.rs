//! Data sets, chat templates, samples, batches and checkpoints.
#![allow(clippy::unwrap_used, reason = "a panic is how a test fails")]

mod batches;
mod chat;
mod checkpoints;
mod data_buffer;
mod data_sources;
mod hub;
mod jsonl;
mod large_data;
mod layouts;
mod packing;
mod records;
mod samples;
mod tokenizer;
