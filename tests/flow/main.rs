//! The dataflow: bounded edges, shutdown, supervision, time, staleness and admission.
#![allow(clippy::unwrap_used, reason = "a panic is how a test fails")]

mod admission;
mod backpressure;
#[cfg(not(feature = "torch"))]
mod compile_fail;
mod dynamic_sampling;
mod faults;
mod feedback;
mod graph_dump;
mod loop_order;
mod loops;
mod ordering;
mod over_sampling;
mod progress;
mod random_graphs;
#[path = "../scripted/mod.rs"]
mod scripted;
mod shutdown;
mod simulated_time;
mod staleness;
mod step_rows;
mod supervision;
#[path = "../support/mod.rs"]
mod support;
mod time_accounting;
