//! Supervised fine-tuning: cross-entropy of the given tokens.

use super::{Loss, LossError, LossInputs, LossMetrics, LossOutput};

/// `−Σ w θ`: with token-mean weights the mask-weighted mean negative log-likelihood over trained tokens (TRL's SFT `nll`).
/// Derivative: `−w`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CrossEntropy;

impl Loss for CrossEntropy {
    fn name(&self) -> &str {
        "cross_entropy"
    }

    fn evaluate(&self, inputs: &LossInputs) -> Result<LossOutput, LossError> {
        let loss = -inputs.log_probs.iter().zip(inputs.weights).map(|(log_prob, weight)| log_prob * weight).sum::<f64>();
        let grad = inputs.weights.iter().map(|weight| -weight).collect();
        let metrics = LossMetrics { tokens: inputs.log_probs.len(), policy_loss: loss, ..Default::default() };
        Ok(LossOutput { loss, grad, entropy_grad: None, metrics })
    }
}

/// `exp(nll)`: how many tokens the model hesitates between. `nll` is a token mean.
pub fn perplexity(nll: f64) -> f64 {
    nll.exp()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_uniform_guess_over_n_tokens_has_perplexity_n() {
        assert!((perplexity(8f64.ln()) - 8.0).abs() < 1e-12);
    }
}
