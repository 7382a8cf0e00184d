//! On-policy distillation: a teacher's log-probabilities of the student's own tokens are advantages
//! (Agarwal et al., 2024; Lu, 2025).

use std::sync::Arc;

use crate::algo::{Distilled, Loss, TeacherDivergence};
use crate::data::Batch;
use crate::rollout::mean;
use crate::settings::declare::section;
use crate::settings::setting::{POSITIVE, UP_TO_ONE};
use crate::train::{TrainBatch, TrainError};

section! {
    /// Settings of distillation: a teacher scored the policy's own rollouts.
    pub struct Distill {
        /// Weight of these advantages, per nat.
        coef: f64 = 1.0, POSITIVE;
        /// Discount per token of the differences that follow: 0 judges each token alone.
        discount: f64 = 0.0, UP_TO_ONE;
        /// If true, the advantages of the rewards are trained on as well. Otherwise the rewards are
        /// only logged.
        rewards: bool = false;
        /// Likeliest tokens of the teacher per position that are compared, all others counting as one
        /// more. The divergence of the distributions is then a term of the loss, and no advantage. 0
        /// compares the sampled tokens alone.
        top_k: usize = 0;
        /// Kind of that divergence: 1 is the reverse KL(policy ‖ teacher), 0 the forward KL(teacher ‖
        /// policy), and between them the generalised Jensen-Shannon divergence (TRL's `beta`).
        beta: f64 = 1.0, UP_TO_ONE;
    }
}

impl Distill {
    /// Adds the divergence of distributions to a loss, if the policy is distilled by it.
    pub fn added_to(&self, loss: Arc<dyn Loss>) -> Arc<dyn Loss> {
        if self.top_k == 0 {
            return loss;
        }
        Arc::new(Distilled { loss, divergence: TeacherDivergence { beta: self.beta }, coef: self.coef })
    }

    /// Sets the advantages of a collated batch, and of its samples to the mean over their tokens, for
    /// logs. Returns the mean over all trained tokens of log π(token) − log teacher(token), an
    /// estimate of the divergence in nats.
    pub(super) fn apply(&self, samples: &mut Batch, batch: &mut TrainBatch) -> Result<f64, TrainError> {
        let (mut sum, mut count) = (0.0, 0_usize);
        let coef = if self.top_k == 0 { self.coef } else { 0.0 };
        let samples = samples.groups.iter_mut().flat_map(|group| &mut group.samples);
        for (sample, sequence) in samples.zip(&mut batch.sequences) {
            let scored = sample.teacher_log_probs.len() == sample.tokens.len();
            let own = sequence.behaviour.as_ref().filter(|_| scored);
            let own = own.ok_or_else(|| TrainError::NoTeacher(sequence.name()))?;
            let mut future = 0.0;
            // From the end, so that each token sees those after it.
            for (at, (row, own)) in sequence.rows.iter().zip(own).enumerate().rev() {
                let teacher = f64::from(sample.teacher_log_probs[row + 1]);
                sum += own - teacher;
                future = (teacher - own) + self.discount * future;
                let reward = if self.rewards { sequence.advantages[at] } else { 0.0 };
                sequence.advantages[at] = reward + coef * future;
            }
            count += sequence.rows.len();
            sample.advantage = mean(sequence.advantages.iter().copied()).or(sample.advantage);
        }
        Ok(sum / count.max(1) as f64)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::algo::Aggregation;
    use crate::data::{Group, Prompt, Sample};
    use crate::train::collate;

    /// Samples of given and sampled tokens, each with the policy's and the teacher's log-probability.
    fn batch(samples: &[Vec<(bool, f32, f32)>]) -> (Batch, TrainBatch) {
        let prompt = Arc::new(Prompt { ordinal: 4, ..Prompt::default() });
        let sample = |(index, tokens): (usize, &Vec<(bool, f32, f32)>)| {
            let mut sample = Sample::begin(&prompt, index as u32, &[1]);
            sample.teacher_log_probs = vec![0.0];
            for (sampled, own, teacher) in tokens {
                if *sampled {
                    sample.push(2, *own, 1)
                } else {
                    sample.give(&[3])
                }
                sample.teacher_log_probs.push(*teacher);
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
            let mean = Distill { coef, discount, rewards, ..Distill::default() }.apply(&mut samples, &mut collated).unwrap();
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

    /// tinker-cookbook's `incorporate_kl_penalty`, recorded.
    #[test]
    fn advantages_equal_those_of_tinker_cookbook() {
        let text = include_str!("../../../tests/golden/cookbook_distillation.json");
        let file: serde_json::Value = serde_json::from_str(text).unwrap();
        for penalty in file["penalties"].as_array().unwrap() {
            let [coef, discount] = ["coef", "discount"].map(|key| penalty[key].as_f64().unwrap());
            let rows = penalty["rows"].as_array().unwrap();
            let column = |row: &serde_json::Value, key: &str| -> Vec<f32> { serde_json::from_value(row[key].clone()).unwrap() };
            let tokens = |row| column(row, "log_probs").into_iter().zip(column(row, "teacher")).map(|(own, of)| (true, own, of));
            let (mut samples, _) = batch(&rows.iter().map(|row| tokens(row).collect()).collect::<Vec<_>>());
            for (sample, row) in samples.groups[0].samples.iter_mut().zip(rows) {
                sample.advantage = row["reward"].as_f64();
            }
            let mut collated = collate(&samples.samples().collect::<Vec<_>>(), Aggregation::default()).unwrap();
            let distill = Distill { coef, discount, rewards: true, ..Distill::default() };
            let mean = distill.apply(&mut samples, &mut collated).unwrap();
            assert!((mean - penalty["teacher_kl"].as_f64().unwrap()).abs() < 1e-6);
            for (sequence, row) in collated.sequences.iter().zip(rows) {
                for (found, expected) in sequence.advantages.iter().zip(column(row, "advantages")) {
                    assert!((found - f64::from(expected)).abs() < 1e-5, "{coef} {discount}: {found} {expected}");
                }
            }
        }
    }

    #[test]
    fn a_sample_that_no_teacher_scored_is_named() {
        let (mut samples, mut collated) = batch(&[vec![(true, -1.0, -2.0)]]);
        samples.groups[0].samples[0].teacher_log_probs.clear();
        let error = Distill::default().apply(&mut samples, &mut collated).unwrap_err();
        assert!(error.to_string().starts_with("sample 0 of group 4 has no log-probabilities"), "{error}");
    }
}
