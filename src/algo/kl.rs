//! KL divergence from a reference policy, by token, with its derivative.

use crate::settings::declare::{choices, section};
use crate::settings::setting::{POSITIVE, POSITIVE_IF_GIVEN, UP_TO_ONE};

choices! {
    /// Estimator of a token's divergence from `d`, its log-probability less the reference's
    /// (Schulman, Approximating KL Divergence, 2020).
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

/// Per-token divergence and its derivative by θ. Finite for every pair of finite log-probabilities,
/// except [`KlForm::K3`], which overflows beyond d = −709.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Kl {
    /// Estimator.
    pub form: KlForm,
    /// If true, the gradient is that of k2, whose expectation is the divergence's own: `k2 − sg(k2)
    /// + sg(value)` (verl's `k1+`, `k3+`, `abs+`).
    pub straight_through: bool,
    /// Largest value; it has no gradient beyond.
    pub truncate: Option<f64>,
    /// Reference probability from which a token counts in full; tokens below count in proportion. 0
    /// counts all in full.
    pub confidence: f64,
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
        last limits: KlLimits;
    }
}

section! {
    /// Limits of a token's divergence.
    pub struct KlLimits {
        /// Largest absolute value of a token's divergence.
        truncate: Option<f64> = None, POSITIVE_IF_GIVEN;
        /// Reference probability from which a token counts in full; tokens below count in
        /// proportion. 0 counts all in full.
        confidence: f64 = 0.0, UP_TO_ONE;
    }
}

impl KlLoss {
    /// Divergence that the coefficient multiplies.
    pub fn kl(&self) -> Kl {
        Kl { straight_through: self.straight_through, ..self.limits.of(self.estimator) }
    }
}

impl KlLimits {
    /// Divergence by an estimator, within these limits.
    pub fn of(&self, form: KlForm) -> Kl {
        Kl { truncate: self.truncate, confidence: self.confidence, ..form.into() }
    }
}

/// Divergence of a token's log-probability from the reference's: [`Kl`], or a closure `Fn(log_prob,
/// reference) -> (value, derivative)`.
pub trait KlFunction: Send + Sync {
    /// Value, and derivative by `log_prob`.
    fn token(&self, log_prob: f64, reference: f64) -> (f64, f64);
}

impl<F: Fn(f64, f64) -> (f64, f64) + Send + Sync> KlFunction for F {
    fn token(&self, log_prob: f64, reference: f64) -> (f64, f64) {
        self(log_prob, reference)
    }
}

impl From<KlForm> for Kl {
    fn from(form: KlForm) -> Self {
        Kl { form, ..Kl::default() }
    }
}

