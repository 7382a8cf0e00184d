//! Engines elsewhere (laws D1, D3, D4, V4, V5, F6): what servers say is read as they mean it, whatever they do every sample comes back once or the
//! error says what to look at, and nothing waits for ever.

mod evaluating;
mod faults;
mod protocols;
mod running;
mod server;
mod simulated;
mod sleeping;
mod synchronous;

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rollflow::data::{Tokenizer, Version};
use rollflow::engine::remote::sync::{SyncConfig, Update, WeightSyncManager};
use rollflow::engine::remote::{Fleet, FleetConfig, FleetHandle, InferenceEngine};
use rollflow::engine::{EngineError, Finished, Request, SamplingParams, TokenEngine};

/// How long a test may hang before it is told so.
const GUARD: Duration = Duration::from_secs(60);

fn tokenizer() -> Arc<Tokenizer> {
    Arc::new(Tokenizer::characters("0123456789+-=", 16).unwrap())
}

/// Short limits, so that what waits for ever does not wait long.
fn hasty() -> FleetConfig {
    FleetConfig {
        per_engine: 16,
        stall_timeout: Duration::from_millis(100),
        attempt_timeout: Duration::from_secs(5),
        fleet_timeout: Duration::from_secs(2),
        retries: 12,
        pause: Duration::from_millis(1),
        max_refused: 1000,
        step: Duration::from_millis(5),
        vocabulary: 16,
        ..FleetConfig::default()
    }
}

fn fleet(handle: &FleetHandle, config: FleetConfig) -> Fleet {
    Fleet::new(handle, config, &tokenizer(), 64, 7)
}

fn handle(engines: impl IntoIterator<Item = Arc<dyn InferenceEngine>>) -> FleetHandle {
    FleetHandle::new(engines.into_iter().collect())
}

/// A number below `below`.
fn draw(key: &[u64], below: u64) -> u64 {
    let mix = |hash: u64, word: &u64| (hash ^ word).wrapping_mul(0x9E37_79B9_7F4A_7C15).rotate_left(23);
    (key.iter().fold(0x1234_5678_9ABC_DEF1, mix).wrapping_mul(0xD6E8_FEB8_6659_FD93) >> 33) % below.max(1)
}

fn manager(handle: &FleetHandle) -> WeightSyncManager {
    let config = SyncConfig { checksums: false, retries: 5, ..SyncConfig::default() };
    WeightSyncManager { fleet: handle.clone(), config, max_lag: 0 }
}

/// Weights of which engines know nothing but the version.
fn unprobed(version: Version) -> Update {
    Update { changed: true, ..Update::unprobed(version, Path::new("/nowhere")) }
}

/// Brings a version to the engines.
fn give(handle: &FleetHandle, version: Version) {
    server::wait_for(manager(handle).sync(unprobed(version))).unwrap();
}

fn prompt(ordinal: u64) -> Vec<u32> {
    vec![3 + (ordinal % 13) as u32, 2 + (ordinal / 13 % 13) as u32, 5]
}

fn request(ordinal: u64, samples: u32, params: &SamplingParams) -> Request {
    Request::new(ordinal, prompt(ordinal), samples, Arc::new(params.clone()))
}

/// Steps to the end, looking at each step; panics if that never comes.
fn finish(fleet: &mut Fleet, mut look: impl FnMut(&Fleet)) -> Result<BTreeMap<(u64, u32), Finished>, EngineError> {
    let (started, mut all) = (Instant::now(), BTreeMap::new());
    while !fleet.is_idle() {
        let ended = fleet.step()?;
        look(fleet);
        for finished in ended {
            assert!(all.insert((finished.ordinal, finished.index), finished).is_none(), "a sample that ended twice");
        }
        assert!(started.elapsed() < GUARD, "it never ended: {fleet:?}");
    }
    Ok(all)
}
