//! Divergence from a teacher's distribution, as a loss.

use std::sync::Arc;

use super::{Loss, LossError, LossInputs, LossOutput};

/// Largest log of the mass of a teacher's likeliest tokens, so that the rest has a logarithm (TRL's
/// `add_tail_bucket`). Beyond it the rest is a constant, without a gradient.
const MOST_MASS: f64 = -1e-7;

/// Generalised Jensen-Shannon divergence of the policy q from the teacher p (Agarwal et al., 2024; TRL's
/// `generalized_jsd_loss`).
///
/// With `m = (1 − β) q + β p` it is `β KL(p‖m) + (1 − β) KL(q‖m)`. At β = 0 it is the forward divergence
/// `KL(p‖q)`, at β = 1 the reverse `KL(q‖p)`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TeacherDivergence {
    /// β, from 0 to 1.
    pub beta: f64,
}

impl TeacherDivergence {
    /// Returns the divergence at one position, in nats, and its derivatives by the policy's
    /// log-probabilities.
    ///
    /// `policy` and `teacher` are log-probabilities of the same tokens, the teacher's likeliest. All
    /// other tokens are one more outcome, unless these are the `whole` vocabulary.
    pub fn evaluate(self, policy: &[f64], teacher: &[f64], whole: bool) -> (f64, Vec<f64>) {
        let kept = policy.iter().copied().zip(teacher.iter().copied());
        let mass = log_mass(policy);
        let rest = (!whole).then(|| (log_rest(mass), log_rest(log_mass(teacher))));
        let outcomes: Vec<(f64, f64)> = kept.chain(rest).map(|(q, p)| self.outcome(q, p)).collect();
        let value = outcomes.iter().map(|(value, _)| value).sum();
        let slope_of_rest = match whole {
            true => 0.0,
            // The constant that the outcomes' slopes leave out: −1 in the reverse divergence, else 0.
            false if mass > MOST_MASS => -f64::from(u8::from(self.beta == 1.0)),
            // Mass that a token gains is lost by the rest.
            false => outcomes[policy.len()].1,
        };
        let slope = |(q, (_, slope)): (&f64, &(f64, f64))| q.exp() * (slope - slope_of_rest);
        (value, policy.iter().zip(&outcomes).map(slope).collect())
    }

    /// Part of an outcome with these log-probabilities, and its derivative by the policy's probability,
    /// up to a constant that all outcomes share.
    fn outcome(self, q: f64, p: f64) -> (f64, f64) {
        // 0 · log 0 is 0.
        let times = |log: f64, other: f64| if log == f64::NEG_INFINITY { 0.0 } else { log.exp() * (log - other) };
        let beta = self.beta;
        if beta == 0.0 {
            return (times(p, q), -(p - q).exp());
        }
        if beta == 1.0 {
            return (times(q, p), q - p);
        }
        let (own, other) = (q + (1.0 - beta).ln(), p + beta.ln());
        let top = own.max(other);
        let m = if top == f64::NEG_INFINITY { top } else { top + ((own - top).exp() + (other - top).exp()).ln() };
        (beta * times(p, m) + (1.0 - beta) * times(q, m), (1.0 - beta) * (q - m))
    }
}

/// Logarithm of the mass of these log-probabilities.
fn log_mass(log_probs: &[f64]) -> f64 {
    log_probs.iter().map(|log_prob| log_prob.exp()).sum::<f64>().ln()
}

/// Logarithm of the mass that a log of a mass leaves.
fn log_rest(mass: f64) -> f64 {
    (-mass.min(MOST_MASS).exp_m1()).ln()
}

/// A teacher's distributions at the trained tokens, and the policy's log-probabilities of the same tokens.
#[derive(Clone, Copy, Debug)]
pub struct TeacherInputs<'a> {
    /// Tokens per trained token.
    pub k: usize,
    /// The policy's log-probabilities, `k` for each trained token. Derivatives are by these.
    pub policy: &'a [f64],
    /// The teacher's.
    pub teacher: &'a [f64],
    /// If true, the `k` tokens are the whole vocabulary.
    pub whole: bool,
}

/// A loss with the divergence from a teacher's distributions added: `loss + coef · Σ w D`.
#[derive(Clone)]
pub struct Distilled {
    /// The loss that it is added to.
    pub loss: Arc<dyn Loss>,
    /// The divergence.
    pub divergence: TeacherDivergence,
    /// Its weight, per nat.
    pub coef: f64,
}

impl Loss for Distilled {
    fn name(&self) -> &str {
        self.loss.name()
    }

    fn whole_batch(&self) -> bool {
        self.loss.whole_batch()
    }

    fn is_sum(&self) -> bool {
        self.loss.is_sum()
    }

    fn evaluate(&self, inputs: &LossInputs) -> Result<LossOutput, LossError> {
        let mut output = self.loss.evaluate(inputs)?;
        let missing = || LossError::missing("distillation", "distributions of a teacher", "the divergence from them");
        let TeacherInputs { k, policy, teacher, whole } = inputs.teacher.ok_or_else(missing)?;
        let (mut sum, mut grad) = (0.0, Vec::with_capacity(policy.len()));
        for ((own, other), weight) in policy.chunks(k.max(1)).zip(teacher.chunks(k.max(1))).zip(inputs.weights) {
            let (divergence, slopes) = self.divergence.evaluate(own, other, whole);
            sum += divergence;
            output.loss += self.coef * weight * divergence;
            grad.extend(slopes.into_iter().map(|slope| self.coef * weight * slope));
        }
        output.metrics.divergence_sum = Some(output.metrics.divergence_sum.unwrap_or(0.0) + sum);
        output.teacher_grad = Some(grad);
        Ok(output)
    }
}
