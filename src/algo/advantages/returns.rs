//! Advantages by token: rewards to go, a greedy baseline (ReMax) and generalised advantage
//! estimation.
//!
//! Columns have one entry per token, sequences end to end; a mask above 0 marks trained tokens.

use std::ops::Range;

use super::estimator::{AdvantageError, aligned};

/// Advantage and return of each token.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Returns {
    /// Advantage.
    pub advantages: Vec<f64>,
    /// Return: sum of discounted rewards from here on, the target of a critic.
    pub returns: Vec<f64>,
}

/// Rewards to go, `G_t = r_t + γ G_{t+1}`. A token that is not trained ends the sum: no reward
/// after it counts for tokens before it.
///
/// Equals the returns of verl 0.9's `reinforce_plus_plus`. To let an outcome count across tool
/// output, pack the trained tokens alone.
pub fn rewards_to_go(rewards: &[f64], mask: &[f32], sequences: &[Range<usize>], gamma: f64) -> Result<Vec<f64>, AdvantageError> {
    aligned("mask", mask.len(), rewards.len())?;
    let mut returns = vec![0.0; rewards.len()];
    for sequence in sequences {
        let mut running = 0.0;
        for t in sequence.clone().rev() {
            running = rewards[t] + gamma * running;
            returns[t] = running;
            running *= f64::from(mask[t]);
        }
    }
    Ok(returns)
}

/// `A_t = Σ_{k ≥ t} m_k r_k − m_t b`, where `b` is the reward of a greedy completion of the same
/// prompt (Li et al., ReMax, 2023).
///
/// `baselines` has one entry per sequence. Equals verl 0.9's `remax`.
pub fn remax(rewards: &[f64], baselines: &[f64], mask: &[f32], sequences: &[Range<usize>]) -> Result<Returns, AdvantageError> {
    aligned("mask", mask.len(), rewards.len())?;
    aligned("baselines", baselines.len(), sequences.len())?;
    let mut of = Returns { advantages: vec![0.0; rewards.len()], returns: vec![0.0; rewards.len()] };
    for (sequence, baseline) in sequences.iter().zip(baselines) {
        let mut running = 0.0;
        for t in sequence.clone().rev() {
            let mask = f64::from(mask[t]);
            running += rewards[t] * mask;
            of.returns[t] = running;
            of.advantages[t] = running - baseline * mask;
        }
    }
    Ok(of)
}

