//! Log-softmax and entropy of one row of logits, exact and overflow-safe: the reference for tensor
//! code.

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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn huge_and_forbidden_logits_stay_finite() {
        assert_eq!(log_softmax_at(&[1e6, 1e6], 0), -(2f64.ln()));
        assert_eq!(entropy(&[0.0, 0.0, f64::NEG_INFINITY]), 2f64.ln());
        assert_eq!(log_softmax_at(&[0.0, f64::NEG_INFINITY], 1), f64::NEG_INFINITY);
    }
}
