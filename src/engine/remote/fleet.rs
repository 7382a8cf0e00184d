//! Many remote engines as one [`TokenEngine`].
//!
//! Each sample is generated in attempts, each a task on one engine. Tokens of an attempt are kept
//! however it ends: by an abort for new weights, a broken connection or a dead server. The sample
//! then continues elsewhere from all its tokens.
//!
//! Every wait is bounded. An engine that sends no token for much longer than usual and does not
//! answer a health check is *lost* until a check succeeds, and so is one that fails repeatedly. If no
//! engine generates a token for too long, the fleet fails with a report (law F7).
//!
//! Completions of an engine on trial, under weights that are not verified yet, are returned after
//! the verification. If it fails, their samples restart.
//!
//! Engines may join and leave at any time. One that leaves finishes what it has begun; when it is
//! removed, its unfinished samples continue elsewhere.
//!
//! Tokens are recorded with the oldest version that can have sampled them. At the end of an
//! attempt, the versions that the engine reports replace it (law D3).

mod changes;
mod events;
mod token_engine;
mod watchdog;

use std::collections::BTreeMap;
use std::fmt;
use std::hash::{BuildHasher, RandomState};
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::sync::watch;

use super::attempt::{self, AttemptEvent};
use super::budget::Budget;
use super::handle::Standings;
use super::in_flight::{InFlightSample, Running, SampleKey, Stage};
use super::router::{EngineSlot, choose};
use super::sync::SyncConfig;
use super::{Attempt, FleetHandle};
use crate::data::{RouteShape, SampledToken, Tokenizer, Version};
use crate::engine::{EngineError, Finished, Load, OlderVersions, TokenEngine};
use crate::net::{Tasks, now};
use crate::util::rng::mix;

/// Events of attempts that wait for the fleet. Attempts with further ones wait.
const EVENTS: usize = 1024;

/// Failures in a row after which an engine is lost.
const FAILURES: u32 = 3;

/// A group waits for room for all its samples if that leaves at most one slot in this many empty.
const IDLE_ONE_IN: usize = 8;

/// Limits and timeouts of a fleet.
#[derive(Clone, Debug)]
pub struct FleetConfig {
    /// Most samples at a time on one engine; fewer while it reports that it is busy. Default: 256.
    pub per_engine: usize,
    /// Longest time without a token of a sample, in full for an engine that does not stream.
    /// Default: 120 s.
    pub stall_timeout: Duration,
    /// Longest time of one attempt. Default: 1 hour.
    pub attempt_timeout: Duration,
    /// Longest time without a token of any engine, in addition to `stall_timeout` while one is at
    /// work. Default: 300 s.
    pub fleet_timeout: Duration,
    /// Longest time of weight syncs that does not count towards `fleet_timeout`. Default:
    /// [`SyncConfig::longest`] of the defaults, 1980 s.
    pub sync_timeout: Duration,
    /// Failed attempts in a row, without a token, before a sample is given up. Default: 5.
    pub retries: u32,
    /// Pause before the first retry, reduced by up to half at random. It doubles up to 10 s.
    /// Default: 250 ms.
    pub pause: Duration,
    /// Samples given up in a row before the run fails. Default: 64.
    pub max_refused: usize,
    /// If true, prefix caches are separated by version, so that new weights need no flush (law V5).
    /// Default: true.
    pub cache_by_version: bool,
    /// Time without a token after which a sample continues on another engine that has room. Default:
    /// only after `stall_timeout`.
    pub hedge_after: Option<Duration>,
    /// Number of token ids. Default: no limit.
    pub vocabulary: usize,
    /// Sizes of the experts that engines return with their tokens. Default: none are asked for.
    pub routes: Option<RouteShape>,
    /// If true, engines must return the log-probabilities of the distribution that they draw from, which
    /// training needs. Default: true.
    pub log_probs: bool,
    /// Longest wait for tokens in a step. Default: 20 ms.
    pub step: Duration,
}

impl Default for FleetConfig {
    fn default() -> Self {
        FleetConfig {
            per_engine: 256,
            stall_timeout: Duration::from_secs(120),
            attempt_timeout: Duration::from_secs(3600),
            fleet_timeout: Duration::from_secs(300),
            sync_timeout: SyncConfig::default().longest(),
            retries: 5,
            pause: Duration::from_millis(250),
            max_refused: 64,
            cache_by_version: true,
            hedge_after: None,
            vocabulary: u32::MAX as usize,
            routes: None,
            log_probs: true,
            step: Duration::from_millis(20),
        }
    }
}

