//! How many samples one engine is given at a time, by what it makes of them. Pure, with the clock as an argument.
//!
//! A server that is given more than it computes at a time lets the others wait in its queue, where they get older and nothing is gained: tokens a
//! second stay, and the time of each sample grows in proportion. So an engine whose room is all in use is measured, and gets fewer where fewer make
//! as much ([`Concurrency`]), and more again where more make more.

use std::time::{Duration, Instant};

use crate::engine::Concurrency;

/// One measurement: long enough to hold many tokens.
const WHILE: Duration = Duration::from_millis(100);

/// Measurements with all room in use before any of it is taken away: what is over sooner needs no care.
const FIRST: usize = 20;

/// What is known of one engine's throughput.
#[derive(Clone, Debug)]
pub(super) struct Throughput {
    most: usize,
    /// Measurements with all room in use.
    full: usize,
    /// After the first of them.
    concurrency: Option<Concurrency>,
    /// When this measurement began, and how many tokens came since.
    since: Option<Instant>,
    tokens: usize,
}

impl Throughput {
    /// Of an engine that never gets more than `most` samples at a time.
    pub(super) fn new(most: usize) -> Self {
        Throughput { most, full: 0, concurrency: None, since: None, tokens: 0 }
    }

    /// Samples that it may have at a time.
    pub(super) fn slots(&self) -> usize {
        self.concurrency.as_ref().map_or(self.most, Concurrency::slots)
    }

    /// It made tokens.
    pub(super) fn made(&mut self, tokens: usize) {
        self.tokens += tokens;
    }

    /// It was given what there is, and has so many samples now; `next` more wait to be begun together.
    pub(super) fn look(&mut self, in_use: usize, next: usize, now: Instant) {
        let slots = self.slots();
        let full = (slots.saturating_sub(next.max(1)) + 1..=slots).contains(&in_use);
        let Some(begun) = self.since.filter(|_| full) else {
            (self.since, self.tokens) = (full.then_some(now), 0);
            return;
        };
        let passed = now.saturating_duration_since(begun);
        if passed < WHILE {
            return;
        }
        let tokens = std::mem::take(&mut self.tokens);
        self.since = Some(now);
        self.full += usize::from(tokens > 0);
        match &mut self.concurrency {
            Some(concurrency) => drop(concurrency.step(slots, tokens, passed.as_secs_f64())),
            None if self.full >= FIRST => self.concurrency = Some(Concurrency::below(self.most)),
            None => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The number that an engine gets in the end which computes `capacity` at a time, if so many samples are there.
    fn settled(most: usize, capacity: usize, there: usize, group: usize) -> usize {
        let (mut throughput, mut now) = (Throughput::new(most), Instant::now());
        for _ in 0..6000 {
            let in_use = there.min(throughput.slots() / group * group);
            throughput.look(in_use, if in_use < there { group } else { 0 }, now);
            throughput.made(in_use.min(capacity));
            now += Duration::from_millis(50);
        }
        throughput.slots()
    }

    #[test]
    fn an_engine_gets_about_as_many_as_it_computes_at_a_time() {
        for group in [1, 5] {
            let slots = settled(256, 64, 1000, group);
            assert!((50..=100).contains(&slots), "{slots} for an engine that computes 64, in groups of {group}");
        }
        assert!(settled(256, 1000, 1000, 1) > 180, "one that computes all of them keeps most of them, and tries more");
    }

    #[test]
    fn an_engine_that_is_never_full_keeps_its_room() {
        assert_eq!(settled(256, 16, 100, 1), 256);
    }
}
