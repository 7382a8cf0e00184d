//! All kinds of importance weights that a recipe can name, one line each.

use super::{Importance, Level};
use crate::settings::declare::{section, tagged};
use crate::settings::section::NoKeys;
use crate::settings::setting::{NOT_NEGATIVE, POSITIVE, POSITIVE_IF_GIVEN};

tagged! {
    /// Importance weights exp(proximal − behaviour) of tokens, constants for the gradient.
    pub enum ImportanceChoice {
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

impl ImportanceChoice {
    /// Lower and upper bound with their keys, if it has both.
    pub(crate) fn bounds(&self) -> Option<[(&'static str, f64); 2]> {
        Some(match self {
            ImportanceChoice::None(_) => return None,
            ImportanceChoice::TruncatedIs(of) => [("min", of.min?), ("max", of.max)],
            ImportanceChoice::MaskedIs(of) => [("min", of.min), ("max", of.max)],
            ImportanceChoice::IcePop(of) => [("alpha", of.alpha), ("beta", of.beta)],
        })
    }

    /// If true, it weights tokens.
    pub fn is_some(&self) -> bool {
        !matches!(self, ImportanceChoice::None(_))
    }

    /// The weights of these settings, if any.
    pub fn importance(&self) -> Option<Importance> {
        Some(match self {
            ImportanceChoice::None(_) => return None,
            ImportanceChoice::TruncatedIs(of) => {
                Importance { level: of.level, min: of.min, max: of.max, mask: false, normalize: of.normalize }
            }
            ImportanceChoice::MaskedIs(of) => {
                Importance { normalize: of.normalize, ..Importance::masked(of.level, of.min, of.max) }
            }
            ImportanceChoice::IcePop(of) => Importance::icepop(of.alpha, of.beta),
        })
    }
}
