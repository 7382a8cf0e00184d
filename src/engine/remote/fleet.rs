//! Many remote engines as one [`TokenEngine`].
//!
//! Each sample is generated in attempts, each a task on one engine. Tokens of an attempt are kept
//! however it ends: by an abort for new weights, a broken connection or a dead server. The sample
//! then continues elsewhere from all its tokens.
//!
//! Every wait is bounded. An engine without a token for too long is abandoned; one that fails
//! repeatedly is *lost* until a health check succeeds. If no engine generates a token for too long,
//! the fleet fails with a report (law F7).
//!
//! Completions of an engine on trial, under weights that are not verified yet, are returned after
//! the verification. If it fails, their samples restart.
//!
//! Engines may join and leave at any time. One that leaves finishes what it has begun; when it is
//! removed, its unfinished samples continue elsewhere.
//!
//! Tokens are recorded with the oldest version that can have sampled them. At the end of an
//! attempt, the versions that the engine reports replace it (law D3).

mod token_engine;
mod watchdog;

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::sync::watch;
use tokio::task::AbortHandle;

use super::attempt::{self, AttemptEvent, AttemptUpdate};
use super::budget::Budget;
use super::handle::{EngineState, Standings};
use super::in_flight::{InFlightSample, Running, SampleKey, Stage, versions};
use super::router::{EngineSlot, choose, pause};
use super::sync::notice_restart;
use super::{Attempt, Ending, Fault, FleetHandle, RemoteError};
use crate::data::{SampledToken, Status, Tokenizer, Version};
use crate::engine::{EngineError, FinishReason, Finished, Load, TokenEngine};
use crate::net::{Tasks, now};
use crate::util::rng::mix;

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
            retries: 5,
            pause: Duration::from_millis(250),
            max_refused: 64,
            cache_by_version: true,
            hedge_after: None,
            vocabulary: u32::MAX as usize,
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
    engine_slots: BTreeMap<usize, EngineSlot>,
    samples: BTreeMap<SampleKey, InFlightSample>,
    budget: Budget,
    /// Time of the newest token, or of the last idle moment.
    progress: Instant,
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
        let (to, from) = flume::bounded(1024);
        let now = now();
        let mut fleet = Fleet {
            handle: handle.clone(),
            changes: handle.changes(),
            tokenizer: tokenizer.clone(),
            seed,
            slots: slots.max(1),
            limit: slots.max(1),
            version: None,
            engine_slots: BTreeMap::new(),
            samples: BTreeMap::new(),
            budget: Budget::new(now, slots),
            progress: now,
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
            let together = self.together(waiting, most);
            let group = self.samples.range((first.0, 0)..=(first.0, u32::MAX));
            let home = group.filter_map(|(_, sample)| sample.running()).map(|running| running.place).next();
            let avoided = self.samples.get(first).and_then(|sample| sample.avoided);
            let serves = |place| Some(place) != avoided && serving.contains(&place);
            let place = choose(&self.engine_slots, home, first.0, together, serves, now);
            // An engine to avoid is better than none.
            let place = place.or_else(|| avoided.filter(|place| self.has_room(*place, together, now)));
            let Some(place) = place.filter(|_| together <= room) else { break };
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
        self.engine_slots.get(&place).is_some_and(|slot| slot.has_room(count, now)) && self.handle.is_serving(place)
    }

    /// Number of waiting samples to start together: all samples of an untouched prompt, if waiting
    /// for room for them leaves few of the `most` slots of an engine empty.
    fn together(&self, waiting: &[SampleKey], most: usize) -> usize {
        let (ordinal, first) = waiting[0];
        let untouched = |key: &&SampleKey| {
            let sample = self.samples.get(key).filter(|sample| sample.number == 0 && sample.answer.tokens.is_empty());
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
        let InFlightSample { request, answer, number, .. } = &*sample;
        let before = answer.tokens.len();
        let attempt = Attempt {
            ordinal: key.0,
            index: key.1,
            number: *number,
            tokens: request.tokens.iter().chain(&answer.tokens).copied().collect(),
            answered: answer.turn(),
            params: request.params.clone(),
            seed: mix(mix(mix(self.seed ^ mix(key.0)) ^ u64::from(key.1)) ^ (request.offset + before) as u64),
            cache_key: self.config.cache_by_version.then(|| format!("v{floor}")),
            adapter: adapter.as_ref().map(|adapter| adapter.label()),
            together: together as u32,
        };
        self.load.prefill += attempt.tokens.len();
        let task = tasks.spawn(attempt::run(engine, place, attempt, self.config.clone(), self.to.clone()));
        if let Some(slot) = self.engine_slots.get_mut(&place) {
            slot.in_flight += 1;
        }
        self.handle.record(place, |meter, name| meter.request(name));
        sample.stage = Stage::Running(Running { place, floor, known: known.is_some(), before, adapter, task });
        sample.since = now;
        Ok(())
    }

    fn on_event(&mut self, event: AttemptEvent, now: Instant) -> Result<(), EngineError> {
        let AttemptEvent { key, number, place, update } = event;
        let current = self.samples.get(&key).filter(|sample| sample.number == number).and_then(InFlightSample::running);
        if current.is_none() {
            // An earlier attempt, which another has replaced.
            if let AttemptUpdate::Ended(Ok(Ending { finish: Some(_), .. })) = update {
                self.handle.record(place, |meter, name| meter.duplicate(name));
            }
            return Ok(());
        }
        match update {
            AttemptUpdate::Tokens(chunk) => self.take(key, place, chunk, now),
            AttemptUpdate::Ended(Ok(ending)) => self.end(key, place, ending, now),
            AttemptUpdate::Ended(Err(error)) => self.fail(key, place, error, now),
        }
    }

    fn take(&mut self, key: SampleKey, place: usize, chunk: Vec<(u32, f32)>, now: Instant) -> Result<(), EngineError> {
        let Some(sample) = self.samples.get_mut(&key) else { return Ok(()) };
        let Some((floor, before)) = sample.running().map(|running| (running.floor, running.before)) else { return Ok(()) };
        if self.handle.on_trial(place) && sample.unproven.iter().all(|(other, _)| *other != place) {
            sample.unproven.push((place, self.handle.refutations(place)));
        }
        let waited = now.saturating_duration_since(sample.since);
        (sample.since, sample.failures, sample.turned_away) = (now, 0, 0);
        self.progress = now;
        sample.avoided = None;
        if let Some(slot) = self.engine_slots.get_mut(&place) {
            slot.works(chunk.len(), waited, now);
        }
        self.load.rows += chunk.len();
        let first = (sample.answer.tokens.len() == before).then_some(waited);
        self.handle.record(place, |meter, name| meter.tokens(name, chunk.len(), first));
        for (token, log_prob) in chunk {
            let (ordinal, index) = key;
            let newest = SampledToken { ordinal, index, token, log_prob, version: floor, status: Status::Pending };
            self.sampled.extend(sample.held.replace(newest));
            sample.answer.push(token, log_prob, floor);
            // A single attempt detects stop strings by itself.
            let continues = before > 0 && !sample.request.params.stop.is_empty();
            if continues && let Some(finish) = sample.ends(&self.tokenizer)? {
                return self.finish(key, finish);
            }
        }
        Ok(())
    }

    fn end(&mut self, key: SampleKey, place: usize, ending: Ending, now: Instant) -> Result<(), EngineError> {
        let newest = self.handle.newest().max(self.version).unwrap_or(0) + 1;
        let Some(sample) = self.samples.get_mut(&key) else { return Ok(()) };
        let Some(Running { floor, known, before, adapter, .. }) = sample.running() else { return Ok(()) };
        let (served, known, before) = (*floor..=newest.max(*floor), *known, *before);
        // Labels of the base weights say nothing about an adapter, which is the same for all
        // tokens.
        let spans = ending.spans.as_deref().filter(|_| adapter.is_none());
        let count = sample.answer.tokens.len() - before;
        match versions(spans, count, served, known) {
            Ok(spans) => {
                sample.answer.versions.truncate(before);
                spans.iter().for_each(|(version, len)| sample.answer.versions.extend(version, len));
                if let (Some(held), Some(version)) = (&mut sample.held, sample.answer.versions.per_token().last().flatten()) {
                    held.version = version;
                }
            }
            Err(why) => {
                // The weights of these tokens are unknown: discard the tokens, and all others that
                // the engine is sampling.
                if known {
                    self.handle.mark_restarted(place);
                }
                sample.restart(now + pause(self.config.pause, key.0, 1));
                self.withdraw(key);
                let error = self.nonsense(place, why);
                self.handle.record(place, |meter, name| meter.error(name, &error.fault));
                tracing::warn!("{}", error.of_sample(&id(key)));
                return Ok(());
            }
        }
        let finish = match ending.finish {
            Some(finish) => Some(finish),
            None => sample.ends(&self.tokenizer)?,
        };
        let Some(finish) = finish else {
            sample.turned_away += u32::from(count == 0);
            let at = if count == 0 { now + pause(self.config.pause, key.0, sample.turned_away.min(5)) } else { now };
            sample.wait(at);
            return Ok(());
        };
        if count == 0 {
            let error = self.nonsense(place, "an answer without a token".into());
            return self.fail(key, place, error.of_sample(&id(key)), now);
        }
        if let Some(slot) = self.engine_slots.get_mut(&place) {
            slot.ended();
        }
        self.budget.earn();
        self.finish(key, finish)
    }

    fn nonsense(&self, place: usize, why: String) -> RemoteError {
        let what = "the request".to_owned();
        RemoteError::new(self.handle.name(place).as_ref(), Fault::Nonsense { what, why, begins: String::new() })
    }

    fn fail(&mut self, key: SampleKey, place: usize, error: RemoteError, now: Instant) -> Result<(), EngineError> {
        let Some(sample) = self.samples.get_mut(&key) else { return Ok(()) };
        // A connection that breaks after the last token lost nothing.
        if let Some(finish) = sample.ends(&self.tokenizer)? {
            return self.finish(key, finish);
        }
        self.handle.record(place, |meter, name| meter.error(name, &error.fault));
        let Some(slot) = self.engine_slots.get_mut(&place) else { return Ok(()) };
        match &error.fault {
            Fault::Busy { status, retry_after } => {
                slot.busy(place, *status, *retry_after, now);
                sample.turned_away += 1;
                sample.wait(now + pause(self.config.pause, mix(key.0 ^ u64::from(key.1)), sample.turned_away.min(4)));
                return Ok(());
            }
            // Every sample fails there with this token, path or certificate.
            Fault::Certificates(_) | Fault::Untrusted { .. } | Fault::Refused { status: 401 | 403 | 404 | 405, .. } => {
                sample.failures += 1;
                slot.failures = FAILURES;
            }
            Fault::Refused { .. } | Fault::Unsupported(_) | Fault::Url { .. } => return self.give_up(key, error),
            Fault::Unreachable(_) => slot.failures = FAILURES,
            _ => {
                sample.failures += 1;
                slot.failures += 1;
            }
        }
        // A connection may break because the engine restarts.
        if matches!(error.fault, Fault::Broke(_)) && slot.recheck.as_ref().is_none_or(AbortHandle::is_finished) {
            let (handle, last_sync) = (self.handle.clone(), self.handle.last_sync(place));
            let recheck = async move {
                // A sync in progress changes its weights.
                if let Some(_free) = last_sync.as_ref().and_then(|last| last.try_lock().ok()) {
                    notice_restart(&handle, place).await;
                }
            };
            slot.recheck = self.tasks.as_ref().map(|tasks| tasks.spawn(recheck));
        }
        let failing = slot.failures >= FAILURES;
        if sample.failures > self.config.retries {
            return self.give_up(key, error);
        }
        tracing::debug!("{error}; trying again");
        let at = self.budget.spend(now) + pause(self.config.pause, mix(key.0 ^ u64::from(key.1)), sample.failures.max(1));
        sample.wait(at);
        if failing && !matches!(self.handle.state(place), EngineState::Lost | EngineState::Leaving) {
            tracing::warn!("{error}; it gets no work until it is well again");
            self.handle.mark_lost(place, error);
        }
        Ok(())
    }

    /// Gives up a sample (law F6). Too many in a row fail the run.
    fn give_up(&mut self, key: SampleKey, error: RemoteError) -> Result<(), EngineError> {
        self.refused += 1;
        if self.refused > self.config.max_refused {
            return Err(EngineError::Refused { in_a_row: self.refused, last: Box::new(error) });
        }
        tracing::warn!("{error}; the sample is given up");
        if let Some(sample) = self.samples.remove(&key) {
            self.sampled.extend(sample.held);
            self.finished.push(Finished::new(key.0, sample.answer, Err(error.to_string())));
        }
        Ok(())
    }

    fn finish(&mut self, key: SampleKey, finish: FinishReason) -> Result<(), EngineError> {
        self.refused = 0;
        if let Some(sample) = self.samples.get_mut(&key).filter(|sample| !sample.unproven.is_empty()) {
            sample.stage = Stage::Ended(finish);
            return Ok(());
        }
        if let Some(sample) = self.samples.remove(&key) {
            self.sampled.extend(sample.held.map(|held| SampledToken { status: finish.into(), ..held }));
            self.finished.push(Finished::new(key.0, sample.answer, Ok(finish)));
        }
        Ok(())
    }

    fn process_changes(&mut self, now: Instant) -> Result<(), EngineError> {
        if !self.changes.has_changed().unwrap_or(false) {
            return Ok(());
        }
        self.changes.mark_unchanged();
        self.reopen(now);
        self.refute(now);
        self.prove()?;
        self.follow_members(now);
        Ok(())
    }

    /// Makes room for engines that joined. Samples on engines that are gone continue elsewhere.
    fn follow_members(&mut self, now: Instant) {
        let places = self.handle.places();
        for place in &places {
            let new = || EngineSlot::new(self.config.per_engine, &self.handle.name(*place));
            self.engine_slots.entry(*place).or_insert_with(new);
        }
        let gone = |place: &usize| places.binary_search(place).is_err();
        self.engine_slots.retain(|place, _| !gone(place));
        let left = self.samples.values_mut().filter(|sample| sample.running().is_some_and(|running| gone(&running.place)));
        left.for_each(|sample| sample.wait(now));
    }

    /// Reopens engines after a sync, and ends the waits of samples that they rejected.
    fn reopen(&mut self, now: Instant) {
        self.engine_slots.values_mut().for_each(EngineSlot::reopen);
        for sample in self.samples.values_mut().filter(|sample| sample.turned_away > 0) {
            if let Stage::Waiting(at) = &mut sample.stage {
                *at = now;
            }
        }
    }

    /// Restarts samples with tokens of refuted weights.
    fn refute(&mut self, now: Instant) {
        let refuted: BTreeMap<usize, u64> =
            self.engine_slots.keys().map(|place| (*place, self.handle.refutations(*place))).collect();
        let more = |place: &usize, than: u64| refuted.get(place).is_some_and(|refuted| *refuted > than);
        let at_work = |sample: &InFlightSample| {
            let slot = |place| self.engine_slots.get(place).map_or(0, |slot| slot.refuted);
            sample.running().is_some_and(|running| more(&running.place, slot(&running.place)))
        };
        let worthless =
            |sample: &InFlightSample| at_work(sample) || sample.unproven.iter().any(|(place, before)| more(place, *before));
        let keys: Vec<SampleKey> = self.samples.iter().filter(|(_, sample)| worthless(sample)).map(|(key, _)| *key).collect();
        for key in &keys {
            if let Some(sample) = self.samples.get_mut(key) {
                sample.restart(now);
            }
            self.withdraw(*key);
        }
        if !keys.is_empty() {
            tracing::warn!("{} samples restart: an engine had resumed under wrong weights", keys.len());
        }
        self.engine_slots.values_mut().zip(refuted.into_values()).for_each(|(slot, refuted)| slot.refuted = refuted);
    }

    /// Finishes samples that have ended and whose weights are verified.
    fn prove(&mut self) -> Result<(), EngineError> {
        let mut ended = Vec::new();
        for (key, sample) in &mut self.samples {
            sample.unproven.retain(|(place, _)| self.handle.on_trial(*place));
            if let (Stage::Ended(finish), true) = (&sample.stage, sample.unproven.is_empty()) {
                ended.push((*key, *finish));
            }
        }
        ended.into_iter().try_for_each(|(key, finish)| self.finish(key, finish))
    }

    /// Discards the reported tokens of a sample.
    fn withdraw(&mut self, key: SampleKey) {
        self.sampled.retain(|token| (token.ordinal, token.index) != key);
        self.discarded.push(key);
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
