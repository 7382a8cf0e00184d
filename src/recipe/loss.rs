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
    /// Policy loss, by the probability ratio ρ and the advantage A of a token, or by pairs.
    pub enum Loss {
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

section! {
    /// Clips ratios to a trust region.
    pub struct Grpo {
        /// Lower clip ε: ratios are clipped at 1 − `epsilon`.
        #[formerly(clip_low)]
        epsilon: f64 = 0.2, BELOW_ONE;
        /// Upper clip ε: ratios are clipped at 1 + `epsilon_high`.
        #[formerly(clip_high)]
        epsilon_high: f64 = 0.2, NOT_NEGATIVE;
        /// Largest ratio, for negative advantages too (two-sided clipping).
        delta: Option<f64> = None, POSITIVE_IF_GIVEN;
        /// Dual clip c: largest loss of a token of negative advantage, as a multiple of its
        /// advantage.
        dual_clip: Option<f64> = None, ABOVE_ONE_IF_GIVEN;
        /// Level of the probability ratio.
        level: Level = Level::default();
    }
}

section! {
    /// Clips ratios to a trust region with a higher upper clip.
    pub struct Dapo {
        /// Lower clip ε: ratios are clipped at 1 − `epsilon`.
        #[formerly(clip_low)]
        epsilon: f64 = 0.2, BELOW_ONE;
        /// Upper clip ε: ratios are clipped at 1 + `epsilon_high`.
        #[formerly(clip_high)]
        epsilon_high: f64 = 0.28, NOT_NEGATIVE;
    }
}

section! {
    /// Clips the ratios of whole completions.
    pub struct Gspo {
        /// Lower clip ε: a completion's ratio is clipped at 1 − `epsilon`.
        #[formerly(clip_low)]
        epsilon: f64 = 3e-4, BELOW_ONE;
        /// Upper clip ε: a completion's ratio is clipped at 1 + `epsilon_high`.
        #[formerly(clip_high)]
        epsilon_high: f64 = 4e-4, NOT_NEGATIVE;
        /// If true, each token has its own gradient (GSPO-token), which advantages that differ by
        /// token need.
        by_token: bool = false;
    }
}

section! {
    /// Bounds the weights of log-probabilities.
    pub struct Cispo {
        /// Lower clip ε: weights are bounded at 1 − `epsilon`; 1 is no bound.
        #[formerly(clip_low)]
        epsilon: f64 = 1.0, UP_TO_ONE;
        /// Upper clip ε: weights are bounded at 1 + `epsilon_high`.
        #[formerly(clip_high)]
        epsilon_high: f64 = 4.0, NOT_NEGATIVE;
        /// Level of the probability ratio.
        level: Level = Level::default();
    }
}

section! {
    /// Gates ratios smoothly.
    pub struct Sapo {
        /// Temperature of the gate for positive advantages.
        tau_pos: f64 = 1.0, POSITIVE;
        /// Temperature of the gate for all other advantages.
        tau_neg: f64 = 1.05, POSITIVE;
        /// Level of the probability ratio.
        level: Level = Level::default();
    }
}

section! {
    /// Penalises squared log-ratios.
    pub struct Dro {
        /// Coefficient of the squared log-ratio.
        beta: f64 = 0.1, POSITIVE;
    }
}

section! {
    /// Masks tokens that have moved too far.
    pub struct Dppo {
        /// Distance that a token has moved.
        divergence: BinaryDivergence = BinaryDivergence::default();
        /// Largest distance downward, for tokens whose advantage is not positive.
        #[formerly(clip_low)]
        epsilon: f64 = 0.2, NOT_NEGATIVE;
        /// Largest distance upward, for tokens of positive advantage.
        #[formerly(clip_high)]
        epsilon_high: f64 = 0.2, NOT_NEGATIVE;
        /// Largest weight.
        max_ratio: f64 = 20.0, POSITIVE;
    }
}

section! {
    /// Weights a completion of ratio w by `e^lambda w^k e^(−lambda w)`.
    pub struct Vespo {
        /// k for advantages of 0 and more.
        k_pos: f64 = 2.0, FINITE;
        /// lambda for advantages of 0 and more.
        lambda_pos: f64 = 3.0, POSITIVE;
        /// k for negative advantages.
        k_neg: f64 = 3.0, FINITE;
        /// lambda for negative advantages.
        lambda_neg: f64 = 2.0, POSITIVE;
    }
}

section! {
    /// Bounds log-ratios.
    pub struct GeoMean {
        /// Lower bound: log-ratios are clipped at −`epsilon`.
        #[formerly(clip_low)]
        epsilon: f64 = 0.4, NOT_NEGATIVE;
        /// Upper bound: log-ratios are clipped at `epsilon_high`.
        #[formerly(clip_high)]
        epsilon_high: f64 = 0.4, NOT_NEGATIVE;
    }
}

section! {
    /// Clips ratios, and leaves some tokens out.
    pub struct ClipCov {
        /// Lower clip ε: ratios are clipped at 1 − `epsilon`.
        #[formerly(clip_low)]
        epsilon: f64 = 0.2, BELOW_ONE;
        /// Upper clip ε: ratios are clipped at 1 + `epsilon_high`.
        #[formerly(clip_high)]
        epsilon_high: f64 = 0.2, NOT_NEGATIVE;
        /// Share of the step's tokens that are left out, at least one token.
        share: f64 = 2e-4, SHARE;
        /// Lower bound of the covariance between advantage and log-probability of tokens that may
        /// be left out.
        min: f64 = 1.0, FINITE;
        /// Upper bound of that covariance.
        max: f64 = 5.0, FINITE;
    }
}

section! {
    /// Penalises some tokens.
    pub struct KlCov {
        /// Share of the step's tokens that are penalised, those of largest covariance between
        /// advantage and log-probability; at least one token.
        share: f64 = 2e-4, SHARE;
        /// Coefficient of the penalty, the absolute log-ratio.
        coef: f64 = 0.1, NOT_NEGATIVE;
    }
}

choices! {
    /// Loss of a pair by its log-ratios, policy over reference: `c` of the chosen completion, `r`
    /// of the rejected one, Δ = c − r.
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
        /// unbiased if a share `label_smoothing` of pairs is labelled wrongly.
        "robust" => Robust,
        /// `−log σ(βc) − log σ(−βr)` (BCO).
        "bco_pair" => BcoPair,
        /// `(c − 1/2β)² + (r + 1/2β)²` (SPPO).
        "sppo_hard" => SppoHard,
        /// the policy's margins against the reference's, sorted over the step (AOT).
        "aot" => Aot,
        /// chosen against rejected, sorted over the step.
        "aot_unpaired" => AotUnpaired,
        /// `1 − σ(βc) + σ(βr)` (APO, for completions better than the model's own).
        "apo_zero" => ApoZero,
        /// `σ(βc) + 1 − σ(β(c − r))` (APO, for completions worse than the model's own).
        "apo_down" => ApoDown,
        /// logistic and exponential, mixed by `σ(βΔ/tau)` (DiscoPOP).
        "discopop" => Discopop,
        /// cross-entropy of the chosen completions, without a reference.
        "sft" => Sft,
        /// `−log σ(βΔ)`, per token.
        "sigmoid_norm" => SigmoidNorm,
    }
}

section! {
    /// A loss of pairs.
    pub struct Dpo {
        /// Loss of a pair.
        pair_loss: PairLoss = PairLoss::default();
        /// Coefficient β: how strongly the policy is kept near the reference.
        beta: f64 = 0.1, POSITIVE;
        /// Share of pairs that are assumed to be labelled wrongly, in the losses that have it.
        label_smoothing: f64 = 0.0, BELOW_ONE;
        /// Temperature of the mixture in `discopop`.
        tau: f64 = 0.05, POSITIVE;
        /// Weight of tokens beyond the shorter completion's length. Left out: all tokens weigh the
        /// same.
        tail_weight: Option<f64> = None, UP_TO_ONE_IF_GIVEN;
        /// If true, completions are scored by their log-probabilities alone, without a reference.
        reference_free: bool = false;
    }
}

impl Dpo {
    /// Whether it looks at a reference policy.
    pub fn needs_reference(&self) -> bool {
        !self.reference_free && self.pair_loss != PairLoss::Sft
    }
}
