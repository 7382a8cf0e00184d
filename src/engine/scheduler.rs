//! Assignment of samples to slots: a state machine without tensors.
//!
//! During a step, slots 0, 1, … are in use without a gap. A free slot takes the next waiting
//! sample; if none waits, the last sample in use moves into it. Samples that keep older weights
//! occupy the lowest slots, oldest first ([`Scheduler::divide`]); new samples follow.

use std::collections::VecDeque;
use std::ops::Range;

/// Samples of one request that are admitted together.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Admission<R> {
    /// Request of the samples.
    pub request: R,
    /// Indices of the samples.
    pub samples: Range<u32>,
    /// Slot of each sample.
    pub slots: Vec<usize>,
    /// If true, more samples of this request wait.
    pub more: bool,
}

/// Move of a sample to another slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Move {
    /// Old slot.
    pub from: usize,
    /// New slot.
    pub to: usize,
}

/// Waiting samples, oldest request first, and free slots.
#[derive(Debug)]
pub struct Scheduler<R> {
    waiting: VecDeque<(R, Range<u32>)>,
    /// Free slots below `end`, highest first.
    holes: Vec<usize>,
    /// Slots from here on are free.
    end: usize,
    /// End of each older part of the slots, ascending. The newest part ends at `end`.
    borders: Vec<usize>,
    slots: usize,
    /// Number of slots that may be used now.
    limit: usize,
}

impl<R: Clone> Scheduler<R> {
    /// Creates a scheduler with this number of free slots.
    pub fn new(slots: usize) -> Self {
        Scheduler { waiting: VecDeque::new(), holes: Vec::new(), end: 0, borders: Vec::new(), slots, limit: slots }
    }

    /// Limits the slots in use to `limit`, at least one. Samples in flight beyond it stay.
    pub fn limit_to(&mut self, limit: usize) {
        self.limit = limit.clamp(1, self.slots);
    }

    /// Queues samples of a request.
    pub fn submit(&mut self, request: R, samples: Range<u32>) {
        if !samples.is_empty() {
            self.waiting.push_back((request, samples));
        }
    }

    /// Queues one sample of a request before all that wait.
    pub fn submit_first(&mut self, request: R, sample: u32) {
        self.waiting.push_front((request, sample..sample + 1));
    }

    /// Requests of waiting samples.
    pub fn waiting_mut(&mut self) -> impl Iterator<Item = &mut R> {
        self.waiting.iter_mut().map(|(request, _)| request)
    }

    /// Separates samples in use from later ones: new samples get slots after them, never between
    /// them.
    pub fn divide(&mut self) {
        self.borders.push(self.end);
    }

    /// Moves samples of older parts together, so that all free slots follow them. Call it before
    /// [`Scheduler::admit`], and apply the moves in order.
    pub fn close_ranks(&mut self) -> Vec<Move> {
        let mut moves = Vec::new();
        let mut start = 0;
        for border in &mut self.borders {
            while let Some(&lowest) = self.holes.last().filter(|hole| **hole < *border) {
                *border -= 1;
                if !self.holes.contains(border) {
                    self.holes.pop();
                    let at = self.holes.partition_point(|hole| *hole > *border);
                    self.holes.insert(at, *border);
                    moves.push(Move { from: *border, to: lowest });
                }
            }
        }
        // Drops parts without samples.
        self.borders.retain(|border| std::mem::replace(&mut start, *border) < *border);
        moves
    }

    /// Admits waiting samples to free slots, in order.
    pub fn admit(&mut self) -> Vec<Admission<R>> {
        let mut admitted = Vec::new();
        while let Some((request, waiting)) = self.waiting.front_mut() {
            let count = waiting.len().min(self.limit.saturating_sub(self.end - self.holes.len()));
            if count == 0 {
                break;
            }
            let samples = waiting.start..waiting.start + count as u32;
            waiting.start = samples.end;
            let (request, more) = (request.clone(), waiting.start < waiting.end);
            if !more {
                self.waiting.pop_front();
            }
            let slots = (0..count).map(|_| self.take()).collect();
            admitted.push(Admission { request, samples, slots, more });
        }
        admitted
    }

    fn take(&mut self) -> usize {
        self.holes.pop().unwrap_or_else(|| {
            self.end += 1;
            self.end - 1
        })
    }

    /// Frees a slot in use.
    pub fn finish(&mut self, slot: usize) {
        let at = self.holes.partition_point(|hole| *hole > slot);
        self.holes.insert(at, slot);
    }

    /// Closes gaps with as few moves as there are gaps. Apply the moves in order.
    pub fn compact(&mut self) -> Vec<Move> {
        let mut moves = Vec::new();
        while let Some(&highest) = self.holes.first() {
            self.end -= 1;
            if highest == self.end {
                self.holes.remove(0);
            } else if let Some(to) = self.holes.pop() {
                moves.push(Move { from: self.end, to });
            }
        }
        moves
    }

    /// Number of slots in use.
    pub fn active(&self) -> usize {
        self.end - self.holes.len()
    }

