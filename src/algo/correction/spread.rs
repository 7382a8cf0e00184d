//! Statistics of weights or divergences over tokens and over sequences, as sums that parts add up
//! to.

/// Guard that verl adds to every divisor; its numbers depend on it.
pub(super) const GUARD: f64 = 1e-8;

/// Mean as verl computes it; 0 without values.
pub(in crate::algo) fn mean(values: &[f64]) -> f64 {
    guarded(values.iter().sum(), values.len())
}

pub(in crate::algo) fn guarded(sum: f64, count: usize) -> f64 {
    sum / (count as f64 + GUARD)
}

/// Inputs of a [`Spread`], by token or by sequence. `extremes` and `judged` are by the unit that is
/// judged.
pub(super) struct Observed<'a> {
    pub tokens: &'a [f64],
    pub extremes: &'a [f64],
    pub judged: &'a [f64],
    pub sequences: &'a [f64],
    pub judged_sequences: &'a [f64],
    /// Lower and upper bound.
    pub bounds: (f64, f64),
    /// Lower bound of tokens before their deviation is computed; the upper one is the high bound.
    pub floor: f64,
}

/// Statistics over tokens and over sequences. The default has seen nothing.
#[derive(Clone, Debug, PartialEq)]
pub struct Spread {
    tokens: usize,
    sum: f64,
    cut_sum: f64,
    cut_squares: f64,
    units: usize,
    low: usize,
    high: usize,
    min: f64,
    max: f64,
    sequences: usize,
    sequence_sum: f64,
    sequence_squares: f64,
    sequence_min: f64,
    sequence_max: f64,
    sequence_low: usize,
    sequence_high: usize,
}

impl Default for Spread {
    fn default() -> Self {
        Spread::new(&Observed {
            tokens: &[],
            extremes: &[],
            judged: &[],
            sequences: &[],
            judged_sequences: &[],
            bounds: (0.0, 0.0),
            floor: 0.0,
        })
    }
}

impl Spread {
    pub(super) fn new(of: &Observed) -> Self {
        let (low, high) = of.bounds;
        let sum = |values: &[f64], what: &dyn Fn(f64) -> f64| values.iter().map(|&value| what(value)).sum::<f64>();
        let count = |values: &[f64], which: &dyn Fn(f64) -> bool| values.iter().filter(|value| which(**value)).count();
        let least = |values: &[f64]| values.iter().copied().fold(f64::INFINITY, f64::min);
        let most = |values: &[f64]| values.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let cut = |value: f64| value.max(of.floor).min(high);
        Spread {
            tokens: of.tokens.len(),
            sum: sum(of.tokens, &|value| value),
            cut_sum: sum(of.tokens, &cut),
            cut_squares: sum(of.tokens, &|value| cut(value).powi(2)),
            units: of.judged.len(),
            low: count(of.judged, &|value| value < low),
            high: count(of.judged, &|value| value > high),
            min: least(of.extremes),
            max: most(of.extremes),
            sequences: of.sequences.len(),
            sequence_sum: sum(of.sequences, &|value| value),
            sequence_squares: sum(of.sequences, &|value| value.powi(2)),
            sequence_min: least(of.sequences),
            sequence_max: most(of.sequences),
            sequence_low: count(of.judged_sequences, &|value| value < low),
            sequence_high: count(of.judged_sequences, &|value| value > high),
        }
    }

    /// Adds the statistics of another part.
    pub fn merge(&mut self, other: &Spread) {
        self.tokens += other.tokens;
        self.sum += other.sum;
        self.cut_sum += other.cut_sum;
        self.cut_squares += other.cut_squares;
        self.units += other.units;
        self.low += other.low;
        self.high += other.high;
        self.min = self.min.min(other.min);
        self.max = self.max.max(other.max);
        self.sequences += other.sequences;
        self.sequence_sum += other.sequence_sum;
        self.sequence_squares += other.sequence_squares;
        self.sequence_min = self.sequence_min.min(other.sequence_min);
        self.sequence_max = self.sequence_max.max(other.sequence_max);
        self.sequence_low += other.sequence_low;
        self.sequence_high += other.sequence_high;
    }

    /// If true, nothing was seen, and the numbers below are meaningless.
    pub fn is_empty(&self) -> bool {
        self.tokens == 0
    }

    /// Mean over tokens.
    pub fn mean(&self) -> f64 {
        guarded(self.sum, self.tokens)
    }

    /// Standard deviation over tokens, of values clipped to the bounds.
    pub fn std(&self) -> f64 {
        let (mean, squares) = (guarded(self.cut_sum, self.tokens), guarded(self.cut_squares, self.tokens));
        if self.tokens > 1 { (squares - mean * mean).max(0.0).sqrt() } else { 0.0 }
    }

    /// Effective sample share over tokens, (Σw)² / (N Σw²).
    pub fn effective_sample_share(&self) -> f64 {
        let mean = guarded(self.cut_sum, self.tokens) + GUARD;
        mean * mean / guarded(self.cut_squares, self.tokens)
    }

    /// Smallest value over the judged units, tokens or sequences.
    pub fn min(&self) -> f64 {
        self.min
    }

    /// Largest value.
    pub fn max(&self) -> f64 {
        self.max
    }

    /// Share of judged units below the bounds.
    pub fn low(&self) -> f64 {
        self.low as f64 / self.units.max(1) as f64
    }

    /// Share of judged units above the bounds.
    pub fn high(&self) -> f64 {
        self.high as f64 / self.units.max(1) as f64
    }

    /// Mean over sequences.
    pub fn sequence_mean(&self) -> f64 {
        self.sequence_sum / self.sequences.max(1) as f64
    }

    /// Unbiased standard deviation over sequences.
    pub fn sequence_std(&self) -> f64 {
        let n = self.sequences as f64;
        let variance = (self.sequence_squares - self.sequence_sum * self.sequence_sum / n) / (n - 1.0);
        if self.sequences > 1 { variance.max(0.0).sqrt() } else { 0.0 }
    }

    /// Smallest value of a sequence.
    pub fn sequence_min(&self) -> f64 {
        self.sequence_min
    }

    /// Largest value of a sequence.
    pub fn sequence_max(&self) -> f64 {
        self.sequence_max
    }

    /// Share of sequences below the bounds.
    pub fn sequence_low(&self) -> f64 {
        self.sequence_low as f64 / self.sequences.max(1) as f64
    }

    /// Share of sequences above the bounds.
    pub fn sequence_high(&self) -> f64 {
        self.sequence_high as f64 / self.sequences.max(1) as f64
    }
}
