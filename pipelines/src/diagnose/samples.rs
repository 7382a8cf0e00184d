//! Checks of the newest recorded samples.

use std::collections::{HashSet, VecDeque};
use std::path::Path;

use anyhow::Result;
use rollflow::data::Status;
use rollflow::observe::logs::Rollout;

use super::curves::is_solved;
use super::{Check, Evidence};
use crate::run::growing::GrowingLines;

/// Newest groups that are read: the batch of a usual step, or two.
const NEWEST: usize = 64;
/// Bytes at the end of `rollouts.jsonl` in which they are searched for.
const BYTES: u64 = 256 << 20;

/// Fewest samples, and fewest groups, that give a share.
const SAMPLES: usize = 16;
const GROUPS: usize = 8;

/// Share of completions that the length limit cuts off. Their reward says little about them, and a
/// quarter of them biases the policy towards short completions.
const TRUNCATED: f64 = 0.25;

/// Share of groups with equal rewards. Their advantages are 0: above it, a step learns from less
/// than a quarter of its groups.
const NO_SPREAD: f64 = 0.75;

/// Share of groups of which half the completions repeat another one nearly.
const REPEATED: f64 = 0.25;

/// Fewest tokens of a completion that should not be repeated. Short answers and single calls of
/// tools are equal if they are right.
const LONG: usize = 100;

/// Tokens of a shingle, and the share of common shingles from which on two completions are
/// near-duplicates.
const SHINGLE: usize = 3;
const ALIKE: f64 = 0.9;

/// Recorded samples of a prompt.
#[derive(Clone, Debug, Default)]
pub(super) struct Group {
    /// Optimizer step and id.
    key: (u64, u64),
    rewards: Vec<f64>,
    truncated: usize,
    /// Sampled tokens of each sample.
    completions: Vec<Vec<u32>>,
}

/// Reads the newest groups of `rollouts.jsonl`; none without the file. Lines that a crash tore are
/// skipped.
pub(super) fn newest(path: &Path) -> Result<Vec<Group>> {
    let mut groups = VecDeque::<Group>::new();
    GrowingLines::of_end(path, BYTES).each_new(|line| {
        let Ok(rollout) = serde_json::from_slice::<Rollout>(line.bytes) else { return Ok(()) };
        let key = (rollout.step, rollout.group);
        if groups.back().is_none_or(|group| group.key != key) {
            groups.push_back(Group { key, ..Group::default() });
            groups.drain(..groups.len().saturating_sub(NEWEST));
        }
        if let Some(group) = groups.back_mut() {
            let sampled = rollout.tokens.iter().zip(rollout.versions.per_token()).filter(|(_, version)| version.is_some());
            group.completions.push(sampled.map(|(token, _)| *token).collect());
            group.truncated += usize::from(rollout.status == Status::Truncated);
            // The parts of a rollout share one reward.
            group.rewards.extend(rollout.reward.filter(|_| rollout.part == 0));
        }
        Ok(())
    })?;
    Ok(groups.into())
}

pub(super) const CHECKS: &[Check] = &[
    Check {
        name: "truncated_completions",
        find: truncated,
        advice: "raise generate.max_new_tokens, or reward shorter completions",
    },
    Check {
        name: "no_spread",
        find: no_spread,
        advice: "use prompts of another difficulty ([curriculum]), a finer reward, a larger generate.group_size or a higher \
                 generate.temperature; [[filter]] replaces such groups",
    },
    Check {
        name: "near_duplicates",
        find: near_duplicates,
        advice: "raise generate.temperature towards 1, or keep the entropy: train.entropy_coef, a lower train.lr",
    },
];

fn truncated(run: &Evidence) -> Option<String> {
    let samples: usize = run.groups.iter().map(|group| group.completions.len()).sum();
    let truncated: usize = run.groups.iter().map(|group| group.truncated).sum();
    let share = truncated as f64 / samples as f64;
    (samples >= SAMPLES && share > TRUNCATED)
        .then(|| format!("the length limit cut off {truncated} of the newest {samples} samples, above {:.0}%", 100.0 * TRUNCATED))
}

fn no_spread(run: &Evidence) -> Option<String> {
    let compared: Vec<&Group> = run.groups.iter().filter(|group| group.rewards.len() > 1).collect();
    let equal = compared.iter().filter(|group| group.rewards.iter().all(|reward| *reward == group.rewards[0])).count();
    let share = equal as f64 / compared.len() as f64;
    (compared.len() >= GROUPS && share > NO_SPREAD && !is_solved(run)).then(|| {
        let (groups, limit) = (compared.len(), 100.0 * NO_SPREAD);
        format!("all rewards are equal in {equal} of the newest {groups} groups, above {limit:.0}%")
    })
}

