//! Many engines as one, for whoever drives a [`TokenEngine`].
//!
//! Each sample is made in attempts, each a task on one engine at a time. What an attempt made is kept whatever ends it: an engine that aborts it for new
//! weights, a connection that breaks, a server that dies. The sample then goes on elsewhere from all of its tokens. Every wait is bounded: an engine that
//! says nothing for too long is left, one that fails again and again is *lost* until it answers a look at its health, and when no engine makes any token
//! for too long the fleet fails with what waits, where and since when.
//!
//! Tokens are written down as they come, with the oldest version that can have sampled them; when an attempt ends and its engine says which did, that is
//! what the finished sample carries (law D3).

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::runtime::Handle;
use tokio::sync::watch;
use tokio::task::JoinHandle;

use super::attempt::{self, Bounds, News, Said, Threads};
use super::budget::{Budget, mix, pause};
use super::router::{Seat, choose};
use super::slip::{Running, Slip, Stage, versions};
use super::{Attempt, Chunk, End, Ending, EngineState, Fault, FleetHandle, RemoteError};
use crate::data::{Answer, SampledToken, Status, Tokenizer, Version};
use crate::engine::waiting::finish_of;
use crate::engine::{EngineError, FinishReason, Finished, Load, Request, TokenEngine};

/// Failures in a row after which an engine is taken for lost.
const FAILURES: u32 = 3;

/// Longest look at an engine's health.
const LOOK: Duration = Duration::from_secs(10);

/// What engines elsewhere read weights from: nothing. It says which version they were brought to, and is published once that was verified (law V4).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Synced {
    /// The version.
    pub version: Version,
}

/// How a fleet treats its engines.
#[derive(Clone, Debug)]
pub struct FleetConfig {
    /// Most samples at a time on one engine; it gets fewer where it says that it is busy.
    pub per_engine: usize,
    /// Longest time without a token of a sample; of an engine that does not stream, without the whole of it.
    pub silence: Duration,
    /// Longest time for one attempt.
    pub whole: Duration,
    /// Longest time without any token of any engine, beyond `silence` where one is at work.
    pub patience: Duration,
    /// Failed attempts in a row, without any token, after which a sample is given up.
    pub retries: u32,
    /// The pause before the first retry; each further one is twice as long, ten seconds at most, less up to half of it by chance.
    pub pause: Duration,
    /// Samples in a row that may be given up before the run is.
    pub max_refused: usize,
    /// A sample of which nothing was heard for so long is named in a warning.
    pub warn: Duration,
    /// Whether engines keep what they remember of prompts apart by version (law V5), so that nothing need be flushed when weights change.
    pub cache_by_version: bool,
    /// Ids below this are tokens.
    pub vocabulary: usize,
    /// How long a step waits for tokens.
    pub step: Duration,
}

impl Default for FleetConfig {
    fn default() -> Self {
        FleetConfig {
            per_engine: 256,
            silence: Duration::from_secs(120),
            whole: Duration::from_secs(3600),
            patience: Duration::from_secs(300),
            retries: 5,
            pause: Duration::from_millis(250),
            max_refused: 64,
            warn: Duration::from_secs(30),
            cache_by_version: true,
            vocabulary: u32::MAX as usize,
            step: Duration::from_millis(20),
        }
    }
}

/// Engines elsewhere, as one engine.
pub struct Fleet {
    handle: FleetHandle,
    /// Tells when an engine was paused, synced or lost.
    changes: watch::Receiver<u64>,
    config: FleetConfig,
    tokenizer: Arc<Tokenizer>,
    seed: u64,
    slots: usize,
    limit: usize,
    version: Option<Version>,
    seats: Vec<Seat>,
    /// Looks at the health of lost engines.
    looks: Vec<Option<JoinHandle<()>>>,
    samples: BTreeMap<(u64, u32), Slip>,
    budget: Budget,
    /// When a token was last made, or there was nothing to do.
    progress: Instant,
    warned: Instant,
    refused: usize,
    finished: Vec<Finished>,
    sampled: Vec<SampledToken>,
    discarded: Vec<(u64, u32)>,
    load: Load,
    to: flume::Sender<News>,
    from: flume::Receiver<News>,
    /// Started with the first work.
    threads: Option<Threads>,
}

