//! Statistics of weights or divergences over tokens and over sequences, as sums that parts add up
//! to.

use serde::{Deserialize, Serialize};

/// Guard that verl adds to every divisor; its numbers depend on it.
pub(super) const GUARD: f64 = 1e-8;

/// Mean as verl computes it; 0 without values.
pub(in crate::algo) fn mean(values: &[f64]) -> f64 {
    guarded(values.iter().sum(), values.len())
}

pub(in crate::algo) fn guarded(sum: f64, count: usize) -> f64 {
    sum / (count as f64 + GUARD)
}

/// Statistics of tokens or of sequences. The default has seen nothing.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Tally {
    count: usize,
    sum: f64,
    squares: f64,
    /// Smallest value; +∞ without values.
    pub min: f64,
    /// Largest value; −∞ without values.
    pub max: f64,
    low: usize,
    high: usize,
}

impl Default for Tally {
    fn default() -> Self {
        Tally { count: 0, sum: 0.0, squares: 0.0, min: f64::INFINITY, max: f64::NEG_INFINITY, low: 0, high: 0 }
    }
}

impl Tally {
    /// Statistics of `values`, and the numbers of `judged` values, as many, that are out of bounds.
    pub(super) fn of(values: &[f64], judged: &[f64], [low, high]: [f64; 2]) -> Self {
        Tally {
            count: values.len(),
            sum: values.iter().sum(),
            squares: values.iter().map(|value| value.powi(2)).sum(),
            min: values.iter().copied().fold(f64::INFINITY, f64::min),
            max: values.iter().copied().fold(f64::NEG_INFINITY, f64::max),
            low: judged.iter().filter(|value| **value < low).count(),
            high: judged.iter().filter(|value| **value > high).count(),
        }
    }

    fn merge(&mut self, other: &Tally) {
        self.count += other.count;
        self.sum += other.sum;
        self.squares += other.squares;
        self.min = self.min.min(other.min);
        self.max = self.max.max(other.max);
        self.low += other.low;
        self.high += other.high;
    }

    /// Mean; 0 without values.
    pub fn mean(&self) -> f64 {
        self.sum / self.count.max(1) as f64
    }

    /// Unbiased standard deviation; 0 for fewer than two values.
    pub fn std(&self) -> f64 {
        let n = self.count as f64;
        let variance = (self.squares - self.sum * self.sum / n) / (n - 1.0);
        if self.count > 1 { variance.max(0.0).sqrt() } else { 0.0 }
    }

    /// Share of values below the bounds.
    pub fn low(&self) -> f64 {
        self.low as f64 / self.count.max(1) as f64
    }

    /// Share of values above the bounds.
    pub fn high(&self) -> f64 {
        self.high as f64 / self.count.max(1) as f64
    }
}

/// Statistics over tokens and over sequences. The default has seen nothing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Spread {
    /// Sum over tokens.
    sum: f64,
    /// Tokens, clipped to the bounds.
    clipped: Tally,
    /// Units that are judged, tokens or sequences.
    pub units: Tally,
    /// Sequences.
    pub sequences: Tally,
}

impl Spread {
    pub(super) fn new(tokens: &[f64], [low, high]: [f64; 2], units: Tally, sequences: Tally) -> Self {
        let clipped: Vec<f64> = tokens.iter().map(|value| value.max(low).min(high)).collect();
        Spread { sum: tokens.iter().sum(), clipped: Tally::of(&clipped, &[], [low, high]), units, sequences }
    }

    /// Adds the statistics of another part.
    pub fn merge(&mut self, other: &Spread) {
        self.sum += other.sum;
        self.clipped.merge(&other.clipped);
        self.units.merge(&other.units);
        self.sequences.merge(&other.sequences);
    }

    /// If true, nothing was seen, and the numbers below are meaningless.
    pub fn is_empty(&self) -> bool {
        self.clipped.count == 0
    }

    /// Mean over tokens.
    pub fn mean(&self) -> f64 {
        guarded(self.sum, self.clipped.count)
    }

    /// Standard deviation over tokens, of values clipped to the bounds.
    pub fn std(&self) -> f64 {
        let Tally { count, sum, squares, .. } = self.clipped;
        let (mean, squares) = (guarded(sum, count), guarded(squares, count));
        if count > 1 { (squares - mean * mean).max(0.0).sqrt() } else { 0.0 }
    }

    /// Effective sample share over tokens, (Σw)² / (N Σw²); 0 if all weights are.
    pub fn effective_sample_share(&self) -> f64 {
        let Tally { count, sum, squares, .. } = self.clipped;
        let mean = guarded(sum, count) + GUARD;
        if squares > 0.0 { mean * mean / guarded(squares, count) } else { 0.0 }
    }
}
