//! Limit of samples per engine by measured throughput: pure, with the clock as an argument.
//!
//! Samples beyond an engine's capacity only wait in its queue and get staler. So a full engine is
//! measured, and its limit follows the knee of its throughput ([`Concurrency`]).

use std::time::{Duration, Instant};

use crate::engine::Concurrency;

/// Duration of one measurement.
const WHILE: Duration = Duration::from_millis(100);

/// Full measurements before the limit is first lowered.
const FIRST: usize = 20;

/// Measured throughput of one engine.
#[derive(Clone, Debug)]
pub(super) struct Throughput {
    most: usize,
    /// Number of measurements with all room in use.
    full: usize,
    /// Present after the first full measurements.
    concurrency: Option<Concurrency>,
    /// Start of the current measurement, and its tokens.
    since: Option<Instant>,
    tokens: usize,
}

impl Throughput {
    /// Starts with a limit of `most` samples.
    pub(super) fn new(most: usize) -> Self {
        Throughput { most, full: 0, concurrency: None, since: None, tokens: 0 }
    }

    /// Most samples at a time.
    pub(super) fn slots(&self) -> usize {
        self.concurrency.as_ref().map_or(self.most, Concurrency::slots)
    }

    /// Records new tokens.
    pub(super) fn made(&mut self, tokens: usize) {
        self.tokens += tokens;
    }

    /// Records the load after dispatch; `next` more samples wait to start together.
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

    /// Final limit of an engine that computes `capacity` samples at a time.
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
