//! Weight sync to remote engines, with verification.
//!
//! A version is written to a folder that the engines can read. Engines load it in
//! parallel, and an engine that fails is isolated. A version counts when an engine's
//! log-probabilities match the trainer's. [`WeightSyncManager`] syncs the engines of a
//! run, [`sync_weights_to_engines`] is the function for use by hand.
//!
//! Laws: V4 (no work before verification), V5 (an explicit policy for caches, [`CachePolicy`]).

mod engine_sync;
mod manager;
#[cfg(feature = "torch")]
mod releases;
mod verify;

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use super::{FleetHandle, InferenceEngine, PauseMode};
use crate::data::Version;
use crate::settings::declare::{choices, section};
use crate::settings::setting::POSITIVE;

pub use engine_sync::IsolatedEngine;
use engine_sync::Phase;
pub use manager::{SyncReport, WeightSyncManager};
#[cfg(feature = "torch")]
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

section! {
    /// Weight sync to servers.
    pub struct SyncConfig {
        /// Policy for a server's work in flight during a weight sync.
        pause: PauseMode = PauseMode::default();
        /// Policy for cached prompts when weights change.
        cache: CachePolicy = CachePolicy::default();
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
    /// Timeout of one phase. A number that no duration holds is none.
    fn timeout(&self, phase: Phase) -> Duration {
        let seconds = match phase {
            Phase::Pause => self.pause_timeout,
            Phase::Load => self.load_timeout,
            _ => self.step_timeout,
        };
        Duration::try_from_secs_f64(seconds).unwrap_or(Duration::MAX)
    }
}

/// Weights of one sync.
#[derive(Clone, Debug)]
pub struct Update {
    /// Version of the weights.
    pub version: Version,
    /// Absolute path of their folder.
    pub folder: Arc<Path>,
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
        Update { version, folder, changed: false, adapter: false, texts, expected, old_head: None, tolerance: 0.0 }
    }

    /// Label of the version.
    fn label(&self) -> String {
        if self.adapter { format!("adapter-{}", self.version) } else { self.version.to_string() }
    }
}

/// Error of a sync.
#[derive(Debug, thiserror::Error)]
pub enum SyncError {
    /// Fleet without engines.
    #[error("there is no engine to give weights to; name one in engine.urls, or let engine.launch start one")]
    NoEngines,
    /// Failure of all engines.
    #[error("no engine holds version {version} of the weights:{}", failures.iter().map(|failure| format!("\n  {failure}")).collect::<String>())]
    NoneHolds {
        /// Version of the weights.
        version: Version,
        /// Failures, in the order of the engines.
        failures: Vec<IsolatedEngine>,
    },
}

/// Loads the weights of a model folder, or a PEFT adapter, into engines in parallel, without a
/// probe. Returns the result of each engine, in their order. The label is the folder's version, or
/// 0.
///
/// # Errors
///
/// If no engine holds the weights.
pub async fn sync_weights_to_engines(
    engines: &[Arc<dyn InferenceEngine>],
    folder: &Path,
    config: &SyncConfig,
) -> Result<SyncReport, SyncError> {
    let folder = std::path::absolute(folder).unwrap_or_else(|_| folder.to_owned());
    let name = folder.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
    let version = name.strip_prefix('v').and_then(|digits| digits.parse().ok()).unwrap_or(0);
    let adapter = folder.join("adapter_config.json").is_file() && !folder.join("config.json").exists();
    let update = Update { adapter, ..Update::unprobed(version, folder) };
    WeightSyncManager::new(FleetHandle::new(engines.to_vec()), config.clone()).sync(update).await
}
