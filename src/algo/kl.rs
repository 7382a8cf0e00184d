//! KL divergence from a reference policy: by token with its derivative, as a loss, and in rewards.

use super::{Loss, LossError, LossInputs, LossOutput};
use crate::data::Sample;
use crate::settings::declare::{choices, section};
use crate::settings::setting::{NOT_NEGATIVE, POSITIVE, POSITIVE_IF_GIVEN, UP_TO_ONE};

choices! {
    /// Estimator of a token's divergence from `d`, its log-probability less the reference's
    /// (Schulman, Approximating KL Divergence, 2020). Finite for every pair of finite
    /// log-probabilities, except `k3`, which overflows beyond d = −709.
    pub enum KlForm {
        /// `e^−d − 1 + d`: unbiased and never negative (TRL's per-token divergence).
        "k3" => K3,
        /// `d`: unbiased, of either sign (verl's `kl`, `k1`). As a loss its expected gradient is 0
        /// on policy.
        "k1" => K1,
        /// `d² / 2`: of least variance near the reference; its gradient is that of the divergence
        /// (verl's `mse`, `k2`).
        "k2" => K2,
        /// `|d|` (verl's `abs`).
        "abs" => Abs,
        /// k3 with `−d` cut to ±20 and the value to ±10 (verl's `low_var_kl`, `k3`). No gradient
        /// where it is cut.
        "low_variance" => LowVariance,
    }
}

section! {
    /// KL loss: divergence from the reference policy, added to the loss.
    pub struct KlLoss {
        /// KL coefficient β.
        #[formerly(coef)]
        beta: f64 = 0.001, POSITIVE;
        /// Estimator of the divergence, from the trained policy's log-probabilities.
        estimator: KlForm = KlForm::K3;
        /// If true, its gradient is that of k2, whatever the estimator.
        straight_through: bool = false;
        /// If true, it is multiplied by the probability ratio, which makes its gradient unbiased
        /// for off-policy tokens.
        unbiased: bool = true;
        /// Largest absolute value of a token's divergence.
        truncate: Option<f64> = None, POSITIVE_IF_GIVEN;
        /// Reference probability from which a token counts in full; tokens below count in
        /// proportion. 0 counts all in full.
        confidence: f64 = 0.0, UP_TO_ONE;
    }
}

section! {
    /// KL in reward: divergence from the reference policy, summed over a completion's tokens and
    /// subtracted from its reward before advantages.
    pub struct KlReward {
        /// KL coefficient β; with a `target`, its first value.
        #[formerly(coef)]
        beta: f64 = 0.001, NOT_NEGATIVE;
        /// Estimator of the divergence, from the behaviour log-probabilities.
        estimator: KlForm = KlForm::K1;
        /// Mean divergence per token, in nats, that the coefficient is adapted to. Left out: the
        /// coefficient is constant.
        target: Option<f64> = None, POSITIVE_IF_GIVEN;
        /// Completions over which the coefficient changes by at most a fifth.
        horizon: f64 = 10_000.0, POSITIVE;
        /// Largest absolute value of a token's divergence.
        truncate: Option<f64> = None, POSITIVE_IF_GIVEN;
        /// Reference probability from which a token counts in full; tokens below count in
        /// proportion. 0 counts all in full.
        confidence: f64 = 0.0, UP_TO_ONE;
    }
}

/// Divergence of a token's log-probability from the reference's: [`KlForm`], [`KlLoss`] or
/// [`KlReward`] without its coefficient, or a closure `Fn(log_prob, reference) -> (value,
/// derivative)`.
pub trait KlFunction: Send + Sync {
    /// Value, and derivative by `log_prob`.
    fn token(&self, log_prob: f64, reference: f64) -> (f64, f64);
}

impl<F: Fn(f64, f64) -> (f64, f64) + Send + Sync> KlFunction for F {
    fn token(&self, log_prob: f64, reference: f64) -> (f64, f64) {
        self(log_prob, reference)
    }
}