impl KlForm {
    /// Value and derivative by d.
    fn of(self, d: f64) -> (f64, f64) {
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

impl KlFunction for Kl {
    fn token(&self, log_prob: f64, reference: f64) -> (f64, f64) {
        let d = log_prob - reference;
        let (mut value, mut slope) = self.form.of(d);
        if self.straight_through {
            slope = d;
        }
        if let Some(most) = self.truncate
            && value > most
        {
            (value, slope) = (most, 0.0);
        }
        let weight = if self.confidence > 0.0 { (reference.exp() / self.confidence).min(1.0) } else { 1.0 };
        (weight * value, weight * slope)
    }
}

/// Value and derivative of every token's divergence, for two aligned columns.
pub fn kl_per_token(log_probs: &[f64], reference: &[f64], kl: &dyn KlFunction) -> Vec<(f64, f64)> {
    log_probs.iter().zip(reference).map(|(&own, &other)| kl.token(own, other)).collect()
}

/// KL in reward, `r_t − coef · kl_t`.
///
/// Equals verl 0.9's `compute_rewards` (k1, behaviour against reference). Summed over a sequence
/// and subtracted from its reward, it equals TRL's `RLOOTrainer` with `beta` above 0.
pub fn rewards_less_kl(rewards: &[f64], log_probs: &[f64], reference: &[f64], coef: f64, kl: &dyn KlFunction) -> Vec<f64> {
    let costs = kl_per_token(log_probs, reference, kl);
    rewards.iter().zip(costs).map(|(reward, (cost, _))| reward - coef * cost).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const FORMS: [KlForm; 5] = [KlForm::K1, KlForm::Abs, KlForm::K2, KlForm::K3, KlForm::LowVariance];

    #[test]
    fn equal_policies_do_not_diverge() {
        for form in FORMS {
            assert_eq!(Kl::from(form).token(-1.5, -1.5).0, 0.0, "{form:?}");
        }
    }

    #[test]
    fn extremes_stay_finite_and_stop_pulling_where_they_are_cut() {
        let low_variance = Kl::from(KlForm::LowVariance);
        assert_eq!([-1e3, -30.0, 1e3].map(|d| low_variance.token(d, 0.0)), [(10.0, 0.0); 3]);
        let truncated = Kl { truncate: Some(0.5), ..Kl::from(KlForm::K1) };
        assert_eq!([truncated.token(2.0, 0.0), truncated.token(0.25, 0.0)], [(0.5, 0.0), (0.25, 1.0)]);
        assert_eq!(truncated.token(-2.0, 0.0), (-2.0, 1.0));
    }

    #[test]
    fn a_reference_that_hardly_knows_the_token_has_little_to_say() {
        let adaptive = Kl { confidence: 0.5, ..Kl::from(KlForm::K1) };
        assert_eq!(adaptive.token(0.0, 0.6f64.ln()), Kl::from(KlForm::K1).token(0.0, 0.6f64.ln()));
        let (value, slope) = adaptive.token(0.0, 0.05f64.ln());
        assert!((value + 0.1 * 0.05f64.ln()).abs() < 1e-12 && (slope - 0.1).abs() < 1e-12);
    }

    #[test]
    fn a_closure_measures_too_and_rewards_pay_for_distance() {
        let squared = |own: f64, other: f64| ((own - other).powi(2), 2.0 * (own - other));
        let terms = kl_per_token(&[1.0, 2.0], &[0.0, 0.0], &squared);
        assert_eq!(terms, [(1.0, 2.0), (4.0, 4.0)]);
        assert_eq!(rewards_less_kl(&[0.0, 1.0], &[1.0, 2.0], &[0.0; 2], 0.5, &squared), [-0.5, -1.0]);
    }

    #[test]
    fn k1_and_k3_estimate_the_divergence_over_samples_and_k2_has_its_gradient() {
        // The exact expectation under a policy of three tokens; the gradient with respect to its logits is Σ_x p_x k(x) ∇log p_x.
        let (policy, reference) = ([0.5f64, 0.3, 0.2], [0.2f64, 0.5, 0.3]);
        let exact: f64 = policy.iter().zip(&reference).map(|(p, q)| p * (p / q).ln()).sum();
        let expected = |form: KlForm| -> f64 {
            policy.iter().zip(&reference).map(|(p, q)| p * Kl::from(form).token(p.ln(), q.ln()).0).sum()
        };
        assert!((expected(KlForm::K1) - exact).abs() < 1e-12 && (expected(KlForm::K3) - exact).abs() < 1e-12);
        for logit in 0..3 {
            let score = |x: usize| f64::from(u8::from(x == logit)) - policy[logit];
            let gradient =
                |kl: Kl| -> f64 { (0..3).map(|x| policy[x] * kl.token(policy[x].ln(), reference[x].ln()).1 * score(x)).sum() };
            let exact: f64 = (0..3).map(|x| policy[x] * ((policy[x] / reference[x]).ln() + 1.0) * score(x)).sum();
            assert!((gradient(Kl::from(KlForm::K2)) - exact).abs() < 1e-12);
            for form in [KlForm::K1, KlForm::Abs, KlForm::K3] {
                assert!((gradient(Kl { straight_through: true, ..Kl::from(form) }) - exact).abs() < 1e-12, "{form:?}+");
            }
            assert!(gradient(Kl::from(KlForm::K1)).abs() < 1e-12, "k1's gradient vanishes on policy");
        }
    }

    proptest! {
        #[test]
        fn slopes_are_the_finite_differences(own in -6.0f64..0.0, other in -6.0f64..0.0, truncate in prop::option::of(0.1f64..3.0), confidence in 0.0f64..1.0) {
            const STEP: f64 = 1e-6;
            prop_assume!((own - other).abs() > 1e-3);
            for form in FORMS {
                let kl = Kl { form, truncate, confidence, straight_through: false };
                let at = |own: f64| kl.token(own, other);
                let near_a_bend = [truncate, Some(10.0)].into_iter().flatten().any(|bend| (form.of(own - other).0 - bend).abs() < 1e-3);
                if !near_a_bend {
                    let difference = (at(own + STEP).0 - at(own - STEP).0) / (2.0 * STEP);
                    prop_assert!((at(own).1 - difference).abs() < 1e-5 * difference.abs().max(1.0), "{kl:?}: {} {difference}", at(own).1);
                }
            }
        }
    }
}
