//! Derivatives against finite differences, parts against the whole, and extremes.

use std::ops::Range;

use proptest::prelude::*;
use rollflow::algo::{Aggregation, BatchSize, Loss, LossError, LossInputs, LossOutput, PairLoss, Preference, ScoreDivergence};

/// Columns of pairs, packed chosen, rejected, chosen, rejected …
#[derive(Clone, Debug)]
struct Pairs {
    log_probs: Vec<f64>,
    reference: Vec<f64>,
    squares: Vec<f64>,
    weights: Vec<f64>,
    sequences: Vec<Range<usize>>,
}

impl Pairs {
    fn new(lengths: &[usize], log_probs: Vec<f64>, reference: Vec<f64>, squares: Vec<f64>) -> Self {
        let masks: Vec<Vec<f32>> = lengths.iter().map(|length| vec![1.0; *length]).collect();
        let weights = Aggregation::SeqMeanTokenMean.token_weights(&masks, &BatchSize::of(&masks)).concat();
        let mut end = 0;
        let place = |length: &usize| {
            end += length;
            end - length..end
        };
        Pairs { sequences: lengths.iter().map(place).collect(), log_probs, reference, squares, weights }
    }

    fn count(&self) -> usize {
        self.sequences.len() / 2
    }

    fn evaluate(&self, loss: &Preference) -> LossOutput {
        self.part(loss, 0..self.count()).unwrap()
    }

    fn part(&self, loss: &Preference, pairs: Range<usize>) -> Result<LossOutput, LossError> {
        let part = &self.sequences[2 * pairs.start..2 * pairs.end];
        let tokens = part.first().map_or(0, |at| at.start)..part.last().map_or(0, |at| at.end);
        let sequences: Vec<Range<usize>> = part.iter().map(|at| at.start - tokens.start..at.end - tokens.start).collect();
        loss.evaluate(&LossInputs {
            log_probs: &self.log_probs[tokens.clone()],
            reference: Some(&self.reference[tokens.clone()]),
            log_sum_squares: Some(&self.squares[tokens.clone()]),
            weights: &self.weights[tokens],
            sequences: &sequences,
            batch_tokens: self.log_probs.len(),
            ..LossInputs::default()
        })
    }
}

prop_compose! {
    fn pairs(most: f64)(lengths in prop::collection::vec([1usize..5, 1usize..5], 1..5))(
        log_probs in prop::collection::vec(-most..-0.01, lengths.as_flattened().iter().sum::<usize>()),
        reference in prop::collection::vec(-most..-0.01, lengths.as_flattened().iter().sum::<usize>()),
        squares in prop::collection::vec(-2.0f64..-0.01, lengths.as_flattened().iter().sum::<usize>()),
        lengths in Just(lengths),
    ) -> Pairs {
        Pairs::new(lengths.as_flattened(), log_probs, reference, squares)
    }
}

/// Two pairs with completions of 2, 1, 1 and 3 tokens.
fn two_pairs() -> Pairs {
    let log_probs = vec![-0.5, -1.0, -2.0, -0.1, -0.7, -1.5, -0.3];
    Pairs::new(&[2, 1, 1, 3], log_probs, vec![-0.6, -1.5, -1.0, -0.4, -0.9, -1.0, -0.2], vec![0.0; 7])
}

fn losses() -> Vec<Preference> {
    let of = |term: &PairLoss| Preference { label_smoothing: 0.1, beta: 0.3, ..Preference::of(*term) };
    let mut losses: Vec<Preference> = PairLoss::ALL.iter().map(of).collect();
    for divergence in [ScoreDivergence::ForwardKl, ScoreDivergence::JensenShannon, ScoreDivergence::Alpha(0.5)] {
        losses.push(Preference { divergence, ..Preference::default() });
    }
    losses.push(Preference { tail_weight: Some(0.5), ..Preference::default() });
    let mixed = vec![(PairLoss::Sigmoid, 0.8), (PairLoss::BcoPair, 0.2), (PairLoss::Sft, 1.0)];
    losses.push(Preference { terms: mixed, ..Preference::default() });
    losses
}

