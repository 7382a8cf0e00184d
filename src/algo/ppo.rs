//! PPO's loss of policy and critic in one number, for loops written by hand.

use super::{Grpo, Loss, LossError, LossInputs, LossMetrics, ValueLoss};

/// The trained tokens of a batch as policy and critic see them now. Every slice has one entry per token.
#[derive(Clone, Copy, Debug)]
pub struct PpoTokens<'a> {
    /// Log-probabilities under the policy.
    pub log_probs: &'a [f64],
    /// Entropies of its distributions.
    pub entropies: &'a [f64],
    /// The critic's values.
    pub values: &'a [f64],
    /// What they were before the first update on the batch.
    pub old_values: &'a [f64],
    /// What the critic is to learn.
    pub returns: &'a [f64],
    /// Those of [`Aggregation`](super::Aggregation).
    pub weights: &'a [f64],
    /// Trained tokens in the whole optimizer batch.
    pub batch_tokens: usize,
}

/// A loss and its derivatives, one entry per token.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct PpoLoss {
    /// `policy + value_loss_coef · value − entropy_coef · mean entropy`.
    pub loss: f64,
    /// The clipped surrogate alone.
    pub policy: f64,
    /// The clipped value loss alone, not yet times its coefficient.
    pub value: f64,
    /// ∂loss/∂log_prob.
    pub by_log_prob: Vec<f64>,
    /// ∂loss/∂entropy.
    pub by_entropy: Vec<f64>,
    /// ∂loss/∂value.
    pub by_value: Vec<f64>,
    /// What the policy's part counted.
    pub metrics: LossMetrics,
}

