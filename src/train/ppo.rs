//! Advantages token by token from a critic's values (PPO).

use std::ops::Range;

use super::{BatchError, SampleId};
use crate::algo::{AdvantageError, aligned, gae};
use crate::data::Sample;

/// One list a sequence, one entry per trained token.
pub type TokenColumn = Vec<Vec<f64>>;

/// Rewards by trained token: the sample's reward at the last one, else 0.
pub fn token_rewards<'a>(samples: impl Iterator<Item = &'a Sample>) -> Result<TokenColumn, BatchError> {
    samples
        .map(|sample| {
            let value = sample.reward.unwrap_or(f64::NAN);
            if !value.is_finite() {
                return Err(BatchError::Reward { id: SampleId::of(sample), value });
            }
            // A sample's first token is never a target.
            let trained = sample.loss_mask.iter().skip(1).filter(|mask| **mask > 0.0).count();
            let mut earned = vec![0.0; trained];
            if let Some(last) = earned.last_mut() {
                *last = value;
            }
            Ok(earned)
        })
        .collect()
}

/// [`gae`] over columns of trained tokens: advantages and returns.
pub fn token_advantages(
    rewards: &[Vec<f64>],
    values: &[Vec<f64>],
    gamma: f64,
    lambda: f64,
) -> Result<(TokenColumn, TokenColumn), AdvantageError> {
    rewards.iter().zip(values).try_for_each(|(rewards, values)| aligned("values", values.len(), rewards.len()))?;
    let mut end = 0;
    let place = |tokens: &Vec<f64>| {
        end += tokens.len();
        end - tokens.len()..end
    };
    let places: Vec<Range<usize>> = rewards.iter().map(place).collect();
    let of = gae(&rewards.concat(), &values.concat(), &vec![1.0; end], &places, gamma, lambda)?;
    let apart = |column: &[f64]| places.iter().map(|at| column[at.clone()].to_vec()).collect();
    Ok((apart(&of.advantages), apart(&of.returns)))
}