/// Remote engines as one engine.
pub struct Fleet {
    handle: FleetHandle,
    /// Notifies of engines that were paused, synced or lost.
    changes: watch::Receiver<Standings>,
    config: FleetConfig,
    tokenizer: Arc<Tokenizer>,
    seed: u64,
    slots: usize,
    limit: usize,
    version: Option<Version>,
    /// Versions before the newest that may sample; none: no older one may.
    older: Option<Arc<dyn OlderVersions>>,
    engine_slots: BTreeMap<usize, EngineSlot>,
    samples: BTreeMap<SampleKey, InFlightSample>,
    /// Random number, and the number of attempts: no two requests have one id.
    nonce: u32,
    attempts: u32,
    budget: Budget,
    /// Time of the newest token, or of the last idle moment.
    progress: Instant,
    /// Time of weight syncs since then, and of the newest look at them.
    in_sync: Duration,
    watched: Instant,
    warned: Instant,
    refused: usize,
    finished: Vec<Finished>,
    sampled: Vec<SampledToken>,
    discarded: Vec<SampleKey>,
    load: Load,
    to: flume::Sender<AttemptEvent>,
    from: flume::Receiver<AttemptEvent>,
    /// Started with the first work.
    tasks: Option<Arc<Tasks>>,
}

impl Fleet {
    /// Creates a fleet of the engines of `handle`, for up to `slots` samples at a time. `seed` keys
    /// their randomness.
    pub fn new(handle: &FleetHandle, config: FleetConfig, tokenizer: &Arc<Tokenizer>, slots: usize, seed: u64) -> Self {
        let (to, from) = flume::bounded(EVENTS);
        let now = now();
        let mut fleet = Fleet {
            handle: handle.clone(),
            changes: handle.changes(),
            tokenizer: tokenizer.clone(),
            seed,
            slots: slots.max(1),
            limit: slots.max(1),
            version: None,
            older: None,
            engine_slots: BTreeMap::new(),
            samples: BTreeMap::new(),
            nonce: RandomState::new().hash_one(seed) as u32,
            attempts: 0,
            budget: Budget::new(now, slots),
            progress: now,
            in_sync: Duration::ZERO,
            watched: now,
            warned: now,
            refused: 0,
            finished: Vec::new(),
            sampled: Vec::new(),
            discarded: Vec::new(),
            load: Load::default(),
            to,
            from,
            tasks: None,
            config,
        };
        fleet.follow_members(now);
        fleet
    }

    /// Sends requests as these tasks, instead of new ones.
    pub fn on(self, tasks: Tasks) -> Self {
        Fleet { tasks: Some(Arc::new(tasks)), ..self }
    }

    fn tasks(&mut self) -> Result<Arc<Tasks>, EngineError> {
        match &self.tasks {
            Some(tasks) => Ok(tasks.clone()),
            None => Ok(self.tasks.insert(Arc::new(Tasks::new()?)).clone()),
        }
    }

    /// Starts waiting samples on engines with room, the oldest first.
    fn dispatch(&mut self, now: Instant) -> Result<(), EngineError> {
        let due = |sample: &InFlightSample| matches!(sample.stage, Stage::Waiting(at) if at <= now);
        let waiting: Vec<SampleKey> = self.samples.iter().filter(|(_, sample)| due(sample)).map(|(key, _)| *key).collect();
        self.engine_slots.values_mut().for_each(|slot| slot.in_flight = 0);
        for running in self.samples.values().filter_map(InFlightSample::running) {
            if let Some(slot) = self.engine_slots.get_mut(&running.place) {
                slot.in_flight += 1;
            }
        }
        let serving = self.handle.serving();
        let mut room = self.limit.saturating_sub(self.active());
        let mut waiting = waiting.as_slice();
        let limits = self.engine_slots.iter().filter(|(place, _)| serving.contains(place)).map(|(_, slot)| slot.limit());
        let most = limits.max().unwrap_or(0).min(self.limit);
        while let Some((first, _)) = waiting.split_first() {
            let mut together = self.together(waiting, most);
            let group = self.samples.range((first.0, 0)..=(first.0, u32::MAX));
            let home = group.filter_map(|(_, sample)| sample.running()).map(|running| running.place).next();
            let avoided = self.samples.get(first).and_then(|sample| sample.avoided);
            let oldest = self.oldest(first.0);
            let usable = |place| serving.contains(&place) && self.serves_since(place, oldest);
            let serves = |place| Some(place) != avoided && usable(place);
            // An engine that begins again with few samples would never have room for a whole group.
            let few = |(place, slot): &(&usize, &EngineSlot)| slot.limit() < together && slot.has_room(1, now) && serves(**place);
            let few = self.engine_slots.iter().find(few).map(|(place, _)| *place);
            together = few.map_or(together, |_| 1);
            let place = few.or_else(|| choose(&self.engine_slots, home, first.0, together, serves, now));
            // An engine to avoid is better than none.
            let place = place.or_else(|| avoided.filter(|place| usable(*place) && self.has_room(*place, together, now)));
            let Some(place) = place.filter(|_| together <= room) else { break };
            if !self.claim(first.0, place) {
                break;
            }
            let (begun, rest) = waiting.split_at(together);
            for key in begun {
                self.begin(*key, place, together, now)?;
            }
            (waiting, room) = (rest, room - together);
        }
        let next = if waiting.is_empty() { 0 } else { self.together(waiting, most) };
        for (place, slot) in &mut self.engine_slots {
            slot.measure(next, now);
            self.handle.record(*place, |meter, name| meter.room(name, slot.in_flight, slot.limit()));
        }
        Ok(())
    }

