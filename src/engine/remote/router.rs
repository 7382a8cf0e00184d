//! Choice of an engine for each sample, and limits of samples per engine: pure, with the clock as
//! an argument.
//!
//! Samples of a group go to one engine while it has room, because it has prefilled their prompt. Turns of a
//! conversation, of which the engines see no group, meet again by rendezvous hashing with bounded loads: an
//! engine's name and the prompt draw a number, and the engine with the largest is preferred while it has at
//! most a quarter more than its share. An engine that joins or leaves changes the preference of those
//! conversations alone that prefer it. Others go to the engine that has the least of its share.
//!
//! The share of an engine is in proportion to its limit and its speed, the tokens a second of a
//! sample there, so that a slow engine gets less.
//!
//! The limit is adapted as a window of TCP is. A busy engine (429) loses a quarter of it and is left
//! alone for as long as it asks for; one that sends nothing for long begins again with one sample.
//! Each finished sample raises it: by one up to half of the limit before, then by one a round. A
//! paused engine (503) keeps its limit. Samples beyond an engine's capacity only wait in its queue and
//! get staler, so a full engine is measured, and its limit follows the knee of its throughput
//! ([`Concurrency`]).

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use tokio::task::AbortHandle;

use crate::engine::Concurrency;
use crate::net::backoff;
use crate::util::rng::mix;

/// Longest pause between two attempts at a sample.
const LONGEST_PAUSE: Duration = Duration::from_secs(10);

/// First pause after an engine reports that it is busy or paused.
const FIRST: Duration = Duration::from_millis(100);

/// Duration of one measurement of the throughput.
const WHILE: Duration = Duration::from_millis(100);

/// Share of its samples that a preferred engine may have, 1 being the share of its limit and speed.
const PREFERENCE: f64 = 1.25;

/// Tokens over which an engine's speed is averaged.
const TOKENS: f64 = 512.0;

/// Smallest speed of an engine, relative to the fastest: a slow one gets samples, to be measured.
const SLOWEST: f64 = 0.1;

/// Shortest time without a token after which an engine's health is checked.
const SILENCE: Duration = Duration::from_millis(500);

/// Time without a token after which an engine's health is checked, in longest waits of late.
const GAPS: u32 = 4;

/// Factor by which the longest wait for a token shrinks with each later one.
const SHRINK: f64 = 0.98;

/// Full measurements before the limit is first lowered.
const MEASUREMENTS: usize = 20;

/// Load and limit of one engine.
#[derive(Clone, Debug, Default)]
pub(super) struct EngineSlot {
    /// Hash of the engine's name.
    name: u64,
    most: usize,
    /// Samples at a time below which the engine does not report that it is busy.
    limit: f64,
    /// Limit up to which each finished sample raises it by one.
    threshold: f64,
    /// Recent tokens and the seconds that samples waited for them; older ones count less.
    pace: (f64, f64),
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
    /// Rejections and silences since the last token.
    refusals: u32,
    /// Time of the newest token.
    last_token: Option<Instant>,
    /// Time of the newest sample that found the engine idle, and of the newest health check.
    idle_until: Option<Instant>,
    checked: Option<Instant>,
    /// Longest wait for a token of late.
    gap: Duration,
    /// Failures since the last token.
    pub(super) failures: u32,
    /// Refutations that were processed.
    pub(super) refuted: u64,
    /// If true, it got work at the last look at its state, and when its weights were verified by then.
    serves: bool,
    verified: Option<Instant>,
    /// Health check of a lost engine.
    pub(super) look: Option<AbortHandle>,
}

impl EngineSlot {
    pub(super) fn new(most: usize, name: &str) -> Self {
        let most = most.max(1);
        let name = name.bytes().fold(0, |hash, byte| mix(hash ^ u64::from(byte)));
        EngineSlot { name, most, limit: most as f64, ..EngineSlot::default() }
    }

    pub(super) fn limit(&self) -> usize {
        (self.limit as usize).min(self.room()).clamp(1, self.most)
    }

    /// Most samples at a time by the throughput.
    fn room(&self) -> usize {
        self.knee.as_ref().map_or(self.most, Concurrency::slots)
    }

    pub(super) fn has_room(&self, count: usize, now: Instant) -> bool {
        self.in_flight + count <= self.limit() && self.closed_until.is_none_or(|until| until <= now)
    }

    /// Tokens a second of a sample, if any came.
    fn speed(&self) -> Option<f64> {
        let (tokens, seconds) = self.pace;
        (tokens > 0.0 && seconds > 0.0).then(|| tokens / seconds)
    }

    /// Records a sample that begins.
    pub(super) fn begins(&mut self, now: Instant) {
        if self.in_flight == 0 {
            self.idle_until = Some(now);
        }
        self.in_flight += 1;
    }

