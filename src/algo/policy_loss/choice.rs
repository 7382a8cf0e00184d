//! All losses that a recipe can name, one line each.

use super::{Cispo, Dapo, Grpo, Gspo, PolicyLoss, Surrogate};
use crate::algo::preference::Dpo;
use crate::algo::zoo::{ClipCov, Dppo, Dro, GeoMean, KlCov, Sapo, Vespo};
use crate::algo::{BuiltIn, Loss, LossError, LossInputs, LossOutput};
use crate::settings::declare::tagged;
use crate::settings::params::Custom;
use crate::settings::section::NoKeys;

tagged! {
    /// Policy loss, by the probability ratio ρ and the advantage A of a token, or by pairs.
    pub enum LossChoice {
        /// ρA, clipped to a trust region (GRPO, PPO).
        "grpo" => Grpo(Grpo),
        /// `grpo` with a higher upper clip (DAPO's clip-higher).
        "dapo" => Dapo(Dapo),
        /// `grpo` with one ratio per completion, the geometric mean of its tokens' ratios (GSPO).
        "gspo" => Gspo(Gspo),
        /// a log-probability weighted by a bounded ratio: no token loses its gradient (CISPO).
        "cispo" => Cispo(Cispo),
        /// ρA through a gate that closes smoothly (SAPO).
        "sapo" => Sapo(Sapo),
        /// a log-probability, without a ratio (REINFORCE, GPG).
        "gpg" => Gpg(NoKeys),
        /// a log-probability with a penalty of half the squared log-ratio (direct reward
        /// optimization).
        "dro" => Dro(Dro),
        /// a log-probability weighted by the ratio, unless the token has moved too far already
        /// (DPPO).
        "dppo" => Dppo(Dppo),
        /// a log-probability weighted by a function of the completion's ratio (VESPO).
        "vespo" => Vespo(Vespo),
        /// the geometric mean of ratios, each bounded (GMPO).
        "geo_mean" => GeoMean(GeoMean),
        /// `grpo` without the tokens that would lose entropy fastest (Clip-Cov).
        "clip_cov" => ClipCov(ClipCov),
        /// ρA with a penalty on the tokens that would lose entropy fastest (KL-Cov).
        "kl_cov" => KlCov(KlCov),
        /// pairs of completions by `[pairs]`, of which one earned more (DPO and its family).
        "dpo" => Dpo(Dpo),
        /// a loss that was registered by a name.
        "custom" => Custom(Custom),
    }
}

impl LossChoice {
    /// Surrogate of a policy loss; `None` for a loss of pairs and for a registered one.
    pub(super) fn policy(&self) -> Option<&dyn Surrogate> {
        Some(match self {
            LossChoice::Grpo(of) => of,
            LossChoice::Dapo(of) => of,
            LossChoice::Gspo(of) => of,
            LossChoice::Cispo(of) => of,
            LossChoice::Sapo(of) => of,
            LossChoice::Gpg(of) => of,
            LossChoice::Dro(of) => of,
            LossChoice::Dppo(of) => of,
            LossChoice::Vespo(of) => of,
            LossChoice::GeoMean(of) => of,
            LossChoice::ClipCov(of) => of,
            LossChoice::KlCov(of) => of,
            LossChoice::Dpo(_) | LossChoice::Custom(_) => return None,
        })
    }
}

impl From<LossChoice> for PolicyLoss {
    fn from(surrogate: LossChoice) -> Self {
        PolicyLoss { surrogate, ..PolicyLoss::default() }
    }
}

/// The surrogates that a [`PolicyLoss`] is made from directly.
macro_rules! policy_losses {
    ($($Name:ident),+) => {
        $(impl From<$Name> for PolicyLoss {
            fn from(surrogate: $Name) -> Self {
                LossChoice::$Name(surrogate).into()
            }
        })+
    };
}

policy_losses!(Grpo, Dapo, Gspo, Cispo, Sapo, Dro, Dppo, Vespo, GeoMean, ClipCov, KlCov);

/// A loss by itself: [`PolicyLoss`] without KL penalty and entropy bonus.
impl Loss for Grpo {
    fn name(&self) -> &str {
        self.method().name
    }

    fn built_in(&self) -> Option<BuiltIn> {
        PolicyLoss::from(self.clone()).built_in()
    }

    fn is_sum(&self) -> bool {
        true
    }

    fn ignores_zero_advantage(&self) -> bool {
        true
    }

    fn evaluate(&self, inputs: &LossInputs) -> Result<LossOutput, LossError> {
        PolicyLoss::from(self.clone()).evaluate(inputs)
    }
}