/// Generalised advantage estimation (Schulman et al., 2016):
///
/// `δ_t = r_t + γ V_{t+1} − V_t`,  `A_t = δ_t + γ λ A_{t+1}`,  returns `A_t + V_t`
///
/// with `V = A = 0` after a sequence's end, and `t + 1` the next *trained* token: a token that is
/// not trained is skipped, with its reward and value, and carries the advantage of the one after
/// it. λ = 1 gives the discounted rewards to go less the value, λ = 0 the error of one step. Equals
/// verl 0.9's `gae` once its advantages are whitened ([`whiten`](crate::algo::whiten)).
pub fn gae(
    rewards: &[f64],
    values: &[f64],
    mask: &[f32],
    sequences: &[Range<usize>],
    gamma: f64,
    lambda: f64,
) -> Result<Returns, AdvantageError> {
    aligned("values", values.len(), rewards.len())?;
    aligned("mask", mask.len(), rewards.len())?;
    let mut advantages = vec![0.0; rewards.len()];
    for sequence in sequences {
        let (mut next_value, mut next) = (0.0, 0.0);
        for t in sequence.clone().rev() {
            if mask[t] > 0.0 {
                next = rewards[t] + gamma * next_value - values[t] + gamma * lambda * next;
                next_value = values[t];
            }
            advantages[t] = next;
        }
    }
    let returns = advantages.iter().zip(values).map(|(advantage, value)| advantage + value).collect();
    Ok(Returns { advantages, returns })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Per token of one sequence: reward, value, whether it is trained.
    fn tokens() -> impl Strategy<Value = Vec<(f64, f64, bool)>> {
        prop::collection::vec((-2.0f64..2.0, -2.0f64..2.0, prop::bool::weighted(0.8)), 0..12)
    }

    fn columns(tokens: &[(f64, f64, bool)]) -> (Vec<f64>, Vec<f64>, Vec<f32>) {
        let mask = tokens.iter().map(|token| f32::from(u8::from(token.2))).collect();
        (tokens.iter().map(|token| token.0).collect(), tokens.iter().map(|token| token.1).collect(), mask)
    }

    fn one_sequence(rewards: &[f64]) -> Vec<Range<usize>> {
        std::iter::once(0..rewards.len()).collect()
    }

    #[test]
    fn what_is_earned_flows_back_within_a_sequence_only() {
        let (rewards, mask) = ([1.0, 2.0, 4.0], [1.0; 3]);
        assert_eq!(rewards_to_go(&rewards, &mask, &[0..2, 2..3], 0.5).unwrap(), [2.0, 2.0, 4.0]);
        assert_eq!(rewards_to_go(&rewards, &[1.0, 0.0, 1.0], &[0..3, 3..3], 1.0).unwrap(), [1.0, 6.0, 4.0]);
        let greedy = remax(&rewards, &[0.5, 1.0], &mask, &[0..2, 2..3]).unwrap();
        assert_eq!(greedy.advantages, [2.5, 1.5, 3.0]);
        assert_eq!(greedy.returns, [3.0, 2.0, 4.0]);
    }

    #[test]
    fn columns_that_do_not_belong_together_are_refused() {
        let refused = gae(&[1.0, 2.0], &[0.0], &[1.0; 2], &[], 1.0, 1.0).unwrap_err();
        assert_eq!(refused.to_string(), "values has 1 entries where 2 are needed; columns are aligned");
        assert!(rewards_to_go(&[1.0], &[], &one_sequence(&[1.0]), 1.0).is_err());
        assert!(remax(&[1.0], &[], &[1.0], &one_sequence(&[1.0])).is_err());
    }

    proptest! {
        #[test]
        fn at_lambda_and_gamma_one_an_advantage_is_the_return_less_the_value(tokens in tokens()) {
            let (rewards, values, mask) = columns(&tokens);
            let of = gae(&rewards, &values, &mask, &one_sequence(&rewards), 1.0, 1.0).unwrap();
            for t in (0..rewards.len()).filter(|&t| mask[t] > 0.0) {
                let to_go: f64 = (t..rewards.len()).map(|k| rewards[k] * f64::from(mask[k])).sum();
                prop_assert!((of.advantages[t] - (to_go - values[t])).abs() < 1e-12);
                prop_assert!((of.returns[t] - to_go).abs() < 1e-12);
            }
        }

        #[test]
        fn at_lambda_zero_an_advantage_is_one_steps_error(tokens in tokens(), gamma in 0.0f64..1.0) {
            let (rewards, values, mask) = columns(&tokens);
            let of = gae(&rewards, &values, &mask, &one_sequence(&rewards), gamma, 0.0).unwrap();
            let kept: Vec<usize> = (0..rewards.len()).filter(|&t| mask[t] > 0.0).collect();
            for (at, &t) in kept.iter().enumerate() {
                let next = kept.get(at + 1).map_or(0.0, |&next| values[next]);
                prop_assert!((of.advantages[t] - (rewards[t] + gamma * next - values[t])).abs() < 1e-12);
            }
        }

        #[test]
        fn tokens_that_are_not_trained_might_as_well_not_be_there(tokens in tokens(), gamma in 0.0f64..1.0, lambda in 0.0f64..1.0) {
            let (rewards, values, mask) = columns(&tokens);
            let with = gae(&rewards, &values, &mask, &one_sequence(&rewards), gamma, lambda).unwrap();
            let trained: Vec<_> = tokens.iter().copied().filter(|token| token.2).collect();
            let (rewards, values, ones) = columns(&trained);
            let without = gae(&rewards, &values, &ones, &one_sequence(&rewards), gamma, lambda).unwrap();
            let kept: Vec<f64> = with.advantages.iter().zip(&mask).filter(|(_, mask)| **mask > 0.0).map(|(a, _)| *a).collect();
            prop_assert_eq!(kept, without.advantages);
        }
    }
}
