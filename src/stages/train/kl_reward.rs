//! KL penalty in the reward.

use crate::algo::{KlFunction, KlReward, token_kl};
use crate::data::{Batch, Sample};
use crate::train::{TrainError, continues, name_of};

/// Penalty `coef · Σ_t kl_t` of every completion, between the sampling policy and the reference. All
/// parts of a rollout ([`Sample::part`]) are one completion. Samples keep their rewards. Equals
/// verl's `apply_kl_penalty` for rewards of completions, and TRL's `RLOOTrainer` with `beta` above 0.
pub struct RewardKl {
    settings: KlReward,
    kl: Box<dyn KlFunction>,
}

impl From<KlReward> for RewardKl {
    fn from(settings: KlReward) -> Self {
        RewardKl { kl: Box::new(settings.clone()), settings }
    }
}

/// KL divergence of a batch, and its coefficient.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct KlCost {
    /// The mean over answers of the mean over tokens.
    pub mean: f64,
    /// The coefficient of this step.
    pub coef: f64,
    /// Coefficient of the next step.
    pub next: f64,
}

impl RewardKl {
    /// Creates a penalty from a [`KlForm`](crate::algo::KlForm), or a closure `Fn(log_prob,
    /// reference) -> (value, derivative)`.
    pub fn new(coef: f64, kl: impl KlFunction + 'static) -> Self {
        RewardKl { settings: KlReward { beta: coef, ..KlReward::default() }, kl: Box::new(kl) }
    }

    /// Moves the coefficient by at most a fifth per `horizon` completions, so that the mean
    /// divergence stays near `target` nats per token.
    pub fn adaptive(self, target: f64, horizon: f64) -> Self {
        RewardKl { settings: KlReward { target: Some(target), horizon, ..self.settings }, ..self }
    }

    /// Rewards after the penalty, one list per group. `coef` is the adaptive coefficient after the
    /// previous step.
    pub(super) fn charge(&self, batch: &Batch, coef: Option<f64>) -> Result<(Vec<Vec<f64>>, KlCost), TrainError> {
        let (costs, cost) = self.costs(batch, coef)?;
        let mut costs = costs.iter().map(|tokens| tokens.iter().sum::<f64>());
        let mut left = |parts: &[Sample]| {
            let paid = cost.coef * costs.by_ref().take(parts.len()).sum::<f64>();
            parts.iter().map(|part| part.reward.unwrap_or(f64::NAN) - paid).collect::<Vec<f64>>()
        };
        let groups = batch.groups.iter().map(|group| group.samples.chunk_by(continues).flat_map(&mut left).collect());
        Ok((groups.collect(), cost))
    }

    /// KL of each trained token without the coefficient, one list per sample.
    pub(super) fn costs(&self, batch: &Batch, coef: Option<f64>) -> Result<(Vec<Vec<f64>>, KlCost), TrainError> {
        self.check()?;
        let coef = coef.filter(|_| self.settings.target.is_some()).unwrap_or(self.settings.beta);
        let of = |sample| token_kl(sample, self.kl.as_ref()).ok_or_else(|| TrainError::NoReference(name_of(sample)));
        let tokens = batch.samples().map(of).collect::<Result<Vec<_>, _>>()?;
        let mut rest = tokens.iter();
        let mean = |parts: &[Sample]| {
            let all: Vec<f64> = rest.by_ref().take(parts.len()).flatten().copied().collect();
            all.iter().sum::<f64>() / all.len().max(1) as f64
        };
        let rollouts = batch.groups.iter().flat_map(|group| group.samples.chunk_by(continues));
        let means: Vec<f64> = rollouts.map(mean).collect();
        let mean = means.iter().sum::<f64>() / means.len().max(1) as f64;
        let next = self.settings.next_coef(coef, mean, means.len() as u64);
        Ok((tokens, KlCost { mean, coef, next }))
    }

