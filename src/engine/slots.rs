//! Slots of an engine that computes many samples together, and the queue for them.

use std::cmp::Reverse;
use std::sync::Arc;

use super::Request;
use super::scheduler::{Move, Scheduler};
use super::waiting::Waiting;
use crate::data::Answer;

/// Sample in a slot.
pub struct ActiveSample<State> {
    /// Request of the sample.
    pub request: Arc<Request>,
    /// Completion so far.
    pub answer: Answer,
    /// Engine's state for the next token.
    pub state: State,
}

/// Samples in slots, and waiting samples.
pub struct Slots<State> {
    /// Assignment of slots.
    pub scheduler: Scheduler<Waiting>,
    places: Vec<Option<ActiveSample<State>>>,
}

impl<State> Slots<State> {
    /// Creates this number of free slots, at least one.
    pub fn new(slots: usize) -> Self {
        let slots = slots.max(1);
        Slots { scheduler: Scheduler::new(slots), places: (0..slots).map(|_| None).collect() }
    }

    /// Number of slots.
    #[cfg(feature = "torch")]
    pub fn len(&self) -> usize {
        self.places.len()
    }

    /// Returns true if no sample is in flight or waiting.
    pub fn is_idle(&self) -> bool {
        self.scheduler.active() == 0 && self.scheduler.waiting() == 0
    }

    /// Puts a sample into the slot that the scheduler assigned.
    pub fn put(&mut self, slot: usize, sample: ActiveSample<State>) {
        self.places[slot] = Some(sample);
    }

    /// Sample in a slot.
    #[cfg(feature = "torch")]
    pub fn get(&self, slot: usize) -> Option<&ActiveSample<State>> {
        self.places[slot].as_ref()
    }

    /// Sample in a slot, mutable.
    pub fn get_mut(&mut self, slot: usize) -> Option<&mut ActiveSample<State>> {
        self.places[slot].as_mut()
    }

    /// Samples in flight, by slot.
    pub fn iter(&self) -> impl Iterator<Item = (usize, &ActiveSample<State>)> {
        self.places.iter().enumerate().filter_map(|(slot, place)| Some((slot, place.as_ref()?)))
    }

    /// Samples in flight, mutable.
    pub fn iter_mut(&mut self) -> impl Iterator<Item = &mut ActiveSample<State>> {
        self.places.iter_mut().flatten()
    }

    /// Frees the slot of a finished sample.
    pub fn finish(&mut self, slot: usize) -> Option<ActiveSample<State>> {
        self.scheduler.finish(slot);
        self.places[slot].take()
    }

    /// Applies moves in order; `moved` moves the engine's state of a sample.
    pub fn apply(&mut self, moves: Vec<Move>, mut moved: impl FnMut(Move, &ActiveSample<State>)) {
        for change in moves {
            let sample = self.places[change.from].take();
            if let Some(sample) = &sample {
                moved(change, sample);
            }
            self.places[change.to] = sample;
        }
    }

    /// Queues all samples in flight again, with their tokens, before all waiting ones.
    pub fn interrupt(&mut self) {
        for sample in self.take_out(|_| true) {
            let index = sample.answer.index;
            self.scheduler.submit_first(Waiting { request: sample.request, begun: Some(sample.answer) }, index);
        }
    }

    /// Clears completions that are `expired`, in flight or waiting, and restarts those in flight
    /// before all that wait. Returns their ordinals and indices.
    pub fn restart_expired(&mut self, expired: impl Fn(u64, &Answer) -> bool) -> Vec<(u64, u32)> {
        let mut restarted = Vec::new();
        for Waiting { request, begun } in self.scheduler.waiting_mut() {
            restarted
                .extend(begun.take_if(|answer| expired(request.ordinal, answer)).map(|answer| (request.ordinal, answer.index)));
        }
        for sample in self.take_out(|sample| expired(sample.request.ordinal, &sample.answer)) {
            let index = sample.answer.index;
            restarted.push((sample.request.ordinal, index));
            self.scheduler.submit_first(Waiting { request: sample.request, begun: None }, index);
        }
        restarted
    }

    /// Removes samples from their slots, the youngest first.
    fn take_out(&mut self, which: impl Fn(&ActiveSample<State>) -> bool) -> Vec<ActiveSample<State>> {
        let mut out = Vec::new();
        for (slot, place) in self.places.iter_mut().enumerate() {
            if let Some(sample) = place.take_if(|sample| which(sample)) {
                self.scheduler.finish(slot);
                out.push(sample);
            }
        }
        out.sort_by_key(|sample| Reverse((sample.request.ordinal, sample.answer.index)));
        out
    }
}
