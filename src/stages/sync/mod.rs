//! Weight sync: new weights for the generators.

#[cfg(feature = "torch")]
mod export;
mod hold;
mod in_process;
mod remote;

#[cfg(feature = "torch")]
pub use export::{ExportError, Exporter, probe_texts};
pub use hold::EvaluationHold;
pub use in_process::WeightSync;
pub use remote::RemoteSync;
