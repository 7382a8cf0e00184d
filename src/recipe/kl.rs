//! `train.kl_loss` and `train.kl_reward`: what distance from the reference policy costs.

pub use crate::algo::KlForm;
use crate::settings::declare::section;
use crate::settings::setting::{Limit, NOT_NEGATIVE, POSITIVE, UP_TO_ONE};

const POSITIVE_IF_GIVEN: Limit<Option<f64>> =
    Limit { text: "above 0", holds: |value| value.is_none_or(|number| number > 0.0 && number.is_finite()) };

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
