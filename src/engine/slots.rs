//! Slots of an engine that computes many samples together, the queue for them, and what its steps
//! report.
//!
//! During a step, slots 0, 1, … are in use without a gap. A free slot takes the next waiting
//! sample; if none waits, the last sample in use moves into it. Samples that keep older weights
//! occupy the lowest slots, oldest first ([`Slots::divide`]); new samples follow.

use std::borrow::Cow;
use std::cmp::Reverse;
use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;

use super::{FinishReason, Finished, Load, Request};
use crate::data::{Answer, SampledToken, Status, Version};

#[derive(Clone, Debug)]
pub struct Waiting {
    pub request: Arc<Request>,
    /// Partial completion, which has not ended.
    pub begun: Option<Answer>,
}

impl Waiting {
    /// Tokens to prefill before the next token is drawn.
    pub fn tokens(&self) -> Cow<'_, [u32]> {
        let prompt = &self.request.tokens;
        self.begun.as_ref().map_or(Cow::Borrowed(prompt), |answer| Cow::Owned([prompt, answer.tokens.as_slice()].concat()))
    }

    /// Largest number of tokens that it can reach. The request has no partial completions any more.
    #[cfg(feature = "torch")]
    pub fn longest(&self) -> usize {
        self.begun.as_ref().map_or_else(|| self.request.longest(), |answer| self.request.longest_of(answer))
    }
}

pub struct ActiveSample<State> {
    pub request: Arc<Request>,
    pub answer: Answer,
    /// Engine's state for the next token.
    pub state: State,
}

impl<State> ActiveSample<State> {
    /// Number of tokens in the cache: all but the newest.
    pub fn computed(&self) -> usize {
        self.request.tokens.len() + self.answer.tokens.len() - 1
    }
}

/// Samples of one request that are admitted together.
pub struct Admission {
    pub request: Waiting,
    pub slots: Vec<usize>,
    /// If true, more samples of this request wait.
    pub more: bool,
}

pub struct Slots<State> {
    /// Indices of waiting samples, oldest request first.
    waiting: VecDeque<(Waiting, Range<u32>)>,
    /// Slots from the end on are free, too.
    places: Vec<Option<ActiveSample<State>>>,
    /// End of each older part of the slots, ascending. The newest part follows.
    borders: Vec<usize>,
    slots: usize,
    /// Number of slots that may be used now.
    limit: usize,
    /// Completions that have ended since the newest step.
    pub finished: Vec<Finished>,
    /// Tokens of the newest step.
    pub sampled: Vec<SampledToken>,
    pub load: Load,
}

impl<State> Slots<State> {
    pub fn new(slots: usize) -> Self {
        let slots = slots.max(1);
        Slots {
            waiting: VecDeque::new(),
            places: Vec::new(),
            borders: Vec::new(),
            slots,
            limit: slots,
            finished: Vec::new(),
            sampled: Vec::new(),
            load: Load::default(),
        }
    }

    #[cfg(feature = "torch")]
    pub fn len(&self) -> usize {
        self.slots
    }

    pub fn active(&self) -> usize {
        self.places.iter().flatten().count()
    }

    /// Number of slots that no sample uses or waits for.
    pub fn free(&self) -> usize {
        self.limit.saturating_sub(self.active() + self.queued())
    }

    fn queued(&self) -> usize {
        self.waiting.iter().map(|(_, samples)| samples.len()).sum()
    }

    /// Returns true if no sample is in flight, waiting or finished since the newest step.
    pub fn is_idle(&self) -> bool {
        self.active() == 0 && self.waiting.is_empty() && self.finished.is_empty()
    }

    /// Limits the slots in use to `limit`, at least one. Samples in flight beyond it stay.
    pub fn limit_to(&mut self, limit: usize) {
        self.limit = limit.clamp(1, self.slots);
    }

    #[cfg(feature = "torch")]
    pub fn get(&self, slot: usize) -> Option<&ActiveSample<State>> {
        self.places[slot].as_ref()
    }

    pub fn get_mut(&mut self, slot: usize) -> Option<&mut ActiveSample<State>> {
        self.places[slot].as_mut()
    }

    /// Samples in flight from this slot on, by slot.
    pub fn iter_from(&self, first: usize) -> impl Iterator<Item = (usize, &ActiveSample<State>)> {
        self.places.iter().enumerate().skip(first).filter_map(|(slot, place)| Some((slot, place.as_ref()?)))
    }

    pub fn iter_mut(&mut self) -> impl Iterator<Item = &mut ActiveSample<State>> {
        self.places.iter_mut().flatten()
    }

