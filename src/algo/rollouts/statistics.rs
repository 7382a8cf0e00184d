//! Statistics of a batch.

use std::collections::HashSet;
use std::fmt;

use crate::data::{Sample, Status};

/// Mean, deviation and range of some numbers.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Spread {
    /// Mean.
    pub mean: f64,
    /// Population standard deviation.
    pub std: f64,
    /// Smallest number.
    pub min: f64,
    /// Largest number.
    pub max: f64,
}

/// Statistics of the samples of a batch.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct BatchStatistics {
    /// Number of samples.
    pub samples: usize,
    /// Number of groups.
    pub groups: usize,
    /// Samples with a finite reward.
    pub scored: usize,
    /// Rewards; `None` without any.
    pub reward: Option<Spread>,
    /// Trained tokens of a sample; `None` without samples.
    pub length: Option<Spread>,
    /// Truncated samples.
    pub truncated: usize,
    /// Number of distinct responses.
    pub distinct: usize,
}

impl Spread {
    /// Statistics of these numbers; `None` without any. A NaN makes all of them NaN.
    pub fn of(values: &[f64]) -> Option<Self> {
        if values.is_empty() {
            return None;
        }
        let count = values.len() as f64;
        let mean = values.iter().sum::<f64>() / count;
        let variance = values.iter().map(|value| (value - mean).powi(2)).sum::<f64>() / count;
        let (min, max) =
            values.iter().fold((f64::INFINITY, f64::NEG_INFINITY), |(min, max), value| (min.min(*value), max.max(*value)));
        Some(Spread { mean, std: variance.sqrt(), min, max })
    }
}

/// Counts samples and their rewards and lengths.
pub fn batch_statistics<'a>(samples: impl IntoIterator<Item = &'a Sample>) -> BatchStatistics {
    let samples: Vec<&Sample> = samples.into_iter().collect();
    let rewards: Vec<f64> = samples.iter().filter_map(|sample| sample.reward).filter(|reward| reward.is_finite()).collect();
    let lengths: Vec<f64> = samples.iter().map(|sample| sample.response_length() as f64).collect();
    BatchStatistics {
        samples: samples.len(),
        groups: samples.iter().map(|sample| sample.group_index).collect::<HashSet<_>>().len(),
        scored: rewards.len(),
        reward: Spread::of(&rewards),
        length: Spread::of(&lengths),
        truncated: samples.iter().filter(|sample| sample.status == Status::Truncated).count(),
        distinct: samples.iter().map(|sample| (&sample.response, &sample.tokens)).collect::<HashSet<_>>().len(),
    }
}

impl fmt::Display for Spread {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:.4} ± {:.4} ({:.4} to {:.4})", self.mean, self.std, self.min, self.max)
    }
}

impl fmt::Display for BatchStatistics {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let spread = |spread: Option<Spread>| spread.map_or_else(|| "none".to_owned(), |spread| spread.to_string());
        write!(
            f,
            "{} samples of {} groups, {} scored; reward {}; trained tokens {}; {} truncated, {} distinct",
            self.samples,
            self.groups,
            self.scored,
            spread(self.reward),
            spread(self.length),
            self.truncated,
            self.distinct,
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn samples_are_counted_and_those_without_a_reward_left_out_of_its_mean() {
        let sample = |group_index, reward, length: usize| Sample {
            group_index,
            reward,
            loss_mask: vec![1.0; length],
            tokens: vec![group_index as u32; length],
            status: if length > 3 { Status::Truncated } else { Status::Completed },
            ..Sample::default()
        };
        let samples = [sample(0, Some(1.0), 2), sample(0, Some(0.0), 2), sample(1, Some(f64::NAN), 4), sample(1, None, 0)];
        let seen = batch_statistics(&samples);
        assert_eq!((seen.samples, seen.groups, seen.scored, seen.truncated, seen.distinct), (4, 2, 2, 1, 3));
        assert_eq!(seen.reward, Some(Spread { mean: 0.5, std: 0.5, min: 0.0, max: 1.0 }));
        assert_eq!(seen.length.map(|length| (length.mean, length.std)), Some((2.0, 2_f64.sqrt())));
        assert_eq!(batch_statistics(&[]), BatchStatistics::default());
        let shown = "4 samples of 2 groups, 2 scored; reward 0.5000 ± 0.5000 (0.0000 to 1.0000); trained tokens 2.0000 ± 1.4142 (0.0000 to 4.0000); 1 truncated, 3 distinct";
        assert_eq!(seen.to_string(), shown);
    }
}
