//! `[train.correction]` and `[[train.reject]]`: what is done about tokens that another policy sampled.

pub use crate::algo::Proximal;
pub use crate::algo::correction::Divergence;
pub use crate::algo::correction::Over;
use crate::settings::declare::{choices, section, tagged};
use crate::settings::section::NoKeys;
use crate::settings::setting::{Limit, NOT_NEGATIVE, POSITIVE};

const POSITIVE_IF_GIVEN: Limit<Option<f64>> =
    Limit { text: "above 0", holds: |value| value.is_none_or(|number| number > 0.0 && number.is_finite()) };

tagged! {
    /// Importance weights exp(proximal − behaviour) of tokens, constants for the gradient.
    pub enum Correction {
        /// no weights.
        "none" => None(NoKeys),
        /// weights are cut to a bound.
        "truncated_is" => TruncatedIs(TruncatedIs),
        /// ratios out of bounds get weight 0.
        "masked_is" => MaskedIs(MaskedIs),
        /// a token's ratio inside [alpha, beta], 0 outside.
        "icepop" => IcePop(IcePop),
    }
}

choices! {
    /// What shares one importance weight.
    pub enum Level {
        /// each token has its own.
        "token" => Token,
        /// the product over a sequence.
        "sequence" => Sequence,
        /// the geometric mean over a sequence.
        "geometric" => Geometric,
    }
}

section! {
    /// Cuts weights.
    pub struct TruncatedIs {
        /// What shares one weight.
        level: Level = Level::default();
        /// Smallest weight; left out, small ratios stay as they are.
        min: Option<f64> = None, POSITIVE_IF_GIVEN;
        /// Largest weight.
        max: f64 = 2.0, POSITIVE;
        /// Whether weights are divided by their mean over the batch; costs a second forward pass where the batch is cut into parts.
        normalize: bool = false;
    }
}

section! {
    /// Masks by ratio.
    pub struct MaskedIs {
        /// What shares one weight.
        level: Level = Level::default();
        /// Smallest ratio that counts; 0 lets all small ones count.
        min: f64 = 0.5, NOT_NEGATIVE;
        /// Largest ratio that counts.
        max: f64 = 2.0, POSITIVE;
        /// Whether weights are divided by their mean over the batch; costs a second forward pass where the batch is cut into parts.
        normalize: bool = false;
    }
}

section! {
    /// Masks tokens, as IcePop does.
    pub struct IcePop {
        /// Smallest ratio that counts.
        alpha: f64 = 0.5, POSITIVE;
        /// Largest ratio that counts.
        beta: f64 = 5.0, POSITIVE;
    }
}

section! {
    /// Takes tokens or sequences out of the policy term that are too far from the policy that sampled them.
    pub struct Reject {
        /// How far a token is off.
        divergence: Divergence = Divergence::default();
        /// What is judged.
        over: Over = Over::default();
        /// Smallest ratio of `k1`; left out, 1 / `max`.
        min: Option<f64> = None, POSITIVE_IF_GIVEN;
        /// Largest divergence, in nats; of `k1`, the largest ratio.
        max: f64 = 0.1, POSITIVE;
    }
}

impl Correction {
    /// Its lower and upper bound with the keys that say them, where it has both.
    pub(crate) fn bounds(&self) -> Option<[(&'static str, f64); 2]> {
        Some(match self {
            Correction::None(_) => return None,
            Correction::TruncatedIs(of) => [("min", of.min?), ("max", of.max)],
            Correction::MaskedIs(of) => [("min", of.min), ("max", of.max)],
            Correction::IcePop(of) => [("alpha", of.alpha), ("beta", of.beta)],
        })
    }

    /// Whether it weighs anything.
    pub fn is_some(&self) -> bool {
        !matches!(self, Correction::None(_))
    }
}
