//! `[train.loss]`: what is made of probability ratios and advantages.

use super::correction::Level;
pub use crate::algo::BinaryDivergence;
use crate::settings::declare::{choices, section, tagged};
use crate::settings::params::Custom;
use crate::settings::section::NoKeys;
use crate::settings::setting::{BELOW_ONE, FINITE, Limit, NOT_NEGATIVE, POSITIVE, POSITIVE_IF_GIVEN, SHARE, UP_TO_ONE};

const ABOVE_ONE_IF_GIVEN: Limit<Option<f64>> =
    Limit { text: "above 1", holds: |value| value.is_none_or(|number| number > 1.0 && number.is_finite()) };
const UP_TO_ONE_IF_GIVEN: Limit<Option<f64>> =
    Limit { text: "0 to 1", holds: |value| value.is_none_or(|number| (0.0..=1.0).contains(&number)) };

tagged! {
    /// What the policy learns from a probability ratio ρ and an advantage A, or from pairs.
    pub enum Loss {
        /// ρA, clipped to a trust region (GRPO, PPO).
        "grpo" => Grpo(Grpo),
        /// the same with a wider region above (DAPO's clip-higher).
        "dapo" => Dapo(Dapo),
        /// the same with one ratio for a whole answer, the geometric mean of its tokens' (GSPO).
        "gspo" => Gspo(Gspo),
        /// A log-probability, weighed by a bounded ratio: no token loses its gradient (CISPO).
        "cispo" => Cispo(Cispo),
        /// ρA through a gate that closes smoothly (SAPO).
        "sapo" => Sapo(Sapo),
        /// A log-probability, without a ratio (REINFORCE, GPG).
        "gpg" => Gpg(NoKeys),
        /// A log-probability, and half the squared log-ratio against it (direct reward optimization).
        "dro" => Dro(Dro),
        /// A log-probability, weighed by the ratio, unless the token has moved too far already (DPPO).
        "dppo" => Dppo(Dppo),
        /// A log-probability, weighed by a function of the whole answer's ratio (VESPO).
        "vespo" => Vespo(Vespo),
        /// the geometric mean of ratios, each bounded (GMPO).
        "geo_mean" => GeoMean(GeoMean),
        /// as `grpo`, and tokens that would lose entropy fastest are left out (Clip-Cov).
        "clip_cov" => ClipCov(ClipCov),
        /// ρA, and tokens that would lose entropy fastest are held back (KL-Cov).
        "kl_cov" => KlCov(KlCov),
        /// pairs of answers by `[pairs]`, of which one earned more (DPO and its family).
        "dpo" => Dpo(Dpo),
        /// One that was registered by a name.
        "custom" => Custom(Custom),
    }
}

section! {
    /// Clips to a trust region.
    pub struct Grpo {
        /// The ratio counts no further below 1 than this.
        clip_low: f64 = 0.2, BELOW_ONE;
        /// The ratio counts no further above 1 than this.
        clip_high: f64 = 0.2, NOT_NEGATIVE;
        /// Largest ratio, also where the advantage is negative.
        delta: Option<f64> = None, POSITIVE_IF_GIVEN;
        /// Most that a token of negative advantage costs, as a multiple of it (dual clip).
        dual_clip: Option<f64> = None, ABOVE_ONE_IF_GIVEN;
        /// What shares a ratio.
        level: Level = Level::default();
    }
}

section! {
    /// Clips to a trust region that is wider above.
    pub struct Dapo {
        /// The ratio counts no further below 1 than this.
        clip_low: f64 = 0.2, BELOW_ONE;
        /// The ratio counts no further above 1 than this.
        clip_high: f64 = 0.28, NOT_NEGATIVE;
    }
}

section! {
    /// Clips whole answers.
    pub struct Gspo {
        /// An answer's ratio counts no further below 1 than this.
        clip_low: f64 = 3e-4, BELOW_ONE;
        /// An answer's ratio counts no further above 1 than this.
        clip_high: f64 = 4e-4, NOT_NEGATIVE;
        /// Whether a token moves its answer's ratio as if it were its own, which advantages that differ by token ask for (GSPO-token).
        by_token: bool = false;
    }
}

section! {
    /// Bounds weights.
    pub struct Cispo {
        /// The ratio weighs no further below 1 than this; 1 is no bound.
        clip_low: f64 = 1.0, UP_TO_ONE;
        /// The ratio weighs no further above 1 than this.
        clip_high: f64 = 4.0, NOT_NEGATIVE;
        /// What shares a ratio.
        level: Level = Level::default();
    }
}

section! {
    /// Gates smoothly.
    pub struct Sapo {
        /// How soon the gate closes for positive advantages.
        tau_pos: f64 = 1.0, POSITIVE;
        /// How soon the gate closes for all others.
        tau_neg: f64 = 1.05, POSITIVE;
        /// What shares a ratio.
        level: Level = Level::default();
    }
}

section! {
    /// Pulls back.
    pub struct Dro {
        /// How strongly the squared log-ratio pulls back.
        beta: f64 = 0.1, POSITIVE;
    }
}

