//! Terms of the DPO family: the loss of one pair, with derivatives by the log-probability of its
//! two completions; scores of log-ratios; the sigmoid.

use super::Preference;
use crate::settings::declare::choices;

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

/// One pair, as terms read it. Arrays hold the chosen and the rejected completion.
#[derive(Clone, Copy, Debug)]
pub(super) struct Pair {
    /// c and r.
    pub ratio: [f64; 2],
    pub log_probs: [f64; 2],
    pub reference: [f64; 2],
    pub lengths: [f64; 2],
    /// Length of the shorter completion.
    pub shared: usize,
}

impl PairLoss {
    /// If true, it sorts the whole batch, and has no term of a single pair.
    pub(super) fn compares_distributions(&self) -> bool {
        matches!(self, PairLoss::Aot | PairLoss::AotUnpaired)
    }

    /// Value of a pair, and derivatives by the log-probabilities of its completions. 0 for terms of
    /// [`sorted`] columns and for `Sft`, which is by token.
    pub(super) fn of(self, pair: &Pair, of: &Preference) -> (f64, [f64; 2]) {
        let (beta, epsilon) = (of.beta, of.label_smoothing);
        let per_token = matches!(self, PairLoss::Ipo | PairLoss::SigmoidNorm);
        let lengths = if per_token { pair.lengths } else { [1.0, 1.0] };
        let [c, r] = pair.ratio;
        let ((chosen, by_chosen), (rejected, by_rejected)) = (of.divergence.score(c), of.divergence.score(r));
        let delta = chosen / lengths[0] - rejected / lengths[1];
        // By Δ.
        let by_delta = |slope: f64| [slope * by_chosen / lengths[0], -slope * by_rejected / lengths[1]];
        // By βc and βr.
        let by_rewards = |chosen: f64, rejected: f64| [beta * chosen, beta * rejected];
        let (x, good, bad) = (beta * delta, beta * c, beta * r);
        let bump = |x: f64| sigmoid(x) * sigmoid(-x);
        match self {
            PairLoss::Sigmoid | PairLoss::SigmoidNorm => (-log_sigmoid(x), by_delta(-beta * sigmoid(-x))),
            PairLoss::Hinge => ((1.0 - x).max(0.0), by_delta(if x < 1.0 { -beta } else { 0.0 })),
            PairLoss::Ipo => {
                let off = delta - 0.5 / beta;
                (off * off, by_delta(2.0 * off))
            }
            PairLoss::ExoPair => {
                // TRL takes the two labels in single precision.
                let label = epsilon as f32;
                let won = log_sigmoid(x) - f64::from((-label).ln_1p());
                let lost = log_sigmoid(-x) - f64::from(label.ln());
                (sigmoid(x) * won + sigmoid(-x) * lost, by_delta(beta * bump(x) * (won - lost)))
            }
            PairLoss::NcaPair => {
                let value = -log_sigmoid(good) - 0.5 * log_sigmoid(-good) - 0.5 * log_sigmoid(-bad);
                (value, by_rewards(-sigmoid(-good) + 0.5 * sigmoid(good), 0.5 * sigmoid(bad)))
            }
            PairLoss::Robust => {
                let scale = 1.0 / (1.0 - 2.0 * epsilon);
                let value = (-(1.0 - epsilon) * log_sigmoid(x) + epsilon * log_sigmoid(-x)) * scale;
                (value, by_delta(-beta * scale * ((1.0 - epsilon) * sigmoid(-x) + epsilon * sigmoid(x))))
            }
            PairLoss::BcoPair => (-log_sigmoid(good) - log_sigmoid(-bad), by_rewards(-sigmoid(-good), sigmoid(bad))),
            PairLoss::SppoHard => {
                let (won, lost) = (c - 0.5 / beta, r + 0.5 / beta);
                (won * won + lost * lost, [2.0 * won, 2.0 * lost])
            }
            PairLoss::ApoZero => (1.0 - sigmoid(good) + sigmoid(bad), by_rewards(-bump(good), bump(bad))),
            PairLoss::ApoDown => {
                let apart = bump(good - bad);
                (sigmoid(good) + 1.0 - sigmoid(good - bad), by_rewards(bump(good) - apart, apart))
            }
            PairLoss::Discopop => {
                let tau = of.tau;
                let mix = sigmoid(x / tau);
                let by_mix = bump(x / tau) / tau;
                let (logistic, exponential) = (-log_sigmoid(x), (-x).exp());
                let slope = -sigmoid(-x) * (1.0 - mix) - logistic * by_mix - exponential * mix + exponential * by_mix;
                (logistic * (1.0 - mix) + exponential * mix, by_delta(beta * slope))
            }
            PairLoss::Aot | PairLoss::AotUnpaired | PairLoss::Sft => (0.0, [0.0; 2]),
        }
    }
}

