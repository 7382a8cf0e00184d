//! Runs elsewhere: the files of a platform, or processes on hosts, from one description of a run.
//!
//! [`settings`] declares the description, [`job`] combines it with a recipe, and one file per platform
//! renders it. Words of commands are quoted for the shell by `shlex`, values for YAML by its serializer.

pub mod compose;
pub mod job;
pub mod kubernetes;
pub mod settings;
pub mod skypilot;
pub mod slurm;
pub mod ssh;
mod yaml;
