//! Preference losses: pairs of completions of one prompt, one chosen and one rejected (the DPO
//! family).
//!
//! Pure, in doubles. Inputs are log-ratios of whole completions, policy over reference: `c` of the
//! chosen one, `r` of the rejected one. Means are over all pairs of the optimizer batch, whatever
//! part is given (law N1). Equal to TRL 1.16 (`DPOTrainer._compute_loss`), whose `loss_type` names
//! are ours in snake case.

mod kinds;
mod loss;
mod score;

use std::ops::Range;

use super::LossError;
pub use kinds::PairLoss;
use kinds::{Pair, Slopes, sorted};
pub use loss::{Dpo, PairwiseLoss};
pub use score::ScoreDivergence;
pub(super) use score::{log_sigmoid, sigmoid};

/// Pairs of completions, their trained tokens packed end to end. Columns have one entry per token.
#[derive(Clone, Copy, Debug)]
pub struct PairInputs<'a> {
    /// Log-probabilities under the weights being trained.
    pub log_probs: &'a [f64],
    /// Log-probabilities under the reference model.
    pub reference: &'a [f64],
    /// `log Σ_v p_v²` of the distribution at each token, which [`Preference::weigh`] needs.
    pub log_sum_squares: Option<&'a [f64]>,
    /// Range of each pair's chosen completion.
    pub chosen: &'a [Range<usize>],
    /// Range of each pair's rejected completion.
    pub rejected: &'a [Range<usize>],
    /// Pairs in the whole optimizer batch.
    pub batch_pairs: usize,
    /// Tokens of all its chosen completions.
    pub batch_chosen_tokens: usize,
}

/// A preference loss: a weighted sum of terms over the same pairs.
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
    /// If true, pairs are weighted by their probability under the policy (WPO).
    pub weigh: bool,
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
        }
    }
}

/// A preference loss, its derivatives, and the rewards of each pair.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct PairOutput {
    /// These pairs' share of the optimizer batch's loss.
    pub loss: f64,
    /// ∂loss/∂log_prob, one entry per token.
    pub grad: Vec<f64>,
    /// Rewards of each pair, chosen and rejected: β times the log-ratio.
    pub rewards: Vec<(f64, f64)>,
    /// Log-probabilities of each pair's completions, chosen and rejected.
    pub log_probs: Vec<(f64, f64)>,
}

impl PairOutput {
    /// Share of pairs whose chosen completion has the higher reward.
    pub fn accuracy(&self) -> f64 {
        let right = self.rewards.iter().filter(|(chosen, rejected)| chosen > rejected).count();
        right as f64 / self.rewards.len().max(1) as f64
    }

    /// Mean reward margin, chosen − rejected.
    pub fn margin(&self) -> f64 {
        self.rewards.iter().map(|(chosen, rejected)| chosen - rejected).sum::<f64>() / self.rewards.len().max(1) as f64
    }
}

impl Preference {
    /// A loss of one term.
    pub fn of(term: PairLoss) -> Self {
        Preference { terms: vec![(term, 1.0)], ..Preference::default() }
    }

    /// If true, it compares several pairs.
    pub fn compares_batch(&self) -> bool {
        self.terms.iter().any(|(term, _)| term.compares_distributions() || *term == PairLoss::Sft)
    }

    /// If true, it reads the reference model.
    pub fn needs_reference(&self) -> bool {
        self.terms.iter().any(|(term, _)| *term != PairLoss::Sft)
    }

    /// Validates ranges of settings, and combinations of them.
    pub fn check(&self) -> Result<(), LossError> {
        let refuse = |setting: &str, why: &str| {
            Err(LossError::Settings { loss: "a preference loss", setting: setting.to_owned(), why: why.to_owned() })
        };
        let has = |of: fn(&PairLoss) -> bool| self.terms.iter().any(|(term, _)| of(term));
        if self.terms.is_empty() {
            return refuse("terms", "there are none");
        }
        if !(self.beta > 0.0 && self.beta.is_finite()) {
            return refuse("beta", "it must be above 0");
        }
        if !(0.0..1.0).contains(&self.label_smoothing) {
            return refuse("label_smoothing", "it is a share, 0 or more and below 1");
        }
        if has(|term| matches!(term, PairLoss::Robust)) && self.label_smoothing >= 0.5 {
            return refuse(
                "label_smoothing",
                "where half of the pairs are the wrong way round, `robust` has nothing left to learn",
            );
        }
        if has(|term| matches!(term, PairLoss::ExoPair)) && self.label_smoothing == 0.0 {
            return refuse("label_smoothing", "`exo_pair` takes its logarithm; 1e-3 is common");
        }
        if has(|term| matches!(term, PairLoss::Discopop)) && self.tau <= 0.0 {
            return refuse("tau", "it must be above 0");
        }
        if self.weigh && has(PairLoss::compares_distributions) {
            return refuse(
                "weigh",
                "`aot` and `aot_unpaired` sort the batch, and what they compare is no pair with a weight of its own",
            );
        }
        Ok(())
    }

