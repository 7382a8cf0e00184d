//! Rewards on a common scale.

/// How [`normalize_rewards`] scales.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Normalizer {
    /// `(r − mean) / std`, with the unbiased (n − 1) standard deviation.
    #[default]
    ZScore,
    /// `(r − min) / (max − min)`, in [0, 1].
    MinMax,
    /// `rank / (n − 1) − 1/2`, in [−1/2, 1/2], where equals share the mean of their ranks (the centred ranks of Salimans et al.,
    /// arXiv:1703.03864).
    Rank,
}

/// A reward that has no place on a scale.
#[derive(Clone, Debug, thiserror::Error, PartialEq)]
#[error("reward {at} is {value}; every reward must be a finite number")]
pub struct NormalizeError {
    /// Its place.
    pub at: usize,
    /// What it is.
    pub value: f64,
}

/// Rewards that differ by less than this share of the largest differ by rounding.
const ROUNDING: f64 = 1e-12;

/// The rewards on another scale, in their order. Equal rewards give zeros, and so does a single one.
///
/// ```
/// use rollflow::algo::rewards::{Normalizer, normalize_rewards};
///
/// assert_eq!(normalize_rewards(&[10.0, 30.0, 20.0], Normalizer::MinMax).unwrap(), [0.0, 1.0, 0.5]);
/// assert_eq!(normalize_rewards(&[0.1, 0.1], Normalizer::ZScore).unwrap(), [0.0, 0.0]);
/// ```
pub fn normalize_rewards(rewards: &[f64], normalizer: Normalizer) -> Result<Vec<f64>, NormalizeError> {
    if let Some(at) = rewards.iter().position(|reward| !reward.is_finite()) {
        return Err(NormalizeError { at, value: rewards[at] });
    }
    let largest = rewards.iter().fold(0.0_f64, |largest, reward| largest.max(reward.abs()));
    let smallest = rewards.iter().copied().fold(f64::INFINITY, f64::min);
    let highest = rewards.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    // Halves, since the difference of two large numbers may be too large for one.
    if rewards.len() < 2 || highest / 2.0 - smallest / 2.0 <= ROUNDING * largest / 2.0 {
        return Ok(vec![0.0; rewards.len()]);
    }
    Ok(match normalizer {
        Normalizer::ZScore => {
            // All scales have the same z-scores; in this one no square overflows.
            let scaled: Vec<f64> = rewards.iter().map(|reward| reward / largest).collect();
            let mean = scaled.iter().sum::<f64>() / scaled.len() as f64;
            let squares = scaled.iter().map(|reward| (reward - mean).powi(2)).sum::<f64>();
            let std = (squares / (scaled.len() - 1) as f64).sqrt();
            scaled.iter().map(|reward| (reward - mean) / std).collect()
        }
        Normalizer::MinMax => {
            let span = highest / 2.0 - smallest / 2.0;
            rewards.iter().map(|reward| (reward / 2.0 - smallest / 2.0) / span).collect()
        }
        Normalizer::Rank => ranks(rewards),
    })
}

fn ranks(rewards: &[f64]) -> Vec<f64> {
    let mut order: Vec<usize> = (0..rewards.len()).collect();
    order.sort_by(|a, b| rewards[*a].total_cmp(&rewards[*b]));
    let last = (rewards.len() - 1) as f64;
    let mut ranks = vec![0.0; rewards.len()];
    let mut rank = 0;
    for equals in order.chunk_by(|a, b| rewards[*a] == rewards[*b]) {
        let mean = rank as f64 + (equals.len() - 1) as f64 / 2.0;
        equals.iter().for_each(|at| ranks[*at] = mean / last - 0.5);
        rank += equals.len();
    }
    ranks
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const ALL: [Normalizer; 3] = [Normalizer::ZScore, Normalizer::MinMax, Normalizer::Rank];

    fn of(rewards: &[f64], normalizer: Normalizer) -> Vec<f64> {
        normalize_rewards(rewards, normalizer).unwrap()
    }

    #[test]
    fn each_scale_is_its_formula() {
        let rewards = [1.0, 3.0, 5.0, 3.0];
        assert_eq!(of(&rewards, Normalizer::MinMax), [0.0, 0.5, 1.0, 0.5]);
        assert_eq!(of(&rewards, Normalizer::Rank), [-0.5, 0.0, 0.5, 0.0]);
        let std = (8.0_f64 / 3.0).sqrt();
        for (found, wanted) in of(&rewards, Normalizer::ZScore).iter().zip([-2.0 / std, 0.0, 2.0 / std, 0.0]) {
            assert!((found - wanted).abs() < 1e-12, "{found} {wanted}");
        }
    }

    #[test]
    fn equal_rewards_give_zeros() {
        for rewards in [&[][..], &[3.0], &[0.1; 7], &[0.3, 0.1 + 0.2], &[0.0, -0.0], &[f64::MAX; 2]] {
            for normalizer in ALL {
                assert!(of(rewards, normalizer).iter().all(|value| *value == 0.0), "{normalizer:?} {rewards:?}");
            }
        }
    }

    #[test]
    fn what_is_not_finite_is_named() {
        let error = normalize_rewards(&[0.0, f64::INFINITY], Normalizer::Rank).unwrap_err();
        assert_eq!(error.to_string(), "reward 1 is inf; every reward must be a finite number");
    }

    proptest! {
        #[test]
        fn every_scale_is_finite_and_keeps_the_order(rewards in prop::collection::vec(prop::num::f64::NORMAL | prop::num::f64::ZERO, 0..20)) {
            for normalizer in ALL {
                let scaled = of(&rewards, normalizer);
                prop_assert!(scaled.iter().all(|value| value.is_finite()));
                for (i, j) in (0..rewards.len()).flat_map(|i| (0..rewards.len()).map(move |j| (i, j))) {
                    prop_assert!(rewards[i] > rewards[j] || scaled[i] <= scaled[j], "{:?}", normalizer);
                }
            }
        }
    }
}