/// Values and derivatives of terms that compare two sorted columns. A value belongs to the pair at
/// its place in the first column.
pub(super) fn sorted(term: PairLoss, pairs: &[Pair], of: &Preference) -> Vec<(f64, [f64; 2])> {
    let order = |column: &dyn Fn(&Pair) -> f64| {
        let mut order: Vec<usize> = (0..pairs.len()).collect();
        order.sort_by(|&a, &b| column(&pairs[a]).total_cmp(&column(&pairs[b])));
        order
    };
    let own = |pair: &Pair| pair.log_probs[0] - pair.log_probs[1];
    let reference = |pair: &Pair| pair.reference[0] - pair.reference[1];
    let unpaired = term == PairLoss::AotUnpaired;
    let (first, second) = match unpaired {
        true => (order(&|pair| pair.ratio[0]), order(&|pair| pair.ratio[1])),
        false => (order(&own), order(&reference)),
    };
    let (beta, epsilon) = (of.beta, of.label_smoothing);
    let mut values = vec![(0.0, [0.0; 2]); pairs.len()];
    for (a, b) in first.into_iter().zip(second) {
        let delta = match unpaired {
            true => pairs[a].ratio[0] - pairs[b].ratio[1],
            false => own(&pairs[a]) - reference(&pairs[b]),
        };
        let x = beta * delta;
        let slope = beta * (epsilon * sigmoid(x) - (1.0 - epsilon) * sigmoid(-x));
        values[a].0 = -log_sigmoid(x) * (1.0 - epsilon) - log_sigmoid(-x) * epsilon;
        values[a].1[0] += slope;
        values[if unpaired { b } else { a }].1[1] -= slope;
    }
    values
}

/// Divergence between policy and reference. The score of a log-ratio is f′ of its ratio (f-DPO;
/// TRL's `f_divergence_type`).
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub enum ScoreDivergence {
    /// The log-ratio itself (DPO).
    #[default]
    ReverseKl,
    /// `1 − 1/t`.
    ForwardKl,
    /// `log 2t/(t + 1)`.
    JensenShannon,
    /// `(t^(α − 1) − 1)/(α − 1)`; the log-ratio itself at α = 1.
    Alpha(f64),
}

impl ScoreDivergence {
    /// Score of a log-ratio, and its derivative.
    pub(super) fn score(self, log_ratio: f64) -> (f64, f64) {
        match self {
            ScoreDivergence::ForwardKl => (1.0 - (-log_ratio).exp(), (-log_ratio).exp()),
            ScoreDivergence::JensenShannon => (2f64.ln() + log_sigmoid(log_ratio), sigmoid(-log_ratio)),
            ScoreDivergence::Alpha(alpha) if (alpha - 1.0).abs() >= 1e-6 => {
                // TRL's bound in single precision, beyond which the exponential has no slope.
                const HIGHEST: f64 = 80.0;
                let power = (alpha - 1.0) * log_ratio;
                let grown = power.min(HIGHEST).exp();
                ((grown - 1.0) / (alpha - 1.0), if power <= HIGHEST { grown } else { 0.0 })
            }
            ScoreDivergence::ReverseKl | ScoreDivergence::Alpha(_) => (log_ratio, 1.0),
        }
    }
}

/// `1/(1 + e^−x)`.
pub(in crate::algo) fn sigmoid(x: f64) -> f64 {
    1.0 / (1.0 + (-x).exp())
}

/// `log σ(x)`, without overflow.
pub(in crate::algo) fn log_sigmoid(x: f64) -> f64 {
    if x.is_nan() { x } else { x.min(0.0) - (-x.abs()).exp().ln_1p() }
}
