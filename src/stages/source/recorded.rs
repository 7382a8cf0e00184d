//! Recorded groups, for training without a generator.

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;

use serde_json::Value;

use super::Supervised;
use super::supervised::{Draw, Size};
use crate::algo::filters::{GroupFilter, Verdict};
use crate::data::source::{DataSet, DataSpec, Mixture, Recorded, Share, Skips};
use crate::data::{BufferState, DataError, Group, Prompt, PromptText, RewardParts, Sample, Tokenizer};
use crate::flow::StageError;
use crate::observe::{Metric, Metrics};

/// Recorded rollouts by group, in a new random order for every pass. Memory holds their positions
/// and changed rewards, not their contents.
pub struct RecordedGroups {
    data: DataSet<Recorded>,
    tokenizer: Arc<Tokenizer>,
    asked: Box<Asked>,
    /// Records of each trained group, ordered by their first record.
    groups: Vec<Vec<u32>>,
    mixture: Mixture,
    seed: u64,
    /// Rewards of the groups whose samples have other rewards than the recorded ones.
    rewards: HashMap<usize, Rewards>,
    /// Groups that a filter rejects, or that could not be scored.
    rejected: Skips,
    /// Numbers of trained rollouts, and of those with log-probabilities.
    rollouts: (usize, usize),
}

/// Format of the prompts that are tokenised here.
type Asked = dyn Fn(PromptText) -> PromptText + Send + Sync;

type Rewards = Vec<(Option<f64>, RewardParts)>;

fn rewards_of(group: &Group) -> Rewards {
    group.samples.iter().map(|sample| (sample.reward, sample.reward_parts.clone())).collect()
}

impl RecordedGroups {
    /// Reads all rollouts once. Invalid rollouts and groups that `filter` rejects are skipped and
    /// counted. Records without a group form one with those of the same prompt and file.
    ///
    /// `asked` formats prompts without recorded tokens; without a format it is `|prompt| prompt`.
    ///
    /// `score` returns a group with new rewards, or the reason to skip it; without new rewards it is
    /// `|group| Ok(Ok(group))`. A group is scored once, before it is filtered.
    pub fn open(
        spec: &DataSpec,
        tokenizer: &Arc<Tokenizer>,
        asked: impl Fn(PromptText) -> PromptText + Send + Sync + 'static,
        score: impl Fn(Group) -> Result<Result<Group, String>, StageError>,
        filter: &impl GroupFilter,
        seed: u64,
    ) -> Result<Self, StageError> {
        let usable = |recorded: &Recorded| recorded.sample(tokenizer, &asked).map(drop);
        let data = DataSet::<Recorded>::open_if(spec, usable)?;
        let mut places: HashMap<(usize, Result<Value, String>), usize> = HashMap::new();
        let mut all: Vec<Vec<u32>> = Vec::new();
        for (at, recorded) in data.iter().enumerate() {
            let recorded = recorded?;
            let prompt = || serde_json::to_string(&recorded.prompt).unwrap_or_default();
            let at = u32::try_from(at).map_err(|_| DataError::Unusable("more than 4 billion rollouts".to_owned()))?;
            let place = places.entry((data.file_of(at as usize), recorded.group.ok_or_else(prompt))).or_insert_with(|| {
                all.push(Vec::new());
                all.len() - 1
            });
            all[*place].push(at);
        }
        let (mut groups, mut rewards, mut rejected, mut rollouts) = (Vec::new(), HashMap::new(), Skips::default(), (0, 0));
        for records in all {
            let (group, with_log_probs) = read(&data, tokenizer, &asked, &records)?;
            let recorded = rewards_of(&group);
            let verdict = match score(group)? {
                Err(skip) => Err(skip),
                Ok(group) => match filter(&group) {
                    Verdict::Keep => Ok(group),
                    Verdict::Drop(reason) => Err(reason.into_owned()),
                },
            };
            match verdict {
                Ok(group) => {
                    let scored = rewards_of(&group);
                    if scored != recorded {
                        rewards.insert(groups.len(), scored);
                    }
                    rollouts = (rollouts.0 + records.len(), rollouts.1 + with_log_probs);
                    groups.push(records);
                }
                Err(reason) => rejected.count(reason),
            }
        }
        if groups.is_empty() {
            let name = spec.name();
            return Err(
                DataError::Unusable(format!("{name}: the filter rejects all groups: {rejected}; change [[filter]]")).into()
            );
        }
        let mixture = Mixture::new(&[(groups.len(), Share::Repeat(1))], seed, true)?;
        let (tokenizer, asked) = (tokenizer.clone(), Box::new(asked));
        Ok(RecordedGroups { data, tokenizer, asked, groups, mixture, seed, rewards, rejected, rollouts })
    }