    /// Returns true if its samples have waited for a token for much longer than they do usually, and
    /// its health was not checked meanwhile.
    pub(super) fn is_suspect(&self, now: Instant) -> bool {
        self.is_silent_since(self.checked, SILENCE.max(GAPS * self.gap), now)
    }

    /// Records a check of its health.
    pub(super) fn checked(&mut self, now: Instant) {
        self.checked = Some(now);
    }

    /// Returns true if it has samples and sends nothing.
    pub(super) fn is_silent(&self, now: Instant) -> bool {
        self.is_silent_since(None, SILENCE, now)
    }

    /// Returns true if it has samples and sent no token for this time after `at`.
    fn is_silent_since(&self, at: Option<Instant>, time: Duration, now: Instant) -> bool {
        let since = self.idle_until.max(self.last_token).max(at);
        self.in_flight > 0 && since.is_some_and(|since| now.saturating_duration_since(since) > time)
    }

    /// Records tokens of a sample that `waited` for them.
    pub(super) fn works(&mut self, tokens: usize, waited: Duration, now: Instant) {
        let since = self.idle_until.max(self.last_token).unwrap_or(now);
        self.gap = now.saturating_duration_since(since).max(self.gap.mul_f64(SHRINK));
        (self.refusals, self.failures, self.last_token) = (0, 0, Some(now));
        self.tokens += tokens;
        let keep = (-(tokens as f64) / TOKENS).exp();
        self.pace = (keep * self.pace.0 + tokens as f64, keep * self.pace.1 + waited.as_secs_f64());
    }

    /// Returns true if a token came within this time.
    pub(super) fn spoke(&self, within: Duration, now: Instant) -> bool {
        self.last_token.is_some_and(|last| now.saturating_duration_since(last) < within)
    }

    /// Returns true unless its samples have waited in vain for a token for the time `after`.
    pub(super) fn answers(&self, after: Duration, now: Instant) -> bool {
        self.in_flight == 0 || self.spoke(after, now)
    }

    /// Records that a sample waited in vain for a token for the time `after`, and went elsewhere. If
    /// no other sample got one, the engine begins again with one sample after a while.
    pub(super) fn silent(&mut self, place: usize, after: Duration, now: Instant) {
        let closed = self.closed_until.is_some_and(|until| until > now);
        if closed || self.spoke(after, now) {
            return;
        }
        self.threshold = if self.limit > 1.0 { self.limit / 2.0 } else { self.threshold };
        self.limit = 1.0;
        self.close(place, Duration::ZERO, now);
    }

    /// Leaves the engine alone for `least`, and longer with each time since its last token.
    fn close(&mut self, place: usize, least: Duration, now: Instant) {
        self.refusals = self.refusals.saturating_add(1);
        let until = now + pause(FIRST, place as u64, self.refusals.min(4)).max(least);
        self.closed_until = self.closed_until.max(Some(until));
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
        let more = if self.limit < self.threshold { 1.0 } else { 1.0 / self.limit };
        self.limit = (self.limit + more).min(self.most as f64);
    }

    /// Allows samples again if, since the last call, the engine serves again or its weights were verified.
    /// Returns true if so.
    pub(super) fn reopen(&mut self, serves: bool, verified: Option<Instant>) -> bool {
        let again = serves && !self.serves || verified > self.verified;
        (self.serves, self.verified) = (serves, verified);
        if again {
            (self.closed_until, self.refusals) = (None, 0);
        }
        again
    }

    /// Time for which the engine gets no samples.
    pub(super) fn closed_for(&self, now: Instant) -> Option<Duration> {
        self.closed_until.map(|until| until.saturating_duration_since(now)).filter(|left| !left.is_zero())
    }

    /// Records a rejected sample.
    pub(super) fn busy(&mut self, place: usize, status: u16, retry_after: Option<Duration>, now: Instant) {
        // Samples that were sent together are rejected together, and count once.
        if status == 429 && self.closed_until.is_none_or(|until| until <= now) {
            self.limit = (0.75 * self.limit).max(1.0);
        }
        self.close(place, retry_after.unwrap_or_default(), now);
    }
}

/// Pause before retry `nth` of sample `key`, from 1.
pub(super) fn pause(first: Duration, key: u64, nth: u32) -> Duration {
    backoff(first, LONGEST_PAUSE, key, nth)
}

