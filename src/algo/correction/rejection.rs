//! Rejection of tokens or sequences that are too far from the behaviour policy (verl's
//! `rollout_rs`).

use std::ops::Range;

use super::spread::{Spread, Tally, mean};
use super::{safe, spread_over};
use crate::settings::declare::{choices, section};
use crate::settings::setting::{POSITIVE, POSITIVE_IF_GIVEN};

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

section! {
    /// Rejection of tokens or sequences that are too far from the behaviour policy: they do not
    /// count in the policy loss.
    pub struct Rejection {
        /// Divergence of a token.
        divergence: Divergence = Divergence::default();
        /// Unit that is judged.
        over: Over = Over::default();
        /// Smallest ratio of `k1`. Left out: 1 / `max`.
        min: Option<f64> = None, POSITIVE_IF_GIVEN;
        /// Largest divergence, in nats; of `k1`, the largest ratio.
        max: f64 = 0.1, POSITIVE;
    }
}

impl Rejection {
    /// Tokens that stay, and the measured divergences.
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
        let bounds = self.bounds();
        let holds = |value: f64| value <= bounds[1] && (self.divergence != Divergence::K1 || value >= bounds[0]);
        // A sequence without trained tokens is not judged.
        let judged = per_sequence.iter().zip(sequences).filter(|(_, at)| !at.is_empty());
        let judged: Vec<f64> = judged.map(|(value, _)| *value).collect();
        let sequences_seen = Tally::of(&judged, &judged, bounds);
        let (tokens, units) = match self.over {
            Over::Token => {
                let seen = Tally::of(&tokens, &tokens, bounds);
                (tokens, seen)
            }
            _ => (spread_over(&per_sequence, sequences), sequences_seen),
        };
        let spread = Spread::new(&tokens, bounds, units, sequences_seen);
        (tokens.iter().map(|&value| holds(value)).collect(), spread)
    }

    /// Lower and upper bound in the units of the divergence.
    fn bounds(&self) -> [f64; 2] {
        match self.divergence {
            Divergence::K1 => [self.min.unwrap_or(1.0 / self.max).ln(), self.max.ln()],
            _ => [0.0, self.max],
        }
    }
}
