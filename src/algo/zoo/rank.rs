//! Advantages without a reward's scale: ranks within the group, z-scores over the batch.

use crate::algo::advantages::{AdvantageError, Missing, over_scored, standardized, zero_missing};
use crate::settings::declare::section;
use crate::settings::setting::POSITIVE;

section! {
    /// Difference from the batch's mean.
    pub struct Normalized {
        /// ε added to the batch's standard deviation.
        epsilon: f64 = 1e-4, POSITIVE;
    }
}

/// `A = (r − mean) / (std + ε)` over the whole batch, with the unbiased standard deviation; equal
/// rewards give exact zeros.
///
/// Shapes: groups × samples in, the same out; a single group normalises a list.
pub fn normalized<G: AsRef<[f64]>>(groups: &[G], missing: Missing, epsilon: f64) -> Result<Vec<Vec<f64>>, AdvantageError> {
    let rewards = over_scored(groups, missing, |_, group| group.rewards.clone())?;
    Ok(zero_missing(standardized(rewards, epsilon)))
}

/// `A = 2 · rank / (n − 1) − 1` within a group: the worst gets −1, the best 1. Equal rewards share
/// the mean of their ranks, so that a group of equal rewards gets zeros; so does a lone sample.
///
/// Shapes: groups × samples in, the same out.
pub fn rank_based<G: AsRef<[f64]>>(groups: &[G], missing: Missing) -> Result<Vec<Vec<f64>>, AdvantageError> {
    let values = over_scored(groups, missing, |_, group| {
        let others = group.rewards.len().saturating_sub(1).max(1) as f64;
        let count = |which: &dyn Fn(f64) -> bool| group.rewards.iter().filter(|other| which(**other)).count() as f64;
        // Twice the mean rank: rewards below, plus other rewards that are not above.
        let twice_rank = |reward: f64| count(&|other| other < reward) + count(&|other| other <= reward) - 1.0;
        match group.rewards.len() {
            1 => vec![0.0],
            _ => group.rewards.iter().map(|&reward| twice_rank(reward) / others - 1.0).collect(),
        }
    })?;
    Ok(zero_missing(values))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn ranks_run_from_minus_one_to_one_and_equals_share_theirs() {
        let groups = [vec![10.0, -3.0, 0.0], vec![1.0, 0.0, 1.0, 1.0], vec![0.1; 5], vec![9.0], vec![]];
        let ranks = rank_based(&groups, Missing::Refuse).unwrap();
        let shared = 4.0 / 3.0 - 1.0;
        assert_eq!(ranks, [vec![1.0, -1.0, 0.0], vec![shared, -1.0, shared, shared], vec![0.0; 5], vec![0.0], vec![]]);
        assert_eq!(rank_based(&[[1.0, f64::NAN, 0.0]], Missing::Zero).unwrap(), [[1.0, 0.0, -1.0]]);
        assert!(rank_based(&[[1.0, f64::NAN]], Missing::Refuse).is_err());
    }

    #[test]
    fn a_batch_is_normalised_as_one() {
        let values = normalized(&[vec![1.0, 0.0], vec![2.0]], Missing::Refuse, 0.0).unwrap();
        assert_eq!(values, [vec![0.0, -1.0], vec![1.0]]);
        assert_eq!(normalized(&[[0.1; 3], [0.1; 3]], Missing::Refuse, 0.0).unwrap(), [[0.0; 3]; 2]);
        assert_eq!(normalized(&[[f64::NAN, 4.0]], Missing::Zero, 0.0).unwrap(), [[0.0; 2]]);
    }

    proptest! {
        #[test]
        fn ranks_sum_to_zero_and_ignore_any_rising_transform(rewards in prop::collection::vec(-3i32..3, 2..12)) {
            let plain: Vec<f64> = rewards.iter().map(|&reward| f64::from(reward)).collect();
            let warped: Vec<f64> = plain.iter().map(|reward| reward.exp() * 7.0 - 2.0).collect();
            let ranks = rank_based(&[&plain[..], &warped[..]], Missing::Refuse).unwrap();
            prop_assert!(ranks[0].iter().sum::<f64>().abs() < 1e-12);
            prop_assert_eq!(&ranks[0], &ranks[1]);
        }
    }
}
