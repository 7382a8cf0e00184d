//! Who is in which slot of an engine that computes many samples together, and who waits for one.
//!
//! What an engine computes a sample's next token with, and what it costs to move, is its own business.

use std::cmp::Reverse;
use std::sync::Arc;

use super::Request;
use super::scheduler::{Move, Scheduler};
use super::waiting::Waiting;
use crate::data::Answer;

/// A sample in a slot.
pub struct ActiveSample<State> {
    /// What was asked.
    pub request: Arc<Request>,
    /// What is there of it.
    pub answer: Answer,
    /// What its next token is computed with.
    pub state: State,
}

/// Samples in slots, and those that wait.
pub struct Slots<State> {
    /// Says which slots are in use.
    pub scheduler: Scheduler<Waiting>,
    places: Vec<Option<ActiveSample<State>>>,
}

impl<State> Slots<State> {
    /// That many slots, at least one, all free.
    pub fn new(slots: usize) -> Self {
        let slots = slots.max(1);
        Slots { scheduler: Scheduler::new(slots), places: (0..slots).map(|_| None).collect() }
    }

    /// How many there are, used or not.
    #[cfg(feature = "torch")]
    pub fn len(&self) -> usize {
        self.places.len()
    }

    /// Whether nobody is under way or waits.
    pub fn is_idle(&self) -> bool {
        self.scheduler.active() == 0 && self.scheduler.waiting() == 0
    }

    /// Puts a sample into the slot that the scheduler has given it.
    pub fn put(&mut self, slot: usize, sample: ActiveSample<State>) {
        self.places[slot] = Some(sample);
    }

    /// Who is there.
    #[cfg(feature = "torch")]
    pub fn get(&self, slot: usize) -> Option<&ActiveSample<State>> {
        self.places[slot].as_ref()
    }

    /// The same, to be changed.
    pub fn get_mut(&mut self, slot: usize) -> Option<&mut ActiveSample<State>> {
        self.places[slot].as_mut()
    }

    /// All samples under way, by slot.
    pub fn iter(&self) -> impl Iterator<Item = (usize, &ActiveSample<State>)> {
        self.places.iter().enumerate().filter_map(|(slot, place)| Some((slot, place.as_ref()?)))
    }

    /// The same, to be changed.
    pub fn iter_mut(&mut self) -> impl Iterator<Item = &mut ActiveSample<State>> {
        self.places.iter_mut().flatten()
    }

    /// Frees the slot of a sample that has ended.
    pub fn finish(&mut self, slot: usize) -> Option<ActiveSample<State>> {
        self.scheduler.finish(slot);
        self.places[slot].take()
    }

    /// Samples change slots, in this order; `moved` takes along what the engine keeps of them.
    pub fn apply(&mut self, moves: Vec<Move>, mut moved: impl FnMut(Move, &ActiveSample<State>)) {
        for change in moves {
            let sample = self.places[change.from].take();
            if let Some(sample) = &sample {
                moved(change, sample);
            }
            self.places[change.to] = sample;
        }
    }

    /// All samples under way wait again, each as far as it is, before all that waited.
    pub fn interrupt(&mut self) {
        for sample in self.take_out(|_| true) {
            let index = sample.answer.index;
            self.scheduler.submit_first(Waiting { request: sample.request, begun: Some(sample.answer) }, index);
        }
    }

    /// Forgets what is there of answers that have `expired`, under way or waiting; those under way begin anew before all that wait. Tells
    /// which they were, by ordinal and index.
    pub fn restart_expired(&mut self, expired: impl Fn(u64, &Answer) -> bool) -> Vec<(u64, u32)> {
        let mut anew = Vec::new();
        for Waiting { request, begun } in self.scheduler.waiting_mut() {
            anew.extend(begun.take_if(|answer| expired(request.ordinal, answer)).map(|answer| (request.ordinal, answer.index)));
        }
        for sample in self.take_out(|sample| expired(sample.request.ordinal, &sample.answer)) {
            let index = sample.answer.index;
            anew.push((sample.request.ordinal, index));
            self.scheduler.submit_first(Waiting { request: sample.request, begun: None }, index);
        }
        anew
    }

    /// Takes samples out of their slots, the youngest first.
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
