//! Engine in simulated time: it schedules as [`LocalEngine`](super::LocalEngine) does and computes
//! nothing.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::scheduler::Admission;
use super::slots::{ActiveSample, Slots};
use super::waiting::Waiting;
use super::{EngineError, FinishReason, Finished, Load, OnNewWeights, Request, TokenEngine};
use crate::data::{Answer, SampledToken, Status, Version};
use crate::flow::Simulation;

/// Duration of an engine's steps, in seconds: linear in the work.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DecodeTimes {
    /// Seconds for each pass through the model.
    pub pass: f64,
    /// Seconds for each generated token.
    pub row: f64,
    /// Seconds for each prefilled token.
    pub prefill: f64,
}

impl DecodeTimes {
    /// Duration of one step.
    pub fn step(&self, load: Load) -> Duration {
        let seconds = self.pass * load.passes as f64 + self.row * load.rows as f64 + self.prefill * load.prefill as f64;
        Duration::try_from_secs_f64(seconds).unwrap_or_default()
    }
}

/// Length of a completion in tokens, by prompt ordinal and sample index. The request's limit
/// applies.
type Length = Arc<dyn Fn(u64, u32) -> usize + Send + Sync>;

/// Engine that generates token 0 for given lengths in simulated time.
pub struct SimulatedEngine {
    simulation: Simulation,
    times: DecodeTimes,
    length: Length,
    on_new_weights: OnNewWeights,
    version: Option<Version>,
    slots: Slots<Version>,
    /// Prompt that is in the cache for the rest of its group.
    shelf: Option<u64>,
    finished: Vec<Finished>,
    sampled: Vec<SampledToken>,
    load: Load,
}

impl SimulatedEngine {
    /// Creates an engine for up to `slots` samples at a time, without weights.
    pub fn new(
        simulation: &Simulation,
        slots: usize,
        times: DecodeTimes,
        length: impl Fn(u64, u32) -> usize + Send + Sync + 'static,
    ) -> Self {
        SimulatedEngine {
            simulation: simulation.clone(),
            times,
            length: Arc::new(length),
            on_new_weights: OnNewWeights::default(),
            version: None,
            slots: Slots::new(slots),
            shelf: None,
            finished: Vec::new(),
            sampled: Vec::new(),
            load: Load::default(),
        }
    }

    /// Sets the policy for samples in flight when weights change.
    pub fn on_new_weights(self, on_new_weights: OnNewWeights) -> Self {
        SimulatedEngine { on_new_weights, ..self }
    }

    fn begin(&mut self, admitted: Vec<Admission<Waiting>>, version: Version) {
        let (mut read, mut slots) = (0, VecDeque::new());
        for Admission { request: waiting, samples, slots: places, more } in admitted {
            if self.shelf.take() != Some(waiting.request.ordinal) || waiting.begun.is_some() {
                read += waiting.tokens().len();
            }
            let Waiting { request, begun } = waiting;
            self.shelf = more.then_some(request.ordinal);
            for (index, slot) in samples.zip(places) {
                let answer = begun.clone().unwrap_or_else(|| Answer::new(index));
                self.slots.put(slot, ActiveSample { request: request.clone(), answer, state: version });
                slots.push_back(slot);
            }
        }
        if read > 0 {
            self.load.add(0, read);
        }
        slots.into_iter().for_each(|slot| self.take_token(slot));
    }

    fn take_token(&mut self, slot: usize) {
        let Some(ActiveSample { request, answer, state: version }) = self.slots.get_mut(slot) else { return };
        let (ordinal, index, version, log_prob) = (request.ordinal, answer.index, *version, -1.0);
        answer.push(0, log_prob, version);
        let made = answer.turn();
        let finish = if made >= (self.length)(ordinal, index) {
            Some(FinishReason::Stop)
        } else {
            (made >= request.params.max_new_tokens).then_some(FinishReason::Length)
        };
        let status = finish.map_or(Status::Pending, Status::from);
        self.sampled.push(SampledToken { ordinal, index, token: 0, log_prob, version, status });
        if let Some(finish) = finish {
            let ended = self.slots.finish(slot);
            self.finished.extend(ended.map(|sequence| Finished::new(ordinal, sequence.answer, finish)));
        }
    }
}

impl TokenEngine for SimulatedEngine {
    type Weights = ();

    fn submit(&mut self, request: Request) -> Result<(), EngineError> {
        request.params.check()?;
        self.finished.extend(self.slots.scheduler.take_in(request));
        Ok(())
    }

    fn set_weights(&mut self, version: Version, _: &()) {
        self.version = Some(version);
        self.shelf = None;
        match self.on_new_weights {
            OnNewWeights::Swap => self.slots.iter_mut().for_each(|sequence| sequence.state = version),
            OnNewWeights::Recompute => {
                let mut load = Load::default();
                for sequence in self.slots.iter_mut() {
                    sequence.state = version;
                    load.prefill += sequence.request.tokens.len() + sequence.answer.tokens.len() - 1;
                    load.passes = 1;
                }
                self.simulation.pass(self.times.step(load));
            }
            OnNewWeights::Finish => self.slots.scheduler.divide(),
            OnNewWeights::Abort => self.slots.interrupt(),
        }
    }

    fn restart_expired(&mut self, expired: &dyn Fn(u64, &Answer) -> bool) -> Vec<(u64, u32)> {
        self.slots.restart_expired(expired)
    }

    fn version(&self) -> Option<Version> {
        self.version
    }

    fn is_idle(&self) -> bool {
        self.slots.is_idle() && self.finished.is_empty()
    }

    fn free_slots(&self) -> usize {
        self.slots.scheduler.free()
    }

    fn active(&self) -> usize {
        self.slots.scheduler.active()
    }

    fn limit_slots(&mut self, limit: usize) {
        self.slots.scheduler.limit_to(limit);
    }

    fn step(&mut self) -> Result<Vec<Finished>, EngineError> {
        self.sampled.clear();
        self.load = Load::default();
        let Some(version) = self.version else { return Err(EngineError::NoWeights) };
        let moves = self.slots.scheduler.close_ranks();
        self.slots.apply(moves, |_, _| ());
        loop {
            let admitted = self.slots.scheduler.admit();
            if admitted.is_empty() {
                break;
            }
            self.begin(admitted, version);
        }
        let moves = self.slots.scheduler.compact();
        self.slots.apply(moves, |_, _| ());
        let active = self.slots.scheduler.active();
        let versions: Vec<Version> = self.slots.iter().map(|(_, sequence)| sequence.state).collect();
        for alike in versions.chunk_by(|one, next| one == next) {
            self.load.add(alike.len(), 0);
        }
        (0..active).for_each(|slot| self.take_token(slot));
        self.load.time = self.times.step(self.load);
        self.simulation.pass(self.load.time);
        Ok(std::mem::take(&mut self.finished))
    }

    fn sampled(&self) -> &[SampledToken] {
        &self.sampled
    }

    fn load(&self) -> Load {
        self.load
    }
}
