//! Changes of engines: members, syncs, and weights that are verified or refuted.

use std::collections::BTreeMap;
use std::time::Instant;

use super::Fleet;
use crate::engine::EngineError;
use crate::engine::remote::in_flight::{InFlightSample, SampleKey, Stage};
use crate::engine::remote::router::EngineSlot;

impl Fleet {
    pub(super) fn process_changes(&mut self, now: Instant) -> Result<(), EngineError> {
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
    pub(super) fn follow_members(&mut self, now: Instant) {
        let places = self.handle.places();
        for place in &places {
            self.engine_slots.entry(*place).or_insert_with(|| {
                let mut slot = EngineSlot::new(self.config.per_engine, &self.handle.name(*place));
                slot.refuted = self.handle.refutations(*place);
                slot
            });
        }
        let gone = |place: &usize| places.binary_search(place).is_err();
        self.engine_slots.retain(|place, _| !gone(place));
        let left = self.samples.values_mut().filter(|sample| sample.running().is_some_and(|running| gone(&running.place)));
        left.for_each(|sample| sample.wait(now));
    }

    /// Reopens engines that were verified or found again. Samples that engines rejected no longer wait then.
    fn reopen(&mut self, now: Instant) {
        let mut reopened = false;
        for (place, slot) in &mut self.engine_slots {
            reopened |= slot.reopen(self.handle.is_serving(*place), self.handle.verified(*place));
        }
        for sample in self.samples.values_mut().filter(|sample| reopened && sample.turned_away > 0) {
            if let Stage::Waiting(at) = &mut sample.stage {
                *at = now;
            }
        }
    }

    /// Restarts samples with tokens of refuted weights.
    fn refute(&mut self, now: Instant) {
        let refuted: BTreeMap<usize, u64> =
            self.engine_slots.keys().map(|place| (*place, self.handle.refutations(*place))).collect();
        // Also of engines that are gone.
        let more =
            |place: &usize, than: u64| refuted.get(place).copied().unwrap_or_else(|| self.handle.refutations(*place)) > than;
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
            // Refuted ones are for the next `refute`.
            let open = |place| self.handle.on_trial(place) || self.handle.is_looked_at(place);
            let proven = |(place, before): &(usize, u64)| !open(*place) && self.handle.refutations(*place) == *before;
            sample.unproven.retain(|entry| !proven(entry));
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

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use async_trait::async_trait;
    use tokio::sync::mpsc::Sender;

    use super::*;
    use crate::data::Tokenizer;
    use crate::engine::remote::attempt::{AttemptEvent, AttemptUpdate};
    use crate::engine::remote::{Attempt, Ending, FleetConfig, FleetHandle, InferenceEngine, RemoteError};
    use crate::engine::{FinishReason, Request, SamplingParams, TokenEngine};

    struct Silent;

    #[async_trait]
    impl InferenceEngine for Silent {
        fn name(&self) -> String {
            "silent".into()
        }

        async fn generate(&self, _: &Attempt, _: &Sender<Vec<(u32, f32)>>) -> Result<Ending, RemoteError> {
            std::future::pending().await
        }
    }

    /// Law V4: an engine is refuted at any moment, also between two looks at its state.
    #[test]
    fn v4_tokens_of_weights_that_are_refuted_while_they_are_read_are_not_delivered() {
        let tokenizer = Arc::new(Tokenizer::characters("0123456789", 16).unwrap());
        for refuted_first in [true, false] {
            let handle = FleetHandle::new(vec![Arc::new(Silent)]);
            let mut fleet = Fleet::new(&handle, FleetConfig::default(), &tokenizer, 4, 0);
            fleet.set_weights(0, &());
            fleet.submit(Request::new(0, vec![2], 1, Arc::new(SamplingParams::default()))).unwrap();
            let now = crate::net::now();
            fleet.dispatch(now).unwrap();
            let number = fleet.samples[&(0, 0)].running().unwrap().number;
            let event = |update| AttemptEvent { key: (0, 0), number, place: 0, update };
            handle.start_trial(0);
            if refuted_first {
                handle.mark_doubtful(0);
            }
            fleet.on_event(event(AttemptUpdate::Tokens(vec![(3, -1.0)])), now).unwrap();
            let ending = Ending { finish: Some(FinishReason::Stop), ..Ending::default() };
            fleet.on_event(event(AttemptUpdate::Ended(Ok(ending))), now).unwrap();
            handle.mark_doubtful(0);
            // It comes after `refute` has looked.
            fleet.prove().unwrap();
            assert!(fleet.finished.is_empty(), "{:?}", fleet.finished);
            fleet.process_changes(now).unwrap();
            assert_eq!((fleet.finished.len(), &*fleet.discarded), (0, &[(0, 0)][..]));
            assert!(fleet.samples[&(0, 0)].answer.tokens.is_empty(), "it restarts");
        }
    }
}
