//! Curriculum: which prompts of the stream are taken, by the pass rates of their earlier groups.
//!
//! Each choice is a pure function of the seed, the number in the stream and the pass rates as of the
//! newest publish. Position and pass rates are saved with the ledger, so that a resumed run chooses
//! the same prompts (law C2). A synchronous run is repeatable to the bit, because groups that are
//! settled within a version count from the next version on (law V3).
//!
//! Memory: one small record and up to one index entry per prompt that was seen. Cost: O(log seen) per
//! prompt and group, and O(1) per prompt that is skipped. If no prompt can be taken, one look at an
//! epoch per publish.

mod rule;

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};

pub use rule::{CurriculumRule, Prefer, SourceShare};

use crate::data::Batch;
use crate::data::shuffle::Draws;
use crate::data::source::Place;
use crate::observe::Metric;

/// Keeps these draws apart from all others of the run's seed.
const ACCEPT: u64 = 0x6375_7272_6963_756c;
const REPLAY: u64 = 0x7265_706c_6179_6564;

/// Ranges of pass rates by which prompts are counted: none, five ranges of a fifth, all, and retired
/// prompts.
pub const RANGES: [&str; 8] = ["0", "0-20", "20-40", "40-60", "60-80", "80-100", "100", "retired"];

/// Position and pass rates: the part of a checkpoint that a curriculum needs.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct CurriculumState {
    /// Next number of the stream.
    next: u64,
    /// Pass over the data of the newest prompt.
    epoch: u64,
    /// Steps whose groups count.
    step: u64,
    /// Pass rates by record.
    seen: BTreeMap<u64, Seen>,
    /// Records of open groups, by ordinal.
    open: BTreeMap<u64, u64>,
    /// Pass rates since the newest publish, and the number of their steps.
    fresh: Vec<(u64, f64)>,
    fresh_steps: u64,
    /// Prompts that were skipped, and hard ones that were repeated.
    skipped: u64,
    replayed: u64,
    /// If true, no prompt of an epoch could be taken under the pass rates of the newest publish.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    exhausted: bool,
}

/// Pass rate of a record.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
struct Seen {
    rate: f64,
    /// Newest groups in a row without a failure.
    passed: u64,
    /// Step whose groups count since.
    step: u64,
}

/// Counts of a curriculum after a step.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Census {
    /// Seen prompts by range of their pass rate, as in [`RANGES`].
    pub ranges: [u64; RANGES.len()],
    /// Prompts of the stream that were skipped so far.
    pub skipped: u64,
    /// Prompts that repeated a hard one so far.
    pub replayed: u64,
}

impl Census {
    /// Entries of the step's row, by name.
    pub(crate) fn row(&self) -> impl Iterator<Item = (String, f64)> {
        let ranges = RANGES.iter().zip(self.ranges).map(|(range, prompts)| (Census::key(range), prompts));
        let counts = [(Metric::CurriculumSkipped, self.skipped), (Metric::CurriculumReplayed, self.replayed)];
        let counts = counts.map(|(metric, prompts)| (metric.key().to_owned(), prompts));
        ranges.chain(counts).map(|(key, prompts)| (key, prompts as f64))
    }

    /// Name of a range's entry.
    pub(crate) fn key(range: &str) -> String {
        format!("{}_{}", Metric::CurriculumPrompts.key(), range.replace('-', "_"))
    }
}

/// A rule with its state.
#[derive(Clone, Debug)]
pub struct Curriculum {
    rule: CurriculumRule,
    seed: u64,
    /// Numbers of the stream in an epoch: as many may be skipped in a row.
    epoch: u64,
    /// For each data set, its changing share.
    shares: Vec<Option<SourceShare>>,
    state: CurriculumState,
    /// Hard prompts by the step that saw them, and counts: derived from the state.
    hard: BTreeSet<(u64, u64)>,
    ranges: [u64; RANGES.len()],
}