    /// Number of trained groups.
    #[expect(clippy::len_without_is_empty, reason = "it cannot be empty")]
    pub fn len(&self) -> usize {
        self.groups.len()
    }

    /// Identity of the data and its order, for checkpoints.
    pub fn state(&self) -> BufferState {
        let fingerprint = format!("recorded-{:016x}", self.data.fingerprint());
        BufferState { fingerprint, len: self.len(), seed: self.seed, shuffled: true, next: 0 }
    }

    /// Returns a source of `batches` batches of `size` groups.
    pub fn batches(self, size: usize, batches: u64) -> Result<Supervised, DataError> {
        Supervised::drawing("offline RL", Box::new(self), Size::Groups(size), batches)
    }
}

/// Reads a group. Also returns the number of its rollouts with log-probabilities.
fn read(data: &DataSet<Recorded>, tokenizer: &Tokenizer, asked: &Asked, records: &[u32]) -> Result<(Group, usize), StageError> {
    let mut with_log_probs = 0;
    let mut places: Vec<(u32, u32)> = Vec::with_capacity(records.len());
    let mut samples: Vec<Sample> = Vec::with_capacity(records.len());
    for &at in records {
        let recorded = data.get(at as usize)?;
        with_log_probs += usize::from(recorded.has_log_probs());
        places.extend(recorded.place());
        samples.push(recorded.sample(tokenizer, asked).map_err(|skip| StageError::new(format!("a rollout {skip}")))?);
    }
    place(&mut samples, &places);
    let source = data.name().to_owned();
    Ok((Group { prompt: Arc::new(Prompt { source, ..Prompt::default() }), samples, ..Group::default() }, with_log_probs))
}

/// Orders samples by their positions, so that the parts of a rollout are adjacent. If positions are
/// missing or inconsistent (two runs in one file), each record is its own rollout.
fn place(samples: &mut [Sample], places: &[(u32, u32)]) {
    let all: BTreeSet<(u32, u32)> = places.iter().copied().collect();
    let recorded = places.len() == samples.len() && all.len() == samples.len();
    for (at, sample) in samples.iter_mut().enumerate() {
        (sample.index, sample.part) = if recorded { places[at] } else { (at as u32, 0) };
    }
    samples.sort_by_key(|sample| (sample.index, sample.part));
    // A skipped record leaves no gap: the first record of a rollout is its part 0.
    for parts in samples.chunk_by_mut(|one, next| one.index == next.index) {
        parts.iter_mut().zip(0..).for_each(|(sample, part)| sample.part = part);
    }
}

impl Draw for RecordedGroups {
    fn draw(&mut self, number: u64) -> Result<Group, StageError> {
        let place = self.mixture.draw(number);
        let (mut group, _) = read(&self.data, &self.tokenizer, &*self.asked, &self.groups[place.record])?;
        if let Some(rewards) = self.rewards.get(&place.record) {
            for (sample, (reward, parts)) in group.samples.iter_mut().zip(rewards) {
                (sample.reward, sample.reward_parts) = (*reward, parts.clone());
            }
        }
        let prompt = Prompt { epoch: place.epoch, ..Prompt::clone(&group.prompt) };
        Ok(Group { prompt: Arc::new(prompt), ..group })
    }

    fn len(&self) -> usize {
        self.groups.len()
    }

