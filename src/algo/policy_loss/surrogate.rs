//! What a policy loss makes of a ratio and an advantage: the choice that gives a method its name.

use crate::settings::declare::choices;
use serde::{Deserialize, Serialize};

/// A token's term of the loss, by its ratio ρ, its log-probability θ and its advantage A. `sg` is a constant for the gradient.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum Surrogate {
    /// `−min(ρA, clip(ρ)A)`, see [`Clip`] (PPO, GRPO, DAPO, GSPO).
    Clip(Clip),
    /// `−sg(clip(ρ, 1 − low, 1 + high)) A θ`: bounded, but no token ever loses its gradient (CISPO). TRL's `epsilon_high` is 1 + `high`, and its
    /// `low` is 1, which is no bound.
    Cispo {
        /// How far below 1 a ratio may weigh.
        low: f64,
        /// How far above 1 a ratio may weigh.
        high: f64,
    },
    /// `−4/τ σ(τ(ρ − 1)) A`: a gate that closes smoothly, with a τ for positive and one for other advantages (SAPO).
    Sapo {
        /// τ of positive advantages.
        tau_pos: f64,
        /// τ of all others; larger closes sooner.
        tau_neg: f64,
    },
    /// `−Aθ`, without a ratio (REINFORCE, GPG).
    Gpg,
    /// `−(Aθ − ½β (log ρ)²)` (direct reward optimization).
    Dro {
        /// β: how strongly the distance pulls back.
        beta: f64,
    },
    /// `−sg(min(ρ, max_ratio) · valid) A θ`, where a token is valid unless its advantage pushes it further than a divergence allows (DPPO).
    Dppo {
        /// How distance is measured.
        divergence: BinaryDivergence,
        /// The most for tokens whose advantage is not positive.
        low: f64,
        /// The most for tokens of positive advantage.
        high: f64,
        /// The largest weight.
        max_ratio: f64,
    },
    /// `−sg(φ(w)) A θ`, with w the product of a sequence's ratios and importance weights, see [`Vespo`].
    Vespo(Vespo),
    /// `−mean(A) exp(mean(bounded log ρ))` over a sequence, each token's log-ratio bounded to [−low, high] on the side that its advantage pushes
    /// to (GMPO; verl's `geo_mean`). Importance weights enter by their geometric mean.
    GeoMean {
        /// How far a log-ratio may fall.
        low: f64,
        /// How far a log-ratio may rise.
        high: f64,
    },
    /// [`Clip`], and no gradient for a random `share` of the batch's tokens, drawn from those whose covariance of advantage and log-probability
    /// lies between `min` and `max` (Clip-Cov). Looks at the whole optimizer batch.
    ClipCov {
        /// What all other tokens get.
        clip: Clip,
        /// How many tokens, as a share of all; at least one.
        share: f64,
        /// Least covariance, exclusive.
        min: f64,
        /// Largest covariance, exclusive.
        max: f64,
    },
    /// `−ρA`, and `coef · |log ρ|` besides for the `share` of the batch's tokens with the largest covariance of advantage and log-probability
    /// (KL-Cov). Looks at the whole optimizer batch.
    KlCov {
        /// How many tokens, as a share of all; at least one.
        share: f64,
        /// Weight of their distance.
        coef: f64,
    },
}

/// The clipped surrogate: `−min(min(ρ, δ) A, clip(ρ, 1 − low, 1 + high) A)`, and for A < 0 at most `−c A`.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Clip {
    /// ε_low: how far the ratio may fall.
    pub low: f64,
    /// ε_high: how far the ratio may rise (DAPO's clip-higher sets it above `low`).
    pub high: f64,
    /// δ: a bound on the ratio itself, also where the advantage is negative (INTELLECT-2's two-sided clip; TRL's `delta`).
    pub delta: Option<f64>,
    /// c: a bound on the term where the advantage is negative (dual-clip PPO; verl's `clip_ratio_c`).
    pub dual: Option<f64>,
}