impl Fleet {
    /// The engines of `handle`, for up to `slots` samples at a time, whose answers this tokenizer reads. `seed` keys their randomness.
    pub fn new(handle: &FleetHandle, config: FleetConfig, tokenizer: &Arc<Tokenizer>, (slots, seed): (usize, u64)) -> Self {
        let (to, from) = flume::bounded(1024);
        let now = Instant::now();
        let engines = handle.engines().len();
        Fleet {
            handle: handle.clone(),
            changes: handle.changes(),
            tokenizer: tokenizer.clone(),
            seed,
            slots: slots.max(1),
            limit: slots.max(1),
            version: None,
            seats: vec![Seat::new(config.per_engine); engines],
            looks: (0..engines).map(|_| None).collect(),
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
            threads: None,
            config,
        }
    }

    fn threads(&mut self) -> Result<Handle, EngineError> {
        match &self.threads {
            Some(threads) => Ok(threads.handle().clone()),
            None => Ok(self.threads.insert(Threads::new()?).handle().clone()),
        }
    }

    /// The engines.
    pub fn handle(&self) -> &FleetHandle {
        &self.handle
    }

    /// Whose answers it reads.
    pub fn tokenizer(&self) -> &Arc<Tokenizer> {
        &self.tokenizer
    }

    /// Steps until nothing is left to do. Answers come in the order in which they end.
    pub fn run(&mut self) -> Result<Vec<Finished>, EngineError> {
        let mut all = Vec::new();
        while !self.is_idle() {
            all.extend(self.step()?);
        }
        Ok(all)
    }

    /// Gives waiting samples to engines with room, the oldest first.
    fn dispatch(&mut self, now: Instant) -> Result<(), EngineError> {
        if self.changes.has_changed().unwrap_or(false) {
            self.changes.mark_unchanged();
            self.reopen(now);
        }
        let due = |slip: &Slip| matches!(slip.stage, Stage::Waiting(at) if at <= now);
        let waiting: Vec<(u64, u32)> = self.samples.iter().filter(|(_, slip)| due(slip)).map(|(key, _)| *key).collect();
        let room = self.limit.saturating_sub(self.active());
        for key in waiting.into_iter().take(room) {
            let group = self.samples.range((key.0, 0)..=(key.0, u32::MAX));
            let home = group.filter_map(|(_, slip)| slip.running()).map(|running| running.place).next();
            let Some(place) = choose(&self.seats, home, |place| self.handle.state(place) == EngineState::Serving, now) else {
                break;
            };
            self.begin(key, place, now)?;
        }
        Ok(())
    }

    /// Something is new about the engines, such as that they go on after a sync: whom they turned away need not wait any longer.
    fn reopen(&mut self, now: Instant) {
        self.seats.iter_mut().for_each(Seat::reopen);
        for slip in self.samples.values_mut().filter(|slip| slip.turned_away > 0) {
            if let Stage::Waiting(at) = &mut slip.stage {
                *at = now;
            }
        }
    }

