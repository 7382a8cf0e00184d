//! Choice of an engine for each sample, and limits of samples per engine: pure, with the clock as
//! an argument.
//!
//! Samples of a group go to one engine while it has room, because it has prefilled their prompt.
//! Others go to the engine with the largest free share. A busy engine (429) loses a quarter of its
//! limit and regains it slowly with successes. A paused engine (503) keeps its limit and is left
//! alone for a while. Samples beyond an engine's capacity only wait in its queue and get staler, so
//! a full engine is measured, and its limit follows the knee of its throughput ([`Concurrency`]).

use std::time::{Duration, Instant};

use tokio::task::AbortHandle;

use crate::engine::Concurrency;
use crate::net::backoff;

/// Longest pause between two attempts at a sample.
const LONGEST_PAUSE: Duration = Duration::from_secs(10);

/// First pause after an engine reports that it is busy or paused.
const FIRST: Duration = Duration::from_millis(100);

/// Duration of one measurement of the throughput.
const WHILE: Duration = Duration::from_millis(100);

/// Full measurements before the limit is first lowered.
const MEASUREMENTS: usize = 20;

/// Load and limit of one engine.
#[derive(Clone, Debug, Default)]
pub(super) struct EngineSlot {
    most: usize,
    /// Samples at a time below which the engine does not report that it is busy.
    limit: f64,
    /// Limit by throughput, after the first full measurements.
    knee: Option<Concurrency>,
    /// Number of measurements with all room in use.
    full: usize,
    /// Start of the current measurement, and its tokens.
    since: Option<Instant>,
    tokens: usize,
    /// Samples at work there, counted before each dispatch.
    pub(super) in_flight: usize,
    /// Time before which the engine gets no samples.
    closed_until: Option<Instant>,
    /// Rejections since the last token.
    refusals: u32,
    /// Failures since the last token.
    pub(super) failures: u32,
    /// Refutations that were processed.
    pub(super) refuted: u64,
    /// Health check of a lost engine.
    pub(super) look: Option<AbortHandle>,
}

impl EngineSlot {
    pub(super) fn new(most: usize) -> Self {
        let most = most.max(1);
        EngineSlot { most, limit: most as f64, ..EngineSlot::default() }
    }

    pub(super) fn limit(&self) -> usize {
        (self.limit as usize).min(self.room()).clamp(1, self.most)
    }

    /// Most samples at a time by the throughput.
    fn room(&self) -> usize {
        self.knee.as_ref().map_or(self.most, Concurrency::slots)
    }

    fn has_room(&self, count: usize, now: Instant) -> bool {
        self.in_flight + count <= self.limit() && self.closed_until.is_none_or(|until| until <= now)
    }

    pub(super) fn works(&mut self, tokens: usize) {
        (self.refusals, self.failures) = (0, 0);
        self.tokens += tokens;
    }

    /// Measures the throughput after dispatch; `next` more samples wait to start together.
    pub(super) fn measure(&mut self, next: usize, now: Instant) {
        let room = self.room();
        let full = (room.saturating_sub(next.max(1)) + 1..=room).contains(&self.in_flight);
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
        match &mut self.knee {
            Some(knee) => drop(knee.step(room, tokens, passed.as_secs_f64())),
            None if self.full >= MEASUREMENTS => self.knee = Some(Concurrency::below(self.most)),
            None => {}
        }
    }

    /// Records a finished sample.
    pub(super) fn ended(&mut self) {
        self.limit = (self.limit + 1.0 / self.limit).min(self.most as f64);
    }

    /// Allows samples again.
    pub(super) fn reopen(&mut self) {
        (self.closed_until, self.refusals) = (None, 0);
    }

    /// Records a rejected sample.
    pub(super) fn busy(&mut self, place: usize, status: u16, retry_after: Option<Duration>, now: Instant) {
        // Samples that were sent together are rejected together, and count once.
        if status == 429 && self.closed_until.is_none_or(|until| until <= now) {
            self.limit = (0.75 * self.limit).max(1.0);
        }
        self.refusals = self.refusals.saturating_add(1);
        let until = now + pause(FIRST, place as u64, self.refusals.min(4)).max(retry_after.unwrap_or_default());
        self.closed_until = self.closed_until.max(Some(until));
    }
}

