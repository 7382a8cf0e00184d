//! Advantages of a batch's samples.

use super::{BatchError, SampleId};
use crate::algo::{AdvantageError, Estimator, ScoredGroup};
use crate::data::{Batch, Sample};
use crate::flow::caught;

/// Sets every sample's advantage from the batch's rewards.
pub fn assign_advantages(batch: &mut Batch, estimator: &dyn Estimator) -> Result<(), BatchError> {
    let rewards = batch.groups.iter().map(|group| group.rewards()).collect();
    assign_advantages_of(rewards, batch, estimator)
}

/// Sets every sample's advantage from `rewards`: one list per group, one reward per sample.
pub fn assign_advantages_of(rewards: Vec<Vec<f64>>, batch: &mut Batch, estimator: &dyn Estimator) -> Result<(), BatchError> {
    let parts: Vec<Vec<usize>> = batch.groups.iter().map(|group| rollouts_of(&group.samples)).collect();
    let rewards: Vec<Vec<f64>> = rewards.iter().zip(&parts).map(|(rewards, parts)| firsts(rewards, parts)).collect();
    let lengths: Vec<Vec<f64>> = batch.groups.iter().zip(&parts).map(|(group, parts)| lengths(&group.samples, parts)).collect();
    let groups: Vec<ScoredGroup> =
        rewards.iter().zip(&lengths).map(|(rewards, lengths)| ScoredGroup { rewards, lengths }).collect();
    let estimated = caught(|| estimator.estimate(&groups))
        .unwrap_or_else(|message| Err(AdvantageError::Custom(format!("the advantage function panicked: {message}"))));
    let values = estimated.map_err(|error| match error {
        AdvantageError::NonFinite { group, sample, value } => {
            let at = parts[group].iter().position(|rollout| *rollout == sample).unwrap_or(sample);
            BatchError::Reward { id: SampleId::of(&batch.groups[group].samples[at]), value }
        }
        error => BatchError::Advantage(error),
    })?;
    one_each(&rewards, &values)?;
    for ((group, parts), values) in batch.groups.iter_mut().zip(&parts).zip(&values) {
        group.samples.iter_mut().zip(parts).for_each(|(sample, rollout)| sample.advantage = Some(values[*rollout]));
    }
    Ok(())
}

/// Rollout index of each sample within its group. Rollouts are compared as wholes, and the parts of
/// one share its advantage.
fn rollouts_of(samples: &[Sample]) -> Vec<usize> {
    let mut rollouts = 0;
    let of = samples.iter().map(|sample| {
        rollouts += usize::from(sample.part == 0 || rollouts == 0);
        rollouts - 1
    });
    of.collect()
}

/// Reward of each rollout's first part.
fn firsts(rewards: &[f64], parts: &[usize]) -> Vec<f64> {
    let mut firsts: Vec<f64> = Vec::new();
    for (reward, rollout) in rewards.iter().zip(parts) {
        if *rollout == firsts.len() {
            firsts.push(*reward);
        }
    }
    firsts
}

fn lengths(samples: &[Sample], parts: &[usize]) -> Vec<f64> {
    let mut lengths = vec![0.0; parts.last().map_or(0, |last| last + 1)];
    samples.iter().zip(parts).for_each(|(sample, rollout)| lengths[*rollout] += sample.response_length() as f64);
    lengths
}

