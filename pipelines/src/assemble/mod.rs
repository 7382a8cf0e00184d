//! A recipe's sections as the library's parts: one file for each, in which a function receives the sections it reads.

pub mod components;
pub(crate) mod conversations;
pub(crate) mod data;
pub mod engines;
pub(crate) mod environments;
pub(crate) mod evaluation;
pub(crate) mod lessons;
pub mod models;
pub(crate) mod origin;
pub mod policy;
pub(crate) mod preferences;
pub(crate) mod references;
pub(crate) mod rewards;
pub(crate) mod rollout;
pub(crate) mod secrets;
pub mod servers;
pub(crate) mod supervised;
pub(crate) mod trainers;
