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

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_critic_learns_returns_from_its_old_values_and_parts_add_up() {
        let (values, old, returns, weights) = ([0.9, -0.9, 0.1], [0.0; 3], [1.0, -1.0, 1.0], [0.5, 0.25, 0.25]);
        let part = |of: std::ops::Range<usize>| {
            let (log_probs, advantages) = (&values[of.clone()], &returns[of.clone()]);
            let (behaviour, weights) = (Some(&old[of.clone()]), &weights[of]);
            let inputs = LossInputs { log_probs, behaviour, advantages, weights, ..LossInputs::default() };
            ValueLoss { clip: Some(0.2) }.evaluate(&inputs).unwrap()
        };
        let (whole, first, second) = (part(0..3), part(0..1), part(1..3));
        assert_eq!((whole.metrics.clipped_low, whole.metrics.clipped_high, whole.metrics.tokens), (1, 1, 3));
        assert_eq!(whole.grad, [0.0, 0.0, 0.25 * -0.9]);
        assert!((first.loss + second.loss - whole.loss).abs() < 1e-12, "law N1");
        assert_eq!([first.grad, second.grad].concat(), whole.grad, "law N1");
        assert!(!ValueLoss::default().ignores_zero_advantage(), "a return of 0 is a lesson, too");
        assert!(value_loss(&[1.0], &[], &[1.0], &[1.0], None).is_err());
        let masked = value_loss(&[f64::NAN, 1.0], &[0.0; 2], &[0.0; 2], &[0.0, 1.0], None).unwrap();
        assert_eq!((masked.loss, masked.grad), (0.5, vec![0.0, 1.0]), "a masked token counts for nothing");
    }

    proptest! {
        #[test]
        fn the_gradient_is_the_finite_difference(tokens in prop::collection::vec((-2.0f64..2.0, -2.0f64..2.0, -2.0f64..2.0, 0.0f64..1.0), 1..9), clip in prop::option::of(0.1f64..1.0)) {
            const STEP: f64 = 1e-6;
            let column = |of: fn(&(f64, f64, f64, f64)) -> f64| tokens.iter().map(of).collect::<Vec<f64>>();
            let (values, old, returns, weights) = (column(|t| t.0), column(|t| t.1), column(|t| t.2), column(|t| t.3));
            let loss = |values: &[f64]| value_loss(values, &old, &returns, &weights, clip).unwrap();
            let grad = loss(&values).grad;
            for t in 0..values.len() {
                let clip = clip.unwrap_or(f64::INFINITY);
                let bend = |at: f64| (values[t] - at).abs() < 1e-3;
                // Bends: the clip's edges, and the prediction as far on the other side of the return as an edge.
                let edges = [old[t] - clip, old[t] + clip];
                if edges.into_iter().any(|edge| bend(edge) || bend(2.0 * returns[t] - edge)) {
                    continue;
                }
                let at = |by: f64| { let mut moved = values.clone(); moved[t] += by; loss(&moved).loss };
                prop_assert!((grad[t] - (at(STEP) - at(-STEP)) / (2.0 * STEP)).abs() < 1e-7);
            }
        }
    }
}