    fn begin(&mut self, key: (u64, u32), place: usize, now: Instant) -> Result<(), EngineError> {
        let threads = self.threads()?;
        let Some(slip) = self.samples.get_mut(&key) else { return Ok(()) };
        let served = self.handle.served(place);
        let Some(floor) = served.or(self.version) else { return Err(EngineError::NoWeights) };
        let Slip { request, answer, number, .. } = &*slip;
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
        };
        self.load.prefill += attempt.tokens.len();
        let FleetConfig { silence, whole, vocabulary, .. } = self.config;
        let engine = self.handle.engines()[place].clone();
        let task = threads.spawn(attempt::run(engine, attempt, Bounds { silence, whole, vocabulary }, self.to.clone()));
        self.seats[place].in_flight += 1;
        slip.stage = Stage::Running(Running::new(place, (floor, served.is_some()), before, task.abort_handle()));
        slip.since = now;
        Ok(())
    }

    fn hear(&mut self, News { key, number, said }: News, now: Instant) -> Result<(), EngineError> {
        // What was begun anew, or is done, is nobody's any more.
        let current = self.samples.get(&key).filter(|slip| slip.number == number).and_then(Slip::running);
        let Some(place) = current.map(|running| running.place) else { return Ok(()) };
        match said {
            Said::Tokens(chunk) => self.take(key, place, chunk, now),
            Said::Ended(ended) => {
                self.seats[place].in_flight = self.seats[place].in_flight.saturating_sub(1);
                match ended {
                    Ok(ending) => self.end(key, place, ending, now),
                    Err(error) => self.fail(key, place, error, now),
                }
            }
        }
    }

    fn take(&mut self, key: (u64, u32), place: usize, chunk: Chunk, now: Instant) -> Result<(), EngineError> {
        let Some(slip) = self.samples.get_mut(&key) else { return Ok(()) };
        let Some((floor, before)) = slip.running().map(|running| (running.floor, running.before)) else { return Ok(()) };
        (slip.since, slip.failures, slip.turned_away) = (now, 0, 0);
        self.progress = now;
        self.seats[place].works();
        self.load.rows += chunk.tokens.len();
        for (token, log_prob) in chunk.tokens.into_iter().zip(chunk.log_probs) {
            let held = slip.held.replace((token, log_prob, floor));
            self.sampled.extend(held.map(|held| sampled(key, held, Status::Pending)));
            slip.answer.push(token, log_prob, floor);
            // Its engine sees all of the rest by itself.
            let continues = before > 0 && !slip.request.params.stop.is_empty();
            if continues && let Some(finish) = slip.ends(&self.tokenizer)? {
                self.seats[place].in_flight = self.seats[place].in_flight.saturating_sub(1);
                return self.finish(key, finish);
            }
        }
        Ok(())
    }

    fn end(&mut self, key: (u64, u32), place: usize, ending: Ending, now: Instant) -> Result<(), EngineError> {
        let newest = self.handle.newest().max(self.version).unwrap_or(0) + 1;
        let Some(slip) = self.samples.get_mut(&key) else { return Ok(()) };
        let Some((floor, known, before)) = slip.running().map(|running| (running.floor, running.known, running.before)) else {
            return Ok(());
        };
        let count = slip.answer.tokens.len() - before;
        match versions(ending.spans.as_deref(), count, (floor, newest.max(floor), known)) {
            Ok(spans) => {
                slip.answer.versions.truncate(before);
                spans.iter().for_each(|span| slip.answer.versions.extend(span.version, span.len));
                if let (Some(held), Some(version)) = (&mut slip.held, slip.answer.versions.per_token().last().flatten()) {
                    held.2 = version;
                }
            }
            Err(why) => {
                // Nobody knows which weights made these tokens: they are no use, and the engine may have others than it should.
                if known {
                    self.handle.doubt(place);
                }
                slip.begin_anew(now + pause(self.config.pause, key.0, 1));
                self.sampled.retain(|token| (token.ordinal, token.index) != key);
                self.discarded.push(key);
                let error = self.nonsense(place, why);
                tracing::warn!("{}", error.of_attempt(id(key)));
                return Ok(());
            }
        }
        let finish = match ending.end {
            End::Stop => FinishReason::Stop,
            End::Length => FinishReason::Length,
            End::Aborted => match slip.ends(&self.tokenizer)? {
                Some(finish) => finish,
                None => {
                    slip.turned_away += u32::from(count == 0);
                    let at = if count == 0 { now + pause(self.config.pause, key.0, slip.turned_away.min(5)) } else { now };
                    slip.wait(at);
                    return Ok(());
                }
            },
        };
        if count == 0 {
            let error = self.nonsense(place, "an answer without a token".into());
            return self.fail(key, place, error.of_attempt(id(key)), now);
        }
        self.seats[place].ended();
        self.budget.earn();
        self.finish(key, finish)
    }

    fn nonsense(&self, place: usize, why: String) -> RemoteError {
        let what = "the request".to_owned();
        RemoteError::new(self.handle.engines()[place].name(), Fault::Nonsense { what, why, begins: String::new() })
    }

    fn fail(&mut self, key: (u64, u32), place: usize, error: RemoteError, now: Instant) -> Result<(), EngineError> {
        let Some(slip) = self.samples.get_mut(&key) else { return Ok(()) };
        // A connection that breaks behind the last token has lost nothing.
        if let Some(finish) = slip.ends(&self.tokenizer)? {
            return self.finish(key, finish);
        }
        let seat = &mut self.seats[place];
        match &error.fault {
            Fault::Busy { status, retry_after } => {
                seat.busy(place, *status, *retry_after, now);
                slip.turned_away += 1;
                slip.wait(now + pause(self.config.pause, mix(key.0 ^ u64::from(key.1)), slip.turned_away.min(4)));
                return Ok(());
            }
            // Nobody gets anything there with this token, or at this path.
            Fault::Refused { status: 401 | 403 | 404 | 405, .. } => {
                slip.failures += 1;
                seat.failures = FAILURES;
            }
            Fault::Refused { .. } | Fault::Unsupported { .. } | Fault::Url { .. } => return self.give_up(key, error),
            Fault::Unreachable { .. } => seat.failures = FAILURES,
            _ => {
                slip.failures += 1;
                seat.failures += 1;
            }
        }
        if slip.failures > self.config.retries {
            return self.give_up(key, error);
        }
        tracing::debug!("{error}; trying again");
        let at = self.budget.spend(now) + pause(self.config.pause, mix(key.0 ^ u64::from(key.1)), slip.failures.max(1));
        slip.wait(at);
        if self.seats[place].failures >= FAILURES && self.handle.state(place) != EngineState::Lost {
            tracing::warn!("{error}; it gets no work until it is well again");
            self.handle.lost(place, error);
        }
        Ok(())
    }

    /// The sample will not be made (law F6): the run goes on, unless that happens to one after the other.
    fn give_up(&mut self, key: (u64, u32), error: RemoteError) -> Result<(), EngineError> {
        self.refused += 1;
        if self.refused > self.config.max_refused {
            return Err(EngineError::Refused { in_a_row: self.refused, last: Box::new(error) });
        }
        tracing::warn!("{error}; the sample is given up");
        if let Some(slip) = self.samples.remove(&key) {
            self.sampled.extend(slip.held.map(|held| sampled(key, held, Status::Pending)));
            self.finished.push(Finished::refused(key.0, slip.answer, error.to_string()));
        }
        Ok(())
    }

    fn finish(&mut self, key: (u64, u32), finish: FinishReason) -> Result<(), EngineError> {
        self.refused = 0;
        if let Some(slip) = self.samples.remove(&key) {
            self.sampled.extend(slip.held.map(|held| sampled(key, held, finish.into())));
            self.finished.push(Finished::new(key.0, slip.answer, finish));
        }
        Ok(())
    }

    /// Looks after lost engines, and at what takes too long.
    fn watch(&mut self, now: Instant) -> Result<(), EngineError> {
        for place in 0..self.seats.len() {
            let looking = self.looks[place].as_ref().is_some_and(|look| !look.is_finished());
            if !looking && self.handle.state(place) == EngineState::Lost {
                let (handle, first) = (self.handle.clone(), self.config.pause);
                // The oftener it was lost without making a token in between, the later one looks.
                let nth = self.seats[place].failures.saturating_sub(FAILURES) + 1;
                self.seats[place].failures = self.seats[place].failures.saturating_add(1);
                self.looks[place] = Some(self.threads()?.spawn(look(handle, place, first, nth)));
            }
        }
        let busy = self.active() > 0;
        let bound = if busy { self.config.patience + self.config.silence } else { self.config.patience };
        let still = now.saturating_duration_since(self.progress);
        if still > bound {
            return Err(EngineError::Stuck { seconds: still.as_secs_f64(), report: self.report(now) });
        }
        if still > self.config.warn && now.saturating_duration_since(self.warned) > self.config.warn {
            self.warned = now;
            tracing::warn!("no engine made a token for {:.0} s; {}", still.as_secs_f64(), self.report(now));
        }
        let longest = self.samples.iter().filter(|(_, slip)| slip.running().is_some()).min_by_key(|(_, slip)| slip.since);
        if let Some((key, slip)) = longest
            && now.saturating_duration_since(slip.since) > self.config.warn
            && now.saturating_duration_since(self.warned) > self.config.warn
        {
            self.warned = now;
            tracing::warn!("{}", self.describe(*key, slip, now));
        }
        Ok(())
    }

    /// What waits, where and since when, and how the engines stand.
    fn report(&self, now: Instant) -> String {
        let mut samples: Vec<_> = self.samples.iter().collect();
        samples.sort_by_key(|(_, slip)| slip.since);
        let shown = samples.iter().take(3).map(|(key, slip)| self.describe(**key, slip, now));
        let engines = self.handle.engines().iter().enumerate().map(|(place, engine)| match self.handle.state(place) {
            EngineState::Serving => format!("{} serves", engine.name()),
            EngineState::Behind => format!("{} waits for weights", engine.name()),
            EngineState::Lost => match self.handle.why_lost(place) {
                Some(error) => format!("lost: {error}"),
                None => format!("{} is lost", engine.name()),
            },
        });
        let more = samples.len().saturating_sub(3);
        let more = if more > 0 { format!(" and {more} more samples") } else { String::new() };
        let (shown, engines) = (shown.collect::<Vec<_>>().join(", "), engines.collect::<Vec<_>>().join("; "));
        format!("waiting: {shown}{more}; engines: {engines}")
    }

    fn describe(&self, key: (u64, u32), slip: &Slip, now: Instant) -> String {
        let at = slip.running().map_or("no engine".to_owned(), |running| self.handle.engines()[running.place].name());
        let (made, silent) = (slip.answer.tokens.len(), now.saturating_duration_since(slip.since).as_secs_f64());
        format!("sample {} on {at} with {made} tokens, nothing new for {silent:.0} s (attempt {})", id(key), slip.number)
    }
}

