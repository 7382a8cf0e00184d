//! Advantages of a batch: by sample, and by token from a critic's values (PPO).

use std::ops::Range;

use super::TrainError;
use super::collate::name_of;
use crate::algo::{AdvantageError, Estimator, ScoredGroup, aligned, gae};
use crate::data::{Batch, Sample};
use crate::flow::caught;

/// Sets every sample's advantage from the batch's rewards.
pub fn assign_advantages(batch: &mut Batch, estimator: &dyn Estimator) -> Result<(), TrainError> {
    let rewards = batch.groups.iter().map(|group| group.rewards()).collect();
    assign_advantages_of(rewards, batch, estimator)
}

/// Sets every sample's advantage from `rewards`: one list per group, one reward per sample.
pub fn assign_advantages_of(rewards: Vec<Vec<f64>>, batch: &mut Batch, estimator: &dyn Estimator) -> Result<(), TrainError> {
    let groups = || batch.groups.iter().zip(&rewards);
    let rollouts: Vec<Rollouts> = groups().map(|(group, rewards)| Rollouts::new(&group.samples, rewards)).collect();
    let scored: Vec<ScoredGroup> = rollouts.iter().map(|of| ScoredGroup { rewards: &of.rewards, lengths: &of.lengths }).collect();
    let estimated = caught(|| estimator.estimate(&scored))
        .unwrap_or_else(|message| Err(AdvantageError::Custom(format!("the advantage function panicked: {message}"))));
    let values = estimated.map_err(|error| match error {
        AdvantageError::NonFinite { group, sample, value } => {
            let at = rollouts[group].of_sample.iter().position(|rollout| *rollout == sample).unwrap_or(sample);
            TrainError::Reward(name_of(&batch.groups[group].samples[at]), value)
        }
        error => TrainError::Advantage(error),
    })?;
    let miscounted = |what: String, found: usize| {
        let problem = format!("the estimator gave {found} advantages for {what}; give one per sample, group by group");
        Err(TrainError::Advantage(AdvantageError::Custom(problem)))
    };
    if values.len() != rollouts.len() {
        return miscounted(format!("{} groups", rollouts.len()), values.len());
    }
    if let Some((of, values)) = rollouts.iter().zip(&values).find(|(of, values)| of.rewards.len() != values.len()) {
        return miscounted(format!("a group of {}", of.rewards.len()), values.len());
    }
    for ((group, of), values) in batch.groups.iter_mut().zip(&rollouts).zip(&values) {
        let samples = group.samples.iter_mut().zip(&of.of_sample);
        samples.for_each(|(sample, rollout)| sample.advantage = Some(values[*rollout]));
    }
    Ok(())
}

/// Returns true if `next` is a further part of the rollout of `before`, its neighbour
/// ([`Sample::part`]).
pub(crate) fn continues(before: &Sample, next: &Sample) -> bool {
    let rollout = |sample: &Sample| (sample.group_index, sample.index);
    next.part > before.part && rollout(next) == rollout(before)
}

/// A group's rollouts. They are compared as wholes, and the parts of one share its advantage.
#[derive(Default)]
struct Rollouts {
    /// Rollout of each sample.
    of_sample: Vec<usize>,
    /// Reward of each rollout: its first part's.
    rewards: Vec<f64>,
    /// Trained tokens of each rollout.
    lengths: Vec<f64>,
}

impl Rollouts {
    fn new(samples: &[Sample], rewards: &[f64]) -> Self {
        let mut all = Rollouts::default();
        for (rollout, parts) in samples.chunk_by(continues).enumerate() {
            all.rewards.push(rewards[all.of_sample.len()]);
            all.lengths.push(parts.iter().map(|part| part.response_length() as f64).sum());
            all.of_sample.extend(parts.iter().map(|_| rollout));
        }
        all
    }
}

/// One list a sequence, one entry per trained token.
pub type TokenColumn = Vec<Vec<f64>>;

/// Rewards by trained token: the sample's reward at the last one, else 0.
pub fn token_rewards<'a>(samples: impl Iterator<Item = &'a Sample>) -> Result<TokenColumn, TrainError> {
    samples
        .map(|sample| {
            let value = sample.reward.unwrap_or(f64::NAN);
            if !value.is_finite() {
                return Err(TrainError::Reward(name_of(sample), value));
            }
            // A sample's first token is never a target.
            let trained = sample.loss_mask.iter().skip(1).filter(|mask| **mask > 0.0).count();
            let mut earned = vec![0.0; trained];
            if let Some(last) = earned.last_mut() {
                *last = value;
            }
            Ok(earned)
        })
        .collect()
}

