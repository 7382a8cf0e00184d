//! Policy losses that have a type of their own: the clipped GRPO family and REINFORCE.

use serde::{Deserialize, Serialize};

use super::{Clip, PolicyLoss, Surrogate};
use crate::algo::{Loss, LossError, LossInputs, LossOutput};

/// `−Σ w · importance · A θ`: plain policy gradient, with the sampled log-probabilities themselves as the surrogate.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PolicyGradient;

impl Loss for PolicyGradient {
    fn name(&self) -> &str {
        "policy_gradient"
    }

    fn is_sum(&self) -> bool {
        true
    }

    fn ignores_zero_advantage(&self) -> bool {
        true
    }

    fn evaluate(&self, inputs: &LossInputs) -> Result<LossOutput, LossError> {
        PolicyLoss::from(Surrogate::Gpg).evaluate(inputs)
    }
}

/// The clipped surrogate of PPO and GRPO, per token: [`PolicyLoss`] with [`Clip`], flat. Which aggregation makes the weights decides whether
/// it is TRL's `grpo`, `bnpo`, `dr_grpo` or `dapo`.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Grpo {
    /// ε_low: how far the ratio may fall.
    pub clip_low: f64,
    /// ε_high: how far the ratio may rise (DAPO's clip-higher sets it above `clip_low`).
    pub clip_high: f64,
    /// δ: a bound on the ratio itself, also where the advantage is negative (INTELLECT-2's two-sided clip).
    pub delta: Option<f64>,
    /// β: weight of the divergence from the reference model. Above 0 it needs reference log-probabilities.
    pub beta: f64,
    /// Multiplies the divergence by ρ, which makes its gradient unbiased off policy (DeepSeek-V3.2).
    pub unbiased_kl: bool,
    /// Trains only this share of the tokens, those of highest entropy in the whole optimizer batch. 1 trains all.
    pub top_entropy: f64,
    /// Drops sequences of negative advantage whose mean `behaviour − θ` exceeds this (DeepSeek-V3.2's off-policy mask).
    pub off_policy_threshold: Option<f64>,
    /// Weight of an entropy bonus: the mean over all trained tokens, whatever the aggregation.
    pub entropy_coef: f64,
}

impl Default for Grpo {
    fn default() -> Self {
        let PolicyLoss { beta, unbiased_kl, top_entropy, off_policy_threshold, entropy_coef, .. } = PolicyLoss::default();
        let Clip { low, high, delta, .. } = Clip::default();
        Grpo { clip_low: low, clip_high: high, delta, beta, unbiased_kl, top_entropy, off_policy_threshold, entropy_coef }
    }
}

impl From<Grpo> for PolicyLoss {
    fn from(grpo: Grpo) -> Self {
        let Grpo { clip_low, clip_high, delta, beta, unbiased_kl, top_entropy, off_policy_threshold, entropy_coef } = grpo;
        let surrogate = Surrogate::Clip(Clip { low: clip_low, high: clip_high, delta, dual: None });
        PolicyLoss { surrogate, beta, unbiased_kl, top_entropy, off_policy_threshold, entropy_coef, ..PolicyLoss::default() }
    }
}

impl Loss for Grpo {
    fn name(&self) -> &str {
        "grpo"
    }

    fn whole_batch(&self) -> bool {
        PolicyLoss::from(*self).whole_batch()
    }

    fn is_sum(&self) -> bool {
        PolicyLoss::from(*self).is_sum()
    }

    fn ignores_zero_advantage(&self) -> bool {
        PolicyLoss::from(*self).ignores_zero_advantage()
    }

    fn evaluate(&self, inputs: &LossInputs) -> Result<LossOutput, LossError> {
        PolicyLoss::from(*self).evaluate(inputs)
    }
}