impl fmt::Debug for Fleet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Fleet").field("engines", &self.handle).field("samples", &self.samples.len()).finish_non_exhaustive()
    }
}

/// Looks until it is well.
async fn look(handle: FleetHandle, place: usize, first: Duration, nth: u32) {
    for again in nth.. {
        tokio::time::sleep(pause(first, place as u64, again.min(20))).await;
        let engine = &handle.engines()[place];
        if matches!(tokio::time::timeout(LOOK, engine.healthy(LOOK)).await, Ok(Ok(()))) {
            tracing::info!("{} is back", engine.name());
            return handle.found(place);
        }
    }
}

fn id((ordinal, index): (u64, u32)) -> String {
    format!("p{ordinal}-s{index}")
}

fn sampled((ordinal, index): (u64, u32), (token, log_prob, version): (u32, f32, Version), status: Status) -> SampledToken {
    SampledToken { ordinal, index, token, log_prob, version, status }
}

impl TokenEngine for Fleet {
    type Weights = Synced;

    fn submit(&mut self, mut request: Request) -> Result<(), EngineError> {
        request.params.check()?;
        let ordinal = request.ordinal;
        if request.tokens.is_empty() {
            let problem = "it has no token; a model needs at least one to continue".to_owned();
            return Err(EngineError::Prompt { ordinal, problem });
        }
        request.check_answers(self.config.vocabulary)?;
        let now = Instant::now();
        if self.samples.is_empty() {
            self.progress = now;
        }
        let mut begun: BTreeMap<u32, Answer> =
            std::mem::take(&mut request.answers).into_iter().map(|answer| (answer.index, answer)).collect();
        let request = Arc::new(request);
        for index in request.first..request.samples {
            let answer = begun.remove(&index).filter(|answer| !answer.tokens.is_empty()).unwrap_or_else(|| Answer::new(index));
            match finish_of(&answer, request.params.max_new_tokens) {
                Some(finish) => self.finished.push(Finished::new(ordinal, answer, finish)),
                None => {
                    self.samples.insert((ordinal, index), Slip::new(&request, answer, now));
                }
            }
        }
        Ok(())
    }