    /// Value and derivatives of some of the optimizer batch's pairs.
    pub fn evaluate(&self, inputs: &PairInputs) -> Result<PairOutput, LossError> {
        self.check()?;
        let whole = self.terms.iter().any(|(term, _)| term.compares_distributions() || (self.weigh && *term == PairLoss::Sft));
        if whole && inputs.chosen.len() < inputs.batch_pairs {
            return Err(LossError::Part { loss: "a preference loss", seen: inputs.chosen.len(), of: inputs.batch_pairs });
        }
        let weights = self.pair_weights(inputs)?;
        let pairs: Vec<Pair> =
            inputs.chosen.iter().zip(inputs.rejected).map(|(chosen, rejected)| self.pair(inputs, chosen, rejected)).collect();
        let share = 1.0 / inputs.batch_pairs.max(1) as f64;
        let mut output = PairOutput { grad: vec![0.0; inputs.log_probs.len()], ..PairOutput::default() };
        let mut slopes = vec![Slopes::default(); pairs.len()];
        for &(term, factor) in &self.terms {
            if term == PairLoss::Sft {
                let scale = factor * weights.iter().sum::<f64>() / weights.len().max(1) as f64;
                self.imitate(inputs, scale, &mut output);
                continue;
            }
            let values = match term.compares_distributions() {
                true => sorted(term, &pairs, self),
                false => pairs.iter().map(|pair| term.of(pair, self)).collect(),
            };
            for ((value, own), (sum, weight)) in values.into_iter().zip(slopes.iter_mut().zip(&weights)) {
                output.loss += factor * share * weight * value;
                sum.add(&own, factor * share * weight);
            }
        }
        for ((pair, slopes), (chosen, rejected)) in pairs.iter().zip(&slopes).zip(inputs.chosen.iter().zip(inputs.rejected)) {
            self.spread(slopes.chosen, chosen, pair.shared, &mut output.grad);
            self.spread(slopes.rejected, rejected, pair.shared, &mut output.grad);
            output.rewards.push((self.beta * pair.chosen, self.beta * pair.rejected));
            output.log_probs.push((pair.log_probs.0, pair.log_probs.1));
        }
        Ok(output)
    }

    fn pair(&self, inputs: &PairInputs, chosen: &Range<usize>, rejected: &Range<usize>) -> Pair {
        let shared = chosen.len().min(rejected.len());
        let total = |column: &[f64], at: &Range<usize>| -> f64 {
            let (head, tail) = column[at.clone()].split_at(shared);
            head.iter().sum::<f64>() + self.tail_weight.unwrap_or(1.0) * tail.iter().sum::<f64>()
        };
        let log_probs = (total(inputs.log_probs, chosen), total(inputs.log_probs, rejected));
        let reference = (total(inputs.reference, chosen), total(inputs.reference, rejected));
        Pair {
            chosen: log_probs.0 - reference.0,
            rejected: log_probs.1 - reference.1,
            log_probs,
            reference,
            lengths: (chosen.len().max(1) as f64, rejected.len().max(1) as f64),
            shared,
        }
    }

    /// Cross-entropy of the chosen completions' tokens.
    fn imitate(&self, inputs: &PairInputs, factor: f64, output: &mut PairOutput) {
        let slope = -factor / inputs.batch_chosen_tokens.max(1) as f64;
        for t in inputs.chosen.iter().flat_map(Clone::clone) {
            output.loss += slope * inputs.log_probs[t];
            output.grad[t] += slope;
        }
    }

    /// Adds a derivative by a completion's log-probability to those of its tokens.
    fn spread(&self, slope: f64, at: &Range<usize>, shared: usize, grad: &mut [f64]) {
        for (place, grad) in grad[at.clone()].iter_mut().enumerate() {
            *grad += slope * if place < shared { 1.0 } else { self.tail_weight.unwrap_or(1.0) };
        }
    }

    /// Weights of pairs, `exp(mean(θ − log Σ p²))` of both completions, multiplied: constants for
    /// the gradient.
    fn pair_weights(&self, inputs: &PairInputs) -> Result<Vec<f64>, LossError> {
        if !self.weigh {
            return Ok(vec![1.0; inputs.chosen.len()]);
        }
        let column = "log Σ p² of its tokens";
        let squares =
            inputs.log_sum_squares.ok_or(LossError::Missing { loss: "a preference loss", column, why: "weighing its pairs" })?;
        let of_answer = |at: &Range<usize>| {
            let sum: f64 = at.clone().map(|t| inputs.log_probs[t] - squares[t]).sum();
            (sum / at.len().max(1) as f64).exp()
        };
        Ok(inputs.chosen.iter().zip(inputs.rejected).map(|(chosen, rejected)| of_answer(chosen) * of_answer(rejected)).collect())
    }
}

#[cfg(test)]
mod tests;