    /// Queues a request's samples. Partial completions that have ended already are finished.
    pub fn submit(&mut self, mut request: Request) {
        let (ordinal, last, max_new_tokens) = (request.ordinal, request.samples, request.params.max_new_tokens);
        let mut answers: Vec<Answer> = std::mem::take(&mut request.answers);
        answers.retain(|answer| !answer.tokens.is_empty());
        answers.sort_by_key(|answer| answer.index);
        let (mut next, request) = (request.first, Arc::new(request));
        for answer in answers {
            let index = answer.index;
            self.queue(&request, None, next..index);
            next = index + 1;
            match finish_of(&answer, max_new_tokens) {
                Some(finish) => self.finished.push(Finished::new(ordinal, answer, Ok(finish))),
                None => self.queue(&request, Some(answer), index..next),
            }
        }
        self.queue(&request, None, next..last);
    }

    fn queue(&mut self, request: &Arc<Request>, begun: Option<Answer>, samples: Range<u32>) {
        if !samples.is_empty() {
            self.waiting.push_back((Waiting { request: request.clone(), begun }, samples));
        }
    }

    fn queue_first(&mut self, request: Arc<Request>, begun: Option<Answer>, index: u32) {
        self.waiting.push_front((Waiting { request, begun }, index..index + 1));
    }

    /// Separates samples in use from later ones: new samples get slots after them, never between
    /// them.
    pub fn divide(&mut self) {
        self.borders.push(self.places.len());
    }

    /// Starts a step: forgets the reports of the step before, and moves samples of older parts
    /// together, so that all free slots follow them. `moved(from, to, sample)` moves the engine's
    /// state of a sample.
    pub fn start_step(&mut self, mut moved: impl FnMut(usize, usize, &ActiveSample<State>)) {
        self.sampled.clear();
        self.load = Load::default();
        let mut start = 0;
        for border in &mut self.borders {
            // Fewer places are left if the newest samples were interrupted.
            *border = (*border).min(self.places.len());
            while let Some(hole) = self.places[..*border].iter().position(Option::is_none) {
                *border -= 1;
                if let Some(sample) = self.places[*border].take() {
                    moved(*border, hole, &sample);
                    self.places[hole] = Some(sample);
                }
            }
        }
        // Drops parts without samples.
        self.borders.retain(|border| std::mem::replace(&mut start, *border) < *border);
    }

    /// Admits waiting samples to free slots, in order, each in this state. `room` says how many of so many
    /// samples there is memory for; fewer than those end the admission.
    pub fn admit(&mut self, state: impl Fn(&Request) -> State, mut room: impl FnMut(&Waiting, usize) -> usize) -> Vec<Admission> {
        let mut admitted = Vec::new();
        let mut free = self.limit.saturating_sub(self.active());
        while let Some((waiting, samples)) = self.waiting.front_mut().filter(|_| free > 0) {
            let wanted = samples.len().min(free);
            let now = samples.start..samples.start + room(waiting, wanted).min(wanted) as u32;
            if now.is_empty() {
                break;
            }
            (samples.start, free) = (now.end, if now.len() < wanted { 0 } else { free - wanted });
            let (request, more) = (waiting.clone(), samples.start < samples.end);
            if !more {
                self.waiting.pop_front();
            }
            let slots = now.map(|index| {
                let answer = request.begun.clone().unwrap_or_else(|| Answer::new(index));
                let slot = self.places.iter().position(Option::is_none).unwrap_or(self.places.len());
                self.places.resize_with(self.places.len().max(slot + 1), || None);
                let state = state(&request.request);
                self.places[slot] = Some(ActiveSample { request: request.request.clone(), answer, state });
                slot
            });
            let slots = slots.collect();
            admitted.push(Admission { request, slots, more });
        }
        admitted
    }

    /// Closes gaps with as few moves as there are gaps; `moved` as in [`Slots::start_step`].
    pub fn compact(&mut self, mut moved: impl FnMut(usize, usize, &ActiveSample<State>)) {
        while let Some(hole) = self.places.iter().position(Option::is_none) {
            let last = self.places.pop().flatten();
            if let Some(sample) = last {
                moved(self.places.len(), hole, &sample);
                self.places[hole] = Some(sample);
            }
        }
    }

    /// Orders samples, which have no gaps between them, by `key`. `swapped(one, other)` swaps the engine's
    /// states of two slots.
    #[cfg(feature = "torch")]
    pub fn order_by(&mut self, key: impl Fn(&ActiveSample<State>) -> u64, mut swapped: impl FnMut(usize, usize)) {
        let mut keys: Vec<u64> = self.places.iter().flatten().map(key).collect();
        let mut sorted = keys.clone();
        sorted.sort_unstable();
        for slot in 0..keys.len() {
            // The best goes where this one comes from, so that one swap serves both.
            let here = |other: &usize| keys[*other] == sorted[slot] && keys[*other] != sorted[*other];
            let others = || (slot + 1..keys.len()).filter(here);
            let best =
                (keys[slot] != sorted[slot]).then(|| others().find(|other| sorted[*other] == keys[slot]).or(others().next()));
            if let Some(other) = best.flatten() {
                keys.swap(slot, other);
                self.places.swap(slot, other);
                swapped(slot, other);
            }
        }
    }

