//! Giving weights to engines elsewhere, and making sure that they serve them.
//!
//! A version goes through a folder that the engines can read ([`Releases`]). Each engine walks its own [`WeightSyncState`]: engines work beside each other,
//! one that fails is left alone, and a version counts where its log-probabilities were found to be the trainer's ([`Probe`]). [`WeightSyncManager`]
//! does this for the engines of a run, version by version; [`sync_weights_to_engines`] once, by hand.
//!
//! Laws: V4 (no work before weights were verified), V5 (what becomes of caches is said, see [`CachePolicy`]).

mod engine_sync;
mod manager;
mod releases;
mod state;
mod verify;

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use super::{FleetHandle, InferenceEngine, PauseMode};
use crate::data::Version;
use crate::settings::declare::{choices, section};
use crate::settings::setting::POSITIVE;

pub use engine_sync::{IsolatedEngine, StepError, SyncedEngine};
pub use manager::{SyncReport, WeightSyncManager};
pub use releases::{Release, Releases};
pub use state::Phase;
pub use verify::{Checksums, Probe, WrongWeights};

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
    /// Timeout of one phase.
    fn timeout(&self, phase: Phase) -> Duration {
        Duration::from_secs_f64(match phase {
            Phase::Pause => self.pause_timeout,
            Phase::Load => self.load_timeout,
            _ => self.step_timeout,
        })
    }
}

/// Weights to be given.
#[derive(Clone, Debug)]
pub struct Update {
    /// Where they are; held until another version is.
    pub release: Release,
    /// Whether they are others than those before.
    pub changed: bool,
    /// How to know them. Without texts, nothing is asked.
    pub probe: Probe,
    /// Whether they are an adapter over what the engines were started with, which is loaded beside others and answers requests that name it.
    pub adapter: bool,
}

impl Update {
    /// What engines call them.
    pub fn label(&self) -> String {
        let version = self.release.version();
        if self.adapter { format!("adapter-{version}") } else { version.to_string() }
    }
}

/// No engine holds a version.
#[derive(Debug, thiserror::Error)]
pub enum SyncError {
    /// There is none.
    #[error("there is no engine to give weights to; name one in engine.urls, or let engine.launch start one")]
    NoEngines,
    /// All failed.
    #[error("no engine holds version {version} of the weights:{}", failures.iter().map(|failure| format!("\n  {failure}")).collect::<String>())]
    NoneHolds {
        /// The version.
        version: Version,
        /// Why, in the order of the engines.
        failures: Vec<IsolatedEngine>,
    },
}

/// Gives the weights in a model folder, or the adapter in one of PEFT's, to engines, all at once, without a probe: whoever knows what they should
/// find uses a [`WeightSyncManager`]. What came of it stands in the order of the engines; at least one holds them, or it is an error. They are
/// called by the folder's version, 0 where its name tells none.
pub async fn sync_weights_to_engines(
    engines: &[Arc<dyn InferenceEngine>],
    folder: &Path,
    config: &SyncConfig,
) -> Result<Vec<Result<SyncedEngine, IsolatedEngine>>, SyncError> {
    let folder = std::path::absolute(folder).unwrap_or_else(|_| folder.to_owned());
    let name = folder.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
    let version = name.strip_prefix('v').and_then(|digits| digits.parse().ok()).unwrap_or(0);
    let adapter = folder.join("adapter_config.json").is_file() && !folder.join("config.json").exists();
    let update = Update { release: Release::of(version, folder), changed: false, probe: Probe::default(), adapter };
    let manager = WeightSyncManager::new(FleetHandle::new(engines.to_vec()), config.clone());
    Ok(manager.sync(update).await?.engines)
}