    fn has_room(&self, place: usize, count: usize, now: Instant) -> bool {
        self.engine_slots.get(&place).is_some_and(|slot| slot.has_room(count, now))
    }

    /// Oldest version that may sample tokens of a prompt's group; none before the first version.
    fn oldest(&self, ordinal: u64) -> Option<Version> {
        let oldest = self.older.as_ref().map(|older| older.oldest(ordinal));
        oldest.unwrap_or(Version::MAX).min(self.version?).into()
    }

    /// Returns true unless the engine was verified to serve a version before `oldest`.
    fn serves_since(&self, place: usize, oldest: Option<Version>) -> bool {
        self.handle.served(place).is_none_or(|served| Some(served.version) >= oldest)
    }

    /// Returns true if the engine's version may sample tokens of the group.
    fn claim(&self, ordinal: u64, place: usize) -> bool {
        let Some((older, served)) = self.older.as_ref().zip(self.handle.served(place)) else { return true };
        Some(served.version) >= self.version || older.claim(ordinal, served.version)
    }

    /// Number of waiting samples to start together: all samples of an untouched prompt, if waiting
    /// for room for them leaves few of the `most` slots of an engine empty.
    fn together(&self, waiting: &[SampleKey], most: usize) -> usize {
        let (ordinal, first) = waiting[0];
        let untouched = |key: &&SampleKey| {
            let sample = self.samples.get(key).filter(|sample| sample.attempts == 0 && sample.answer.tokens.is_empty());
            key.0 == ordinal && sample.is_some_and(|sample| sample.request.first == first)
        };
        let all = waiting.iter().take_while(untouched).count();
        if all > 1 && IDLE_ONE_IN * all <= most { all } else { 1 }
    }

    fn begin(&mut self, key: SampleKey, place: usize, together: usize, now: Instant) -> Result<(), EngineError> {
        let tasks = self.tasks()?;
        let (Some(sample), Some(engine)) = (self.samples.get_mut(&key), self.handle.engine(place)) else { return Ok(()) };
        let served = self.handle.served(place);
        let known = served.as_ref().map(|served| served.version);
        let Some(floor) = known.or(self.version) else { return Err(EngineError::NoWeights) };
        let adapter = served.filter(|served| served.adapter);
        let InFlightSample { request, answer, .. } = &*sample;
        let (number, before, answered) = (self.attempts, answer.tokens.len(), answer.turn());
        self.attempts = number.wrapping_add(1);
        let attempt = Attempt {
            ordinal: key.0,
            index: key.1,
            number,
            fleet: self.nonce,
            tokens: request.tokens.iter().chain(&answer.tokens).copied().collect(),
            answered,
            params: request.params.clone(),
            seed: mix(mix(mix(self.seed ^ mix(key.0)) ^ u64::from(key.1)) ^ (request.offset + before) as u64),
            // Servers outlive a run, and in another one its versions are numbers of other weights.
            cache_key: self.config.cache_by_version.then(|| format!("v{floor}-{:08x}", self.nonce)),
            adapter: adapter.as_ref().map(|adapter| adapter.label()),
            together: together as u32,
            routes: self.config.routes.filter(|_| request.routes),
            log_probs: self.config.log_probs,
        };
        self.load.prefill += attempt.tokens.len();
        let task = tasks.spawn(attempt::run(self.handle.clone(), engine, place, attempt, self.config.clone(), self.to.clone()));
        if let Some(slot) = self.engine_slots.get_mut(&place) {
            slot.begins(now);
        }
        self.handle.record(place, |meter, name| meter.request(name));
        sample.stage = Stage::Running(Running {
            number,
            place,
            floor,
            known: known.is_some(),
            before,
            continues: answered > 0,
            adapter,
            task,
        });
        sample.since = now;
        Ok(())
    }
}

impl fmt::Debug for Fleet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Fleet").field("engines", &self.handle).field("samples", &self.samples.len()).finish_non_exhaustive()
    }
}

fn id(key: SampleKey) -> String {
    format!("p{}-s{}", key.0, key.1)
}
