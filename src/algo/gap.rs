//! Gap between the trainer's and the generator's log-probabilities, by token (law N3).
//!
//! Sums, so that parts merge into the whole batch (law N1). The gap of stale tokens includes the
//! policy's own change; at lag 0 it is the difference of two implementations of one model.
//! O(tokens).

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::correction::{guarded, mean, safe};

/// Largest ratio in the reported effective sample share, which a single outlier would dominate.
const REPORTED_RATIO: f64 = 10.0;

/// One sampled token with both log-probabilities.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct ComparedToken {
    /// The sample's group.
    pub group: u64,
    /// The sample's place in its group.
    pub sample: u32,
    /// The token's place in the sample, prompt included.
    pub position: usize,
    /// The token.
    pub token: i64,
    /// Token lag: version being trained − version that sampled the token.
    pub lag: u64,
    /// The trainer's log-probability.
    pub trainer: f64,
    /// The generator's log-probability.
    pub behaviour: f64,
}

impl ComparedToken {
    /// |trainer − behaviour|, in nats.
    pub fn gap(&self) -> f64 {
        (self.trainer - self.behaviour).abs()
    }
}

/// Tokens of one lag.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct LagGap {
    /// Number of tokens.
    pub tokens: usize,
    /// Σ exp(θ − b).
    pub ratio_sum: f64,
    /// Σ |θ − b|.
    pub abs_sum: f64,
}

impl LagGap {
    /// Mean ratio.
    pub fn ratio(&self) -> f64 {
        self.ratio_sum / self.tokens.max(1) as f64
    }

    /// Mean |θ − b|.
    pub fn gap(&self) -> f64 {
        self.abs_sum / self.tokens.max(1) as f64
    }

    fn merge(&mut self, other: &LagGap) {
        self.tokens += other.tokens;
        self.ratio_sum += other.ratio_sum;
        self.abs_sum += other.abs_sum;
    }
}

/// Gap over whole sequences: perplexities and the χ² divergence. Equal to verl 0.9's
/// `compute_offpolicy_metrics`. Sums over sequences with sampled tokens.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct SequenceGap {
    /// Sequences compared.
    pub sequences: usize,
    /// Log-perplexities and perplexities under the trainer: Σ mean −θ, and Σ exp of it.
    pub trainer: (f64, f64),
    /// Log-perplexities and perplexities under the behaviour policy: Σ mean −b, and Σ exp of it.
    pub behaviour: (f64, f64),
    /// Σ |difference| of the two means.
    pub abs_sum: f64,
    /// Σ exp of the difference.
    ratio_sum: f64,
    /// Σ (Π ρ)².
    square_ratio_sum: f64,
    /// Smallest and largest difference of the log-perplexities, trainer − generator.
    pub range: Option<(f64, f64)>,
}

impl SequenceGap {
    /// Adds a sequence's sampled tokens, which may be none.
    fn add(&mut self, tokens: &[ComparedToken]) {
        if tokens.is_empty() {
            return;
        }
        let column = |of: fn(&ComparedToken) -> f64| -> Vec<f64> { tokens.iter().map(of).collect() };
        let (trainer, behaviour) = (-mean(&column(|token| token.trainer)), -mean(&column(|token| token.behaviour)));
        let difference = trainer - behaviour;
        let log_ratio: f64 = column(|token| token.trainer - token.behaviour).iter().sum();
        self.merge(&SequenceGap {
            sequences: 1,
            trainer: (trainer, trainer.exp()),
            behaviour: (behaviour, behaviour.exp()),
            abs_sum: difference.abs(),
            ratio_sum: difference.exp(),
            square_ratio_sum: (2.0 * safe(log_ratio)).exp(),
            range: Some((difference, difference)),
        });
    }

    /// Adds another part's sequences.
    pub fn merge(&mut self, other: &SequenceGap) {
        let add = |a: (f64, f64), b: (f64, f64)| (a.0 + b.0, a.1 + b.1);
        self.sequences += other.sequences;
        self.trainer = add(self.trainer, other.trainer);
        self.behaviour = add(self.behaviour, other.behaviour);
        self.abs_sum += other.abs_sum;
        self.ratio_sum += other.ratio_sum;
        self.square_ratio_sum += other.square_ratio_sum;
        self.range = match (self.range, other.range) {
            (Some(a), Some(b)) => Some((a.0.min(b.0), a.1.max(b.1))),
            (a, b) => a.or(b),
        };
    }

    /// Mean perplexity ratio over sequences, trainer over generator; 1 without sequences.
    pub fn perplexity_ratio(&self) -> f64 {
        if self.sequences == 0 { 1.0 } else { self.per_sequence(self.ratio_sum) }
    }

