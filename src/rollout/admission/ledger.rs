//! The ledger: the fate of every prompt and token (law D4), and the partial cache of those in
//! flight (law C1). Pure data.
//!
//! A prompt is open from its entry until its group is trained or dropped. The ledger keeps the
//! completions of open prompts for checkpoints, so that no interruption loses a token or samples
//! one twice.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::data::{Answer, Batch, DroppedSample, POISONED, Partial, Prompt, Sample, SampledToken, Status, Version};

/// Reason for dropping a group whose tokens were too old.
pub const STALE: &str = "stale";

/// Reason for dropping a sample that was cut off before it could be trained.
pub const TRUNCATED: &str = "truncated";

/// Reason for dropping an over-sampled group that no step of its round needed.
pub const SURPLUS: &str = "surplus";

/// Reason for dropping a sample that an engine, an environment, a sandbox or a service lost.
pub const LOST: &str = "lost";

/// Fate of a token, or of a prompt with all its samples. Tokens without a fate are in flight.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Fate {
    /// Trained with a weight above zero.
    Trained,
    /// Trained with a weight of zero.
    Masked,
    /// In a group that a filter dropped.
    Filtered,
    /// Dropped because its weights were too old.
    Stale,
    /// Discarded before training.
    Truncated,
    /// In a group whose reward failed.
    Poisoned,
    /// In an over-sampled group that no step of its round needed.
    Surplus,
    /// In a sample that an engine, an environment, a sandbox or a service lost.
    Lost,
}

impl Fate {
    /// All fates.
    pub const ALL: [Fate; 8] =
        [Fate::Trained, Fate::Masked, Fate::Filtered, Fate::Stale, Fate::Truncated, Fate::Poisoned, Fate::Surplus, Fate::Lost];

    /// Fate by the reason of a drop: `poisoned`, `stale`, `truncated`, `surplus` and `lost` name
    /// theirs, any other reason is a filter's.
    pub fn of_reason(reason: &str) -> Self {
        let named = [Fate::Poisoned, Fate::Stale, Fate::Truncated, Fate::Surplus, Fate::Lost];
        named.into_iter().find(|fate| fate.label() == reason).unwrap_or(Fate::Filtered)
    }

    /// Label in metrics.
    pub fn label(self) -> &'static str {
        match self {
            Fate::Trained => "trained",
            Fate::Masked => "masked",
            Fate::Filtered => "filtered",
            Fate::Stale => STALE,
            Fate::Truncated => TRUNCATED,
            Fate::Poisoned => POISONED,
            Fate::Surplus => SURPLUS,
            Fate::Lost => LOST,
        }
    }
}

/// Groups whose samples hold other tokens than were sampled for them. Found before the batch is
/// trained, so that nothing has changed yet.
#[derive(Clone, Copy, Debug, thiserror::Error, PartialEq, Eq)]
#[error(
    "group {group}: {sampled} tokens were sampled for it, and {found} came to the trainer; a stage between them removed or changed \
     samples. Remove samples with `drop_samples` of `Group` or `Scored`, which counts their tokens by its reason"
)]
pub struct TokensMissing {
    /// The group's id.
    pub group: u64,
    /// Tokens that were sampled for it.
    pub sampled: u64,
    /// Tokens in its samples, those of dropped samples included.
    pub found: u64,
}

/// Prompt whose group is not settled, with its completions.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct OpenGroup {
    /// Prompt without partial completions, which are in `answers` and `states`.
    pub prompt: Prompt,
    /// Newest version when it entered.
    pub entered_under: Version,
    /// Oldest version before that which may sample its tokens.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub claimed: Option<Version>,
    /// Completions by index, with tokens given between turns. Those without a token are missing.
    pub answers: BTreeMap<u32, Answer>,
    /// States that environments of multi-turn rollouts saved, by index, as of the newest given
    /// token.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub states: BTreeMap<u32, Value>,
}

impl OpenGroup {
    /// The prompt with its partial completions, as it re-enters (law D7).
    pub fn reentering(&self) -> Prompt {
        let partial = Partial { completions: self.answers.values().cloned().collect(), environments: self.states.clone() };
        Prompt { partial, ..self.prompt.clone() }
    }

    /// Oldest version that may sample its tokens.
    pub fn oldest(&self) -> Version {
        self.claimed.map_or(self.entered_under, |claimed| claimed.min(self.entered_under))
    }

