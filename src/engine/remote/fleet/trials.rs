//! Reactions to changes of engines: reopened engines, and verified or refuted weights.

use std::time::Instant;

use super::Fleet;
use crate::engine::EngineError;
use crate::engine::remote::in_flight::{InFlightSample, SampleKey, Stage};
use crate::engine::remote::router::EngineSlot;

impl Fleet {
    /// Processes changes, if there are any.
    pub(super) fn process_changes(&mut self, now: Instant) -> Result<(), EngineError> {
        if !self.changes.has_changed().unwrap_or(false) {
            return Ok(());
        }
        self.changes.mark_unchanged();
        self.reopen(now);
        self.refute(now);
        self.prove()
    }

    /// Reopens engines after a sync, and ends the waits of samples that they rejected.
    fn reopen(&mut self, now: Instant) {
        self.engine_slots.iter_mut().for_each(EngineSlot::reopen);
        for sample in self.samples.values_mut().filter(|sample| sample.turned_away > 0) {
            if let Stage::Waiting(at) = &mut sample.stage {
                *at = now;
            }
        }
    }

    /// Restarts samples with tokens of refuted weights.
    fn refute(&mut self, now: Instant) {
        let refuted: Vec<u64> = (0..self.engine_slots.len()).map(|place| self.handle.refutations(place)).collect();
        let at_work = |sample: &InFlightSample| {
            sample.running().is_some_and(|running| refuted[running.place] > self.engine_slots[running.place].refuted)
        };
        let worthless =
            |sample: &InFlightSample| at_work(sample) || sample.unproven.iter().any(|(place, before)| refuted[*place] > *before);
        let keys: Vec<SampleKey> = self.samples.iter().filter(|(_, sample)| worthless(sample)).map(|(key, _)| *key).collect();
        for key in &keys {
            let Some(sample) = self.samples.get_mut(key) else { continue };
            if let Some(place) = sample.running().map(|running| running.place) {
                self.engine_slots[place].in_flight = self.engine_slots[place].in_flight.saturating_sub(1);
            }
            sample.restart(now);
            self.withdraw(*key);
        }
        if !keys.is_empty() {
            tracing::warn!("{} samples restart: an engine had resumed under wrong weights", keys.len());
        }
        self.engine_slots.iter_mut().zip(refuted).for_each(|(slot, refuted)| slot.refuted = refuted);
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
    pub(super) fn withdraw(&mut self, key: SampleKey) {
        self.sampled.retain(|token| (token.ordinal, token.index) != key);
        self.discarded.push(key);
    }
}
