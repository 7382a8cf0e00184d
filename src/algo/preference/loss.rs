//! Preference losses as losses of packed sequences.

use std::ops::Range;

use super::{PairInputs, PairLoss, Preference};
use crate::algo::{Loss, LossError, LossInputs, LossMetrics, LossOutput, PairMetrics};
use crate::settings::declare::section;
use crate::settings::setting::{BELOW_ONE, Limit, POSITIVE};

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
        !self.reference_free && self.pair_loss != PairLoss::Sft
    }

    /// The loss with these settings.
    pub fn loss(&self) -> PairwiseLoss {
        let Dpo { pair_loss, beta, label_smoothing, tau, tail_weight, reference_free } = *self;
        let preference = Preference { beta, label_smoothing, tau, tail_weight, ..Preference::of(pair_loss) };
        PairwiseLoss { preference, reference_free }
    }
}

/// Preference loss of packed sequences, of which 2i and 2i + 1 are the chosen and the rejected
/// completion of a pair ([`TrainBatch::in_pairs`](crate::train::TrainBatch::in_pairs)).
///
/// Advantages are not read. The weights give the number of pairs of the optimizer batch: they must
/// be those of [`Aggregation::SeqMeanTokenMean`](crate::algo::Aggregation).
#[derive(Clone, Debug, Default, PartialEq)]
pub struct PairwiseLoss {
    /// Loss of a pair.
    pub preference: Preference,
    /// If true, completions are scored by their log-probabilities alone, without a reference.
    pub reference_free: bool,
}

impl From<Preference> for PairwiseLoss {
    fn from(preference: Preference) -> Self {
        PairwiseLoss { preference, reference_free: false }
    }
}

impl Loss for PairwiseLoss {
    fn name(&self) -> &str {
        "dpo"
    }

    fn whole_batch(&self) -> bool {
        self.preference.compares_batch()
    }

    fn evaluate(&self, inputs: &LossInputs) -> Result<LossOutput, LossError> {
        let alike;
        let reference = match inputs.reference {
            _ if self.reference_free || !self.preference.needs_reference() => {
                alike = vec![0.0; inputs.log_probs.len()];
                &alike
            }
            Some(reference) => reference,
            None => return Err(LossError::Missing { loss: "dpo", column: "reference log-probabilities", why: "its pairs" }),
        };
        if self.whole_batch() && inputs.log_probs.len() < inputs.batch_tokens {
            return Err(LossError::Part { loss: "dpo", seen: inputs.log_probs.len(), of: inputs.batch_tokens });
        }
        let (chosen, rejected) = pairs(inputs.sequences)?;
        let output = self.preference.evaluate(&PairInputs {
            log_probs: inputs.log_probs,
            reference,
            log_sum_squares: None,
            batch_pairs: batch_pairs(inputs)?,
            // Read by a term that sees the whole batch alone.
            batch_chosen_tokens: chosen.iter().map(|at| at.len()).sum(),
            chosen: &chosen,
            rejected: &rejected,
        })?;
        let metrics = LossMetrics {
            tokens: inputs.log_probs.len(),
            policy_loss: output.loss,
            pairs: PairMetrics::of(output.rewards),
            ..LossMetrics::default()
        };
        Ok(LossOutput { loss: output.loss, grad: output.grad, entropy_grad: None, metrics })
    }
}

type Places = Vec<Range<usize>>;

fn pairs(sequences: &[Range<usize>]) -> Result<(Places, Places), LossError> {
    let (pairs, rest) = sequences.as_chunks::<2>();
    if !rest.is_empty() {
        let count = sequences.len();
        return Err(LossError::Custom(format!("dpo takes sequences two by two, chosen and rejected, and these are {count}")));
    }
    Ok(pairs.iter().map(|[chosen, rejected]| (chosen.clone(), rejected.clone())).unzip())
}