impl Curriculum {
    /// Makes a curriculum over data sets with these names, with `epoch` numbers an epoch.
    ///
    /// # Errors
    /// Returns the name of a share whose data set does not exist.
    pub(crate) fn new(rule: CurriculumRule, seed: u64, names: &[&str], epoch: usize) -> Result<Self, String> {
        if let Some(unknown) = rule.source.iter().find(|share| !names.contains(&share.name.as_str())) {
            return Err(unknown.name.clone());
        }
        let shares = names.iter().map(|name| rule.source.iter().rfind(|share| share.name == *name).cloned()).collect();
        let (state, hard) = (CurriculumState::default(), BTreeSet::new());
        Ok(Curriculum { rule, seed, epoch: epoch.max(1) as u64, shares, state, hard, ranges: Default::default() })
    }

    /// Continues from a saved state.
    pub(crate) fn resume(&mut self, state: CurriculumState) {
        self.state = state;
        (self.hard, self.ranges) = (BTreeSet::new(), Default::default());
        for (record, seen) in self.state.seen.clone() {
            self.count(record, seen);
        }
    }

    /// Begins at this number of the stream, without pass rates.
    pub(crate) fn begin_at(&mut self, next: u64) {
        self.resume(CurriculumState { next, ..CurriculumState::default() });
    }

    /// The state, for a checkpoint.
    pub(crate) fn state(&self) -> &CurriculumState {
        &self.state
    }

    /// Chooses the record of the prompt with this ordinal. `at` is the stream without a curriculum.
    pub(crate) fn choose(&mut self, ordinal: u64, mut at: impl FnMut(u64) -> Place) -> Place {
        let place = self.replayed(ordinal).unwrap_or_else(|| {
            let number = self.accept(&mut at);
            self.state.skipped += number - self.state.next;
            self.state.next = number + 1;
            let place = at(number);
            self.state.epoch = place.epoch;
            place
        });
        self.state.open.insert(ordinal, place.key());
        place
    }

    /// Returns the next number of the stream that is taken. After an epoch of skipped prompts that is the
    /// next one, whatever its pass rate. If none of them can be taken, none is skipped until the next
    /// publish.
    fn accept(&mut self, at: &mut impl FnMut(u64) -> Place) -> u64 {
        let (first, mut possible) = (self.state.next, false);
        if self.state.exhausted {
            return first;
        }
        let largest = self.shares.iter().map(|share| self.share(share.as_ref())).fold(0.0, f64::max);
        for number in first..first + self.epoch {
            let place = at(number);
            let share = self.shares.get(place.set).map_or(1.0, |share| self.share(share.as_ref()) / largest);
            let probability = share * self.probability(place.key());
            if probability >= 1.0 || uniform(self.seed ^ ACCEPT, number) < probability {
                return number;
            }
            possible |= probability > 0.0;
        }
        self.state.exhausted = !possible;
        if possible { first + self.epoch } else { first }
    }

    /// Takes in the groups of a trained step, which count from the next publish on.
    pub(crate) fn settle(&mut self, batch: &Batch) {
        let mut groups: Vec<(u64, Option<f64>)> = Vec::new();
        let passes = |rewards: &mut dyn Iterator<Item = f64>| {
            let (passed, all) =
                rewards.fold((0, 0), |(passed, all), reward| (passed + u64::from(reward >= self.rule.success), all + 1));
            (all > 0).then(|| passed as f64 / all as f64)
        };
        for group in &batch.groups {
            let kept = group.rollouts().filter_map(|sample| sample.reward);
            let dropped = group.dropped.iter().filter_map(|sample| sample.reward);
            groups.push((group.id(), passes(&mut kept.chain(dropped))));
        }
        for dropped in &batch.dropped {
            let before = dropped.samples.iter().filter_map(|sample| sample.reward);
            groups.push((dropped.id, passes(&mut dropped.rewards.iter().copied().chain(before))));
        }
        groups.sort_by_key(|(ordinal, _)| *ordinal);
        for (ordinal, rate) in groups {
            let record = self.state.open.remove(&ordinal);
            self.state.fresh.extend(record.zip(rate));
        }
        self.state.fresh_steps += 1;
    }

