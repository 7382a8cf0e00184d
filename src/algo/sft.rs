//! Supervised fine-tuning: cross-entropy of the given tokens. Log-softmax and entropy of one row of
//! logits, exact and overflow-safe, are the reference for tensor code.

use super::{Loss, LossError, LossInputs, LossOutput};

/// `−Σ w θ`: with token-mean weights the mean negative log-likelihood over trained tokens (TRL's
/// SFT `nll`). Derivative: `−w`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CrossEntropy;

impl Loss for CrossEntropy {
    fn name(&self) -> &str {
        "cross_entropy"
    }

    fn evaluate(&self, inputs: &LossInputs) -> Result<LossOutput, LossError> {
        let mut output = LossOutput::new(nll(inputs), inputs.weights.iter().map(|weight| -weight).collect());
        output.metrics.nll = Some(output.loss);
        Ok(output)
    }
}

fn nll(inputs: &LossInputs) -> f64 {
    -inputs.log_probs.iter().zip(inputs.weights).map(|(log_prob, weight)| log_prob * weight).sum::<f64>()
}

/// `−Σ w sg(e^θ) θ`: cross-entropy with tokens weighted by their own probability (dynamic
/// fine-tuning; TRL's `loss_type = "dft"`). Derivative: `−w e^θ`.
pub fn dynamic_fine_tuning() -> impl Loss {
    DynamicFineTuning
}

struct DynamicFineTuning;

impl Loss for DynamicFineTuning {
    fn name(&self) -> &str {
        "dft"
    }

    fn evaluate(&self, inputs: &LossInputs) -> Result<LossOutput, LossError> {
        let slope = |(log_prob, weight): (&f64, &f64)| -weight * log_prob.exp();
        let grad: Vec<f64> = inputs.log_probs.iter().zip(inputs.weights).map(slope).collect();
        let loss = grad.iter().zip(inputs.log_probs).map(|(grad, log_prob)| grad * log_prob).sum();
        let mut output = LossOutput::new(loss, grad);
        output.metrics.nll = Some(nll(inputs));
        Ok(output)
    }
}

/// Largest logit and `log Σ exp(logit − largest)`, separate so that huge logits keep their
/// precision.
fn normaliser(logits: &[f64]) -> (f64, f64) {
    let max = logits.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    (max, logits.iter().map(|logit| (logit - max).exp()).sum::<f64>().ln())
}

/// `log softmax(logits)[index]` (TRL's `selective_log_softmax`, one row).
pub fn log_softmax_at(logits: &[f64], index: usize) -> f64 {
    let (max, log_sum) = normaliser(logits);
    (logits[index] - max) - log_sum
}

/// Entropy `−Σ p log p` of `softmax(logits)` (TRL's `entropy_from_logits`, one row). Masked tokens
/// (−∞) add nothing.
pub fn entropy(logits: &[f64]) -> f64 {
    let (max, log_sum) = normaliser(logits);
    logits.iter().map(|logit| (logit - max) - log_sum).filter(|log_p| log_p.is_finite()).map(|log_p| -log_p.exp() * log_p).sum()
}

/// `−(1 − ε) log p[target] − ε mean_v log p_v` of one row of logits, and its derivative
/// (transformers' `LabelSmoother`). It needs all logits, so it is no [`Loss`].
pub fn smoothed_cross_entropy(logits: &[f64], target: usize, epsilon: f64) -> (f64, Vec<f64>) {
    let log_probs: Vec<f64> = (0..logits.len()).map(|token| log_softmax_at(logits, token)).collect();
    let each = epsilon / logits.len() as f64;
    let wanted = |token: usize| each + if token == target { 1.0 - epsilon } else { 0.0 };
    let value = (0..logits.len()).map(|token| -wanted(token) * log_probs[token]).sum();
    (value, log_probs.iter().enumerate().map(|(token, log_prob)| log_prob.exp() - wanted(token)).collect())
}

/// Perplexity, `exp(nll)`. `nll` is a token mean.
pub fn perplexity(nll: f64) -> f64 {
    nll.exp()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_uniform_guess_over_n_tokens_has_perplexity_n() {
        assert!((perplexity(8f64.ln()) - 8.0).abs() < 1e-12);
    }

    #[test]
    fn huge_and_forbidden_logits_stay_finite() {
        assert_eq!(log_softmax_at(&[1e6, 1e6], 0), -(2f64.ln()));
        assert_eq!(entropy(&[0.0, 0.0, f64::NEG_INFINITY]), 2f64.ln());
        assert_eq!(log_softmax_at(&[0.0, f64::NEG_INFINITY], 1), f64::NEG_INFINITY);
    }

    proptest! {
        #[test]
        fn smoothing_has_the_slope_it_reports(
            logits in prop::collection::vec(-3.0f64..3.0, 2..8), target in any::<prop::sample::Index>(), epsilon in 0.0f64..1.0
        ) {
            let target = target.index(logits.len());
            let (value, slopes) = smoothed_cross_entropy(&logits, target, epsilon);
            if epsilon == 0.0 {
                prop_assert_eq!(value, -log_softmax_at(&logits, target));
            }
            for (at, slope) in slopes.iter().enumerate() {
                let moved = |by: f64| {
                    let mut logits = logits.clone();
                    logits[at] += by;
                    smoothed_cross_entropy(&logits, target, epsilon).0
                };
                prop_assert!(((moved(1e-6) - moved(-1e-6)) / 2e-6 - slope).abs() < 1e-7);
            }
        }
    }
}