    fn tokens(&self) -> u64 {
        self.answers.values().map(|answer| answer.versions.generated() as u64).sum()
    }
}

/// Sums over a whole run, resumes included.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Totals {
    /// Admitted prompts.
    pub entered: u64,
    /// Groups by fate.
    pub groups: BTreeMap<Fate, u64>,
    /// Sampled tokens.
    pub generated: u64,
    /// Tokens by fate.
    pub tokens: BTreeMap<Fate, u64>,
    /// Groups without a fate.
    #[serde(skip)]
    pub open_groups: u64,
    /// Tokens without a fate.
    #[serde(skip)]
    pub open_tokens: u64,
}

impl Totals {
    /// Sampled tokens and admitted prompts without a fate that are not open either, negative if
    /// some count twice: `(tokens, prompts)`. The run ends with an error unless both are 0.
    pub fn imbalance(&self) -> (i64, i64) {
        let sum = |fates: &BTreeMap<Fate, u64>| fates.values().sum::<u64>();
        let off = |all: u64, known: u64| all as i64 - known as i64;
        (off(self.generated, sum(&self.tokens) + self.open_tokens), off(self.entered, sum(&self.groups) + self.open_groups))
    }

    /// Returns the sums, or an error with the numbers if they do not agree.
    pub(super) fn balanced(self) -> Result<Totals, String> {
        let (tokens, prompts) = self.imbalance();
        if (tokens, prompts) == (0, 0) {
            return Ok(self);
        }
        Err(format!(
            "the ledger does not balance: {tokens} of {} sampled tokens and {prompts} of {} prompts are accounted for by nothing (a negative \
             number: twice); the step is not saved. Resume from the newest checkpoint; if it happens again, report it with these sums: {self:?}",
            self.generated, self.entered
        ))
    }

    /// Groups that will never be trained.
    pub fn dropped(&self) -> u64 {
        self.groups.iter().filter(|(fate, _)| **fate != Fate::Trained).map(|(_, groups)| groups).sum()
    }
}

/// Ledger of one run. [`Totals`] has its sums.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Ledger {
    next: u64,
    open: BTreeMap<u64, OpenGroup>,
    /// Sums without the open groups.
    #[serde(flatten)]
    settled: Totals,
}

impl Ledger {
    /// Next ordinal to enter; all smaller ones are open or settled.
    pub fn next(&self) -> u64 {
        self.next
    }

    /// Groups that are not settled, oldest first.
    pub fn open(&self) -> impl Iterator<Item = &OpenGroup> {
        self.open.values()
    }

    pub(super) fn open_group(&self, ordinal: u64) -> Option<&OpenGroup> {
        self.open.get(&ordinal)
    }

    pub(super) fn open_group_mut(&mut self, ordinal: u64) -> Option<&mut OpenGroup> {
        self.open.get_mut(&ordinal)
    }

    /// Enters a prompt. One that re-enters after an interruption has an open group, which keeps its
    /// completions. A new one may carry partial completions of another run, whose tokens count as
    /// sampled by this one.
    pub fn enter(&mut self, prompt: &Prompt, version: Version) {
        self.next = self.next.max(prompt.ordinal + 1);
        if self.open.contains_key(&prompt.ordinal) {
            return;
        }
        let mut prompt = prompt.clone();
        let Partial { completions, environments: states } = std::mem::take(&mut prompt.partial);
        let answers = completions.into_iter().map(|answer| (answer.index, answer)).collect();
        let group = OpenGroup { prompt, entered_under: version, claimed: None, answers, states };
        self.settled.entered += 1;
        self.settled.generated += group.tokens();
        self.open.insert(group.prompt.ordinal, group);
    }

    /// Newest version when an open group's prompt entered for the first time.
    pub fn entered_under(&self, ordinal: u64) -> Option<Version> {
        self.open.get(&ordinal).map(|group| group.entered_under)
    }

    /// Number of groups that are trained before this one, in the order of entry: trained and open
    /// ones.
    pub fn before(&self, ordinal: u64) -> u64 {
        self.settled.groups.get(&Fate::Trained).copied().unwrap_or(0) + self.open.range(..ordinal).count() as u64
    }

