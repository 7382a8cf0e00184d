//! KL in reward, and a coefficient that is adapted to a target divergence.

use super::kl::{KlForm, KlLimits};
use crate::settings::declare::section;
use crate::settings::setting::{NOT_NEGATIVE, POSITIVE, POSITIVE_IF_GIVEN};

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
        last limits: KlLimits;
    }
}

impl KlReward {
    /// Controller of the coefficient, if it has a target.
    pub fn control(&self) -> Option<AdaptiveKl> {
        self.target.map(|target| AdaptiveKl { target, horizon: self.horizon })
    }
}

/// Controller of the KL coefficient, `coef · (1 + clip(kl / target − 1, ±0.2) · samples / horizon)`
/// (Ziegler et al., Fine-Tuning Language Models from Human Preferences, 2019). Equals verl 0.9's
/// `AdaptiveKLController`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AdaptiveKl {
    /// Target of the mean divergence per token, in nats.
    pub target: f64,
    /// Samples over which the coefficient changes by at most a fifth.
    pub horizon: f64,
}

/// Target or horizon out of range.
#[derive(Clone, Debug, thiserror::Error, PartialEq)]
#[error("the adaptive KL coefficient's {what} is {value}; it must be a finite number above 0")]
pub struct KlControlError {
    what: &'static str,
    value: f64,
}

impl AdaptiveKl {
    /// Returns an error for a target or horizon that is not above 0.
    pub fn validate(&self) -> Result<(), KlControlError> {
        let refused = [("target", self.target), ("horizon", self.horizon)].into_iter().find(|(_, value)| {
            let usable = value.is_finite() && *value > 0.0;
            !usable
        });
        refused.map_or(Ok(()), |(what, value)| Err(KlControlError { what, value }))
    }

    /// Next coefficient, after `samples` with a mean divergence of `kl`.
    pub fn next(&self, coef: f64, kl: f64, samples: u64) -> f64 {
        let error = (kl / self.target - 1.0).clamp(-0.2, 0.2);
        coef * (1.0 + error * samples as f64 / self.horizon)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn it_rises_above_the_target_falls_below_and_rests_on_it() {
        let control = AdaptiveKl { target: 6.0, horizon: 100.0 };
        assert_eq!(control.next(0.2, 6.0, 50), 0.2);
        assert_eq!([control.next(0.5, 60.0, 100), control.next(0.5, 0.0, 100)], [0.6, 0.4]);
    }

    #[test]
    fn a_target_or_horizon_of_nothing_is_refused() {
        assert_eq!(AdaptiveKl { target: 1.0, horizon: 1.0 }.validate(), Ok(()));
        let refused = AdaptiveKl { target: 1.0, horizon: 0.0 }.validate().unwrap_err();
        assert_eq!(refused.to_string(), "the adaptive KL coefficient's horizon is 0; it must be a finite number above 0");
        assert!(AdaptiveKl { target: f64::NAN, horizon: 1.0 }.validate().is_err());
    }

    proptest! {
        #[test]
        fn it_stays_positive_and_moves_by_a_fifth_a_horizon(coef in 1e-6f64..10.0, kl in 0.0f64..1e6, samples in 0u64..1000) {
            let next = AdaptiveKl { target: 1.0, horizon: 1000.0 }.next(coef, kl, samples);
            prop_assert!(next > 0.0 && (next / coef - 1.0).abs() <= 0.2 + 1e-12);
        }
    }
}
