//! What became of every prompt and every token (law D4), and what is still under way: the partial cache (law C1). Pure data.
//!
//! A prompt is open from its entry until its group was trained or dropped for good; its answers are kept with it, finished or not, so that
//! whatever interrupts the run, no token is sampled twice and none is lost.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::data::{Answer, Batch, Dropped, POISONED, Prompt, Sample, Status, Version};

/// Why a group was dropped whose tokens were too old.
pub const STALE: &str = "stale";

/// How a token, or a prompt with all its samples, ended. Tokens that have no fate yet are in flight.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Fate {
    /// Learned from.
    Trained,
    /// In a trained sample, with a weight of zero.
    Masked,
    /// In a group that a filter dropped.
    Filtered,
    /// Dropped because the weights that made it were too old.
    Stale,
    /// Cut away before anything was learned from it.
    Truncated,
    /// In a group whose reward failed.
    Poisoned,
}

impl Fate {
    /// All of them.
    pub const ALL: [Fate; 6] = [Fate::Trained, Fate::Masked, Fate::Filtered, Fate::Stale, Fate::Truncated, Fate::Poisoned];

    /// Of a dropped group, by the reason.
    pub fn of(dropped: &Dropped) -> Self {
        match dropped.reason.as_str() {
            POISONED => Fate::Poisoned,
            STALE => Fate::Stale,
            _ => Fate::Filtered,
        }
    }

    /// Its label in metrics.
    pub fn label(self) -> &'static str {
        match self {
            Fate::Trained => "trained",
            Fate::Masked => "masked",
            Fate::Filtered => "filtered",
            Fate::Stale => "stale",
            Fate::Truncated => "truncated",
            Fate::Poisoned => "poisoned",
        }
    }
}

/// A prompt whose group is not settled, and what was sampled for it.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct OpenGroup {
    /// What was asked.
    pub prompt: Prompt,
    /// The newest version when it entered: none of its tokens is older.
    pub entered_under: Version,
    /// What was sampled, and given between turns, by index; answers that have not begun are missing.
    pub answers: BTreeMap<u32, Answer>,
    /// What environments saved of rollouts with several turns, by index, as of the newest given token.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub states: BTreeMap<u32, Value>,
}

impl OpenGroup {
    fn tokens(&self) -> u64 {
        self.answers.values().map(|answer| answer.versions.generated() as u64).sum()
    }
}

/// Sums over a whole run, resumes included.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Totals {
    /// Prompts that entered.
    pub entered: u64,
    /// Groups by how they ended.
    pub groups: BTreeMap<Fate, u64>,
    /// Tokens that were sampled.
    pub generated: u64,
    /// Tokens by how they ended.
    pub tokens: BTreeMap<Fate, u64>,
    /// Groups that have no fate yet.
    pub open_groups: u64,
    /// Tokens that have no fate yet.
    pub open_tokens: u64,
}

impl Totals {
    /// Sampled tokens and entered prompts that are accounted for by nobody, or twice: `(tokens, prompts)`, both 0 unless the engine is
    /// broken.
    pub fn imbalance(&self) -> (i64, i64) {
        let sum = |fates: &BTreeMap<Fate, u64>| fates.values().sum::<u64>();
        let off = |all: u64, known: u64| all as i64 - known as i64;
        (off(self.generated, sum(&self.tokens) + self.open_tokens), off(self.entered, sum(&self.groups) + self.open_groups))
    }

    /// Groups that will never be trained.
    pub fn dropped(&self) -> u64 {
        untrained(&self.groups)
    }
}

fn untrained(groups: &BTreeMap<Fate, u64>) -> u64 {
    groups.iter().filter(|(fate, _)| **fate != Fate::Trained).map(|(_, groups)| groups).sum()
}

/// The book of one run. See [`Totals`] for its sums.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Ledger {
    next: u64,
    entered: u64,
    open: BTreeMap<u64, OpenGroup>,
    groups: BTreeMap<Fate, u64>,
    generated: u64,
    tokens: BTreeMap<Fate, u64>,
}

impl Ledger {
    /// The ordinal that enters next; all smaller ones are open or settled.
    pub fn next(&self) -> u64 {
        self.next
    }

    /// What entered and is not settled, oldest first.
    pub fn open(&self) -> impl Iterator<Item = &OpenGroup> {
        self.open.values()
    }

