//! Training and sampling on a server of the Tinker API: one that SkyRL, verl or this library starts,
//! or a hosted one.
//!
//! [`TinkerService`] opens a session and finds out what the server does, [`TinkerBackend`] trains,
//! [`TinkerEngine`] samples, [`TinkerExporter`] brings versions to other engines, and
//! [`TinkerTeacher`] scores.

mod address;
mod backend;
mod dialect;
mod engine;
mod exporter;
mod model;
mod one_pass;
mod service;
mod teacher;

pub use address::{ADDRESS, download, has_adapters};
pub use backend::{SamplerWeights, TinkerBackend, TinkerConfig};
pub use dialect::{Dialect, Reduction};
pub use engine::TinkerEngine;
pub use exporter::{ExportError, TinkerExporter};
pub use rollflow_tinker::message::LoraConfig;
pub use rollflow_tinker::{Encoding, Patience, TinkerError};
pub use service::TinkerService;
pub use teacher::TinkerTeacher;
