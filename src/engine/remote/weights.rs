//! What a weight sync needs of an engine.

use crate::settings::declare::choices;
use std::collections::BTreeMap;
use std::path::Path;

use super::Pending;

choices! {
    /// Policy for an engine's work while its weights change.
    pub enum PauseMode {
        /// the engine pauses and continues with its keys and values (vLLM `keep`, SGLang `in_place`).
        "keep" => Keep,
        /// the engine pauses and recomputes keys and values under the new weights (SGLang `retract`).
        "recompute" => Recompute,
        /// the engine aborts what is in flight, which continues as new requests.
        "abort" => Abort,
        /// the engine finishes what is in flight first and takes nothing new (vLLM `wait`).
        "finish" => Finish,
    }
}

/// The steps of a sync, one engine at a time. Labels are decimal version numbers.
pub trait WeightControl: Send + Sync {
    /// The pause modes that it has.
    fn pause_modes(&self) -> &'static [PauseMode];

    /// Makes it stand still. Doing it twice is fine.
    fn pause(&self, mode: PauseMode) -> Pending<'_, ()>;

    /// Loads the weights of a Hugging Face folder that it can read.
    fn load<'a>(&'a self, folder: &'a Path, label: &'a str) -> Pending<'a, ()>;

    /// Loads an adapter of a PEFT folder that it can read, for requests that name it so. One that has the name is replaced.
    fn load_adapter<'a>(&'a self, name: &'a str, folder: &'a Path) -> Pending<'a, ()>;

    /// Forgets an adapter.
    fn unload_adapter<'a>(&'a self, name: &'a str) -> Pending<'a, ()>;

    /// The adapters that it has, by name.
    fn adapters(&self) -> Pending<'_, Vec<String>>;

    /// Names what it serves.
    fn label<'a>(&'a self, label: &'a str) -> Pending<'a, ()>;

    /// What it says it serves; `None` where nobody named it yet.
    fn served(&self) -> Pending<'_, Option<String>>;

    /// Checksums of its weights, by whatever names it has for them; `None` where it has none.
    fn checksums(&self) -> Pending<'_, Option<BTreeMap<String, String>>>;

    /// Forgets the keys and values of finished work.
    fn flush_cache(&self) -> Pending<'_, ()>;

    /// Makes it go on. Doing it twice is fine.
    fn resume(&self) -> Pending<'_, ()>;
}