    /// Reports the newest token of a slot. If it ended the sample, finishes it and frees the slot.
    pub fn report(&mut self, slot: usize, version: Version, finish: Option<FinishReason>) {
        let Some(ActiveSample { request, answer, .. }) = &self.places[slot] else { return };
        let (Some(&token), Some(&log_prob)) = (answer.tokens.last(), answer.log_probs.last()) else { return };
        let (ordinal, index, status) = (request.ordinal, answer.index, finish.map_or(Status::Pending, Status::from));
        let routes = finish.and(answer.routes.clone());
        self.sampled.push(SampledToken { ordinal, index, token, log_prob, version, status, routes });
        if let Some(finish) = finish
            && let Some(sample) = self.places[slot].take()
        {
            self.finished.push(Finished::new(ordinal, sample.answer, Ok(finish)));
        }
    }

    /// Queues the youngest sample in flight again, with its tokens, before all waiting ones. Returns its slot.
    #[cfg(feature = "torch")]
    pub fn interrupt_youngest(&mut self) -> Option<usize> {
        let age = |sample: &ActiveSample<State>| (sample.request.ordinal, sample.answer.index);
        let (slot, _) = self.iter_from(0).max_by_key(|(_, sample)| age(sample))?;
        let sample = self.places[slot].take()?;
        let index = sample.answer.index;
        self.queue_first(sample.request, Some(sample.answer), index);
        Some(slot)
    }

    /// Queues all samples in flight again, with their tokens, before all waiting ones.
    pub fn interrupt(&mut self) {
        for sample in self.take_out(|_| true) {
            let index = sample.answer.index;
            self.queue_first(sample.request, Some(sample.answer), index);
        }
    }

    /// Clears completions that are `expired`, in flight or waiting, and restarts those in flight
    /// before all that wait. Returns their ordinals and indices.
    pub fn restart_expired(&mut self, expired: impl Fn(u64, &Answer) -> bool) -> Vec<(u64, u32)> {
        let mut restarted = Vec::new();
        for (Waiting { request, begun }, _) in &mut self.waiting {
            restarted
                .extend(begun.take_if(|answer| expired(request.ordinal, answer)).map(|answer| (request.ordinal, answer.index)));
        }
        for sample in self.take_out(|sample| expired(sample.request.ordinal, &sample.answer)) {
            restarted.push((sample.request.ordinal, sample.answer.index));
            self.queue_first(sample.request, None, sample.answer.index);
        }
        restarted
    }

    /// Removes a request's samples, also those that have ended since the newest step.
    pub fn cancel(&mut self, ordinal: u64) {
        self.remove(|request| request.ordinal == ordinal);
        self.finished.retain(|finished| finished.ordinal != ordinal);
    }

    /// Removes the samples of requests that match, in flight or waiting. Returns their ordinals and indices.
    pub fn remove(&mut self, which: impl Fn(&Request) -> bool) -> Vec<(u64, u32)> {
        let out = self.take_out(|sample| which(&sample.request));
        let mut removed: Vec<_> = out.iter().map(|sample| (sample.request.ordinal, sample.answer.index)).collect();
        self.waiting.retain(|(waiting, samples)| {
            let goes = which(&waiting.request);
            if goes {
                removed.extend(samples.clone().map(|index| (waiting.request.ordinal, index)));
            }
            !goes
        });
        removed
    }

    /// Removes samples from their slots, the youngest first.
    fn take_out(&mut self, which: impl Fn(&ActiveSample<State>) -> bool) -> Vec<ActiveSample<State>> {
        let mut out: Vec<_> = self.places.iter_mut().filter_map(|place| place.take_if(|sample| which(sample))).collect();
        out.sort_by_key(|sample| Reverse((sample.request.ordinal, sample.answer.index)));
        out
    }
}