section! {
    /// Masks what has moved too far.
    pub struct Dppo {
        /// How far a token has moved.
        divergence: BinaryDivergence = BinaryDivergence::default();
        /// Farthest down, for tokens whose advantage is not positive.
        clip_low: f64 = 0.2, NOT_NEGATIVE;
        /// Farthest up, for tokens of positive advantage.
        clip_high: f64 = 0.2, NOT_NEGATIVE;
        /// Largest weight.
        max_ratio: f64 = 20.0, POSITIVE;
    }
}

section! {
    /// Weighs an answer of ratio w by `e^lambda w^k e^(−lambda w)`.
    pub struct Vespo {
        /// k of advantages of 0 and more.
        k_pos: f64 = 2.0, FINITE;
        /// lambda of advantages of 0 and more.
        lambda_pos: f64 = 3.0, POSITIVE;
        /// k of negative advantages.
        k_neg: f64 = 3.0, FINITE;
        /// lambda of negative advantages.
        lambda_neg: f64 = 2.0, POSITIVE;
    }
}

section! {
    /// Bounds log-ratios.
    pub struct GeoMean {
        /// A token's log-ratio counts no further below 0 than this.
        clip_low: f64 = 0.4, NOT_NEGATIVE;
        /// A token's log-ratio counts no further above 0 than this.
        clip_high: f64 = 0.4, NOT_NEGATIVE;
    }
}

section! {
    /// Clips, and leaves some tokens out.
    pub struct ClipCov {
        /// The ratio counts no further below 1 than this.
        clip_low: f64 = 0.2, BELOW_ONE;
        /// The ratio counts no further above 1 than this.
        clip_high: f64 = 0.2, NOT_NEGATIVE;
        /// Share of the step's tokens that are left out, at least one.
        share: f64 = 2e-4, SHARE;
        /// Those whose advantage and log-probability have a covariance above this.
        min: f64 = 1.0, FINITE;
        /// Those whose covariance is below this.
        max: f64 = 5.0, FINITE;
    }
}

section! {
    /// Holds some tokens back.
    pub struct KlCov {
        /// Share of the step's tokens that are held back, those of largest covariance between advantage and log-probability, at least one.
        share: f64 = 2e-4, SHARE;
        /// Weight of their log-ratio's size.
        coef: f64 = 0.1, NOT_NEGATIVE;
    }
}

choices! {
    /// What is made of a pair's log-ratios, policy over reference: `c` of the chosen answer, `r` of the rejected one, Δ = c − r.
    pub enum PairLoss {
        /// `−log σ(βΔ)` (DPO).
        "sigmoid" => Sigmoid,
        /// `max(0, 1 − βΔ)` (SLiC).
        "hinge" => Hinge,
        /// `(Δ − 1/2β)²`, per token (IPO).
        "ipo" => Ipo,
        /// the divergence from a smoothed label (EXO).
        "exo_pair" => ExoPair,
        /// noise-contrastive (NCA).
        "nca_pair" => NcaPair,
        /// unbiased where a share `label_smoothing` of pairs is the wrong way round.
        "robust" => Robust,
        /// `−log σ(βc) − log σ(−βr)` (BCO).
        "bco_pair" => BcoPair,
        /// `(c − 1/2β)² + (r + 1/2β)²` (SPPO).
        "sppo_hard" => SppoHard,
        /// the policy's margins against the reference's, sorted over the step (AOT).
        "aot" => Aot,
        /// chosen against rejected, sorted over the step.
        "aot_unpaired" => AotUnpaired,
        /// `1 − σ(βc) + σ(βr)` (APO, for answers better than the model's own).
        "apo_zero" => ApoZero,
        /// `σ(βc) + 1 − σ(β(c − r))` (APO, for answers worse than the model's own).
        "apo_down" => ApoDown,
        /// logistic and exponential, mixed by `σ(βΔ/tau)` (DiscoPOP).
        "discopop" => Discopop,
        /// cross-entropy of the chosen answers; looks at no reference.
        "sft" => Sft,
        /// `−log σ(βΔ)`, per token.
        "sigmoid_norm" => SigmoidNorm,
    }
}

section! {
    /// Prefers.
    pub struct Dpo {
        /// What is made of a pair.
        pair_loss: PairLoss = PairLoss::default();
        /// How strongly the policy is held to the reference.
        beta: f64 = 0.1, POSITIVE;
        /// How often a pair is taken to be the wrong way round, by the losses that allow for it.
        label_smoothing: f64 = 0.0, BELOW_ONE;
        /// Mixture of `discopop`.
        tau: f64 = 0.05, POSITIVE;
        /// Weight of tokens beyond the shorter answer's length; left out, all weigh alike.
        tail_weight: Option<f64> = None, UP_TO_ONE_IF_GIVEN;
        /// Whether answers are scored by their log-probabilities alone, without a reference.
        reference_free: bool = false;
    }
}

impl Dpo {
    /// Whether it looks at a reference policy.
    pub fn needs_reference(&self) -> bool {
        !self.reference_free && self.pair_loss != PairLoss::Sft
    }
}
