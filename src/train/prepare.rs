//! From what pipelines carry to what backends read.

use super::{CollateError, SampleId, TrainBatch, collate};
use crate::algo::{AdvantageConfig, AdvantageError, Aggregation, advantages, subtract_baseline};
use crate::data::{Batch, Sample};

/// A batch that can't be learned from.
#[derive(Debug, thiserror::Error, PartialEq)]
pub enum PrepareError {
    /// A reward that is no number (law N4), or missing.
    #[error("{id}: its reward is {value}; score it with a finite number, or drop its group")]
    Reward {
        /// The sample.
        id: SampleId,
        /// NaN where it was never scored.
        value: f64,
    },
    /// Advantages couldn't be computed otherwise.
    #[error(transparent)]
    Advantage(AdvantageError),
    /// The samples couldn't be collated.
    #[error(transparent)]
    Collate(#[from] CollateError),
}

/// Supervised samples, every trained token counting alike. Ragged; samples never see each other.
pub fn prepare_sft_batch(samples: &[Sample]) -> Result<TrainBatch, CollateError> {
    collate(samples, Aggregation::TokenMean)
}

/// Compares the samples of each group, writes down their advantages, and collates all groups.
pub fn prepare_grpo_batch(
    batch: &mut Batch,
    config: &AdvantageConfig,
    aggregation: Aggregation,
) -> Result<TrainBatch, PrepareError> {
    assign_advantages(batch, config)?;
    let samples: Vec<&Sample> = batch.samples().collect();
    Ok(collate(&samples, aggregation)?)
}

/// Sets every sample's advantage from its group's rewards.
pub fn assign_advantages(batch: &mut Batch, config: &AdvantageConfig) -> Result<(), PrepareError> {
    let rewards: Vec<Vec<f64>> = batch.groups.iter().map(|group| group.rewards()).collect();
    let values = advantages(&rewards, config).map_err(|error| match error {
        AdvantageError::NonFinite { group, sample, value } => {
            PrepareError::Reward { id: SampleId::of(&batch.groups[group].samples[sample]), value }
        }
        error => PrepareError::Advantage(error),
    })?;
    let samples = batch.groups.iter_mut().flat_map(|group| &mut group.samples);
    samples.zip(values.into_iter().flatten()).for_each(|(sample, value)| sample.advantage = Some(value));
    Ok(())
}

/// Sets every sample's advantage to its reward less `baseline`, one constant for all.
pub fn assign_constant_baseline(batch: &mut Batch, baseline: f64) -> Result<(), PrepareError> {
    for group in &mut batch.groups {
        let values = subtract_baseline(&group.rewards(), baseline);
        for (sample, value) in group.samples.iter_mut().zip(values) {
            if !value.is_finite() {
                return Err(PrepareError::Reward { id: SampleId::of(sample), value: sample.reward.unwrap_or(f64::NAN) });
            }
            sample.advantage = Some(value);
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::algo::Scale;
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
            Group { samples, prompt }
        };
        Batch { groups: rewards.iter().enumerate().map(group).collect(), ..Batch::default() }
    }

    #[test]
    fn groups_are_compared_among_themselves_and_collated_ragged() {
        let mut batch = batch(&[&[Some(1.0), Some(0.0)], &[Some(0.5), Some(0.5)]]);
        let config = AdvantageConfig { scale: Scale::None, ..AdvantageConfig::default() };
        let prepared = prepare_grpo_batch(&mut batch, &config, Aggregation::TokenMean).unwrap();
        let advantages: Vec<&[f64]> = prepared.sequences.iter().map(|sequence| &sequence.advantages[..]).collect();
        assert_eq!(advantages, [&[0.5][..], &[-0.5, -0.5], &[0.0], &[0.0, 0.0]]);
        assert_eq!(batch.groups[0].samples[1].advantage, Some(-0.5));
    }

    #[test]
    fn a_constant_baseline_knows_no_groups() {
        let mut scored = batch(&[&[Some(1.0), Some(1.0)], &[Some(0.0)]]);
        assign_constant_baseline(&mut scored, 0.25).unwrap();
        let advantages: Vec<Option<f64>> = scored.samples().map(|sample| sample.advantage).collect();
        assert_eq!(advantages, [0.75, 0.75, -0.25].map(Some));
        let error = assign_constant_baseline(&mut batch(&[&[Some(1.0), None]]), 0.25).unwrap_err();
        assert!(matches!(error, PrepareError::Reward { value, .. } if value.is_nan()), "law N4: {error}");
    }

    #[test]
    fn a_sample_that_was_not_scored_is_named() {
        let mut batch = batch(&[&[Some(1.0), Some(0.0)], &[Some(0.5), None]]);
        let error = prepare_grpo_batch(&mut batch, &AdvantageConfig::default(), Aggregation::TokenMean).unwrap_err();
        assert_eq!(
            error.to_string(),
            "sample 1 of group 41: its reward is NaN; score it with a finite number, or drop its group"
        );
    }
}
