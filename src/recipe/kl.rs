//! `train.kl_loss` and `train.kl_reward`: what distance from the reference policy costs.

use crate::settings::declare::{choices, section};
use crate::settings::setting::{Limit, NOT_NEGATIVE, POSITIVE, UP_TO_ONE};

const POSITIVE_IF_GIVEN: Limit<Option<f64>> =
    Limit { text: "above 0", holds: |value| value.is_none_or(|number| number > 0.0 && number.is_finite()) };

choices! {
    /// How a token's divergence is estimated from `d`, its log-probability less the reference's.
    pub enum Estimator {
        /// `e^−d − 1 + d`: unbiased and never negative.
        "k3" => K3,
        /// `d`: unbiased, of either sign.
        "k1" => K1,
        /// `d² / 2`.
        "k2" => K2,
        /// `|d|`.
        "abs" => Abs,
        /// k3 with `d` cut to ±20 and the value to 10.
        "low_variance" => LowVariance,
    }
}

section! {
    /// A divergence from the reference policy in the loss.
    pub struct KlLoss {
        /// Its weight.
        coef: f64 = 0.001, POSITIVE;
        /// How it is estimated, from the trained policy's log-probabilities.
        estimator: Estimator = Estimator::K3;
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
        estimator: Estimator = Estimator::K1;
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