    /// Returns an error for settings that would make the coefficient, and with it all later rewards,
    /// NaN or infinite.
    fn check(&self) -> Result<(), TrainError> {
        let Some(target) = self.settings.target else { return Ok(()) };
        let rules = [
            (target, "the target of an adaptive KL coefficient must be a finite number above 0"),
            (self.settings.horizon, "the horizon of an adaptive KL coefficient must be a finite number above 0"),
        ];
        let is_positive = |value: f64| value.is_finite() && value > 0.0;
        let broken = rules.into_iter().find(|(value, _)| !is_positive(*value));
        broken.map_or(Ok(()), |(_, problem)| Err(TrainError::Setting(problem)))
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::algo::KlForm;
    use crate::data::{Group, Prompt};

    /// Two answers of rewards 1 and 0, whose tokens are `d` likelier than the reference finds them.
    fn batch(d: f32) -> Batch {
        let prompt = Arc::new(Prompt { ordinal: 4, ..Prompt::default() });
        let sample = |index: u32, tokens: usize| {
            let mut sample = Sample::begin(&prompt, index, &[1]);
            (0..tokens).for_each(|_| sample.push(2, -1.0, 1));
            sample.ref_log_probs = [vec![0.0], vec![-1.0 - d; tokens]].concat();
            Sample { reward: Some(1.0 - f64::from(index)), ..sample }
        };
        let samples = vec![sample(0, 2), sample(1, 4)];
        Batch { groups: vec![Group { samples, prompt, ..Group::default() }], ..Batch::default() }
    }

    #[test]
    fn an_answer_pays_for_the_sum_over_its_tokens_and_the_coefficient_goes_on_from_step_to_step() {
        let kl = RewardKl::new(0.5, KlForm::K1);
        let (rewards, cost) = kl.charge(&batch(0.5), None).unwrap();
        assert_eq!(rewards, [[1.0 - 0.5 * 1.0, -0.5 * 2.0]]);
        assert_eq!(cost, KlCost { mean: 0.5, coef: 0.5, next: 0.5 });
        let kl = kl.adaptive(0.25, 10.0);
        let (_, first) = kl.charge(&batch(0.5), None).unwrap();
        assert_eq!(first.next, 0.5 * (1.0 + 0.2 * 2.0 / 10.0));
        let (rewards, second) = kl.charge(&batch(0.5), Some(first.next)).unwrap();
        assert_eq!((second.coef, rewards[0][0]), (first.next, 1.0 - first.next));
        let mut unscored = batch(0.5);
        unscored.groups[0].samples[1].ref_log_probs.clear();
        let error = kl.charge(&unscored, None).unwrap_err();
        assert!(error.to_string().starts_with("sample 1 of group 4 has no log-probabilities"), "{error}");
    }

    /// The first part is like its reference, the second is 0.5 likelier per token.
    #[test]
    fn the_parts_of_a_rollout_pay_together_and_count_as_one_answer() {
        let mut parts = batch(0.5);
        let [first, second] = &mut parts.groups[0].samples[..] else { panic!("two samples") };
        first.ref_log_probs = first.log_probs.clone();
        (second.index, second.part, second.reward) = (0, 1, Some(1.0));
        let (rewards, cost) = RewardKl::new(0.5, KlForm::K1).adaptive(0.25, 10.0).charge(&parts, None).unwrap();
        assert_eq!(rewards, [[1.0 - 0.5 * 4.0 * 0.5; 2]]);
        let mean = 4.0 * 0.5 / 6.0;
        assert_eq!((cost.mean, cost.next), (mean, 0.5 * (1.0 + 0.2 * 1.0 / 10.0)));
    }

    /// Law N4.
    #[test]
    fn a_target_or_horizon_that_gives_no_coefficient_is_refused_by_name() {
        for (target, horizon, named) in [(0.0, 10.0, "target"), (f64::NAN, 10.0, "target"), (0.25, 0.0, "horizon")] {
            let error = RewardKl::new(0.5, KlForm::K1).adaptive(target, horizon).charge(&batch(0.0), None).unwrap_err();
            assert_eq!(error.to_string(), format!("the {named} of an adaptive KL coefficient must be a finite number above 0"));
        }
    }
}