proptest! {
    #[test]
    fn derivatives_equal_finite_differences(pairs in pairs(2.0)) {
        let h = 1e-6;
        for loss in losses() {
            let output = pairs.evaluate(&loss);
            // A hinge has a bend, and a sort has no derivative where two columns change places.
            let bends = matches!(loss.terms[0].0, PairLoss::Hinge | PairLoss::Aot | PairLoss::AotUnpaired);
            for t in 0..pairs.log_probs.len() {
                let moved = |by: f64| {
                    let mut pairs = pairs.clone();
                    pairs.log_probs[t] += by;
                    pairs.evaluate(&loss).loss
                };
                let (up, down) = ((moved(h) - output.loss) / h, (output.loss - moved(-h)) / h);
                if bends && (up - down).abs() > 1e-4 {
                    continue;
                }
                let slope = (up + down) / 2.0;
                prop_assert!((slope - output.grad[t]).abs() < 1e-6 * (1.0 + slope.abs()), "{loss:?}: {slope} {}", output.grad[t]);
            }
        }
    }

    /// Law N1.
    #[test]
    fn parts_of_whole_pairs_add_up_or_are_refused(pairs in pairs(2.0)) {
        let n = pairs.count();
        let weighed = Preference { weigh: true, ..Preference::default() };
        for loss in losses().into_iter().chain([weighed]) {
            let whole = pairs.evaluate(&loss);
            if loss.whole_batch() {
                let refused = matches!(pairs.part(&loss, 0..n - 1), Err(LossError::Part { .. }));
                prop_assert!(refused);
                continue;
            }
            let parts: Vec<LossOutput> = (0..n).map(|at| pairs.part(&loss, at..at + 1).unwrap()).collect();
            prop_assert!((parts.iter().map(|part| part.loss).sum::<f64>() - whole.loss).abs() < 1e-12);
            let grad: Vec<f64> = parts.into_iter().flat_map(|part| part.grad).collect();
            prop_assert!(grad.iter().zip(&whole.grad).all(|(part, whole)| (part - whole).abs() < 1e-12));
        }
    }

    #[test]
    fn answers_that_are_never_or_always_given_cost_no_infinities(pairs in pairs(400.0)) {
        let grows = |(term, _): &(PairLoss, f64)| *term == PairLoss::Discopop;
        for loss in losses() {
            if loss.terms.iter().any(grows) || loss.divergence != ScoreDivergence::ReverseKl {
                continue;
            }
            let output = pairs.evaluate(&loss);
            prop_assert!(output.loss.is_finite() && output.grad.iter().all(|slope| slope.is_finite()), "{loss:?}");
        }
    }

    #[test]
    fn weights_scale_pairs_and_are_constants(pairs in pairs(2.0)) {
        let plain = pairs.part(&Preference::default(), 0..1).unwrap();
        let weighed = pairs.part(&Preference { weigh: true, ..Preference::default() }, 0..1).unwrap();
        let factor = weighed.loss / plain.loss;
        prop_assert!(plain.grad.iter().zip(&weighed.grad).all(|(plain, weighed)| (plain * factor - weighed).abs() < 1e-12));
    }
}

#[test]
fn r167_the_sigmoid_loss_is_log_2_at_the_reference_and_falls_with_the_margin() {
    let mut pairs = two_pairs();
    let loss = Preference { beta: 0.3, ..Preference::default() };
    let margin = |pairs: &Pairs, pair: usize| {
        let ratio = |at: &Range<usize>| at.clone().map(|t| pairs.log_probs[t] - pairs.reference[t]).sum::<f64>();
        0.3 * (ratio(&pairs.sequences[2 * pair]) - ratio(&pairs.sequences[2 * pair + 1]))
    };
    let found = pairs.evaluate(&loss);
    let expected = (0..2).map(|pair| (-margin(&pairs, pair)).exp().ln_1p()).sum::<f64>() / 2.0;
    assert!((found.loss - expected).abs() < 1e-15);
    assert_eq!((found.metrics.pairs.pairs, found.metrics.pairs.right), (2, 2));
    pairs.reference = pairs.log_probs.clone();
    let found = pairs.evaluate(&loss);
    assert!((found.loss - 2f64.ln()).abs() < 1e-15);
    assert_eq!((found.metrics.pairs.accuracy(), found.metrics.pairs.margin()), (0.0, 0.0));
}

#[test]
fn what_needs_no_reference_has_none_and_what_does_says_so() {
    let Pairs { log_probs, weights, sequences, .. } = &two_pairs();
    let inputs = LossInputs { log_probs, weights, sequences, batch_tokens: 7, ..LossInputs::default() };
    assert!(Preference::of(PairLoss::Sft).evaluate(&inputs).is_ok());
    assert!(Preference { reference_free: true, ..Preference::of(PairLoss::SigmoidNorm) }.evaluate(&inputs).is_ok());
    let refused = |inputs: &LossInputs| Preference::default().evaluate(inputs).unwrap_err().to_string();
    assert!(refused(&inputs).contains("reference log-probabilities"));
    let referred = LossInputs { reference: Some(log_probs), ..inputs };
    assert!(refused(&LossInputs { weights: &[1.0 / 7.0; 7], ..referred }).contains("SeqMeanTokenMean"));
    assert!(refused(&LossInputs { sequences: &sequences[..3], ..referred }).contains("two by two"));
}

#[test]
fn no_pairs_cost_nothing() {
    let pairs = Pairs::new(&[], vec![], vec![], vec![]);
    losses().iter().for_each(|loss| assert_eq!(pairs.evaluate(loss), LossOutput::default(), "{loss:?}"));
}

#[test]
fn settings_that_do_not_go_together_are_refused_with_the_reason() {
    let refused = |loss: Preference| loss.check().unwrap_err().to_string();
    assert!(refused(Preference::of(PairLoss::ExoPair)).contains("takes its logarithm"));
    assert!(refused(Preference { label_smoothing: 0.5, ..Preference::of(PairLoss::Robust) }).contains("nothing left to learn"));
    assert!(refused(Preference { weigh: true, ..Preference::of(PairLoss::Aot) }).contains("no pair with a weight of its own"));
    assert!(refused(Preference { terms: vec![], ..Preference::default() }).contains("there are none"));
    assert!(refused(Preference { beta: 0.0, ..Preference::default() }).contains("beta"));
}
