//! Some of many samples, as new lists.

use std::ops::RangeBounds;

use crate::data::Sample;
use crate::data::shuffle::permutation;

/// Which samples [`sample_batch`] takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pick {
    /// Any, each as likely as another; the same for the same seed.
    Random(u64),
    /// Those of the highest rewards.
    Top,
    /// Those of the lowest.
    Bottom,
}

/// Those whose reward is in `range`, in their order. One that was not scored is in none.
pub fn filter_by_reward(samples: &[Sample], range: impl RangeBounds<f64>) -> Vec<Sample> {
    samples.iter().filter(|sample| sample.reward.is_some_and(|reward| range.contains(&reward))).cloned().collect()
}

/// `count` of the samples, or all there are: the highest or lowest first, among equals the earlier; a random choice in random order. By reward
/// only those with one that is a number can be chosen.
pub fn sample_batch(samples: &[Sample], count: usize, pick: Pick) -> Vec<Sample> {
    let by_reward = |sign: f64| {
        let mut scored: Vec<(f64, &Sample)> = samples
            .iter()
            .filter_map(|sample| sample.reward.filter(|reward| !reward.is_nan()).map(|reward| (sign * reward, sample)))
            .collect();
        scored.sort_by(|one, other| one.0.total_cmp(&other.0));
        scored.into_iter().map(|(_, sample)| sample).collect()
    };
    let order: Vec<&Sample> = match pick {
        Pick::Random(seed) => permutation(samples.len(), seed, 0).into_iter().map(|place| &samples[place]).collect(),
        Pick::Top => by_reward(-1.0),
        Pick::Bottom => by_reward(1.0),
    };
    order.into_iter().take(count).cloned().collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn samples() -> Vec<Sample> {
        let rewards = [Some(0.5), None, Some(1.0), Some(f64::NAN), Some(0.5), Some(-1.0)];
        (0..).zip(rewards).map(|(index, reward)| Sample { index, reward, ..Sample::default() }).collect()
    }

    fn indices(samples: &[Sample]) -> Vec<u32> {
        samples.iter().map(|sample| sample.index).collect()
    }

    #[test]
    fn a_range_of_rewards_holds_no_sample_without_one() {
        assert_eq!(indices(&filter_by_reward(&samples(), 0.5..)), [0, 2, 4]);
        assert_eq!(indices(&filter_by_reward(&samples(), ..=0.0)), [5]);
        assert_eq!(indices(&filter_by_reward(&samples(), ..)), [0, 2, 3, 4, 5], "NaN is in the range of everything");
    }

    #[test]
    fn the_best_and_the_worst_come_first_and_chance_repeats_by_its_seed() {
        assert_eq!(indices(&sample_batch(&samples(), 3, Pick::Top)), [2, 0, 4]);
        assert_eq!(indices(&sample_batch(&samples(), 2, Pick::Bottom)), [5, 0]);
        assert_eq!(indices(&sample_batch(&samples(), 99, Pick::Bottom)), [5, 0, 4, 2]);
        let drawn = |seed| indices(&sample_batch(&samples(), 4, Pick::Random(seed)));
        assert_eq!(drawn(1), drawn(1));
        assert!((0..20).any(|seed| drawn(seed) != drawn(1)));
        for seed in 0..20 {
            let mut all = drawn(seed);
            all.sort_unstable();
            all.dedup();
            assert_eq!(all.len(), 4, "none twice");
        }
    }
}
