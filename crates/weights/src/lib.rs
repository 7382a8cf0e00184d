//! Versions of weights as immutable artefacts, in folders and object stores.
//!
//! ```text
//! s3://bucket/run/weights/
//!   writers/0000000001                                          claim of a process that writes
//!   manifests/w0000000001-v0000000042-delta-to-v0000000041.jsonl
//!   data/w0000000001-v0000000042/000000                         compressed chunks
//!   hosts/gpu-7.json                                            version that a host has pulled
//! ```
//!
//! A [`Publisher`] writes a folder as an artefact: all objects, then the manifest, which makes the
//! artefact complete. Of the tensors it stores what changed since the version before; every Nth
//! artefact is whole. A [`Puller`] restores the folder on another machine, exact to the bit, and
//! refuses what differs from its checksums. `manifest.rs` and `delta.rs` describe the format.

mod aws_files;
mod delta;
mod error;
mod manifest;
mod publisher;
mod puller;
mod settings;
mod source;
mod store;
mod web_pages;

#[cfg(test)]
mod tests;

pub use error::WeightsError;
pub use manifest::{FORMAT, Id};
pub use publisher::{Published, Publisher};
pub use puller::{HostReport, LATEST, Pulled, Puller};
pub use settings::{CHECKPOINTS, StoreRule, WEIGHTS};
pub use store::{Store, check_address, check_writable};
