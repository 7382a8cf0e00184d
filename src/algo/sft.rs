//! Supervised fine-tuning: cross-entropy of the given tokens.

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
        let nll = -inputs.log_probs.iter().zip(inputs.weights).map(|(log_prob, weight)| log_prob * weight).sum::<f64>();
        let mut output = LossOutput::new(nll, inputs.weights.iter().map(|weight| -weight).collect());
        output.metrics.nll = Some(output.loss);
        Ok(output)
    }
}

/// Perplexity, `exp(nll)`. `nll` is a token mean.
pub fn perplexity(nll: f64) -> f64 {
    nll.exp()
}
