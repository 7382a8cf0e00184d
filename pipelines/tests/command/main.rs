//! The command, as people meet it: the built binary, its exit codes, what it prints and what it leaves behind.
#![cfg(unix)]
#![allow(clippy::unwrap_used)]

mod adapters;
mod agents;
mod asking;
mod changing;
mod charts;
mod console;
mod conversing;
mod crashes;
mod data;
mod deploying;
mod devices;
mod diagnosing;
mod diffing;
mod disks;
mod distilling;
mod drawing;
mod evaluating;
mod file_faults;
mod fork_server;
mod hostile;
mod hub;
mod large_parquet;
mod lineage;
mod live_page;
mod model_clients;
mod model_server;
mod model_serving;
mod models;
mod network;
mod offline;
mod preferring;
mod python;
mod ranks;
mod real_servers;
mod recipes;
mod references;
mod registering;
mod remembering;
mod replaying;
mod reward_models;
mod running;
mod runs;
mod scaling;
mod served_runs;
mod serving;
mod simulating;
#[path = "../../../tests/support/mod.rs"]
mod support;
mod tailing;
mod terminal;
mod tinker;
mod topping;
mod tracking;
mod watching;
