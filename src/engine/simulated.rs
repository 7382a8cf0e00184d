//! Engine in simulated time: it schedules as [`LocalEngine`](super::LocalEngine) does and computes
//! nothing.

use std::time::Duration;

use super::slots::{ActiveSample, Admission, Slots};
use super::{EngineError, FinishReason, Finished, Load, OnNewWeights, Request, TokenEngine};
use crate::data::{Answer, SampledToken, Version};
use crate::flow::Simulation;

/// Engine that generates token 0 for given lengths in simulated time.
pub struct SimulatedEngine {
    simulation: Simulation,
    time: Box<dyn FnMut(Load) -> Duration>,
    length: Box<dyn Fn(u64, u32) -> usize>,
    on_new_weights: OnNewWeights,
    pause: Duration,
    version: Option<Version>,
    slots: Slots<Version>,
    /// Prompt that is in the cache for the rest of its group.
    shelf: Option<u64>,
}

impl SimulatedEngine {
    /// Creates an engine for up to `slots` samples at a time, without weights. `time` is the
    /// duration of a step by its work; `length` is the number of tokens of a completion by prompt
    /// ordinal and sample index, within the request's limit.
    pub fn new(
        simulation: &Simulation,
        slots: usize,
        time: impl FnMut(Load) -> Duration + 'static,
        length: impl Fn(u64, u32) -> usize + 'static,
    ) -> Self {
        SimulatedEngine {
            simulation: simulation.clone(),
            time: Box::new(time),
            length: Box::new(length),
            on_new_weights: OnNewWeights::default(),
            pause: Duration::ZERO,
            version: None,
            slots: Slots::new(slots),
            shelf: None,
        }
    }

    /// Sets the time for which the engine stands still when weights change.
    pub fn pause(self, pause: Duration) -> Self {
        SimulatedEngine { pause, ..self }
    }

    /// Sets the policy for samples in flight when weights change.
    pub fn on_new_weights(self, on_new_weights: OnNewWeights) -> Self {
        SimulatedEngine { on_new_weights, ..self }
    }

    fn begin(&mut self, admitted: Vec<Admission>) {
        let mut read = 0;
        for Admission { request: waiting, more, .. } in &admitted {
            let ordinal = waiting.request.ordinal;
            if self.shelf.take() != Some(ordinal) || waiting.begun.is_some() {
                read += waiting.tokens().len();
            }
            self.shelf = more.then_some(ordinal);
        }
        if read > 0 {
            self.slots.load.add(0, read);
        }
        admitted.into_iter().flat_map(|group| group.slots).for_each(|slot| self.take_token(slot));
    }

    fn take_token(&mut self, slot: usize) {
        let Some(ActiveSample { request, answer, state: version }) = self.slots.get_mut(slot) else { return };
        let version = *version;
        answer.push(0, -1.0, version);
        let made = answer.turn();
        let finish = if made >= (self.length)(request.ordinal, answer.index) {
            Some(FinishReason::Stop)
        } else {
            (made >= request.params.max_new_tokens).then_some(FinishReason::Length)
        };
        self.slots.report(slot, version, finish);
    }
}

impl TokenEngine for SimulatedEngine {
    type Weights = ();

    fn submit(&mut self, request: Request) -> Result<(), EngineError> {
        request.params.check()?;
        self.slots.submit(request);
        Ok(())
    }

    fn set_weights(&mut self, version: Version, _: &()) {
        self.version = Some(version);
        self.shelf = None;
        self.simulation.pass(self.pause);
        match self.on_new_weights {
            OnNewWeights::Swap => self.slots.iter_mut().for_each(|sequence| sequence.state = version),
            OnNewWeights::Recompute => {
                let mut load = Load::default();
                for sequence in self.slots.iter_mut() {
                    sequence.state = version;
                    load.prefill += sequence.computed();
                    load.passes = 1;
                }
                self.simulation.pass((self.time)(load));
            }
            OnNewWeights::Finish => self.slots.divide(),
            OnNewWeights::Abort => self.slots.interrupt(),
        }
    }

    fn restart_expired(&mut self, expired: &dyn Fn(u64, &Answer) -> bool) -> Vec<(u64, u32)> {
        self.slots.restart_expired(expired)
    }

    fn cancel(&mut self, ordinal: u64) {
        self.slots.cancel(ordinal);
        self.shelf = None;
    }

    fn version(&self) -> Option<Version> {
        self.version
    }

    fn is_idle(&self) -> bool {
        self.slots.is_idle()
    }

    fn free_slots(&self) -> usize {
        self.slots.free()
    }

    fn active(&self) -> usize {
        self.slots.active()
    }

    fn limit_slots(&mut self, limit: usize) {
        self.slots.limit_to(limit);
    }

    fn step(&mut self) -> Result<Vec<Finished>, EngineError> {
        self.slots.start_step(|_, _, _| ());
        let Some(version) = self.version else { return Err(EngineError::NoWeights) };
        loop {
            let admitted = self.slots.admit(|_| version, |_, wanted| wanted);
            if admitted.is_empty() {
                break;
            }
            self.begin(admitted);
        }
        self.slots.compact(|_, _, _| ());
        let versions: Vec<Version> = self.slots.iter_from(0).map(|(_, sequence)| sequence.state).collect();
        for alike in versions.chunk_by(|one, next| one == next) {
            self.slots.load.add(alike.len(), 0);
        }
        (0..versions.len()).for_each(|slot| self.take_token(slot));
        self.slots.load.time = (self.time)(self.slots.load);
        self.simulation.pass(self.slots.load.time);
        Ok(std::mem::take(&mut self.slots.finished))
    }

    fn sampled(&self) -> &[SampledToken] {
        &self.slots.sampled
    }

    fn load(&self) -> Load {
        self.slots.load
    }
}