    /// Number of groups that were settled without training.
    pub fn dropped(&self) -> u64 {
        self.settled.dropped()
    }

    /// Records a sampled token of a completion, and the end of the completion if it is the last.
    pub fn sampled(&mut self, sampled: SampledToken) {
        let SampledToken { ordinal, index, token, log_prob, version, status, routes } = sampled;
        let Some(group) = self.open.get_mut(&ordinal) else { return };
        let answer = group.answers.entry(index).or_insert_with(|| Answer::new(index));
        answer.push(token, log_prob, version);
        if status != Status::Pending {
            answer.status = status;
            answer.routes = routes;
        }
        self.settled.generated += 1;
    }

    /// Records tokens that were given to a completion before its next turn, and the state that the
    /// environment of a rollout, by its index, saved then.
    pub(crate) fn given(&mut self, ordinal: u64, index: u32, tokens: &[u32], saved: Option<(u32, Value)>) {
        let Some(group) = self.open.get_mut(&ordinal) else { return };
        group.answers.entry(index).or_insert_with(|| Answer::new(index)).give(tokens);
        group.states.extend(saved);
    }

    /// Discards a completion that is restarted. Returns the number of its sampled tokens.
    pub fn discard(&mut self, ordinal: u64, index: u32) -> u64 {
        let answer = self.open.get_mut(&ordinal).and_then(|group| {
            group.states.remove(&index);
            group.answers.remove(&index)
        });
        let tokens = answer.map_or(0, |answer| answer.versions.generated() as u64);
        self.count(Fate::Truncated, tokens);
        tokens
    }

    /// Verifies that the batch's groups hold every token that was sampled for them. Groups without
    /// recorded tokens pass.
    pub fn verify(&self, batch: &Batch) -> Result<(), TokensMissing> {
        let kept = batch.groups.iter().map(|group| (group.id(), group.generated(), &group.dropped));
        let dropped = batch.dropped.iter().map(|dropped| (dropped.id, dropped.generated(), &dropped.samples));
        for (group, generated, before) in kept.chain(dropped) {
            let Some(open) = self.open.get(&group).filter(|open| !open.answers.is_empty()) else { continue };
            let found = (generated + before.iter().map(|sample| sample.generated).sum::<usize>()) as u64;
            if found != open.tokens() {
                return Err(TokensMissing { group, sampled: open.tokens(), found });
            }
        }
        Ok(())
    }

    /// Settles the groups of a trained batch, and those that were dropped while it was collected.
    pub fn settle(&mut self, batch: &Batch) {
        for group in &batch.groups {
            let generated = group.generated() as u64;
            let trained = group.samples.iter().map(Sample::learned).sum::<usize>() as u64;
            let tokens = [(Fate::Trained, trained), (Fate::Masked, generated - trained)];
            self.close(group.id(), Fate::Trained, &tokens, &group.dropped);
        }
        for dropped in &batch.dropped {
            let fate = Fate::of_reason(&dropped.reason);
            self.close(dropped.id, fate, &[(fate, dropped.generated() as u64)], &dropped.samples);
        }
    }

    /// Present sums.
    pub fn totals(&self) -> Totals {
        Totals {
            open_groups: self.open.len() as u64,
            open_tokens: self.open.values().map(OpenGroup::tokens).sum(),
            ..self.settled.clone()
        }
    }

    /// Settles an open group. `tokens` counts its samples' tokens by fate; `dropped` has the
    /// samples that left it before.
    fn close(&mut self, id: u64, fate: Fate, tokens: &[(Fate, u64)], dropped: &[DroppedSample]) {
        let Some(group) = self.open.remove(&id) else { return };
        let before = dropped.iter().map(|sample| (Fate::of_reason(&sample.reason), sample.generated as u64));
        let tokens: Vec<(Fate, u64)> = tokens.iter().copied().chain(before).collect();
        if group.answers.is_empty() {
            // The generator does not record tokens.
            self.settled.generated += tokens.iter().map(|(_, tokens)| tokens).sum::<u64>();
        }
        *self.settled.groups.entry(fate).or_default() += 1;
        for (fate, tokens) in tokens {
            self.count(fate, tokens);
        }
    }

    fn count(&mut self, fate: Fate, tokens: u64) {
        if tokens > 0 {
            *self.settled.tokens.entry(fate).or_default() += tokens;
        }
    }
}