    fn announce(&self, metrics: Option<&Metrics>) {
        let (all, with_log_probs) = self.rollouts;
        let (skipped, rejected) = (self.data.skips(), &self.rejected);
        tracing::info!("  Rollouts: {all} in {} groups", self.groups.len());
        if skipped.total() > 0 {
            tracing::info!("  Rollouts left out: {skipped}");
        }
        if rejected.total() > 0 {
            tracing::info!("  Groups left out: {rejected}");
        }
        match all - with_log_probs {
            0 => tracing::info!("  Behaviour log-probabilities: as recorded"),
            missing => tracing::info!(
                "  Behaviour log-probabilities: recorded for {with_log_probs} rollouts; for {missing} the trainer's own, at the step that learns from them"
            ),
        }
        let Some(metrics) = metrics else { return };
        metrics.set(Metric::DataRecords, &[self.data.name()], all as f64);
        for (reason, count) in skipped.iter().chain(rejected.iter()) {
            metrics.set(Metric::DataSkipped, &[self.data.name(), reason], count as f64);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn changed_rewards_replace_the_recorded_ones_and_no_others_stay_in_memory() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("rollouts.jsonl");
        let lines = [("1+2=", 1.0), ("2+2=", 0.0)]
            .map(|(prompt, reward)| serde_json::json!({ "prompt": prompt, "response": "3", "reward": reward }).to_string());
        std::fs::write(&path, lines.join("\n")).unwrap();
        let tokenizer = Arc::new(Tokenizer::characters("0123456789+=", 16).unwrap());
        let keep = |_: &Group| Verdict::Keep;
        let opened = |wrong: f64| {
            let score = move |mut group: Group| {
                let change = |sample: &mut Sample| sample.reward = sample.reward.filter(|reward| *reward > 0.0).or(Some(wrong));
                group.samples.iter_mut().for_each(change);
                Ok(Ok(group))
            };
            RecordedGroups::open(&DataSpec::new(&path), &tokenizer, |prompt| prompt, score, &keep, 0).unwrap()
        };
        let rewards = |groups: &mut RecordedGroups| -> Vec<f64> {
            let mut rewards: Vec<f64> = (0..2).map(|number| groups.draw(number).unwrap().samples[0].reward.unwrap()).collect();
            rewards.sort_by(f64::total_cmp);
            rewards
        };
        let (mut same, mut other) = (opened(0.0), opened(-0.5));
        assert_eq!((same.rewards.len(), rewards(&mut same)), (0, vec![0.0, 1.0]));
        assert_eq!((other.rewards.len(), rewards(&mut other)), (1, vec![-0.5, 1.0]));
    }

    #[test]
    fn a_group_is_named_by_a_number_or_a_text() {
        let file = tempfile::NamedTempFile::with_suffix(".jsonl").unwrap();
        let record =
            |group| serde_json::json!({"prompt": "1+2=", "response": "3", "reward": 1, "group": group}).to_string() + "\n";
        let groups = ["\"5e0c\"", "7", "\"5e0c\"", "\"7\""].map(|group| record(serde_json::from_str::<Value>(group).unwrap()));
        std::fs::write(file.path(), groups.concat()).unwrap();
        let tokenizer = Arc::new(Tokenizer::characters("0123456789+=", 16).unwrap());
        let keep = |_: &Group| Verdict::Keep;
        let spec = DataSpec::new(file.path());
        let opened = RecordedGroups::open(&spec, &tokenizer, |prompt| prompt, |group| Ok(Ok(group)), &keep, 0).unwrap();
        assert_eq!(opened.groups, [vec![0, 2], vec![1], vec![3]]);
    }

    #[test]
    fn parts_of_a_rollout_stand_together_and_records_without_places_are_rollouts() {
        let placed = |places: &[(u32, u32)], records: usize| -> Vec<(f64, u32, u32)> {
            let record = |at: usize| Sample { reward: Some(at as f64), ..Sample::default() };
            let mut samples: Vec<Sample> = (0..records).map(record).collect();
            place(&mut samples, places);
            samples.iter().map(|sample| (sample.reward.unwrap(), sample.index, sample.part)).collect()
        };
        assert_eq!(placed(&[(2, 1), (0, 0), (2, 0)], 3), [(1.0, 0, 0), (2.0, 2, 0), (0.0, 2, 1)]);
        assert_eq!(placed(&[(0, 0), (1, 1)], 2), [(0.0, 0, 0), (1.0, 1, 0)], "one that was left out leaves no gap");
        assert_eq!(placed(&[(0, 0), (0, 0)], 2), [(0.0, 0, 0), (1.0, 1, 0)], "two runs in one file");
        assert_eq!(placed(&[(3, 0)], 2), [(0.0, 0, 0), (1.0, 1, 0)], "some without a place");
    }
}
