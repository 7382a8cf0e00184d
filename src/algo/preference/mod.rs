//! Preference losses: pairs of completions of one prompt, one chosen and one rejected (the DPO
//! family).
//!
//! Inputs are log-ratios of whole completions, policy over reference: `c` of the chosen one, `r` of
//! the rejected one. Means are over all pairs of the optimizer batch, whatever part is given (law
//! N1). Equal to TRL 1.16 (`DPOTrainer._compute_loss`), whose `loss_type` names are ours in snake
//! case.

mod kinds;

use std::ops::Range;

use super::{Loss, LossError, LossInputs, LossOutput, PairMetrics};
use crate::settings::declare::section;
use crate::settings::setting::{BELOW_ONE, Limit, POSITIVE};
use kinds::{Pair, sorted};
pub use kinds::{PairLoss, ScoreDivergence};
pub(super) use kinds::{log_sigmoid, sigmoid};

const UP_TO_ONE_IF_GIVEN: Limit<Option<f64>> =
    Limit { text: "0 to 1", holds: |value| value.is_none_or(|number| (0.0..=1.0).contains(&number)) };

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
    /// If true, it reads a reference policy.
    pub fn needs_reference(&self) -> bool {
        self.loss().needs_reference()
    }

    /// The loss with these settings.
    pub fn loss(&self) -> Preference {
        let Dpo { pair_loss, beta, label_smoothing, tau, tail_weight, reference_free } = *self;
        Preference { beta, label_smoothing, tau, tail_weight, reference_free, ..Preference::of(pair_loss) }
    }
}

/// A preference loss: a weighted sum of terms over the same pairs. Sequences 2i and 2i + 1 are the
/// chosen and the rejected completion of a pair
/// ([`TrainBatch::pairs`](crate::train::TrainBatch::pairs)).
///
/// Advantages are not read. The weights give the number of pairs of the optimizer batch: they must
/// be those of [`Aggregation::SeqMeanTokenMean`](crate::algo::Aggregation).
#[derive(Clone, Debug, PartialEq)]
pub struct Preference {
    /// The terms and their weights.
    pub terms: Vec<(PairLoss, f64)>,
    /// Coefficient β: how strongly the policy is kept near the reference. Rewards are β times
    /// log-ratios.
    pub beta: f64,
    /// Label smoothing ε: share of pairs assumed to be labelled wrongly, in the terms that have it.
    pub label_smoothing: f64,
    /// Temperature of the mixture in [`PairLoss::Discopop`], above 0.
    pub tau: f64,
    /// Divergence that turns log-ratios into scores.
    pub divergence: ScoreDivergence,
    /// Weight of tokens beyond the shorter completion's length (LD-DPO's α). `None` weighs all
    /// tokens the same.
    pub tail_weight: Option<f64>,
    /// If true, pairs are weighted by their probability under the policy (WPO), which needs
    /// [`LossInputs::log_sum_squares`].
    pub weigh: bool,
    /// If true, completions are scored by their log-probabilities alone, without a reference.
    pub reference_free: bool,
}

impl Default for Preference {
    fn default() -> Self {
        Preference {
            terms: vec![(PairLoss::Sigmoid, 1.0)],
            beta: 0.1,
            label_smoothing: 0.0,
            tau: 0.05,
            divergence: ScoreDivergence::ReverseKl,
            tail_weight: None,
            weigh: false,
            reference_free: false,
        }
    }
}

impl Loss for Preference {
    fn name(&self) -> &str {
        "dpo"
    }

    fn whole_batch(&self) -> bool {
        self.terms.iter().any(|(term, _)| term.compares_distributions() || *term == PairLoss::Sft)
    }

    fn evaluate(&self, inputs: &LossInputs) -> Result<LossOutput, LossError> {
        self.check()?;
        let tokens = inputs.log_probs.len();
        let nothing = vec![0.0; tokens];
        let reference = match inputs.reference {
            Some(reference) if !self.reference_free => reference,
            _ if self.needs_reference() => inputs.needed_reference("dpo", "its pairs")?,
            _ => &nothing,
        };
        if self.whole_batch() {
            inputs.check_whole("dpo")?;
        }
        let (places, []) = inputs.sequences.as_chunks::<2>() else {
            let count = inputs.sequences.len();
            return Err(LossError::Custom(format!("dpo takes sequences two by two, chosen and rejected, and these are {count}")));
        };
        let weights = self.pair_weights(inputs, places)?;
        let pairs: Vec<Pair> = places.iter().map(|places| self.pair(inputs.log_probs, reference, places)).collect();
        let share = 1.0 / batch_pairs(inputs)?.max(1) as f64;
        let (mut loss, mut grad) = (0.0, vec![0.0; tokens]);
        let mut slopes = vec![[0.0; 2]; pairs.len()];
        for &(term, factor) in &self.terms {
            if term == PairLoss::Sft {
                // Cross-entropy of the chosen completions' tokens, all of which are here.
                let chosen = || places.iter().flat_map(|[chosen, _]| chosen.clone());
                let scale = factor * weights.iter().sum::<f64>() / weights.len().max(1) as f64;
                let slope = -scale / chosen().count().max(1) as f64;
                for t in chosen() {
                    loss += slope * inputs.log_probs[t];
                    grad[t] += slope;
                }
                continue;
            }
            let values = match term.compares_distributions() {
                true => sorted(term, &pairs, self),
                false => pairs.iter().map(|pair| term.of(pair, self)).collect(),
            };
            for ((value, own), (sum, weight)) in values.into_iter().zip(slopes.iter_mut().zip(&weights)) {
                let scale = factor * share * weight;
                loss += scale * value;
                *sum = [sum[0] + scale * own[0], sum[1] + scale * own[1]];
            }
        }
        for ((pair, slopes), places) in pairs.iter().zip(slopes).zip(places) {
            for (slope, at) in slopes.into_iter().zip(places) {
                for (place, grad) in grad[at.clone()].iter_mut().enumerate() {
                    *grad += slope * if place < pair.shared { 1.0 } else { self.tail_weight.unwrap_or(1.0) };
                }
            }
        }
        let mut output = LossOutput::new(loss, grad);
        output.metrics.pairs = PairMetrics::of(pairs.iter().map(|pair| (self.beta * pair.ratio[0], self.beta * pair.ratio[1])));
        for pair in &pairs {
            let sums = &mut output.metrics.pairs.log_prob_sums;
            *sums = [sums[0] + pair.log_probs[0], sums[1] + pair.log_probs[1]];
        }
        Ok(output)
    }
}