/// Pause before retry `nth` of sample `key`, from 1.
pub(super) fn pause(first: Duration, key: u64, nth: u32) -> Duration {
    backoff(first, LONGEST_PAUSE, key, nth)
}

/// Returns an engine with room for `count` samples of a group, preferably `home`, among those that
/// `serves`.
pub(super) fn choose(
    engine_slots: &[EngineSlot],
    home: Option<usize>,
    count: usize,
    serves: impl Fn(usize) -> bool,
    now: Instant,
) -> Option<usize> {
    let has_room = |place: &usize| engine_slots.get(*place).is_some_and(|slot| slot.has_room(count, now)) && serves(*place);
    home.filter(has_room).or_else(|| {
        let taken = |place: &usize| engine_slots[*place].in_flight as f64 / engine_slots[*place].limit() as f64;
        (0..engine_slots.len()).filter(has_room).min_by(|a, b| taken(a).total_cmp(&taken(b)))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_group_stays_together_while_there_is_room_and_others_go_where_the_least_is_taken() {
        let now = Instant::now();
        let mut engine_slots = vec![EngineSlot::new(4), EngineSlot::new(4), EngineSlot::new(8)];
        (engine_slots[0].in_flight, engine_slots[1].in_flight, engine_slots[2].in_flight) = (3, 1, 1);
        assert_eq!(choose(&engine_slots, Some(0), 1, |_| true, now), Some(0));
        assert_eq!(choose(&engine_slots, None, 1, |_| true, now), Some(2), "an eighth of its room is taken");
        assert_eq!(choose(&engine_slots, Some(0), 2, |place| place < 2, now), Some(1), "where all of them have room");
        assert_eq!(choose(&engine_slots, None, 8, |_| true, now), None);
        assert_eq!(choose(&engine_slots, Some(0), 1, |place| place == 1, now), Some(1), "who does not serve gets nothing");
        engine_slots[0].in_flight = 4;
        assert_eq!(choose(&engine_slots, Some(0), 1, |_| true, now), Some(2), "rather elsewhere than not at all");
        assert_eq!(choose(&engine_slots, None, 1, |_| false, now), None);
    }

    #[test]
    fn a_busy_engine_gets_fewer_and_more_again_and_a_paused_one_is_left_alone() {
        let now = Instant::now();
        let mut slot = EngineSlot::new(64);
        for _ in 0..3 {
            slot.busy(0, 429, None, now);
        }
        assert_eq!(slot.limit(), 48, "turned away together, counted once");
        assert_eq!(choose(&[slot.clone()], Some(0), 1, |_| true, now), None);
        assert_eq!(choose(&[slot.clone()], None, 1, |_| true, now + Duration::from_secs(1)), Some(0));
        for _ in 0..2000 {
            slot.ended();
        }
        assert_eq!(slot.limit(), 64);
        let mut paused = EngineSlot::new(8);
        paused.busy(0, 503, Some(Duration::from_secs(7)), now);
        assert_eq!(paused.limit(), 8);
        assert_eq!(choose(&[paused.clone()], None, 1, |_| true, now + Duration::from_secs(6)), None, "as long as it asked for");
        assert_eq!(choose(&[paused], None, 1, |_| true, now + Duration::from_secs(7)), Some(0));
    }

    /// Final limit of an engine that computes `capacity` samples at a time.
    fn settled(most: usize, capacity: usize, there: usize, group: usize) -> usize {
        let (mut slot, mut now) = (EngineSlot::new(most), Instant::now());
        for _ in 0..6000 {
            slot.in_flight = there.min(slot.limit() / group * group);
            slot.measure(if slot.in_flight < there { group } else { 0 }, now);
            slot.works(slot.in_flight.min(capacity));
            now += Duration::from_millis(50);
        }
        slot.limit()
    }

    #[test]
    fn an_engine_gets_about_as_many_as_it_computes_at_a_time() {
        for group in [1, 5] {
            let slots = settled(256, 64, 1000, group);
            assert!((50..=100).contains(&slots), "{slots} for an engine that computes 64, in groups of {group}");
        }
        assert!(settled(256, 1000, 1000, 1) > 180, "one that computes all of them keeps most of them, and tries more");
        assert_eq!(settled(256, 16, 100, 1), 256, "one that is never full keeps its room");
    }
}