    /// χ² divergence over sequences, `E[(Π ρ)²] − 1`: the variance of sequence weights.
    pub fn chi2(&self) -> f64 {
        if self.sequences == 0 { 0.0 } else { self.per_sequence(self.square_ratio_sum) - 1.0 }
    }

    fn per_sequence(&self, sum: f64) -> f64 {
        sum / self.sequences.max(1) as f64
    }
}

/// Sums over sampled tokens; parts merge.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct LogProbGap {
    /// Tokens compared.
    pub tokens: usize,
    /// Σ (b − θ): the k1 estimate of KL(behaviour ‖ trainer).
    pub k1_sum: f64,
    /// Σ (exp(θ − b) − 1 − (θ − b)): the k3 estimate.
    pub kl_sum: f64,
    /// Σ exp(θ − b)².
    pub square_ratio_sum: f64,
    /// Σ exp(θ − b) and Σ exp(θ − b)², with ratios truncated at 10.
    pub cut_sums: (f64, f64),
    /// Tokens by token lag.
    pub by_lag: BTreeMap<u64, LagGap>,
    /// The token with the largest gap.
    pub worst: Option<ComparedToken>,
    /// Whole sequences compared.
    pub sequences: SequenceGap,
}

impl LogProbGap {
    /// Adds the sampled tokens of one sequence, which may be none.
    pub fn add_sequence(&mut self, tokens: &[ComparedToken]) {
        for token in tokens {
            let d = token.trainer - token.behaviour;
            let (ratio, safe) = (d.exp(), safe(d).exp());
            self.k1_sum -= d;
            self.kl_sum += d.exp_m1() - d;
            self.square_ratio_sum += safe * safe;
            let cut = safe.min(REPORTED_RATIO);
            self.cut_sums = (self.cut_sums.0 + cut, self.cut_sums.1 + cut * cut);
            let of_token = LagGap { tokens: 1, ratio_sum: ratio, abs_sum: d.abs() };
            self.by_lag.entry(token.lag).or_default().merge(&of_token);
            self.worst = worse(self.worst, Some(*token));
        }
        self.tokens += tokens.len();
        self.sequences.add(tokens);
    }

    /// Adds another part's tokens.
    pub fn merge(&mut self, other: &LogProbGap) {
        self.tokens += other.tokens;
        self.k1_sum += other.k1_sum;
        self.kl_sum += other.kl_sum;
        self.square_ratio_sum += other.square_ratio_sum;
        self.cut_sums = (self.cut_sums.0 + other.cut_sums.0, self.cut_sums.1 + other.cut_sums.1);
        for (lag, other) in &other.by_lag {
            self.by_lag.entry(*lag).or_default().merge(other);
        }
        self.worst = worse(self.worst, other.worst);
        self.sequences.merge(&other.sequences);
    }

    /// Mean |θ − b|; 0 without tokens.
    pub fn mean(&self) -> f64 {
        self.per_token(self.by_lag.values().map(|lag| lag.abs_sum).sum())
    }

    /// Largest |θ − b|; 0 without tokens.
    pub fn max(&self) -> f64 {
        self.worst.map_or(0.0, |worst| worst.gap())
    }

    /// Mean ratio exp(θ − b); 1 without tokens.
    pub fn ratio(&self) -> f64 {
        let sum: f64 = self.by_lag.values().map(|lag| lag.ratio_sum).sum();
        if self.tokens == 0 { 1.0 } else { self.per_token(sum) }
    }

    /// Mean k3 estimate of KL(behaviour ‖ trainer).
    pub fn approx_kl(&self) -> f64 {
        self.per_token(self.kl_sum)
    }

    /// Mean k1 estimate of KL(behaviour ‖ trainer): unbiased, and noisier than k3.
    pub fn k1(&self) -> f64 {
        self.per_token(self.k1_sum)
    }

    /// `E[ρ²] − 1` over tokens, ρ = exp(θ − b): the χ² divergence, the variance that importance
    /// weights would have.
    pub fn chi2(&self) -> f64 {
        if self.tokens == 0 { 0.0 } else { guarded(self.square_ratio_sum, self.tokens) - 1.0 }
    }

    /// Effective sample size of the ratios as a share of the tokens, (Σw)² / (N Σw²); 1 where
    /// nothing was sampled.
    pub fn effective_sample_share(&self) -> f64 {
        let (sum, squares) = self.cut_sums;
        if self.tokens == 0 { 1.0 } else { sum * sum / (self.tokens as f64 * squares) }
    }

    fn per_token(&self, sum: f64) -> f64 {
        sum / self.tokens.max(1) as f64
    }
}

/// The one with the larger gap, the earlier one of equals.
fn worse(a: Option<ComparedToken>, b: Option<ComparedToken>) -> Option<ComparedToken> {
    match (a, b) {
        (Some(a), Some(b)) => Some(if b.gap() > a.gap() { b } else { a }),
        (a, b) => a.or(b),
    }
}
