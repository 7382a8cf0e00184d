//! Scores of log-ratios, and the sigmoid.

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
