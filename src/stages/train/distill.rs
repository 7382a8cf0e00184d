//! On-policy distillation: the teacher is the reference policy, and its log-probabilities of the
//! student's own tokens are advantages (Agarwal et al., 2024; Lu, 2025).

use crate::data::{Batch, Sample};
use crate::settings::declare::section;
use crate::settings::setting::{POSITIVE, UP_TO_ONE};
use crate::train::{TrainBatch, TrainError};

section! {
    /// On-policy distillation: `[reference]` is a teacher, which scores the policy's own rollouts. A
    /// token's advantage is the teacher's log-probability minus the policy's own when it sampled
    /// the token, so that the policy minimises the reverse KL divergence.
    pub struct Distill {
        /// Weight of these advantages, per nat.
        coef: f64 = 1.0, POSITIVE;
        /// Discount per token of the differences that follow: 0 judges each token alone.
        discount: f64 = 0.0, UP_TO_ONE;
        /// If true, they are added to the advantages of the rewards. Otherwise the rewards are only
        /// logged.
        rewards: bool = false;
    }
}

impl Distill {
    /// Sets the advantages of a collated batch, and of its samples to the mean over their tokens, for
    /// logs. Returns the mean over all trained tokens of log π(token) − log teacher(token), an
    /// estimate of the divergence in nats.
    pub(super) fn apply(&self, samples: &mut Batch, batch: &mut TrainBatch) -> Result<f64, TrainError> {
        let (mut sum, mut count) = (0.0, 0_usize);
        let samples = samples.groups.iter_mut().flat_map(|group| &mut group.samples);
        for (sample, sequence) in samples.zip(&mut batch.sequences) {
            let no_reference = || TrainError::NoReference(sequence.name());
            let teacher = sequence.reference.as_ref().ok_or_else(no_reference)?;
            let own = sequence.behaviour.as_ref().ok_or_else(no_reference)?;
            let mut future = 0.0;
            // From the end, so that each token sees those after it.
            for (at, (teacher, own)) in teacher.iter().zip(own).enumerate().rev() {
                sum += own - teacher;
                future = (teacher - own) + self.discount * future;
                let reward = if self.rewards { sequence.advantages[at] } else { 0.0 };
                sequence.advantages[at] = reward + self.coef * future;
            }
            count += teacher.len();
            log_mean(sample, &sequence.advantages);
        }
        Ok(sum / count.max(1) as f64)
    }
}

fn log_mean(sample: &mut Sample, advantages: &[f64]) {
    if !advantages.is_empty() {
        sample.advantage = Some(advantages.iter().sum::<f64>() / advantages.len() as f64);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use proptest::prelude::*;

    use super::*;
    use crate::algo::Aggregation;
    use crate::data::{Group, Prompt};
    use crate::train::collate;

    /// Samples of given and sampled tokens, each with the policy's and the teacher's log-probability.
    fn batch(samples: &[Vec<(bool, f32, f32)>]) -> (Batch, TrainBatch) {
        let prompt = Arc::new(Prompt { ordinal: 4, ..Prompt::default() });
        let sample = |(index, tokens): (usize, &Vec<(bool, f32, f32)>)| {
            let mut sample = Sample::begin(&prompt, index as u32, &[1]);
            sample.ref_log_probs = vec![0.0];
            for (sampled, own, teacher) in tokens {
                if *sampled {
                    sample.push(2, *own, 1)
                } else {
                    sample.give(&[3])
                }
                sample.ref_log_probs.push(*teacher);
            }
            Sample { advantage: Some(0.25), ..sample }
        };
        let samples: Vec<Sample> = samples.iter().enumerate().map(sample).collect();
        let collated = collate(&samples, Aggregation::default()).unwrap();
        (Batch { groups: vec![Group { samples, prompt, ..Group::default() }], ..Batch::default() }, collated)
    }

    proptest! {
        /// The definition, over sampled tokens:
        /// A_t = A + coef · Σ_{s ≥ t} discount^(s−t) (log teacher_s − log π_s).
        #[test]
        fn an_advantage_is_the_discounted_sum_of_the_differences_from_its_token_on(
            tokens in prop::collection::vec((any::<bool>(), -5.0_f32..0.0, -5.0_f32..0.0), 1..12),
            (coef, discount, rewards) in (0.1..3.0_f64, 0.0..=1.0_f64, any::<bool>()),
        ) {
            let tokens = [&tokens[..], &[(true, -1.0, -2.0)]].concat();
            let (mut samples, mut collated) = batch(&[tokens.clone(), vec![(true, -0.5, -0.5)]]);
            let mean = Distill { coef, discount, rewards }.apply(&mut samples, &mut collated).unwrap();
            let differences: Vec<f64> =
                tokens.iter().filter(|token| token.0).map(|(_, own, teacher)| f64::from(*teacher) - f64::from(*own)).collect();
            for (at, found) in collated.sequences[0].advantages.iter().enumerate() {
                let later = differences[at..].iter().enumerate();
                let sum: f64 = later.map(|(ahead, difference)| discount.powi(ahead as i32) * difference).sum();
                let expected = if rewards { 0.25 } else { 0.0 } + coef * sum;
                prop_assert!((found - expected).abs() < 1e-9, "{found} {expected}");
            }
            let total: f64 = differences.iter().sum();
            prop_assert!((mean + total / (differences.len() + 1) as f64).abs() < 1e-9);
        }
    }

    #[test]
    fn a_sample_that_no_teacher_scored_is_named() {
        let (mut samples, mut collated) = batch(&[vec![(true, -1.0, -2.0)]]);
        collated.sequences[0].reference = None;
        let error = Distill::default().apply(&mut samples, &mut collated).unwrap_err();
        assert!(error.to_string().starts_with("sample 0 of group 4 has no log-probabilities"), "{error}");
    }
}
