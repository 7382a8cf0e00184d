//! All kinds of importance weights that a recipe can name.

use super::{Importance, Level};
use crate::settings::declare::tagged;
use crate::settings::setting::{NOT_NEGATIVE, POSITIVE, POSITIVE_IF_GIVEN};

tagged! {
    /// Importance weights exp(proximal − behaviour) of tokens, constants for the gradient.
    pub enum ImportanceChoice {
        /// no weights.
        "none" => None,
        /// weights are truncated at a bound.
        "truncated_is" => TruncatedIs {
            /// Level of the weights.
            level: Level = Level::default();
            /// Smallest weight. Left out: small ratios are kept.
            min: Option<f64> = None, POSITIVE_IF_GIVEN;
            /// Largest weight.
            max: f64 = 2.0, POSITIVE;
            /// If true, weights are divided by their mean over the batch. Costs a second forward pass
            /// if the batch is cut into micro-batches.
            normalize: bool = false;
        },
        /// ratios out of bounds get weight 0.
        "masked_is" => MaskedIs {
            /// Level of the weights.
            level: Level = Level::default();
            /// Smallest ratio that counts; 0 is no bound.
            min: f64 = 0.5, NOT_NEGATIVE;
            /// Largest ratio that counts.
            max: f64 = 2.0, POSITIVE;
            /// If true, weights are divided by their mean over the batch. Costs a second forward pass
            /// if the batch is cut into micro-batches.
            normalize: bool = false;
        },
        /// a token's ratio inside [alpha, beta], 0 outside (IcePop).
        "icepop" => IcePop {
            /// Smallest ratio that counts.
            alpha: f64 = 0.5, POSITIVE;
            /// Largest ratio that counts.
            beta: f64 = 5.0, POSITIVE;
        },
    }
}

impl ImportanceChoice {
    /// Lower and upper bound with their keys, if it has both.
    pub(crate) fn bounds(&self) -> Option<[(&'static str, f64); 2]> {
        let weights = self.importance()?;
        let [lower, upper] = if matches!(self, ImportanceChoice::IcePop { .. }) { ["alpha", "beta"] } else { ["min", "max"] };
        Some([(lower, weights.min?), (upper, weights.max)])
    }

    /// If true, it weights tokens.
    pub fn is_some(&self) -> bool {
        *self != ImportanceChoice::None
    }

    /// The weights of these settings, if any.
    pub fn importance(&self) -> Option<Importance> {
        Some(match *self {
            ImportanceChoice::None => return None,
            ImportanceChoice::TruncatedIs { level, min, max, normalize } => {
                Importance { level, min, max, mask: false, normalize }
            }
            ImportanceChoice::MaskedIs { level, min, max, normalize } => {
                Importance { normalize, ..Importance::masked(level, min, max) }
            }
            ImportanceChoice::IcePop { alpha, beta } => Importance::icepop(alpha, beta),
        })
    }
}