impl Default for Clip {
    fn default() -> Self {
        Clip { low: 0.2, high: 0.2, delta: None, dual: None }
    }
}

choices! {
    /// Distance between two probabilities of a token, with all other tokens taken as one.
    pub enum BinaryDivergence {
        /// total variation: |π_θ − π_anchor|.
        "tv" => TotalVariation,
        /// the divergence KL(anchor ‖ θ).
        "kl" => Kl,
    }
}

/// VESPO's weight of a sequence, `φ(w) = e^λ wᵏ e^−λw`, which is 1 at w = 1; k and λ for advantages of 0 and more, and for negative ones.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Vespo {
    /// k where the advantage is not negative.
    pub k_pos: f64,
    /// λ where the advantage is not negative.
    pub lambda_pos: f64,
    /// k of negative advantages.
    pub k_neg: f64,
    /// λ of negative advantages.
    pub lambda_neg: f64,
}

impl Default for Vespo {
    fn default() -> Self {
        Vespo { k_pos: 2.0, lambda_pos: 3.0, k_neg: 3.0, lambda_neg: 2.0 }
    }
}

impl Default for Surrogate {
    fn default() -> Self {
        Surrogate::Clip(Clip::default())
    }
}

/// One token as a surrogate sees it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Token {
    pub log_ratio: f64,
    pub log_prob: f64,
    pub anchor: f64,
    pub advantage: f64,
    /// log w of its sequence, for [`Vespo`].
    pub log_weight: f64,
    /// Whether its covariance singles it out.
    pub singled_out: bool,
}

/// A token's term, and its derivatives by log-ratio and by its own log-probability.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Term {
    pub value: f64,
    pub by_log_ratio: f64,
    pub by_log_prob: f64,
    pub clipped: Clipped,
}

/// Whether the trust region holds a token back that its advantage pushes out of it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Clipped {
    #[default]
    No,
    Low,
    High,
}

impl Clipped {
    /// `below` and `above` the region; a token is pushed there by a negative and a positive advantage.
    fn new(below: bool, above: bool, advantage: f64) -> Self {
        if below && advantage < 0.0 {
            Clipped::Low
        } else if above && advantage > 0.0 {
            Clipped::High
        } else {
            Clipped::No
        }
    }
}

impl Term {
    /// `−sg(weight) A θ`.
    fn weighted(weight: f64, token: &Token, clipped: Clipped) -> Self {
        let slope = -weight * token.advantage;
        Term { value: slope * token.log_prob, by_log_ratio: 0.0, by_log_prob: slope, clipped }
    }
}