    /// Counts what was settled before this publish.
    pub(crate) fn published(&mut self) {
        self.state.exhausted = false;
        self.state.step += std::mem::take(&mut self.state.fresh_steps);
        for (record, rate) in std::mem::take(&mut self.state.fresh) {
            let before = self.known(record);
            let decay = self.rule.decay;
            let seen = Seen {
                rate: before.map_or(rate, |before| decay * before.rate + (1.0 - decay) * rate),
                passed: if rate >= 1.0 { before.map_or(0, |before| before.passed) + 1 } else { 0 },
                step: self.state.step,
            };
            if let Some(old) = self.state.seen.insert(record, seen) {
                self.ranges[self.range(old)] -= 1;
                self.hard.remove(&(old.step, record));
            }
            self.count(record, seen);
        }
    }

    /// Counts of prompts by pass rate.
    pub(crate) fn census(&self) -> Census {
        Census { ranges: self.ranges, skipped: self.state.skipped, replayed: self.state.replayed }
    }

    fn count(&mut self, record: u64, seen: Seen) {
        self.ranges[self.range(seen)] += 1;
        if seen.rate < self.rule.band[0] {
            self.hard.insert((seen.step, record));
        }
    }

    fn range(&self, seen: Seen) -> usize {
        match seen.rate {
            _ if self.retires(seen) => RANGES.len() - 1,
            rate if rate <= 0.0 => 0,
            rate if rate >= 1.0 => RANGES.len() - 2,
            rate => 1 + ((rate * 5.0) as usize).min(4),
        }
    }

    fn retires(&self, seen: Seen) -> bool {
        self.rule.retire_after > 0 && seen.passed >= self.rule.retire_after
    }

    /// Pass rate of a record, unless it is forgotten.
    fn known(&self, record: u64) -> Option<Seen> {
        let forgotten = |seen: &Seen| self.rule.forget_after > 0 && self.state.step - seen.step >= self.rule.forget_after;
        self.state.seen.get(&record).copied().filter(|seen| !forgotten(seen))
    }

    /// Probability that a record is taken when its turn comes.
    fn probability(&self, record: u64) -> f64 {
        let Some(seen) = self.known(record) else { return 1.0 };
        let [low, high] = self.rule.band;
        match (seen.rate, self.rule.prefer) {
            _ if self.retires(seen) => 0.0,
            (rate, _) if rate < low => self.rule.hard,
            (rate, _) if rate > high => self.rule.easy,
            (_, Prefer::Band) => 1.0,
            (rate, Prefer::Learnability) => 4.0 * rate * (1.0 - rate),
        }
    }

    /// Factor of a data set's share in the step that is trained next.
    fn share(&self, share: Option<&SourceShare>) -> f64 {
        share.map_or(1.0, |share| share.at(self.state.step + 1))
    }

    /// The hard record that was unseen for longest, if this prompt repeats one.
    fn replayed(&mut self, ordinal: u64) -> Option<Place> {
        if self.rule.replay == 0.0 || uniform(self.seed ^ REPLAY, ordinal) >= self.rule.replay {
            return None;
        }
        let open: BTreeSet<u64> = self.state.open.values().copied().collect();
        let (_, record) = *self.hard.iter().find(|(_, record)| !open.contains(record))?;
        self.state.replayed += 1;
        Some(Place::of_key(record, self.state.epoch))
    }
}

/// Uniform from 0 to 1, a pure function of seed and number.
fn uniform(seed: u64, number: u64) -> f64 {
    const FINE: u64 = 1 << 53;
    Draws::new(seed, number).below(FINE) as f64 / FINE as f64
}

#[cfg(test)]
mod tests;