/// Reason for the end of a partial completion, if it has ended. One without room for a token has.
pub fn finish_of(answer: &Answer, max_new_tokens: usize) -> Option<FinishReason> {
    match answer.status {
        Status::Completed => Some(FinishReason::Stop),
        Status::Truncated => Some(FinishReason::Length),
        Status::Pending | Status::Aborted => (answer.turn() >= max_new_tokens).then_some(FinishReason::Length),
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;

    fn group(ordinal: u64, samples: u32) -> Request {
        Request::new(ordinal, [1], samples, Arc::default())
    }

    /// Ordinal, slots and `more` of all that is admitted now.
    fn admit(slots: &mut Slots<u32>) -> Vec<(u64, Vec<usize>, bool)> {
        slots
            .admit(|_| 0, |_, wanted| wanted)
            .into_iter()
            .map(|group| (group.request.request.ordinal, group.slots, group.more))
            .collect()
    }

    fn key(sample: &ActiveSample<u32>) -> (u64, u32) {
        (sample.request.ordinal, sample.answer.index)
    }

    /// Moves a sample's part of an engine's cache.
    fn move_cached(cache: &mut BTreeMap<usize, (u64, u32)>, from: usize, to: usize, sample: &ActiveSample<u32>) {
        assert!(to < from);
        assert_eq!(cache.remove(&from), Some(key(sample)), "another sample is at {from}");
        assert_eq!(cache.insert(to, key(sample)), None, "slot {to} is taken");
    }

    #[test]
    fn a_lower_limit_ends_no_sample_and_a_higher_one_admits_more() {
        let mut slots = Slots::new(4);
        slots.submit(group(7, 6));
        slots.limit_to(3);
        assert_eq!(admit(&mut slots)[0].1, [0, 1, 2]);
        slots.limit_to(1);
        slots.places[1] = None;
        assert!(admit(&mut slots).is_empty());
        slots.compact(|from, to, _| assert_eq!((from, to), (2, 1)));
        assert_eq!((slots.active(), slots.free()), (2, 0));
        slots.limit_to(9);
        assert_eq!(admit(&mut slots)[0].1, [2, 3], "never more than there are");
    }

    #[test]
    fn what_was_interrupted_enters_before_all_that_waits() {
        let mut slots = Slots::new(2);
        slots.submit(group(7, 2));
        admit(&mut slots);
        slots.submit(group(8, 2));
        slots.interrupt();
        assert_eq!(admit(&mut slots), [(7, vec![0], false), (7, vec![1], false)]);
        assert_eq!(slots.queued(), 2);
    }

    #[cfg(feature = "torch")]
    #[test]
    fn samples_of_an_older_part_may_be_interrupted() {
        let mut slots = Slots::new(3);
        slots.submit(group(7, 3));
        admit(&mut slots);
        slots.divide();
        slots.interrupt_youngest();
        slots.compact(|_, _, _| ());
        slots.start_step(|_, _, _| ());
        assert_eq!((slots.active(), slots.queued()), (2, 1));
    }

    proptest! {
        #[test]
        fn every_sample_gets_one_slot_once_and_slots_in_use_have_no_gap(
            count in 1usize..9, groups in prop::collection::vec(1u32..12, 0..12), ends in prop::collection::vec(any::<u64>(), 1..200),
            divides in 1u64..12,
        ) {
            let mut slots = Slots::new(count);
            for (ordinal, &samples) in (0..).zip(&groups) {
                slots.submit(group(ordinal, samples));
            }
            let (mut served, mut part, mut cache) = (Vec::new(), 0u32, BTreeMap::new());
            for bits in ends.iter().cycle().take(2000) {
                // Sometimes samples are separated from those in use.
                if bits % divides == 0 {
                    slots.divide();
                    part += 1;
                }
                let before = slots.active();
                slots.start_step(|from, to, sample| move_cached(&mut cache, from, to, sample));
                prop_assert!(slots.borders.len() <= count, "parts without samples are forgotten");
                for Admission { slots: taken, .. } in slots.admit(|_| part, |_, wanted| wanted) {
                    for slot in taken {
                        let sample = slots.places[slot].as_ref().map(key);
                        cache.extend(sample.map(|sample| (slot, sample)));
                        served.push(sample);
                    }
                }
                prop_assert!(slots.active() == count || slots.queued() == 0, "a slot is idle while a sample waits");
                prop_assert!(slots.active() >= before, "a sample is lost");
                let (gaps, mut moves) = (slots.places.iter().filter(|place| place.is_none()).count(), 0);
                slots.compact(|from, to, sample| {
                    moves += 1;
                    move_cached(&mut cache, from, to, sample);
                });
                prop_assert!(moves <= gaps, "{moves} moves for {gaps} gaps");
                let in_use: BTreeMap<usize, (u64, u32)> = slots.iter_from(0).map(|(slot, sample)| (slot, key(sample))).collect();
                prop_assert_eq!(&cache, &in_use, "the cache was moved otherwise");
                prop_assert!(slots.places.iter().all(Option::is_some), "a gap");
                prop_assert!(slots.iter_from(0).map(|(_, sample)| sample.state).is_sorted(), "the parts are not in order");
                let ending: Vec<usize> = (0..slots.active()).filter(|slot| bits >> slot & 1 == 1).collect();
                for slot in ending {
                    slots.places[slot] = None;
                    cache.remove(&slot);
                }
            }
            let all: Vec<_> = (0..).zip(&groups).flat_map(|(ordinal, &samples)| (0..samples).map(move |index| Some((ordinal, index)))).collect();
            prop_assert!(slots.queued() > 0 || served == all, "samples are served in order, each once");
        }
    }
}