/// `clipped surrogate + value_loss_coef · clipped value loss − entropy_coef · mean entropy` (Schulman et al., 2017): [`Grpo`] and
/// [`ValueLoss`](super::ValueLoss), both clipped at `clip_epsilon`. Parts of a batch add up (law N1).
///
/// A [`Trainer`](crate::stages::train::Trainer) has two models with an optimizer each, and so no such sum: AdamW does not care about the
/// coefficient of a loss that is minimised alone.
///
/// ```
/// use rollflow::algo::{PpoTokens, compute_ppo_loss};
///
/// let tokens = PpoTokens {
///     log_probs: &[-1.0, -0.5],
///     entropies: &[1.2, 0.7],
///     values: &[0.2, 0.4],
///     old_values: &[0.2, 0.4],
///     returns: &[1.0, 1.0],
///     weights: &[0.5; 2],
///     batch_tokens: 2,
/// };
/// // On policy, the surrogate is the mean advantage with its sign changed.
/// let ppo = compute_ppo_loss(&tokens, &[-1.0, -0.5], &[0.8, 0.6], 0.2, 0.5, 0.01)?;
/// assert!((ppo.policy + 0.7).abs() < 1e-12);
/// assert!((ppo.loss - (ppo.policy + 0.5 * ppo.value - 0.01 * 0.95)).abs() < 1e-12);
/// # Ok::<(), rollflow::algo::LossError>(())
/// ```
pub fn compute_ppo_loss(
    batch: &PpoTokens,
    old_log_probs: &[f64],
    advantages: &[f64],
    clip_epsilon: f64,
    value_loss_coef: f64,
    entropy_coef: f64,
) -> Result<PpoLoss, LossError> {
    let PpoTokens { log_probs, entropies, values, old_values, returns, weights, batch_tokens } = *batch;
    let columns = [
        ("entropies", entropies),
        ("values", values),
        ("old values", old_values),
        ("returns", returns),
        ("weights", weights),
        ("old log-probabilities", old_log_probs),
        ("advantages", advantages),
    ];
    if let Some((name, column)) = columns.into_iter().find(|(_, column)| column.len() != log_probs.len()) {
        let (found, needed) = (column.len(), log_probs.len());
        return Err(LossError::Custom(format!("{name} has {found} entries where {needed} are needed; columns are aligned")));
    }
    let sequence = 0..log_probs.len();
    let of_policy = LossInputs {
        log_probs,
        behaviour: Some(old_log_probs),
        proximal: None,
        reference: None,
        importance: None,
        entropies,
        advantages,
        weights,
        sequences: std::slice::from_ref(&sequence),
        batch_tokens,
    };
    let of_critic = LossInputs { log_probs: values, behaviour: Some(old_values), advantages: returns, ..of_policy };
    let clipped = Grpo { clip_low: clip_epsilon, clip_high: clip_epsilon, entropy_coef, ..Grpo::default() };
    let policy = clipped.evaluate(&of_policy)?;
    let value = ValueLoss { clip: Some(clip_epsilon) }.evaluate(&of_critic)?;
    Ok(PpoLoss {
        loss: policy.loss + value_loss_coef * value.loss,
        policy: policy.metrics.policy_loss,
        value: value.loss,
        by_log_prob: policy.grad,
        by_entropy: policy.entropy_grad.unwrap_or_else(|| vec![0.0; log_probs.len()]),
        by_value: value.grad.into_iter().map(|slope| value_loss_coef * slope).collect(),
        metrics: policy.metrics,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const TOKENS: PpoTokens = PpoTokens {
        log_probs: &[-1.0, -0.5, -2.0],
        entropies: &[1.2, 0.7, 0.1],
        values: &[0.2, 0.4, -0.3],
        old_values: &[0.1, 0.0, -0.3],
        returns: &[1.0, 1.0, 0.0],
        weights: &[0.25, 0.25, 0.5],
        batch_tokens: 3,
    };
    const OLD: [f64; 3] = [-1.1, -0.9, -1.8];
    const ADVANTAGES: [f64; 3] = [0.8, 0.6, -0.3];

    fn loss(clip: f64, value: f64, entropy: f64) -> PpoLoss {
        compute_ppo_loss(&TOKENS, &OLD, &ADVANTAGES, clip, value, entropy).unwrap()
    }

    #[test]
    fn every_coefficient_has_an_effect_and_no_other() {
        let plain = loss(0.2, 0.0, 0.0);
        assert_eq!((plain.loss, &plain.by_entropy[..], &plain.by_value[..]), (plain.policy, &[0.0; 3][..], &[0.0; 3][..]));
        let valued = loss(0.2, 0.5, 0.0);
        assert_eq!((valued.loss, &valued.by_log_prob), (plain.loss + 0.5 * plain.value, &plain.by_log_prob));
        assert!(valued.by_value[0] != 0.0);
        let bonus = loss(0.2, 0.0, 0.1);
        assert!((bonus.loss - (plain.loss - 0.1 * 2.0 / 3.0)).abs() < 1e-12);
        assert_eq!((&bonus.by_log_prob, bonus.by_entropy[0] < 0.0), (&plain.by_log_prob, true));
        let tight = loss(0.01, 0.5, 0.0);
        assert!(tight.policy != plain.policy && tight.value != plain.value);
    }

    #[test]
    fn derivatives_equal_finite_differences() {
        const STEP: f64 = 1e-6;
        let of = loss(0.2, 0.5, 0.1);
        for t in 0..3 {
            let moved = |by: f64, which: usize| {
                let mut columns = [TOKENS.log_probs.to_vec(), TOKENS.entropies.to_vec(), TOKENS.values.to_vec()];
                columns[which][t] += by;
                let [log_probs, entropies, values] = &columns;
                let tokens = PpoTokens { log_probs, entropies, values, ..TOKENS };
                compute_ppo_loss(&tokens, &OLD, &ADVANTAGES, 0.2, 0.5, 0.1).unwrap().loss
            };
            for (which, slopes) in [&of.by_log_prob, &of.by_entropy, &of.by_value].into_iter().enumerate() {
                let slope = (moved(STEP, which) - moved(-STEP, which)) / (2.0 * STEP);
                assert!((slopes[t] - slope).abs() < 1e-7, "token {t}, column {which}: {} and {slope}", slopes[t]);
            }
        }
    }

    #[test]
    fn columns_of_other_lengths_are_refused_by_name() {
        let error = compute_ppo_loss(&TOKENS, &OLD[1..], &ADVANTAGES, 0.2, 0.5, 0.0).unwrap_err();
        assert_eq!(error.to_string(), "old log-probabilities has 2 entries where 3 are needed; columns are aligned");
    }
}
