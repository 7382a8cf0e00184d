//! Weight sync to remote engines, with verification.
//!
//! A version is written to a folder that the engines can read, or through a store to a folder of each
//! engine's host ([`Carried`]), or sent from this process's memory ([`TensorSource`]). Engines load it in
//! parallel, and an engine that fails is isolated. A version counts when an engine's log-probabilities
//! match the trainer's. [`WeightSyncManager`] syncs the engines of a run, [`sync_weights_to_engines`] is
//! the function for use by hand.
//!
//! Laws: V4 (no work before verification), V5 (an explicit policy for caches, [`CachePolicy`]).

mod carried;
mod engine_sync;
mod manager;
mod releases;
mod verify;

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use super::transfer::TensorSource;
use super::{FleetHandle, InferenceEngine, PauseMode};
use crate::data::Version;
use crate::engine::EngineError;
use crate::model::holds_adapter;
use crate::settings::declare::{choices, section};
use crate::settings::setting::POSITIVE;

pub use carried::Carried;
pub use engine_sync::IsolatedEngine;
pub(super) use engine_sync::look_for_restart;
pub(super) use manager::LastSync;
pub use manager::{SyncReport, WeightSyncManager};
pub(crate) use releases::Releases;

choices! {
    /// Policy for cached prompts when weights change (law V5).
    pub enum CachePolicy {
        /// keys and values are kept apart by version.
        "namespaced" => Namespaced,
        /// keys and values are discarded with every update.
        "flush" => Flush,
        /// keys and values are reused whatever weights made them.
        "keep" => Keep,
    }
}

choices! {
    /// Way of new weights to servers.
    pub enum Carry {
        /// servers read `engine.folder`, or what a store brings to their hosts.
        "folder" => Folder,
        /// the run sends each server the files over HTTP, before the pause (`rollflow serve`).
        "stream" => Stream,
        /// the run broadcasts tensors to each server, over NCCL from a GPU and over TCP from a processor. vLLM needs
        /// `--weight-transfer-config '{"backend": "nccl"}'`, and a trainer on a GPU.
        "broadcast" => Broadcast,
        /// vLLM on the trainer's GPU reads tensors from its memory (CUDA IPC). It needs
        /// `--weight-transfer-config '{"backend": "ipc"}'` and `VLLM_ALLOW_INSECURE_SERIALIZATION=1`.
        "ipc" => Ipc,
    }
}

impl Carry {
    /// Returns true if servers take tensors out of the trainer's memory.
    pub fn is_from_memory(self) -> bool {
        matches!(self, Carry::Broadcast | Carry::Ipc)
    }
}

section! {
    /// Weight sync to servers.
    pub struct SyncConfig {
        /// Way of new weights to servers.
        carry: Carry = Carry::default();
        /// Policy for a server's work in flight during a weight sync.
        pause: PauseMode = PauseMode::default();
        /// Policy for cached prompts when weights change.
        cache: CachePolicy = CachePolicy::default();
        /// If true, servers free their GPU's memory while the trainer takes a step, for synchronous runs that share
        /// the GPU with them: weights wait in the host's memory, and keys and values are dropped. vLLM needs
        /// `--enable-sleep-mode`, SGLang `--enable-memory-saver --enable-weights-cpu-backup`; servers that the
        /// run starts have them.
        sleep: bool = false;
        /// If true, servers are asked for checksums, which read all weights.
        checksums: bool = true;
        /// Retries of a sync to one server.
        retries: u32 = 2;
        /// Timeout of a pause, in seconds.
        pause_timeout: f64 = 60.0, POSITIVE;
        /// Timeout of a load, in seconds.
        load_timeout: f64 = 600.0, POSITIVE;
        /// Timeout of any other step of a sync, in seconds.
        step_timeout: f64 = 60.0, POSITIVE;
    }
}

impl SyncConfig {
    /// Longest time for which a sync may pause an engine to load, with all retries.
    pub fn longest(&self) -> Duration {
        let seconds = f64::from(self.retries.saturating_add(1)) * (self.pause_timeout + self.load_timeout);
        Duration::try_from_secs_f64(seconds).unwrap_or(Duration::MAX)
    }
}

/// Weights of one sync.
#[derive(Clone, Debug)]
pub struct Update {
    /// Version of the weights.
    pub version: Version,
    /// Absolute path of their folder. Empty if engines take `tensors`.
    pub folder: Arc<Path>,
    /// Tensors in this process's memory, which engines take instead of a folder.
    pub tensors: Option<Arc<dyn TensorSource>>,
    /// Their artefact in a store, for hosts that cannot read the folder. `None`: all can.
    pub carried: Option<Carried>,
    /// If true, the weights differ from those of the sync before.
    pub changed: bool,
    /// If true, the weights are an adapter, which is loaded in addition to others and used by
    /// requests that name it.
    pub adapter: bool,
    /// Texts that the engine scores as a probe. Without texts, it is not probed.
    pub texts: Vec<Vec<u32>>,
    /// Trainer's log-probability of each token but the first, for every text.
    pub expected: Vec<Vec<f64>>,
    /// Log-probabilities with the output head that the servers were started with, for a model with
    /// a tied head. A server that reloads only the embedding returns these.
    pub old_head: Option<Vec<Vec<f64>>>,
    /// Largest mean difference, in nats.
    pub tolerance: f64,
}

impl Update {
    /// Whole weights of a folder, without a probe.
    pub fn unprobed(version: Version, folder: impl Into<Arc<Path>>) -> Self {
        let (folder, texts, expected) = (folder.into(), Vec::new(), Vec::new());
        let (tensors, carried, old_head) = (None, None, None);
        Update { version, folder, tensors, carried, changed: false, adapter: false, texts, expected, old_head, tolerance: 0.0 }
    }

    /// The same without what only a sync needs: tensors take memory of the trainer's device.
    fn without_tensors(&self) -> Self {
        Update { tensors: None, ..self.clone() }
    }

    /// Label of the version.
    pub(super) fn label(&self) -> String {
        if self.adapter { format!("adapter-{}", self.version) } else { self.version.to_string() }
    }
}

impl From<&Path> for Update {
    /// Weights of a model folder, or a PEFT adapter, without a probe. The version is that of the
    /// folder's name, such as `v0000000042`, or else 0.
    fn from(folder: &Path) -> Self {
        let folder = std::path::absolute(folder).unwrap_or_else(|_| folder.to_owned());
        let name = folder.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
        let version = name.strip_prefix('v').and_then(|digits| digits.parse().ok()).unwrap_or(0);
        Update { adapter: holds_adapter(&folder), ..Update::unprobed(version, folder) }
    }
}

/// Loads weights, such as those of a folder, into engines in parallel. Returns the result of each
/// engine, in their order.
///
/// # Errors
///
/// If no engine holds the weights.
pub async fn sync_weights_to_engines(
    engines: Vec<Arc<dyn InferenceEngine>>,
    weights: impl Into<Update>,
    config: &SyncConfig,
) -> Result<SyncReport, EngineError> {
    WeightSyncManager { fleet: FleetHandle::new(engines), config: config.clone(), max_lag: 0 }.sync(weights.into()).await
}
