//! Advantages token by token from a critic's values (PPO).

use std::borrow::Borrow;
use std::ops::Range;

use super::{PrepareError, SampleId};
use crate::algo::{AdvantageError, gae};
use crate::data::Sample;

/// One list a sequence, one entry per trained token.
pub type TokenColumn = Vec<Vec<f64>>;

/// Advantages and returns by generalised advantage estimation ([`gae`]), not whitened: what a token earned and what is expected from the
/// next trained token on, less what was expected. λ = γ = 1 gives the answer's reward less the value.
///
/// An answer earns its reward at its last trained token, and nothing is expected after it, also where it was cut off for its length: as
/// in verl, what might have come then is not guessed at. `value_fn` gives the value before each of a sample's trained tokens.
///
/// ```
/// use rollflow::data::{Prompt, Sample};
/// use rollflow::train::compute_ppo_advantages;
///
/// let mut sample = Sample::begin(&Prompt::default(), 0, &[1, 2]);
/// (0..3).for_each(|_| sample.push(3, -1.0, 1));
/// sample.reward = Some(1.0);
/// let (advantages, returns) = compute_ppo_advantages(&[sample], |_| vec![0.2, 0.4, 0.7], 1.0, 1.0)?;
/// assert_eq!(returns, [[1.0; 3]]);
/// assert!(advantages[0].iter().zip([0.8, 0.6, 0.3]).all(|(found, expected)| (found - expected).abs() < 1e-12));
/// # Ok::<(), rollflow::train::PrepareError>(())
/// ```
pub fn compute_ppo_advantages<S: Borrow<Sample>>(
    samples: &[S],
    mut value_fn: impl FnMut(&Sample) -> Vec<f64>,
    gamma: f64,
    gae_lambda: f64,
) -> Result<(TokenColumn, TokenColumn), PrepareError> {
    let samples = || samples.iter().map(Borrow::borrow);
    let rewards = token_rewards(samples())?;
    let values: TokenColumn = samples().map(&mut value_fn).collect();
    token_advantages(&rewards, &values, gamma, gae_lambda).map_err(PrepareError::Advantage)
}

/// What each trained token earned: the last one the answer's reward, the others nothing.
pub fn token_rewards<'a>(samples: impl Iterator<Item = &'a Sample>) -> Result<TokenColumn, PrepareError> {
    samples
        .map(|sample| {
            let value = sample.reward.unwrap_or(f64::NAN);
            if !value.is_finite() {
                return Err(PrepareError::Reward { id: SampleId::of(sample), value });
            }
            // A sample's first token is never a target, whatever its mask.
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
    if let Some((rewards, values)) = rewards.iter().zip(values).find(|(rewards, values)| rewards.len() != values.len()) {
        return Err(AdvantageError::Length { column: "values", found: values.len(), expected: rewards.len() });
    }
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