impl Preference {
    /// A loss of one term.
    pub fn of(term: PairLoss) -> Self {
        Preference { terms: vec![(term, 1.0)], ..Preference::default() }
    }

    /// If true, it reads the reference model.
    pub fn needs_reference(&self) -> bool {
        !self.reference_free && self.terms.iter().any(|(term, _)| *term != PairLoss::Sft)
    }

    /// Validates ranges of settings, and combinations of them.
    pub fn check(&self) -> Result<(), LossError> {
        let has = |of: fn(&PairLoss) -> bool| self.terms.iter().any(|(term, _)| of(term));
        let wrong_half = has(|term| *term == PairLoss::Robust) && self.label_smoothing >= 0.5;
        let no_label = has(|term| *term == PairLoss::ExoPair) && self.label_smoothing == 0.0;
        let no_mixture = has(|term| *term == PairLoss::Discopop) && self.tau <= 0.0;
        let rules = [
            (self.terms.is_empty(), "terms", "there are none"),
            (!(self.beta > 0.0 && self.beta.is_finite()), "beta", "it must be above 0"),
            (!(0.0..1.0).contains(&self.label_smoothing), "label_smoothing", "it is a share, 0 or more and below 1"),
            (
                wrong_half,
                "label_smoothing",
                "where half of the pairs are the wrong way round, `robust` has nothing left to learn",
            ),
            (no_label, "label_smoothing", "`exo_pair` takes its logarithm; 1e-3 is common"),
            (no_mixture, "tau", "it must be above 0"),
            (
                self.weigh && has(PairLoss::compares_distributions),
                "weigh",
                "`aot` and `aot_unpaired` sort the batch, and what they compare is no pair with a weight of its own",
            ),
        ];
        let broken = rules.into_iter().find(|(broken, ..)| *broken);
        broken.map_or(Ok(()), |(_, setting, why)| Err(LossError::settings("a preference loss", setting, why)))
    }

    fn pair(&self, log_probs: &[f64], reference: &[f64], places: &[Range<usize>; 2]) -> Pair {
        let shared = places[0].len().min(places[1].len());
        let totals = |column: &[f64]| {
            [0, 1].map(|side: usize| {
                let (head, tail) = column[places[side].clone()].split_at(shared);
                head.iter().sum::<f64>() + self.tail_weight.unwrap_or(1.0) * tail.iter().sum::<f64>()
            })
        };
        let (log_probs, reference) = (totals(log_probs), totals(reference));
        let ratio = [log_probs[0] - reference[0], log_probs[1] - reference[1]];
        Pair { ratio, log_probs, reference, lengths: [0, 1].map(|side: usize| places[side].len().max(1) as f64), shared }
    }

    /// Weights of pairs, `exp(mean(θ − log Σ p²))` of both completions, multiplied: constants for
    /// the gradient.
    fn pair_weights(&self, inputs: &LossInputs, places: &[[Range<usize>; 2]]) -> Result<Vec<f64>, LossError> {
        if !self.weigh {
            return Ok(vec![1.0; places.len()]);
        }
        let missing = || LossError::missing("a preference loss", "log Σ p² of its tokens", "weighing its pairs");
        let squares = inputs.log_sum_squares.ok_or_else(missing)?;
        let of_completion = |at: &Range<usize>| {
            let sum: f64 = at.clone().map(|t| inputs.log_probs[t] - squares[t]).sum();
            (sum / at.len().max(1) as f64).exp()
        };
        Ok(places.iter().map(|[chosen, rejected]| of_completion(chosen) * of_completion(rejected)).collect())
    }
}

/// Pairs of the optimizer batch, from the weight of each sequence.
fn batch_pairs(inputs: &LossInputs) -> Result<usize, LossError> {
    let weigh = |at: &Range<usize>| inputs.weights[at.clone()].iter().sum::<f64>();
    let mut weights = inputs.sequences.iter().filter(|at| !at.is_empty()).map(weigh);
    let Some(first) = weights.next() else { return Ok(0) };
    let pairs = (0.5 / first).round();
    let whole = (pairs * 2.0 * first - 1.0).abs() < 1e-6;
    if !whole || weights.any(|weight| (weight - first).abs() > 1e-6 * first) {
        let why = "all pairs count alike, and so must answers; use `SeqMeanTokenMean` and loss masks of 0 and 1";
        return Err(LossError::settings("dpo", "aggregation", why));
    }
    Ok(pairs as usize)
}
