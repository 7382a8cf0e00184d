//! `train.kl_loss` and `train.kl_reward`: what distance from the reference policy costs.

pub use crate::algo::KlForm;
use crate::settings::declare::section;
use crate::settings::setting::{Limit, NOT_NEGATIVE, POSITIVE, UP_TO_ONE};

const POSITIVE_IF_GIVEN: Limit<Option<f64>> =
    Limit { text: "above 0", holds: |value| value.is_none_or(|number| number > 0.0 && number.is_finite()) };

section! {
    /// A divergence from the reference policy in the loss.
    pub struct KlLoss {
        /// Its weight.
        coef: f64 = 0.001, POSITIVE;
        /// How it is estimated, from the trained policy's log-probabilities.
        estimator: KlForm = KlForm::K3;
        /// Whether it pulls as k2 does, whatever its value.
        straight_through: bool = false;
        /// Whether it is multiplied by the probability ratio, which makes its gradient unbiased for tokens of another policy.
        unbiased: bool = true;
        last limits: KlLimits;
    }
}

section! {
    /// A divergence from the reference policy in the reward: its sum over an answer's tokens is taken off before rewards are compared.
    pub struct KlReward {
        /// Its weight; with a `target`, where it begins.
        coef: f64 = 0.001, NOT_NEGATIVE;
        /// How it is estimated, from the log-probabilities that tokens were sampled with.
        estimator: KlForm = KlForm::K1;
        /// Moves the weight so that the mean per token stays near this; left out, the weight stays.
        target: Option<f64> = None, POSITIVE_IF_GIVEN;
        /// Answers over which the weight moves by at most a fifth.
        horizon: f64 = 10_000.0, POSITIVE;
        last limits: KlLimits;
    }
}

section! {
    /// How far a token's divergence counts.
    pub struct KlLimits {
        /// A token counts no further than this.
        truncate: Option<f64> = None, POSITIVE_IF_GIVEN;
        /// A token counts in full where the reference gives it at least this probability, and in proportion below; 0 counts all in full.
        confidence: f64 = 0.0, UP_TO_ONE;
    }
}
