//! Assembly of a pipeline: each file turns one section of the recipe into the library's parts.
//!
//! The files form no circle. In order: `secrets`, `models`, `conversations`, `policy`, `origin`, `data`,
//! `rewards`, `environments`, `supervised`, `steps`, `trainers`, `references`, `preferences`,
//! `rollout`, `servers`, `engines`, `evaluation`.

pub(crate) mod conversations;
pub(crate) mod data;
pub mod engines;
pub(crate) mod environments;
pub(crate) mod evaluation;
pub mod models;
pub(crate) mod origin;
pub mod policy;
pub(crate) mod preferences;
pub(crate) mod references;
pub(crate) mod rewards;
pub(crate) mod rollout;
pub mod rotation;
pub(crate) mod secrets;
pub mod servers;
pub(crate) mod steps;
pub(crate) mod supervised;
pub(crate) mod trainers;
