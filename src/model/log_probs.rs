//! Log-probabilities of chosen tokens and entropies, from logits.

use tch::{Kind, Tensor};

/// Log-probabilities of targets `[M]`, and entropies, from logits `[M, V]` divided by
/// `temperature`. Both results are `[M]` in f32. Only log-probabilities carry gradients.
pub fn log_probs_and_entropy(logits: &Tensor, targets: &Tensor, temperature: f64) -> (Tensor, Tensor) {
    let logits = logits.to_kind(Kind::Float);
    let log_probs = if temperature == 1.0 { logits } else { logits / temperature };
    let log_probs = log_probs.log_softmax(-1, Kind::Float);
    let chosen = log_probs.gather(-1, &targets.unsqueeze(-1), false).squeeze_dim(-1);
    let detached = log_probs.detach();
    // A logit of minus infinity has no share in the entropy; 0 · -inf would make it NaN.
    let entropy = -(detached.exp() * detached.clamp_min(f64::from(f32::MIN))).sum_dim_intlist([-1i64].as_slice(), false, None);
    (chosen, entropy)
}
