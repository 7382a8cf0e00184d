//! What does not go together in a policy loss, and why.

use super::{Clip, PolicyLoss, RatioLevel, Surrogate};
use crate::algo::{Loss, LossError, LossInputs};

impl PolicyLoss {
    /// The method's name, by which errors and logs call it.
    pub(super) fn method(&self) -> &'static str {
        match (self.surrogate, self.level) {
            (Surrogate::Clip(_), RatioLevel::Token) => "grpo",
            (Surrogate::Clip(_), _) => "gspo",
            (Surrogate::Cispo { .. }, _) => "cispo",
            (Surrogate::Sapo { .. }, _) => "sapo",
            (Surrogate::Gpg, _) => "gpg",
            (Surrogate::Dro { .. }, _) => "dro",
            (Surrogate::Dppo { .. }, _) => "dppo",
            (Surrogate::Vespo(_), _) => "vespo",
            (Surrogate::GeoMean { .. }, _) => "geo_mean",
            (Surrogate::ClipCov { .. }, _) => "clip_cov",
            (Surrogate::KlCov { .. }, _) => "kl_cov",
        }
    }

    /// Whether its settings are in range and go together.
    pub fn check(&self) -> Result<(), LossError> {
        self.ranges()?;
        self.level_fits()?;
        self.masks_fit()
    }

    /// A surrogate that looks at tokens has no use for a ratio that they share.
    fn level_fits(&self) -> Result<(), LossError> {
        let why = match self.surrogate {
            Surrogate::GeoMean { .. } if self.level != RatioLevel::Geometric => {
                return self
                    .refuse("level", "it takes the geometric mean of ratios that it bounds itself; say level = geometric");
            }
            Surrogate::Gpg => "it has no ratio that a level could be of",
            Surrogate::Dppo { .. } => "it measures how far each token's own probability has moved",
            Surrogate::Vespo(_) => "it weighs sequences itself, by the product of their ratios",
            Surrogate::ClipCov { .. } | Surrogate::KlCov { .. } => "a covariance is a token's, and so must its ratio be",
            _ => return Ok(()),
        };
        if self.level.is_token() { Ok(()) } else { self.refuse("level", why) }
    }

    fn masks_fit(&self) -> Result<(), LossError> {
        if matches!(self.surrogate, Surrogate::GeoMean { .. }) {
            let why = "its ratio and its advantage are means over all tokens of a sequence, of which none can be left out";
            if self.top_entropy < 1.0 {
                return self.refuse("top_entropy", why);
            }
            if self.off_policy_threshold.is_some() {
                return self.refuse("off_policy_threshold", why);
            }
        }
        Ok(())
    }

    fn ranges(&self) -> Result<(), LossError> {
        let [lowest, highest] = self.log_ratio_limits;
        let mut rules = vec![
            (self.top_entropy > 0.0 && self.top_entropy <= 1.0, "top_entropy", "it is a share, above 0 and at most 1"),
            (lowest < 0.0 && highest > 0.0, "log_ratio_limits", "they must lie on both sides of 0"),
            (self.kl.truncate.is_none_or(|most| most > 0.0), "kl", "a divergence that is cut at 0 or below says nothing"),
            (self.beta.is_finite() && self.entropy_coef.is_finite(), "beta or entropy_coef", "they must be finite"),
        ];
        let mut clipped = |low: f64, high: f64| {
            rules.push((low >= 0.0 && high >= 0.0, "the clip range", "both of its sides are distances, 0 or more"));
        };
        match self.surrogate {
            Surrogate::Clip(clip) | Surrogate::ClipCov { clip, .. } => clipped(clip.low, clip.high),
            Surrogate::Cispo { low, high } | Surrogate::GeoMean { low, high } | Surrogate::Dppo { low, high, .. } => {
                clipped(low, high)
            }
            _ => {}
        }
        match self.surrogate {
            Surrogate::Clip(Clip { delta, dual, .. }) | Surrogate::ClipCov { clip: Clip { delta, dual, .. }, .. } => {
                rules.push((delta.is_none_or(|delta| delta > 0.0), "delta", "a ratio's bound is above 0"));
                rules.push((dual.is_none_or(|dual| dual > 1.0), "dual", "at 1 or less it would bound tokens that are on policy"));
            }
            Surrogate::Sapo { tau_pos, tau_neg } => {
                rules.push((tau_pos > 0.0 && tau_neg > 0.0, "tau", "both must be above 0, or the gate never closes"));
            }
            Surrogate::Dro { beta } => rules.push((beta > 0.0, "beta", "without it nothing holds the policy")),
            Surrogate::Dppo { max_ratio, .. } => rules.push((max_ratio > 0.0, "max_ratio", "it must be above 0")),
            _ => {}
        }
        match self.surrogate {
            Surrogate::ClipCov { share, min, max, .. } => {
                rules.push((share > 0.0 && share <= 1.0, "share", "it is a share of tokens, above 0 and at most 1"));
                rules.push((min < max, "min", "no covariance is between it and max"));
            }
            Surrogate::KlCov { share, .. } => {
                rules.push((share > 0.0 && share <= 1.0, "share", "it is a share of tokens, above 0 and at most 1"));
            }
            _ => {}
        }
        match rules.into_iter().find(|(holds, ..)| !holds) {
            Some((_, setting, why)) => self.refuse(setting, why),
            None => Ok(()),
        }
    }

    /// Whether the columns that it reads are there, and all that must be seen at once.
    pub(super) fn check_inputs(&self, inputs: &LossInputs) -> Result<(), LossError> {
        if self.beta != 0.0 && inputs.reference.is_none() {
            let column = "reference log-probabilities";
            return Err(LossError::Missing { loss: self.method(), column, why: "beta above 0" });
        }
        let seen = inputs.log_probs.len();
        if self.whole_batch() && seen < inputs.batch_tokens {
            return Err(LossError::Part { loss: self.method(), seen, of: inputs.batch_tokens });
        }
        Ok(())
    }

    fn refuse(&self, setting: &'static str, why: &'static str) -> Result<(), LossError> {
        Err(LossError::Settings { loss: self.method(), setting, why })
    }
}
