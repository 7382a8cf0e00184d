//! Interface for giving weights to an engine.

use crate::settings::declare::choices;
use std::collections::BTreeMap;
use std::path::Path;

use super::Pending;

choices! {
    /// Policy for an engine's work while its weights change.
    pub enum PauseMode {
        /// the engine pauses and continues with its keys and values (vLLM `keep`, SGLang
        /// `in_place`).
        "keep" => Keep,
        /// the engine pauses and recomputes keys and values under the new weights (SGLang
        /// `retract`).
        "recompute" => Recompute,
        /// the engine aborts what is in flight, which continues as new requests.
        "abort" => Abort,
        /// the engine finishes what is in flight first and takes nothing new (vLLM `wait`).
        "finish" => Finish,
    }
}

/// Operations of a weight sync on one engine. Labels are decimal version numbers.
pub trait WeightControl: Send + Sync {
    /// Supported pause modes.
    fn pause_modes(&self) -> &'static [PauseMode];

    /// Pauses the engine; idempotent.
    fn pause(&self, mode: PauseMode) -> Pending<'_, ()>;

    /// Loads a Hugging Face folder that the engine can read.
    fn load<'a>(&'a self, folder: &'a Path, label: &'a str) -> Pending<'a, ()>;

    /// Loads a PEFT folder as an adapter of this name, replacing one that has it.
    fn load_adapter<'a>(&'a self, name: &'a str, folder: &'a Path) -> Pending<'a, ()>;

    /// Unloads an adapter.
    fn unload_adapter<'a>(&'a self, name: &'a str) -> Pending<'a, ()>;

    /// Names of the loaded adapters.
    fn adapters(&self) -> Pending<'_, Vec<String>>;

    /// Labels the served weights.
    fn label<'a>(&'a self, label: &'a str) -> Pending<'a, ()>;

    /// Label of the served weights; `None` before the first label.
    fn served(&self) -> Pending<'_, Option<String>>;

    /// Checksums by tensor name; `None` if the engine has none.
    fn checksums(&self) -> Pending<'_, Option<BTreeMap<String, String>>>;

    /// Clears the cache of finished work.
    fn flush_cache(&self) -> Pending<'_, ()>;

    /// Resumes the engine; idempotent.
    fn resume(&self) -> Pending<'_, ()>;
}
