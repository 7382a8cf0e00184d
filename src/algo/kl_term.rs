//! KL penalty as a term of any loss, and the divergence of samples.

use super::kl::{KlFunction, kl_per_token};
use super::{Loss, LossError, LossInputs, LossOutput};
use crate::data::Sample;

/// `loss + coef · Σ w · kl(θ, ref)`, for own divergences and for losses without a KL penalty. A
/// [`PolicyLoss`](super::PolicyLoss) has one, which can be unbiased for off-policy tokens.
///
/// ```
/// use rollflow::algo::{CrossEntropy, Loss, WithKl};
///
/// let squared = |own: f64, reference: f64| ((own - reference).powi(2), 2.0 * (own - reference));
/// let held = WithKl::new(CrossEntropy, 0.1, squared);
/// assert_eq!(held.name(), CrossEntropy.name());
/// ```
pub struct WithKl<L> {
    loss: L,
    coef: f64,
    kl: Box<dyn KlFunction>,
}

impl<L: Loss> WithKl<L> {
    /// Adds `coef` times a divergence: [`Kl`](super::Kl), or a closure `Fn(log_prob, reference) ->
    /// (value, derivative)`.
    pub fn new(loss: L, coef: f64, kl: impl KlFunction + 'static) -> Self {
        WithKl { loss, coef, kl: Box::new(kl) }
    }
}

impl<L: Loss> Loss for WithKl<L> {
    fn name(&self) -> &str {
        self.loss.name()
    }

    fn whole_batch(&self) -> bool {
        self.loss.whole_batch()
    }

    fn evaluate(&self, inputs: &LossInputs) -> Result<LossOutput, LossError> {
        let missing = LossError::Missing { loss: "a KL term", column: "reference log-probabilities", why: "its divergence" };
        let terms = kl_per_token(inputs.log_probs, inputs.reference.ok_or(missing)?, self.kl.as_ref());
        let mut output = self.loss.evaluate(inputs)?;
        for (t, weight) in inputs.weights.iter().enumerate() {
            output.loss += weight * self.coef * terms[t].0;
            output.grad[t] += weight * self.coef * terms[t].1;
        }
        output.metrics.kl_sum += terms.iter().map(|(value, _)| value).sum::<f64>();
        output.metrics.kl_coef = Some(self.coef);
        Ok(output)
    }
}

/// Divergence of each trained token from the reference; `None` if a policy did not score the
/// sample.
pub fn token_kl(sample: &Sample, kl: &dyn KlFunction) -> Option<Vec<f64>> {
    let len = sample.tokens.len();
    if len == 0 || [&sample.log_probs, &sample.ref_log_probs, &sample.loss_mask].iter().any(|column| column.len() != len) {
        return None;
    }
    let columns = sample.loss_mask.iter().zip(sample.log_probs.iter().zip(&sample.ref_log_probs)).skip(1);
    let trained = columns.filter(|(mask, _)| **mask > 0.0);
    Some(trained.map(|(_, (own, reference))| kl.token(f64::from(*own), f64::from(*reference)).0).collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::algo::{CrossEntropy, Kl, KlForm};

    fn inputs<'a>(log_probs: &'a [f64], reference: Option<&'a [f64]>, sequences: &'a [std::ops::Range<usize>]) -> LossInputs<'a> {
        LossInputs {
            log_probs,
            behaviour: None,
            proximal: None,
            reference,
            importance: None,
            entropies: &[0.0; 2],
            advantages: &[0.0; 2],
            weights: &[0.25, 0.75],
            sequences,
            batch_tokens: 2,
        }
    }

    #[test]
    fn a_closure_pulls_on_any_loss_and_needs_a_reference() {
        let k1 = |own: f64, other: f64| (own - other, 1.0);
        let held = WithKl::new(CrossEntropy, 0.5, k1);
        let sequences = std::slice::from_ref(&(0..2));
        let own = [-1.0, -2.0];
        let plain = CrossEntropy.evaluate(&inputs(&own, None, sequences)).unwrap();
        let output = held.evaluate(&inputs(&own, Some(&[-3.0, -2.0]), sequences)).unwrap();
        assert_eq!(output.loss, plain.loss + 0.25 * 0.5 * 2.0);
        assert_eq!(output.grad, [plain.grad[0] + 0.125, plain.grad[1] + 0.375]);
        assert_eq!((output.metrics.kl(), output.metrics.kl_coef), (1.0, Some(0.5)));
        assert!(held.evaluate(&inputs(&own, None, sequences)).unwrap_err().to_string().contains("reference log-probabilities"));
        assert!(!held.ignores_zero_advantage());
    }

    #[test]
    fn masked_tokens_and_the_prompt_cost_nothing() {
        let sample = Sample {
            tokens: vec![1, 2, 3, 4],
            loss_mask: vec![0.0, 1.0, 0.0, 1.0],
            log_probs: vec![0.0, -1.0, -9.0, -2.0],
            ref_log_probs: vec![0.0, -2.0, 0.0, -2.5],
            ..Sample::default()
        };
        let k1 = Kl::from(KlForm::K1);
        assert_eq!(token_kl(&sample, &k1), Some(vec![1.0, 0.5]));
        assert_eq!(token_kl(&Sample { ref_log_probs: Vec::new(), ..sample }, &k1), None);
    }
}