    /// Number of waiting samples.
    pub fn waiting(&self) -> usize {
        self.waiting.iter().map(|(_, samples)| samples.len()).sum()
    }

    /// Number of slots that no sample uses or waits for.
    pub fn free(&self) -> usize {
        self.limit.saturating_sub(self.active() + self.waiting())
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_group_larger_than_the_free_slots_enters_in_parts_and_before_later_groups() {
        let mut scheduler = Scheduler::new(3);
        scheduler.submit('a', 0..4);
        scheduler.submit('b', 0..2);
        let first = scheduler.admit();
        assert_eq!(first, [Admission { request: 'a', samples: 0..3, slots: vec![0, 1, 2], more: true }]);
        assert!(scheduler.admit().is_empty(), "no slot is free");
        scheduler.finish(2);
        scheduler.finish(0);
        let second = scheduler.admit();
        assert_eq!(second[0], Admission { request: 'a', samples: 3..4, slots: vec![0], more: false });
        assert_eq!(second[1], Admission { request: 'b', samples: 0..1, slots: vec![2], more: true });
        assert_eq!((scheduler.active(), scheduler.waiting(), scheduler.free()), (3, 1, 0));
    }

    #[test]
    fn a_lower_limit_ends_nobody_and_a_higher_one_lets_more_in() {
        let mut scheduler = Scheduler::new(4);
        scheduler.submit('a', 0..6);
        scheduler.limit_to(3);
        assert_eq!(scheduler.admit()[0].slots, [0, 1, 2]);
        scheduler.limit_to(1);
        scheduler.finish(1);
        assert!(scheduler.admit().is_empty());
        assert_eq!((scheduler.compact().len(), scheduler.active(), scheduler.free()), (1, 2, 0));
        scheduler.limit_to(9);
        assert_eq!(scheduler.admit()[0].slots, [2, 3], "never more than there are");
    }

    #[test]
    fn gaps_that_nothing_fills_are_closed_by_the_last_samples() {
        let mut scheduler = Scheduler::new(6);
        scheduler.submit((), 0..6);
        scheduler.admit();
        for slot in [5, 1, 3] {
            scheduler.finish(slot);
        }
        assert_eq!(scheduler.compact(), [Move { from: 4, to: 1 }]);
        assert_eq!((scheduler.active(), scheduler.free()), (3, 3));
    }

    #[test]
    fn what_waits_first_enters_before_all_that_waits() {
        let mut scheduler = Scheduler::new(2);
        scheduler.submit('a', 0..2);
        scheduler.submit_first('b', 5);
        let entered: Vec<_> = scheduler.admit().into_iter().map(|admission| (admission.request, admission.samples)).collect();
        assert_eq!(entered, [('b', 5..6), ('a', 0..1)]);
    }

    proptest! {
        #[test]
        fn every_sample_gets_one_slot_once_and_slots_in_use_have_no_gap(
            slots in 1usize..9, groups in prop::collection::vec(1u32..12, 0..12), ends in prop::collection::vec(any::<u64>(), 1..200),
            divides in 1u64..12,
        ) {
            let mut scheduler = Scheduler::new(slots);
            for (request, &samples) in groups.iter().enumerate() {
                scheduler.submit(request, 0..samples);
            }
            let (mut held, mut served, mut part) = (BTreeMap::new(), Vec::new(), 0);
            for bits in ends.iter().cycle().take(2000) {
                // Sometimes samples are separated from those in use.
                if bits % divides == 0 {
                    scheduler.divide();
                    part += 1;
                }
                for moved in scheduler.close_ranks() {
                    let sample = held.remove(&moved.from).expect("a sample moves");
                    prop_assert_eq!(held.insert(moved.to, sample), None);
                }
                prop_assert!(scheduler.borders.len() <= slots, "parts without samples are forgotten");
                for admission in scheduler.admit() {
                    for (sample, slot) in admission.samples.clone().zip(admission.slots) {
                        prop_assert_eq!(held.insert(slot, (part, admission.request, sample)), None, "slot {} is taken", slot);
                        served.push((admission.request, sample));
                    }
                }
                prop_assert!(held.len() == slots || scheduler.waiting() == 0, "a slot is idle while a sample waits");
                for moved in scheduler.compact() {
                    let sample = held.remove(&moved.from).expect("a sample moves");
                    prop_assert_eq!(held.insert(moved.to, sample), None);
                }
                prop_assert!(held.keys().copied().eq(0..scheduler.active()), "{:?}", held);
                prop_assert!(held.values().is_sorted_by_key(|(part, ..)| *part), "parts lie side by side: {:?}", held);
                let ending: Vec<usize> = held.keys().copied().filter(|slot| bits >> slot & 1 == 1).collect();
                for slot in ending {
                    held.remove(&slot);
                    scheduler.finish(slot);
                }
            }
            let all: Vec<_> = groups.iter().enumerate().flat_map(|(request, &samples)| (0..samples).map(move |sample| (request, sample))).collect();
            prop_assert!(scheduler.waiting() > 0 || served == all, "samples are served in order, each once");
        }
    }
}