    /// A prompt enters, or enters again after an interruption, and then keeps what it has.
    pub fn enter(&mut self, prompt: &Prompt, version: Version) {
        self.next = self.next.max(prompt.ordinal + 1);
        self.open.entry(prompt.ordinal).or_insert_with(|| {
            self.entered += 1;
            OpenGroup { prompt: prompt.clone(), entered_under: version, ..OpenGroup::default() }
        });
    }

    /// The newest version when an open group's prompt entered for the first time.
    pub fn entered_under(&self, ordinal: u64) -> Option<Version> {
        self.open.get(&ordinal).map(|group| group.entered_under)
    }

    /// What is there of a group's answers already.
    pub fn answers(&self, ordinal: u64) -> Vec<Answer> {
        self.open.get(&ordinal).map(|group| group.answers.values().cloned().collect()).unwrap_or_default()
    }

    /// Groups that are trained before this one, if groups are trained in the order of their entry: those that were, and those that are open.
    pub fn before(&self, ordinal: u64) -> u64 {
        self.groups.get(&Fate::Trained).copied().unwrap_or(0) + self.open.range(..ordinal).count() as u64
    }

    /// Groups that were settled without being trained.
    pub fn dropped(&self) -> u64 {
        untrained(&self.groups)
    }

    /// One more token of an answer.
    pub fn sampled(&mut self, ordinal: u64, index: u32, token: u32, log_prob: f32, version: Version) {
        if let Some(group) = self.open.get_mut(&ordinal) {
            group.answers.entry(index).or_insert_with(|| Answer::new(index)).push(token, log_prob, version);
            self.generated += 1;
        }
    }

    /// More tokens of an answer that nobody sampled: its next turn follows.
    pub fn given(&mut self, ordinal: u64, index: u32, tokens: &[u32]) {
        if let Some(group) = self.open.get_mut(&ordinal) {
            group.answers.entry(index).or_insert_with(|| Answer::new(index)).give(tokens);
        }
    }

    /// What a rollout's environment saved of it.
    pub fn state(&self, ordinal: u64, index: u32) -> Option<Value> {
        self.open.get(&ordinal).and_then(|group| group.states.get(&index)).cloned()
    }

    /// Keeps that.
    pub fn remember(&mut self, ordinal: u64, index: u32, state: Value) {
        if let Some(group) = self.open.get_mut(&ordinal) {
            group.states.insert(index, state);
        }
    }

    /// An answer has ended.
    pub fn ended(&mut self, ordinal: u64, index: u32, status: Status) {
        if let Some(answer) = self.open.get_mut(&ordinal).and_then(|group| group.answers.get_mut(&index)) {
            answer.status = status;
        }
    }

    /// Forgets an answer, to begin it anew. Tells how many tokens that cost.
    pub fn discard(&mut self, ordinal: u64, index: u32) -> u64 {
        let answer = self.open.get_mut(&ordinal).and_then(|group| {
            group.states.remove(&index);
            group.answers.remove(&index)
        });
        let tokens = answer.map_or(0, |answer| answer.versions.generated() as u64);
        self.count(Fate::Truncated, tokens);
        tokens
    }

    /// A batch was trained: the groups in it, and those that were dropped while it was collected, are settled.
    pub fn settle(&mut self, batch: &Batch) {
        for group in &batch.groups {
            let generated = group.generated() as u64;
            let trained = group.samples.iter().map(Sample::learned).sum::<usize>() as u64;
            self.close(group.id(), generated, Fate::Trained, &[(Fate::Trained, trained), (Fate::Masked, generated - trained)]);
        }
        for dropped in &batch.dropped {
            let (fate, generated) = (Fate::of(dropped), dropped.generated() as u64);
            self.close(dropped.id, generated, fate, &[(fate, generated)]);
        }
    }

    /// The sums as of now.
    pub fn totals(&self) -> Totals {
        Totals {
            entered: self.entered,
            groups: self.groups.clone(),
            generated: self.generated,
            tokens: self.tokens.clone(),
            open_groups: self.open.len() as u64,
            open_tokens: self.open.values().map(OpenGroup::tokens).sum(),
        }
    }

    fn close(&mut self, id: u64, generated: u64, fate: Fate, tokens: &[(Fate, u64)]) {
        let Some(group) = self.open.remove(&id) else { return };
        if group.answers.is_empty() {
            // Its generator reports whole groups only.
            self.generated += generated;
        }
        *self.groups.entry(fate).or_default() += 1;
        for &(fate, tokens) in tokens {
            self.count(fate, tokens);
        }
    }

    fn count(&mut self, fate: Fate, tokens: u64) {
        if tokens > 0 {
            *self.tokens.entry(fate).or_default() += tokens;
        }
    }
}