/// Pairs of the optimizer batch, from the weight of each sequence.
fn batch_pairs(inputs: &LossInputs) -> Result<usize, LossError> {
    let weigh = |at: &Range<usize>| inputs.weights[at.clone()].iter().sum::<f64>();
    let mut weights = inputs.sequences.iter().filter(|at| !at.is_empty()).map(weigh);
    let Some(first) = weights.next() else { return Ok(0) };
    let pairs = (0.5 / first).round();
    let whole = (pairs * 2.0 * first - 1.0).abs() < 1e-6;
    if !whole || weights.any(|weight| (weight - first).abs() > 1e-6 * first) {
        return Err(LossError::Settings {
            loss: "dpo",
            setting: "aggregation".to_owned(),
            why: "all pairs count alike, and so must answers; use `SeqMeanTokenMean` and loss masks of 0 and 1".to_owned(),
        });
    }
    Ok(pairs as usize)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::algo::{Aggregation, BatchSize};

    struct Columns {
        log_probs: Vec<f64>,
        reference: Vec<f64>,
        weights: Vec<f64>,
        sequences: Vec<Range<usize>>,
    }

    /// Two pairs with answers of 2, 1, 1 and 3 tokens.
    fn columns() -> Columns {
        let sequences = vec![0..2, 2..3, 3..4, 4..7];
        let masks: Vec<Vec<f32>> = sequences.iter().map(|at| vec![1.0; at.len()]).collect();
        Columns {
            log_probs: vec![-0.5, -1.0, -2.0, -0.1, -0.7, -1.5, -0.3],
            reference: vec![-0.6, -1.5, -1.0, -0.4, -0.9, -1.0, -0.2],
            weights: Aggregation::SeqMeanTokenMean.token_weights(&masks, &BatchSize::of(&masks)).concat(),
            sequences,
        }
    }

    impl Columns {
        fn evaluate(&self, loss: &PairwiseLoss, pairs: Range<usize>) -> Result<LossOutput, LossError> {
            let part = &self.sequences[2 * pairs.start..2 * pairs.end];
            let tokens = part.first().map_or(0, |at| at.start)..part.last().map_or(0, |at| at.end);
            let sequences: Places = part.iter().map(|at| at.start - tokens.start..at.end - tokens.start).collect();
            loss.evaluate(&LossInputs {
                log_probs: &self.log_probs[tokens.clone()],
                behaviour: None,
                proximal: None,
                reference: Some(&self.reference[tokens.clone()]),
                importance: None,
                entropies: &vec![0.0; tokens.len()],
                advantages: &vec![f64::NAN; tokens.len()],
                weights: &self.weights[tokens],
                sequences: &sequences,
                batch_tokens: self.log_probs.len(),
            })
        }
    }

    #[test]
    fn r167_the_sigmoid_loss_is_log_2_at_the_reference_and_falls_with_the_margin() {
        let mut columns = columns();
        let loss = PairwiseLoss::from(Preference { beta: 0.3, ..Preference::default() });
        let margin = |columns: &Columns, pair: usize| {
            let ratio = |at: &Range<usize>| at.clone().map(|t| columns.log_probs[t] - columns.reference[t]).sum::<f64>();
            0.3 * (ratio(&columns.sequences[2 * pair]) - ratio(&columns.sequences[2 * pair + 1]))
        };
        let found = columns.evaluate(&loss, 0..2).unwrap();
        let expected = (0..2).map(|pair| (-margin(&columns, pair)).exp().ln_1p()).sum::<f64>() / 2.0;
        assert!((found.loss - expected).abs() < 1e-15);
        assert_eq!((found.metrics.pairs.pairs, found.metrics.pairs.right), (2, 2));
        columns.reference = columns.log_probs.clone();
        assert!((columns.evaluate(&loss, 0..2).unwrap().loss - 2f64.ln()).abs() < 1e-15);
    }

    /// Law N1.
    #[test]
    fn parts_of_whole_pairs_add_up_and_others_are_refused() {
        let columns = columns();
        for term in [PairLoss::Sigmoid, PairLoss::Ipo, PairLoss::NcaPair] {
            let loss = PairwiseLoss::from(Preference::of(term));
            let [whole, first, second] = [0..2, 0..1, 1..2].map(|pairs| columns.evaluate(&loss, pairs).unwrap());
            assert!((whole.loss - first.loss - second.loss).abs() < 1e-15, "{term:?}");
            assert_eq!(whole.grad, [first.grad, second.grad].concat());
        }
        for term in [PairLoss::Aot, PairLoss::Sft] {
            let loss = PairwiseLoss::from(Preference::of(term));
            assert!(loss.whole_batch() && columns.evaluate(&loss, 0..2).is_ok());
            assert!(matches!(columns.evaluate(&loss, 0..1), Err(LossError::Part { .. })));
        }
    }

    #[test]
    fn what_needs_no_reference_has_none_and_what_does_says_so() {
        let columns = columns();
        let without = |loss: PairwiseLoss| {
            let (weights, sequences) = (&columns.weights, &columns.sequences);
            let nothing = vec![0.0; 7];
            loss.evaluate(&LossInputs {
                log_probs: &columns.log_probs,
                behaviour: None,
                proximal: None,
                reference: None,
                importance: None,
                entropies: &nothing,
                advantages: &nothing,
                weights,
                sequences,
                batch_tokens: 7,
            })
        };
        assert!(without(Preference::of(PairLoss::Sft).into()).is_ok());
        let simpo = PairwiseLoss { reference_free: true, preference: Preference::of(PairLoss::SigmoidNorm) };
        assert!(without(simpo).is_ok());
        assert!(without(PairwiseLoss::default()).unwrap_err().to_string().contains("reference log-probabilities"));
        let unequal = Columns { weights: vec![1.0 / 7.0; 7], ..self::columns() };
        assert!(unequal.evaluate(&PairwiseLoss::default(), 0..2).unwrap_err().to_string().contains("SeqMeanTokenMean"));
    }
}