/// Returns an engine with room for `count` samples of the prompt `ordinal`, among those that
/// `serves`: `home` first, then the preferred one, then the one with the least of its share.
pub(super) fn choose(
    engine_slots: &BTreeMap<usize, EngineSlot>,
    home: Option<usize>,
    ordinal: u64,
    count: usize,
    serves: impl Fn(usize) -> bool,
    now: Instant,
) -> Option<usize> {
    let has_room = |place: usize, slot: &EngineSlot| slot.has_room(count, now) && serves(place);
    if let Some(home) = home.filter(|home| engine_slots.get(home).is_some_and(|slot| has_room(*home, slot))) {
        return Some(home);
    }
    let serving = || engine_slots.iter().filter(|(place, _)| serves(**place)).map(|(_, slot)| slot);
    let fastest = serving().filter_map(EngineSlot::speed).fold(0.0, f64::max);
    // An engine without a token yet is taken for a fast one.
    let weight = |slot: &EngineSlot| slot.limit() as f64 * slot.speed().map_or(1.0, |speed| (speed / fastest).max(SLOWEST));
    let of_share = |slot: &EngineSlot| (slot.in_flight + count) as f64 / weight(slot);
    let open = || engine_slots.iter().filter(|(place, slot)| has_room(**place, slot));
    let preferred = open().max_by_key(|(_, slot)| mix(slot.name ^ mix(ordinal)))?;
    let all: usize = serving().map(|slot| slot.in_flight).sum();
    let fair = (all + count) as f64 / serving().map(weight).sum::<f64>() * weight(preferred.1);
    if (preferred.1.in_flight + count) as f64 <= (PREFERENCE * fair).ceil().max(count as f64) {
        return Some(*preferred.0);
    }
    open().min_by(|(_, a), (_, b)| of_share(a).total_cmp(&of_share(b))).map(|(place, _)| *place)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn slots(limits: &[usize]) -> BTreeMap<usize, EngineSlot> {
        limits.iter().enumerate().map(|(place, most)| (place, EngineSlot::new(*most, &format!("engine {place}")))).collect()
    }

    /// Prompt of these tests.
    const ORDINAL: u64 = 1;

    #[test]
    fn a_group_stays_together_while_there_is_room_and_others_go_where_the_least_is_taken() {
        let now = Instant::now();
        let mut engine_slots = slots(&[4, 4, 8]);
        for (place, in_flight) in [(0, 3), (1, 1), (2, 1)] {
            engine_slots.get_mut(&place).unwrap().in_flight = in_flight;
        }
        let of = |engine_slots: &_, home, count, serves: &dyn Fn(usize) -> bool| {
            choose(engine_slots, home, ORDINAL, count, serves, now)
        };
        assert_eq!(of(&engine_slots, Some(0), 1, &|_| true), Some(0));
        assert_eq!(of(&engine_slots, None, 1, &|place| place != 1), Some(2), "an eighth of its room is taken");
        assert_eq!(of(&engine_slots, Some(0), 2, &|place| place < 2), Some(1), "where all of them have room");
        assert_eq!(of(&engine_slots, None, 8, &|_| true), None);
        assert_eq!(of(&engine_slots, Some(0), 1, &|place| place == 1), Some(1), "who does not serve gets nothing");
        engine_slots.get_mut(&0).unwrap().in_flight = 4;
        assert_eq!(of(&engine_slots, Some(0), 1, &|place| place != 1), Some(2), "rather elsewhere than not at all");
        assert_eq!(of(&engine_slots, None, 1, &|_| false), None);
    }

    #[test]
    fn turns_of_a_prompt_meet_again_and_an_engine_that_joins_moves_few_prompts() {
        let now = Instant::now();
        let homes = |engine_slots: &BTreeMap<usize, EngineSlot>| -> Vec<Option<usize>> {
            (0..900).map(|ordinal| choose(engine_slots, None, ordinal, 1, |_| true, now)).collect()
        };
        let (three, four) = (slots(&[64; 3]), slots(&[64; 4]));
        let (before, after) = (homes(&three), homes(&four));
        for place in 0..3 {
            let share = before.iter().filter(|home| **home == Some(place)).count();
            assert!((240..360).contains(&share), "{share} of 900 prefer engine {place}");
        }
        let moved = before.iter().zip(&after).filter(|(before, after)| before != after);
        assert!(moved.clone().all(|(_, after)| *after == Some(3)), "only to the new one");
        assert!((170..280).contains(&moved.count()));
        // Not to an engine that is much fuller than another.
        let mut full = slots(&[64; 3]);
        let preferred = before[0].unwrap();
        full.get_mut(&preferred).unwrap().in_flight = 32;
        assert_ne!(choose(&full, None, 0, 1, |_| true, now), Some(preferred));
    }

    #[test]
    fn a_busy_engine_gets_fewer_and_more_again_and_a_paused_one_is_left_alone() {
        let now = Instant::now();
        let mut slot = EngineSlot::new(64, "");
        for _ in 0..3 {
            slot.busy(0, 429, None, now);
        }
        assert_eq!(slot.limit(), 48, "turned away together, counted once");
        let later = now + Duration::from_secs(1);
        assert_eq!((slot.has_room(1, now), slot.has_room(1, later)), (false, true));
        for _ in 0..2000 {
            slot.ended();
        }
        assert_eq!(slot.limit(), 64);
        let mut paused = EngineSlot::new(8, "");
        paused.busy(0, 503, Some(Duration::from_secs(7)), now);
        assert_eq!(paused.limit(), 8);
        let after = |seconds| paused.has_room(1, now + Duration::from_secs(seconds));
        assert_eq!((after(6), after(7)), (false, true), "as long as it asked for");
    }

    #[test]
    fn a_slow_engine_gets_a_smaller_share_and_an_unmeasured_one_a_full_share() {
        let mut now = Instant::now();
        let mut engine_slots = slots(&[64; 3]);
        // Milliseconds of a token there.
        let pace = BTreeMap::from([(0, 10), (1, 20), (2, 10_000)]);
        for _ in 0..200 {
            for (place, slot) in &mut engine_slots {
                slot.works(8, Duration::from_millis(8 * pace[place]), now);
            }
            now += Duration::from_millis(10);
        }
        engine_slots.insert(3, EngineSlot::new(64, "engine 3"));
        for ordinal in 0..93 {
            let place = choose(&engine_slots, None, ordinal, 1, |_| true, now).unwrap();
            engine_slots.get_mut(&place).unwrap().in_flight += 1;
        }
        let shares: Vec<usize> = engine_slots.values().map(|slot| slot.in_flight).collect();
        for (share, expected) in shares.iter().zip([1.0, 0.5, 0.1, 1.0].map(|weight| 93.0 * weight / 2.6)) {
            let most = (PREFERENCE * expected).ceil() as usize;
            assert!((1..=most).contains(share) && *share as f64 >= 0.5 * expected, "{shares:?}");
        }
    }

    #[test]
    fn a_silent_engine_begins_again_with_one_sample_and_is_soon_where_it_was() {
        let (mut slot, begun, after) = (EngineSlot::new(64, ""), Instant::now(), Duration::from_secs(3));
        slot.works(1, Duration::ZERO, begun);
        slot.silent(0, after, begun + Duration::from_secs(2));
        assert_eq!(slot.limit(), 64, "another sample got a token");
        let later = begun + Duration::from_secs(4);
        // Its samples go elsewhere together.
        (0..64).for_each(|_| slot.silent(0, after, later));
        assert_eq!((slot.limit(), slot.has_room(1, later)), (1, false));
        let later = later + LONGEST_PAUSE;
        assert!(slot.has_room(1, later) && !slot.has_room(2, later));
        slot.silent(0, after, later);
        assert_eq!(slot.limit(), 1);
        (0..31).for_each(|_| slot.ended());
        assert_eq!(slot.limit(), 32, "half of what it was, after as many samples");
        slot.ended();
        assert_eq!(slot.limit(), 32, "then slowly");
    }

    #[test]
    fn an_engine_is_checked_once_it_sends_nothing_for_much_longer_than_usual_and_not_again_soon() {
        let (mut slot, begun) = (EngineSlot::new(8, ""), Instant::now());
        let after = |millis| begun + Duration::from_millis(millis);
        assert!(!slot.is_suspect(after(9999)), "without samples nothing is due");
        slot.begins(begun);
        assert!(!slot.is_suspect(after(400)) && slot.is_suspect(after(600)));
        slot.works(1, Duration::ZERO, after(1000));
        assert!(!slot.is_suspect(after(4900)) && slot.is_suspect(after(5100)), "it took a second before");
        assert!(!slot.is_silent(after(1400)) && slot.is_silent(after(1600)));
        slot.checked(after(5100));
        assert!(!slot.is_suspect(after(9000)) && slot.is_suspect(after(9200)));
        (0..400).for_each(|_| slot.works(1, Duration::ZERO, after(9300)));
        assert!(slot.is_suspect(after(9900)), "waits of long ago do not count");
    }

    /// Final limit of an engine that computes `capacity` samples at a time.
    fn settled(most: usize, capacity: usize, there: usize, group: usize) -> usize {
        let (mut slot, mut now) = (EngineSlot::new(most, ""), Instant::now());
        for _ in 0..6000 {
            slot.in_flight = there.min(slot.limit() / group * group);
            slot.measure(if slot.in_flight < there { group } else { 0 }, now);
            slot.works(slot.in_flight.min(capacity), Duration::from_millis(50), now);
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