impl KlFunction for KlForm {
    fn token(&self, log_prob: f64, reference: f64) -> (f64, f64) {
        let d = log_prob - reference;
        match self {
            KlForm::K1 => (d, 1.0),
            KlForm::Abs => (d.abs(), if d == 0.0 { 0.0 } else { d.signum() }),
            KlForm::K2 => (0.5 * d * d, d),
            KlForm::K3 => ((-d).exp() - 1.0 + d, 1.0 - (-d).exp()),
            KlForm::LowVariance => {
                let cut = (-d).clamp(-20.0, 20.0);
                let value = cut.exp() - cut - 1.0;
                let free = cut == -d && value <= 10.0;
                (value.min(10.0), if free { 1.0 - cut.exp() } else { 0.0 })
            }
        }
    }
}

/// Straight-through, the gradient is that of k2, whose expectation is the divergence's own: `k2 −
/// sg(k2) + sg(value)` (verl's `k1+`, `k3+`, `abs+`).
impl KlFunction for KlLoss {
    fn token(&self, log_prob: f64, reference: f64) -> (f64, f64) {
        let (value, slope) = self.estimator.token(log_prob, reference);
        let slope = if self.straight_through { log_prob - reference } else { slope };
        limited(value, slope, self.truncate, self.confidence, reference)
    }
}

impl KlFunction for KlReward {
    fn token(&self, log_prob: f64, reference: f64) -> (f64, f64) {
        let (value, slope) = self.estimator.token(log_prob, reference);
        limited(value, slope, self.truncate, self.confidence, reference)
    }
}

/// Value and derivative within the limits; a truncated value has no derivative.
fn limited(value: f64, slope: f64, truncate: Option<f64>, confidence: f64, reference: f64) -> (f64, f64) {
    let (value, slope) = match truncate {
        Some(most) if value.abs() > most => (most.copysign(value), 0.0),
        _ => (value, slope),
    };
    let weight = if confidence > 0.0 { (reference.exp() / confidence).min(1.0) } else { 1.0 };
    (weight * value, weight * slope)
}

impl KlReward {
    /// Next coefficient, after `samples` with a mean divergence of `kl` nats per token: `coef · (1 +
    /// clip(kl / target − 1, ±0.2) · samples / horizon)`, or `coef` without a target.
    ///
    /// Ziegler et al., Fine-Tuning Language Models from Human Preferences, 2019. Equals verl 0.9's
    /// `AdaptiveKLController`.
    pub fn next_coef(&self, coef: f64, kl: f64, samples: u64) -> f64 {
        let error = |target: f64| (kl / target - 1.0).clamp(-0.2, 0.2);
        self.target.map_or(coef, |target| coef * (1.0 + error(target) * samples as f64 / self.horizon))
    }
}

/// Value and derivative of every token's divergence, for two aligned columns.
///
/// Times a coefficient and subtracted from rewards, values equal verl 0.9's `compute_rewards` (k1,
/// behaviour against reference). Summed over a sequence they equal TRL's `RLOOTrainer` with `beta`
/// above 0.
pub fn kl_per_token(log_probs: &[f64], reference: &[f64], kl: &dyn KlFunction) -> Vec<(f64, f64)> {
    log_probs.iter().zip(reference).map(|(&own, &other)| kl.token(own, other)).collect()
}

/// `loss + coef · Σ w · kl(θ, ref)`, for own divergences and for losses without a KL penalty. A
/// [`PolicyLoss`](super::PolicyLoss) has one, which can be unbiased for off-policy tokens.
///
/// ```
/// use rollflow::algo::{CrossEntropy, Loss, with_kl};
///
/// let squared = |own: f64, reference: f64| ((own - reference).powi(2), 2.0 * (own - reference));
/// let held = with_kl(CrossEntropy, 0.1, squared);
/// assert_eq!(held.name(), CrossEntropy.name());
/// ```
pub fn with_kl(loss: impl Loss, coef: f64, kl: impl KlFunction) -> impl Loss {
    WithKl { loss, coef, kl }
}

struct WithKl<L, K> {
    loss: L,
    coef: f64,
    kl: K,
}

impl<L: Loss, K: KlFunction> Loss for WithKl<L, K> {
    fn name(&self) -> &str {
        self.loss.name()
    }

    fn whole_batch(&self) -> bool {
        self.loss.whole_batch()
    }

    fn evaluate(&self, inputs: &LossInputs) -> Result<LossOutput, LossError> {
        let terms = kl_per_token(inputs.log_probs, inputs.needed_reference("a KL term", "its divergence")?, &self.kl);
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