    fn set_weights(&mut self, version: Version, weights: &Synced) {
        self.version = Some(version);
        self.handle.require(weights.version);
    }

    fn begin_anew(&mut self, expired: &dyn Fn(u64, &Answer) -> bool) -> Vec<(u64, u32)> {
        let (mut anew, now) = (Vec::new(), Instant::now());
        for (key, slip) in &mut self.samples {
            if slip.answer.tokens.is_empty() || !expired(key.0, &slip.answer) {
                continue;
            }
            if let Some(place) = slip.running().map(|running| running.place) {
                self.seats[place].in_flight = self.seats[place].in_flight.saturating_sub(1);
            }
            slip.begin_anew(now);
            anew.push(*key);
        }
        anew
    }

    fn version(&self) -> Option<Version> {
        self.version
    }

    fn is_idle(&self) -> bool {
        self.samples.is_empty() && self.finished.is_empty()
    }

    fn free_slots(&self) -> usize {
        self.limit.saturating_sub(self.samples.len())
    }

    fn active(&self) -> usize {
        self.samples.values().filter(|slip| slip.running().is_some()).count()
    }

    fn limit_slots(&mut self, limit: usize) {
        self.limit = limit.clamp(1, self.slots);
    }

    fn step(&mut self) -> Result<Vec<Finished>, EngineError> {
        let started = Instant::now();
        self.sampled.clear();
        self.discarded.clear();
        self.load = Load { passes: 1, ..Load::default() };
        if !self.samples.is_empty() {
            self.dispatch(started)?;
            // What has ended already is not to wait for what has not.
            let wait = if self.finished.is_empty() { self.config.step } else { Duration::ZERO };
            if let Ok(news) = self.from.recv_timeout(wait) {
                let now = Instant::now();
                self.hear(news, now)?;
                for news in self.from.drain().collect::<Vec<_>>() {
                    self.hear(news, now)?;
                }
            }
            self.watch(Instant::now())?;
        }
        self.load.time = started.elapsed();
        Ok(std::mem::take(&mut self.finished))
    }

    fn sampled(&self) -> &[SampledToken] {
        &self.sampled
    }

    fn discarded(&self) -> &[(u64, u32)] {
        &self.discarded
    }

    fn load(&self) -> Load {
        self.load
    }
}
