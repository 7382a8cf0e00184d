//! Loss of a critic.

use serde::{Deserialize, Serialize};

use super::advantages::{AdvantageError, aligned};
use super::{Loss, LossError, LossInputs, LossOutput};

/// A value loss, its derivative, and the clipped tokens.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ValueOutput {
    /// This part's share of the optimizer batch's loss.
    pub loss: f64,
    /// ∂loss/∂prediction, one entry per token.
    pub grad: Vec<f64>,
    /// Places of tokens whose clipped term was the larger: they have no gradient.
    pub clipped: Vec<usize>,
}

/// `½ Σ w · max((v − R)², (clip(v, v_old ± ε) − R)²)` (PPO), or without `clip` `½ Σ w (v − R)²`.
///
/// Shapes: columns with one entry per token; `weights` are those of
/// [`Aggregation`](super::Aggregation), so that parts add up (law N1). Equals verl 0.9's
/// `compute_value_loss`.
pub fn value_loss(
    predictions: &[f64],
    old: &[f64],
    returns: &[f64],
    weights: &[f64],
    clip: Option<f64>,
) -> Result<ValueOutput, AdvantageError> {
    aligned("old values", old.len(), predictions.len())?;
    aligned("returns", returns.len(), predictions.len())?;
    aligned("weights", weights.len(), predictions.len())?;
    let mut of = ValueOutput { grad: vec![0.0; predictions.len()], ..ValueOutput::default() };
    for t in (0..predictions.len()).filter(|&t| weights[t] != 0.0) {
        let value = predictions[t];
        let bounded = clip.map_or(value, |clip| value.min(old[t] + clip).max(old[t] - clip));
        let (free, clipped) = (value - returns[t], bounded - returns[t]);
        // `clip` has no slope where it holds; where it doesn't, both terms are the same.
        if clipped.powi(2) > free.powi(2) {
            of.clipped.push(t);
            of.loss += 0.5 * weights[t] * clipped.powi(2);
        } else {
            of.loss += 0.5 * weights[t] * free.powi(2);
            of.grad[t] = weights[t] * free;
        }
    }
    Ok(of)
}

/// [`value_loss`] as the [`Loss`] of a critic, a model with one number per row
/// ([`LossInputs::log_probs`] are its values).
///
/// Returns are [`LossInputs::advantages`], and the values before the first update on the batch are
/// [`LossInputs::anchor`]. Clipped tokens are counted by the side of the old value.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ValueLoss {
    /// Clip range of values around the old ones; `None` does not clip.
    pub clip: Option<f64>,
}

impl Loss for ValueLoss {
    fn name(&self) -> &str {
        "value"
    }

    fn is_sum(&self) -> bool {
        true
    }

    fn evaluate(&self, inputs: &LossInputs) -> Result<LossOutput, LossError> {
        let LossInputs { log_probs: values, advantages: returns, weights, .. } = *inputs;
        let old = inputs.anchor();
        let of = value_loss(values, old, returns, weights, self.clip).map_err(|error| LossError::Custom(error.to_string()))?;
        let mut output = LossOutput::new(of.loss, of.grad);
        output.metrics.clipped_low = of.clipped.iter().filter(|t| values[**t] < old[**t]).count();
        output.metrics.clipped_high = of.clipped.iter().filter(|t| values[**t] > old[**t]).count();
        Ok(output)
    }
}