/// [`gae`] over columns of trained tokens: advantages and returns.
pub fn token_advantages(
    rewards: &[Vec<f64>],
    values: &[Vec<f64>],
    gamma: f64,
    lambda: f64,
) -> Result<(TokenColumn, TokenColumn), AdvantageError> {
    rewards.iter().zip(values).try_for_each(|(rewards, values)| aligned("values", values.len(), rewards.len()))?;
    let mut end = 0;
    let place = |tokens: &Vec<f64>| {
        end += tokens.len();
        end - tokens.len()..end
    };
    let places: Vec<Range<usize>> = rewards.iter().map(place).collect();
    let of = gae(&rewards.concat(), &values.concat(), &vec![1.0; end], &places, gamma, lambda)?;
    let apart = |column: &[f64]| places.iter().map(|at| column[at.clone()].to_vec()).collect();
    Ok((apart(&of.advantages), apart(&of.returns)))
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::algo::{Advantage, GroupMean, Scale};
    use crate::data::{Group, Prompt};

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

    fn assigned(rewards: &[&[Option<f64>]], estimator: &dyn Estimator) -> Result<Vec<f64>, String> {
        let mut batch = batch(rewards);
        assign_advantages(&mut batch, estimator).map_err(|error| error.to_string())?;
        Ok(batch.samples().map(|sample| sample.advantage.unwrap()).collect())
    }

    /// Sample `i` of a group has `i + 1` trained tokens.
    #[test]
    fn groups_are_compared_among_themselves_unless_the_estimator_is_blind_to_them() {
        let pair: &[Option<f64>] = &[Some(1.0), Some(0.0)];
        let plain = GroupMean { std: Scale::None, ..GroupMean::default() };
        assert_eq!(assigned(&[pair, &[Some(0.5); 2]], &plain).unwrap(), [0.5, -0.5, 0.0, 0.0]);
        let constant = Advantage::Constant { baseline: 0.25 };
        assert_eq!(assigned(&[&[Some(1.0); 2], &[Some(0.0)]], &constant).unwrap(), [0.75, 0.75, -0.25]);
        let by_tokens = Advantage::OptimalBaseline;
        assert_eq!(assigned(&[&[Some(1.0), Some(0.25)]], &by_tokens).unwrap()[0], 0.5);
        let unscored = |at| {
            let fix = "score it with a finite number of at most 1e100 either way, or drop its group";
            Err(format!("sample 1 of group {at}: its reward is NaN; {fix}"))
        };
        assert_eq!(assigned(&[&[Some(1.0), None]], &constant), unscored(40), "law N4");
        assert_eq!(assigned(&[pair, &[Some(0.5), None]], &GroupMean::default()), unscored(41));
    }

    #[test]
    fn a_closure_estimates_and_must_give_one_value_a_sample() {
        type Values = Result<Vec<Vec<f64>>, AdvantageError>;
        let rewards: [&[Option<f64>]; 2] = [&[Some(1.0), Some(0.0)], &[Some(0.5)]];
        let first_wins = |groups: &[ScoredGroup]| -> Values {
            Ok(groups.iter().map(|group| (0..group.rewards.len()).map(|at| f64::from(u8::from(at == 0))).collect()).collect())
        };
        assert_eq!(assigned(&rewards, &first_wins).unwrap(), [1.0, 0.0, 1.0]);
        let short = |groups: &[ScoredGroup]| -> Values { Ok(vec![vec![0.0]; groups.len()]) };
        let none = |_: &[ScoredGroup]| -> Values { Ok(Vec::new()) };
        let panics = |_: &[ScoredGroup]| -> Values { panic!("no idea") };
        let count = |count: &str| format!("the estimator gave {count}; give one per sample, group by group");
        let cases: [(&dyn Estimator, String); 3] = [
            (&short, count("1 advantages for a group of 2")),
            (&none, count("0 advantages for 2 groups")),
            (&panics, "the advantage function panicked: no idea".to_owned()),
        ];
        for (estimator, error) in cases {
            assert_eq!(assigned(&rewards, estimator), Err(error));
        }
    }
}