fn near_duplicates(run: &Evidence) -> Option<String> {
    let long: Vec<Vec<HashSet<&[u32]>>> = run.groups.iter().map(shingles).filter(|of| of.len() > 1).collect();
    let repeated = long.iter().filter(|completions| 2 * repeats(completions) >= completions.len()).count();
    let share = repeated as f64 / long.len() as f64;
    (long.len() >= GROUPS && share > REPEATED).then(|| {
        let (groups, limit) = (long.len(), 100.0 * REPEATED);
        format!("half the completions nearly repeat another one in {repeated} of the newest {groups} groups, above {limit:.0}%")
    })
}

/// Shingles of the group's long completions.
fn shingles(group: &Group) -> Vec<HashSet<&[u32]>> {
    let long = group.completions.iter().filter(|completion| completion.len() >= LONG);
    long.map(|completion| completion.windows(SHINGLE).collect()).collect()
}

/// Completions that are near-duplicates of an earlier one.
fn repeats(completions: &[HashSet<&[u32]>]) -> usize {
    let alike = |a: &HashSet<&[u32]>, b: &HashSet<&[u32]>| {
        let common = a.intersection(b).count();
        common as f64 >= ALIKE * (a.len() + b.len() - common) as f64
    };
    (0..completions.len()).filter(|&at| completions[..at].iter().any(|earlier| alike(earlier, &completions[at]))).count()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(groups: usize, group: impl Fn(usize) -> Group) -> Evidence {
        Evidence { groups: (0..groups).map(group).collect(), ..Evidence::default() }
    }

    #[test]
    fn d2_the_parts_of_a_rollout_have_one_reward() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("rollouts.jsonl");
        let line = |part| serde_json::to_string(&Rollout { part, reward: Some(1.0), ..Rollout::default() }).unwrap();
        std::fs::write(&path, format!("{}\n{}\n", line(0), line(1))).unwrap();
        let groups = newest(&path).unwrap();
        assert_eq!((groups.len(), groups[0].completions.len(), groups[0].rewards.clone()), (1, 2, vec![1.0]));
    }

    #[test]
    fn truncation_is_a_finding_above_a_quarter_of_the_samples() {
        let of = |truncated| run(8, |_| Group { truncated, completions: vec![vec![1]; 4], ..Group::default() });
        assert_eq!(truncated(&of(1)), None);
        assert_eq!(truncated(&of(2)).unwrap(), "the length limit cut off 16 of the newest 32 samples, above 25%");
        let few = run(1, |_| Group { truncated: 4, completions: vec![vec![1]; 4], ..Group::default() });
        assert_eq!(truncated(&few), None, "four samples are no share");
    }

    #[test]
    fn equal_rewards_are_a_finding_unless_all_are_the_best() {
        let equal = |share: usize| {
            run(20, |at| Group { rewards: if at < share { vec![0.0; 4] } else { vec![0.0, 1.0] }, ..Group::default() })
        };
        assert_eq!(no_spread(&equal(15)), None);
        assert!(no_spread(&equal(16)).unwrap().starts_with("all rewards are equal in 16 of the newest 20 groups"));
        let column = |from: f64| vec![from; 20];
        let columns = [("reward_mean", column(0.95)), ("reward_min", column(0.0)), ("reward_max", column(1.0))];
        let columns = columns.map(|(name, values)| (name.to_owned(), values)).into();
        assert_eq!(no_spread(&Evidence { columns, ..equal(20) }), None, "it is solved");
        assert_eq!(no_spread(&run(20, |_| Group { rewards: vec![1.0], ..Group::default() })), None, "groups of one sample");
    }

    #[test]
    fn completions_that_repeat_each_other_are_a_finding_if_they_are_long() {
        let text = |from: u32, length: u32| (from..from + length).collect::<Vec<_>>();
        let group = |completions| Group { completions, ..Group::default() };
        // One token of 200 differs.
        let alike = |at: u32| [text(0, 100), vec![1000 + at], text(100, 99)].concat();
        assert!(
            near_duplicates(&run(8, |_| group((0..4).map(alike).collect()))).unwrap().contains("in 8 of the newest 8 groups")
        );
        assert_eq!(near_duplicates(&run(8, |_| group((0..4).map(|at| text(1000 * at, 200)).collect()))), None);
        assert_eq!(near_duplicates(&run(8, |_| group(vec![text(0, 60); 4]))), None, "short answers are alike");
    }
}
