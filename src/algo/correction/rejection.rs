//! Which tokens or sequences are too far from the policy that sampled them to be trained on.

use crate::settings::declare::choices;
use std::ops::Range;

use serde::{Deserialize, Serialize};

use super::spread::{Observed, mean};
use super::{Spread, safe, spread_over};

choices! {
    /// Divergence of a token by its log-ratio `log r` (trainer − behaviour).
    pub enum Divergence {
        /// `r − 1 − log r`.
        "k3" => K3,
        /// `(log r)² / 2`.
        "k2" => K2,
        /// `−log r`, bounded on both sides.
        "k1" => K1,
    }
}

impl Divergence {
    fn of(self, log_ratio: f64) -> f64 {
        let d = safe(log_ratio);
        match self {
            Divergence::K1 => -d,
            Divergence::K2 => 0.5 * d * d,
            Divergence::K3 => d.exp() - 1.0 - d,
        }
    }
}

choices! {
    /// Unit that a rejection judges.
    pub enum Over {
        /// a sequence by the mean over its tokens.
        "mean" => Mean,
        /// a sequence by the sum over its tokens.
        "sum" => Sum,
        /// a sequence by its worst token.
        "max" => Max,
        /// each token by itself.
        "token" => Token,
    }
}

/// Rejects what diverges too far (verl's `rollout_rs`: `token_k1` … `seq_max_k3`).
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Rejection {
    /// How far a token is off.
    pub divergence: Divergence,
    /// What is judged by it.
    pub over: Over,
    /// Lower bound of [`Divergence::K1`], as a ratio: kept is `ln min ≤ k1 ≤ ln max`. `None` is `1 / max`. The others have none.
    #[serde(default)]
    pub min: Option<f64>,
    /// Upper bound: a ratio for `K1`, the divergence itself, in nats, for the others.
    pub max: f64,
}

impl Rejection {
    /// Which tokens stay, and what was measured.
    pub fn judge(&self, log_ratios: &[f64], sequences: &[Range<usize>]) -> (Vec<bool>, Spread) {
        let tokens: Vec<f64> = log_ratios.iter().map(|&log_ratio| self.divergence.of(log_ratio)).collect();
        let of_sequence = |at: &Range<usize>| {
            let tokens = &tokens[at.clone()];
            match self.over {
                Over::Token | Over::Mean => mean(tokens),
                Over::Sum => tokens.iter().sum(),
                Over::Max => tokens.iter().copied().reduce(f64::max).unwrap_or(0.0),
            }
        };
        let per_sequence: Vec<f64> = sequences.iter().map(of_sequence).collect();
        let (low, high) = self.bounds();
        let holds = |value: f64| value <= high && (self.divergence != Divergence::K1 || value >= low);
        let at_tokens = self.over == Over::Token;
        let tokens = if at_tokens { tokens } else { spread_over(&per_sequence, sequences, |value| value) };
        let units = if at_tokens { &tokens } else { &per_sequence };
        let spread = Spread::new(&Observed {
            tokens: &tokens,
            extremes: units,
            judged: units,
            sequences: &per_sequence,
            judged_sequences: &per_sequence,
            bounds: (low, high),
            floor: low,
        });
        (tokens.iter().map(|&value| holds(value)).collect(), spread)
    }

    /// In the units of the divergence.
    fn bounds(&self) -> (f64, f64) {
        match self.divergence {
            Divergence::K1 => (self.min.unwrap_or(1.0 / self.max).ln(), self.max.ln()),
            _ => (0.0, self.max),
        }
    }
}
