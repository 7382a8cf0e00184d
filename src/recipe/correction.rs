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
        /// weights are truncated at a bound.
        "truncated_is" => TruncatedIs(TruncatedIs),
        /// ratios out of bounds get weight 0.
        "masked_is" => MaskedIs(MaskedIs),
        /// a token's ratio inside [alpha, beta], 0 outside (IcePop).
        "icepop" => IcePop(IcePop),
    }
}

choices! {
    /// Level of an importance weight or ratio.
    pub enum Level {
        /// each token has its own.
        "token" => Token,
        /// the product of the sequence's token ratios.
        "sequence" => Sequence,
        /// the geometric mean of the sequence's token ratios.
        "geometric" => Geometric,
    }
}

section! {
    /// Truncates weights.
    pub struct TruncatedIs {
        /// Level of the weights.
        level: Level = Level::default();
        /// Smallest weight. Left out: small ratios are kept.
        min: Option<f64> = None, POSITIVE_IF_GIVEN;
        /// Largest weight.
        max: f64 = 2.0, POSITIVE;
        /// If true, weights are divided by their mean over the batch. Costs a second forward pass
        /// if the batch is cut into micro-batches.
        normalize: bool = false;
    }
}

section! {
    /// Masks ratios out of bounds.
    pub struct MaskedIs {
        /// Level of the weights.
        level: Level = Level::default();
        /// Smallest ratio that counts; 0 is no bound.
        min: f64 = 0.5, NOT_NEGATIVE;
        /// Largest ratio that counts.
        max: f64 = 2.0, POSITIVE;
        /// If true, weights are divided by their mean over the batch. Costs a second forward pass
        /// if the batch is cut into micro-batches.
        normalize: bool = false;
    }
}

section! {
    /// Masks tokens by their ratio (IcePop).
    pub struct IcePop {
        /// Smallest ratio that counts.
        alpha: f64 = 0.5, POSITIVE;
        /// Largest ratio that counts.
        beta: f64 = 5.0, POSITIVE;
    }
}

section! {
    /// Rejection of tokens or sequences that are too far from the behaviour policy: they do not
    /// count in the policy loss.
    pub struct Reject {
        /// Divergence of a token.
        divergence: Divergence = Divergence::default();
        /// Unit that is judged.
        over: Over = Over::default();
        /// Smallest ratio of `k1`. Left out: 1 / `max`.
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
