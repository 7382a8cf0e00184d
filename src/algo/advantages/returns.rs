//! Advantages by token: rewards to go and generalised advantage estimation.
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

/// Rewards to go, `G_t = r_t + γ G_{t+1}`, with `t + 1` the next *trained* token: a token that is
/// not trained is skipped, with its reward, and its return is 0.
///
/// Equals the returns of verl 0.9's `reinforce_plus_plus`.
pub fn rewards_to_go(rewards: &[f64], mask: &[f32], sequences: &[Range<usize>], gamma: f64) -> Result<Vec<f64>, AdvantageError> {
    aligned("mask", mask.len(), rewards.len())?;
    let mut returns = vec![0.0; rewards.len()];
    for sequence in sequences {
        let mut running = 0.0;
        for t in sequence.clone().rev() {
            let weight = f64::from(mask[t]);
            returns[t] = weight * (rewards[t] + gamma * running);
            running = returns[t] + (1.0 - weight) * running;
        }
    }
    Ok(returns)
}

/// Generalised advantage estimation (Schulman et al., 2016):
///
/// `δ_t = r_t + γ V_{t+1} − V_t`,  `A_t = δ_t + γ λ A_{t+1}`,  returns `A_t + V_t`
///
/// with `V = A = 0` after a sequence's end, and `t + 1` the next *trained* token: a token that is
/// not trained is skipped, with its reward and value, and carries the advantage of the one after
/// it. λ = 1 gives the discounted rewards to go less the value, λ = 0 the error of one step. Equals
/// verl 0.9's `gae` once its advantages are whitened ([`whiten`](crate::algo::whiten)).
///
/// With values of 0 and γ = λ = 1, returns are undiscounted rewards to go. Less the reward of a
/// greedy completion of the same prompt they are the advantages of ReMax (Li et al., 2023; verl's
/// `remax`).
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
