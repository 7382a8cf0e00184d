//! What a critic learns from.

use super::advantages::AdvantageError;
use super::advantages::aligned;

/// A value loss, its derivative, and how much of it was clipped.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ValueLoss {
    /// This part's share of the optimizer batch's loss.
    pub loss: f64,
    /// ∂loss/∂prediction, one entry per token.
    pub grad: Vec<f64>,
    /// Tokens whose clipped term was the larger: no gradient.
    pub clipped: usize,
}

/// `½ Σ w · max((v − R)², (clip(v, v_old ± ε) − R)²)`: the larger of both squares, so that no prediction gains by moving further than ε
/// from the old one (PPO). Without `clip`, `½ Σ w (v − R)²`.
///
/// Shapes: columns with one entry per token; `weights` are those of [`Aggregation`](super::Aggregation), so that parts add up (law N1).
/// Equals verl 0.9's `compute_value_loss`.
pub fn value_loss(
    predictions: &[f64],
    old: &[f64],
    returns: &[f64],
    weights: &[f64],
    clip: Option<f64>,
) -> Result<ValueLoss, AdvantageError> {
    aligned("old values", old.len(), predictions.len())?;
    aligned("returns", returns.len(), predictions.len())?;
    aligned("weights", weights.len(), predictions.len())?;
    let mut of = ValueLoss { grad: vec![0.0; predictions.len()], ..ValueLoss::default() };
    for t in (0..predictions.len()).filter(|&t| weights[t] != 0.0) {
        let value = predictions[t];
        let bounded = clip.map_or(value, |clip| value.min(old[t] + clip).max(old[t] - clip));
        let (free, clipped) = (value - returns[t], bounded - returns[t]);
        // `clip` has no slope where it holds; where it doesn't, both terms are the same.
        if clipped.powi(2) > free.powi(2) {
            of.clipped += 1;
            of.loss += 0.5 * weights[t] * clipped.powi(2);
        } else {
            of.loss += 0.5 * weights[t] * free.powi(2);
            of.grad[t] = weights[t] * free;
        }
    }
    Ok(of)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_prediction_gains_nothing_beyond_the_clip() {
        // Towards a return of 1 from 0: at 0.1 it is free, at 0.9 it is held at 0.2.
        let of = value_loss(&[0.1, 0.9], &[0.0; 2], &[1.0; 2], &[1.0; 2], Some(0.2)).unwrap();
        assert_eq!((of.grad, of.clipped), (vec![-0.9, 0.0], 1));
        assert!((of.loss - 0.5 * (0.81 + 0.64)).abs() < 1e-12);
        // Away from it, it is never held.
        let of = value_loss(&[-0.9], &[0.0], &[1.0], &[1.0], Some(0.2)).unwrap();
        assert_eq!((of.grad, of.clipped), (vec![-1.9], 0));
        assert_eq!(value_loss(&[0.9], &[0.0], &[1.0], &[2.0], None).unwrap().clipped, 0);
    }

    #[test]
    fn masked_tokens_count_for_nothing_and_no_tokens_cost_nothing() {
        let of = value_loss(&[f64::NAN, 1.0], &[0.0; 2], &[0.0; 2], &[0.0, 1.0], None).unwrap();
        assert_eq!((of.loss, of.grad), (0.5, vec![0.0, 1.0]));
        assert_eq!(value_loss(&[], &[], &[], &[], Some(0.2)).unwrap(), ValueLoss::default());
        assert!(value_loss(&[1.0], &[], &[1.0], &[1.0], None).is_err());
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