impl Surrogate {
    pub(super) fn term(&self, token: &Token) -> Term {
        let (ratio, advantage) = (token.log_ratio.exp(), token.advantage);
        match self {
            Surrogate::Clip(clip) => clip.term(ratio, advantage),
            Surrogate::ClipCov { clip, .. } => match token.singled_out {
                true => Term { value: 0.0 * advantage * ratio, ..Term::default() },
                false => clip.term(ratio, advantage),
            },
            Surrogate::KlCov { coef, .. } => {
                let coef = if token.singled_out { *coef } else { 0.0 };
                let side = if token.log_ratio == 0.0 { 0.0 } else { token.log_ratio.signum() };
                let plain = -ratio * advantage;
                let value = plain + coef * token.log_ratio.abs();
                Term { value, by_log_ratio: plain + coef * side, ..Term::default() }
            }
            Surrogate::Cispo { low, high } => {
                let (floor, ceiling) = (1.0 - low, 1.0 + high);
                let clipped = Clipped::new(ratio < floor, ratio > ceiling, advantage);
                Term::weighted(ratio.clamp(floor, ceiling), token, clipped)
            }
            Surrogate::Sapo { tau_pos, tau_neg } => {
                let tau = if advantage > 0.0 { *tau_pos } else { *tau_neg };
                let gate = 1.0 / (1.0 + (-tau * (ratio - 1.0)).exp());
                let value = -gate * 4.0 / tau * advantage;
                Term { value, by_log_ratio: -4.0 * gate * (1.0 - gate) * ratio * advantage, ..Term::default() }
            }
            Surrogate::Gpg => Term::weighted(1.0, token, Clipped::No),
            Surrogate::Dro { beta } => {
                let distance = token.log_ratio;
                let value = -(token.log_prob * advantage - 0.5 * beta * distance * distance);
                Term { value, by_log_ratio: beta * distance, by_log_prob: -advantage, clipped: Clipped::No }
            }
            Surrogate::Dppo { divergence, low, high, max_ratio } => {
                let (too_high, too_low) = divergence.beyond(token.log_prob, token.anchor, *low, *high);
                let clipped = match (advantage > 0.0, too_high, too_low) {
                    (true, true, _) => Clipped::High,
                    (false, _, true) => Clipped::Low,
                    _ => Clipped::No,
                };
                let valid = f64::from(u8::from(clipped == Clipped::No));
                Term::weighted(ratio.min(*max_ratio) * valid, token, clipped)
            }
            Surrogate::Vespo(vespo) => Term::weighted(vespo.phi(token.log_weight, advantage), token, Clipped::No),
            Surrogate::GeoMean { .. } => {
                let value = -ratio * advantage;
                Term { value, by_log_ratio: value, ..Term::default() }
            }
        }
    }
}

impl Clip {
    fn term(&self, ratio: f64, advantage: f64) -> Term {
        let (floor, ceiling) = (1.0 - self.low, 1.0 + self.high);
        let bound = self.delta.unwrap_or(f64::INFINITY);
        let bounded = ratio.min(bound);
        let clipped = Clipped::new(bounded < floor, bounded > ceiling, advantage);
        let (free, held) = (bounded * advantage, ratio.clamp(floor, ceiling) * advantage);
        // dρ/d log ρ = ρ, and a bound that holds has no slope; 0 · A rather than 0, so that a NaN advantage shows.
        let slope = |moves: bool| if moves { -ratio * advantage } else { 0.0 * advantage };
        let (value, by_log_ratio) =
            if free <= held { (-free, slope(ratio <= bound)) } else { (-held, slope((floor..=ceiling).contains(&ratio))) };
        match self.dual.map(|most| -most * advantage) {
            Some(most) if advantage < 0.0 && value > most => Term { value: most, by_log_ratio: 0.0, by_log_prob: 0.0, clipped },
            _ => Term { value, by_log_ratio, by_log_prob: 0.0, clipped },
        }
    }
}

impl BinaryDivergence {
    /// Whether θ is too far above the anchor, and too far below it.
    fn beyond(self, log_prob: f64, anchor: f64, low: f64, high: f64) -> (bool, bool) {
        let (prob, old) = (log_prob.exp(), anchor.exp());
        match self {
            BinaryDivergence::TotalVariation => (prob - old > high, prob - old < -low),
            BinaryDivergence::Kl => {
                // verl's guard against a certain token.
                let rest = (1.0 - old) * ((1.0 - old + 1e-8) / (1.0 - prob + 1e-8)).ln();
                let kl = old * (anchor - log_prob) + rest;
                // It is no number, and no bound holds, where rounding left a log-probability above 0.
                let (within_high, within_low) = (kl <= high, kl <= low);
                (!within_high && prob > old, !within_low && prob < old)
            }
        }
    }
}

impl Vespo {
    fn phi(&self, log_weight: f64, advantage: f64) -> f64 {
        let (k, lambda) = if advantage >= 0.0 { (self.k_pos, self.lambda_pos) } else { (self.k_neg, self.lambda_neg) };
        let lambda = lambda.max(1e-4);
        let phi = (lambda + k * log_weight - lambda * log_weight.exp()).exp();
        if phi.is_finite() { phi } else { 0.0 }
    }
}