/// Rejects the result of a user-defined estimator unless it has one value per reward.
fn one_each(rewards: &[Vec<f64>], values: &[Vec<f64>]) -> Result<(), BatchError> {
    let count = |what: String, found| {
        let problem = format!("the estimator gave {found} advantages for {what}; give one per sample, group by group");
        Err(BatchError::Advantage(AdvantageError::Custom(problem)))
    };
    if values.len() != rewards.len() {
        return count(format!("{} groups", rewards.len()), values.len());
    }
    match rewards.iter().zip(values).find(|(rewards, values)| rewards.len() != values.len()) {
        Some((rewards, values)) => count(format!("a group of {}", rewards.len()), values.len()),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::algo::{Advantage, Constant, GroupMean, Scale};
    use crate::data::{Group, Prompt};
    use crate::settings::NoKeys;

    fn batch(rewards: &[&[Option<f64>]]) -> Batch {
        let group = |(ordinal, rewards): (usize, &&[Option<f64>])| {
            let prompt = Arc::new(Prompt { ordinal: ordinal as u64 + 40, ..Prompt::default() });
            let sample = |(index, &reward): (usize, &Option<f64>)| {
                let mut sample = Sample::begin(&prompt, index as u32, &[1, 2]);
                (0..=index).for_each(|_| sample.push(3, -1.0, 1));
                sample.reward = reward;
                sample
            };
            let samples = rewards.iter().enumerate().map(sample).collect();
            Group { samples, prompt, ..Group::default() }
        };
        Batch { groups: rewards.iter().enumerate().map(group).collect(), ..Batch::default() }
    }

    #[test]
    fn groups_are_compared_among_themselves() {
        let mut batch = batch(&[&[Some(1.0), Some(0.0)], &[Some(0.5), Some(0.5)]]);
        let config = GroupMean { std: Scale::None, ..GroupMean::default() };
        assign_advantages(&mut batch, &config).unwrap();
        let advantages: Vec<Option<f64>> = batch.samples().map(|sample| sample.advantage).collect();
        assert_eq!(advantages, [0.5, -0.5, 0.0, 0.0].map(Some));
    }

    #[test]
    fn a_constant_baseline_knows_no_groups() {
        let constant = Advantage::Constant(Constant { baseline: 0.25 });
        let mut scored = batch(&[&[Some(1.0), Some(1.0)], &[Some(0.0)]]);
        assign_advantages(&mut scored, &constant).unwrap();
        let advantages: Vec<Option<f64>> = scored.samples().map(|sample| sample.advantage).collect();
        assert_eq!(advantages, [0.75, 0.75, -0.25].map(Some));
        let error = assign_advantages(&mut batch(&[&[Some(1.0), None]]), &constant).unwrap_err();
        assert!(matches!(error, BatchError::Reward { value, .. } if value.is_nan()), "law N4: {error}");
    }

    #[test]
    fn answers_weigh_by_their_trained_tokens() {
        // Samples have one and two tokens.
        let mut scored = batch(&[&[Some(1.0), Some(0.25)]]);
        assign_advantages(&mut scored, &Advantage::OptimalBaseline(NoKeys)).unwrap();
        assert_eq!(scored.groups[0].samples[0].advantage, Some(0.5));
    }

    #[test]
    fn a_closure_estimates_and_must_give_one_value_a_sample() {
        let first_wins = |groups: &[ScoredGroup]| -> Result<Vec<Vec<f64>>, AdvantageError> {
            Ok(groups.iter().map(|group| (0..group.rewards.len()).map(|at| f64::from(u8::from(at == 0))).collect()).collect())
        };
        let mut scored = batch(&[&[Some(1.0), Some(0.0)], &[Some(0.5)]]);
        assign_advantages(&mut scored, &first_wins).unwrap();
        assert_eq!(scored.samples().map(|sample| sample.advantage).collect::<Vec<_>>(), [1.0, 0.0, 1.0].map(Some));
        let short = |groups: &[ScoredGroup]| -> Result<Vec<Vec<f64>>, AdvantageError> { Ok(vec![vec![0.0]; groups.len()]) };
        let error = assign_advantages(&mut scored, &short).unwrap_err();
        assert_eq!(error.to_string(), "the estimator gave 1 advantages for a group of 2; give one per sample, group by group");
        let panics = |_: &[ScoredGroup]| -> Result<Vec<Vec<f64>>, AdvantageError> { panic!("no idea") };
        let error = assign_advantages(&mut scored, &panics).unwrap_err();
        assert_eq!(error.to_string(), "the advantage function panicked: no idea");
        let none = |_: &[ScoredGroup]| -> Result<Vec<Vec<f64>>, AdvantageError> { Ok(Vec::new()) };
        let error = assign_advantages(&mut scored, &none).unwrap_err();
        assert_eq!(error.to_string(), "the estimator gave 0 advantages for 2 groups; give one per sample, group by group");
    }

    #[test]
    fn a_sample_that_was_not_scored_is_named() {
        let mut batch = batch(&[&[Some(1.0), Some(0.0)], &[Some(0.5), None]]);
        let error = assign_advantages(&mut batch, &GroupMean::default()).unwrap_err();
        assert_eq!(
            error.to_string(),
            "sample 1 of group 41: its reward is NaN; score it with a finite number of at most 1e100 either way, or drop its group"
        );
    }
}
