//! What follows from news about the engines: who need not wait any longer, and what was made under weights that nobody had verified.

use std::time::Instant;

use super::Fleet;
use crate::engine::EngineError;
use crate::engine::remote::router::Seat;
use crate::engine::remote::slip::{Slip, Stage};

impl Fleet {
    /// Does it, if there are any.
    pub(super) fn look_at_changes(&mut self, now: Instant) -> Result<(), EngineError> {
        if !self.changes.has_changed().unwrap_or(false) {
            return Ok(());
        }
        self.changes.mark_unchanged();
        self.reopen(now);
        self.refute(now);
        self.prove()
    }

    /// They may go on after a sync: whom they turned away need not wait any longer.
    fn reopen(&mut self, now: Instant) {
        self.seats.iter_mut().for_each(Seat::reopen);
        for slip in self.samples.values_mut().filter(|slip| slip.turned_away > 0) {
            if let Stage::Waiting(at) = &mut slip.stage {
                *at = now;
            }
        }
    }

    /// Begins anew what engines made, or are making, under weights that turned out to be wrong.
    fn refute(&mut self, now: Instant) {
        let refuted: Vec<u64> = (0..self.seats.len()).map(|place| self.handle.refuted(place)).collect();
        let at_work =
            |slip: &Slip| slip.running().is_some_and(|running| refuted[running.place] > self.seats[running.place].refuted);
        let worthless = |slip: &Slip| at_work(slip) || slip.unproven.iter().any(|(place, before)| refuted[*place] > *before);
        let keys: Vec<(u64, u32)> = self.samples.iter().filter(|(_, slip)| worthless(slip)).map(|(key, _)| *key).collect();
        for key in &keys {
            let Some(slip) = self.samples.get_mut(key) else { continue };
            if let Some(place) = slip.running().map(|running| running.place) {
                self.seats[place].in_flight = self.seats[place].in_flight.saturating_sub(1);
            }
            slip.begin_anew(now);
            self.withdraw(*key);
        }
        if !keys.is_empty() {
            tracing::warn!(
                "{} samples are made anew: an engine had gone on under weights that turned out to be wrong",
                keys.len()
            );
        }
        self.seats.iter_mut().zip(refuted).for_each(|(seat, refuted)| seat.refuted = refuted);
    }

    /// Gives back what has ended and is no longer in doubt.
    fn prove(&mut self) -> Result<(), EngineError> {
        let mut ended = Vec::new();
        for (key, slip) in &mut self.samples {
            slip.unproven.retain(|(place, _)| self.handle.on_trial(*place));
            if let (Stage::Ended(finish), true) = (&slip.stage, slip.unproven.is_empty()) {
                ended.push((*key, *finish));
            }
        }
        ended.into_iter().try_for_each(|(key, finish)| self.finish(key, finish))
    }

    /// What was told of it is to be forgotten.
    pub(super) fn withdraw(&mut self, key: (u64, u32)) {
        self.sampled.retain(|token| (token.ordinal, token.index) != key);
        self.discarded.push(key);
    }
}
