//! Derivatives against finite differences, parts against the whole, and extremes.

use proptest::prelude::*;

use super::*;

/// Pairs whose answers have these lengths.
#[derive(Clone, Debug)]
struct Pairs {
    log_probs: Vec<f64>,
    reference: Vec<f64>,
    squares: Vec<f64>,
    chosen: Vec<Range<usize>>,
    rejected: Vec<Range<usize>>,
}

impl Pairs {
    fn evaluate(&self, loss: &Preference) -> PairOutput {
        self.part(loss, 0..self.chosen.len()).unwrap()
    }

    fn part(&self, loss: &Preference, pairs: Range<usize>) -> Result<PairOutput, LossError> {
        loss.evaluate(&PairInputs {
            log_probs: &self.log_probs,
            reference: &self.reference,
            log_sum_squares: Some(&self.squares),
            chosen: &self.chosen[pairs.clone()],
            rejected: &self.rejected[pairs],
            batch_pairs: self.chosen.len(),
            batch_chosen_tokens: self.chosen.iter().map(Range::len).sum(),
        })
    }
}

prop_compose! {
    fn pairs(most: f64)(lengths in prop::collection::vec((1usize..5, 1usize..5), 1..5))(
        log_probs in prop::collection::vec(-most..-0.01, lengths.iter().map(|(a, b)| a + b).sum::<usize>()),
        reference in prop::collection::vec(-most..-0.01, lengths.iter().map(|(a, b)| a + b).sum::<usize>()),
        squares in prop::collection::vec(-2.0f64..-0.01, lengths.iter().map(|(a, b)| a + b).sum::<usize>()),
        lengths in Just(lengths),
    ) -> Pairs {
        let (mut chosen, mut rejected, mut start) = (Vec::new(), Vec::new(), 0);
        for (a, b) in lengths {
            chosen.push(start..start + a);
            rejected.push(start + a..start + a + b);
            start += a + b;
        }
        Pairs { log_probs, reference, squares, chosen, rejected }
    }
}

const KINDS: [PairLoss; 15] = [
    PairLoss::Sigmoid,
    PairLoss::Hinge,
    PairLoss::Ipo,
    PairLoss::ExoPair,
    PairLoss::NcaPair,
    PairLoss::Robust,
    PairLoss::BcoPair,
    PairLoss::SppoHard,
    PairLoss::Aot,
    PairLoss::AotUnpaired,
    PairLoss::ApoZero,
    PairLoss::ApoDown,
    PairLoss::Discopop,
    PairLoss::Sft,
    PairLoss::SigmoidNorm,
];

fn losses() -> Vec<Preference> {
    let of = |term| Preference { label_smoothing: 0.1, beta: 0.3, ..Preference::of(term) };
    let mut losses: Vec<Preference> = KINDS.into_iter().map(of).collect();
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
            let kinked = loss.terms[0].0 == PairLoss::Hinge && output.rewards.iter().any(|(c, r)| (1.0 - c + r).abs() < 1e-3);
            // Where two columns change places, a sort has no derivative.
            let sorts = loss.terms[0].0.compares_distributions();
            for t in 0..pairs.log_probs.len() {
                let moved = |by: f64| {
                    let mut pairs = pairs.clone();
                    pairs.log_probs[t] += by;
                    pairs.evaluate(&loss).loss
                };
                let (up, down) = ((moved(h) - output.loss) / h, (output.loss - moved(-h)) / h);
                if kinked || (sorts && (up - down).abs() > 1e-4) {
                    continue;
                }
                let slope = (up + down) / 2.0;
                prop_assert!((slope - output.grad[t]).abs() < 1e-6 * (1.0 + slope.abs()), "{loss:?}: {slope} {}", output.grad[t]);
            }
        }
    }

    /// Law N1.
    #[test]
    fn parts_add_up_to_the_whole_or_are_refused(pairs in pairs(2.0)) {
        let n = pairs.chosen.len();
        let weighed = Preference { weigh: true, ..Preference::default() };
        for loss in losses().into_iter().chain([weighed]) {
            let whole = pairs.evaluate(&loss);
            if loss.terms[0].0.compares_distributions() {
                prop_assert_eq!(pairs.part(&loss, 0..n - 1).is_err(), n > 0);
                continue;
            }
            let parts: Vec<PairOutput> = (0..n).map(|at| pairs.part(&loss, at..at + 1).unwrap()).collect();
            prop_assert!((parts.iter().map(|part| part.loss).sum::<f64>() - whole.loss).abs() < 1e-12);
            for t in 0..whole.grad.len() {
                prop_assert!((parts.iter().map(|part| part.grad[t]).sum::<f64>() - whole.grad[t]).abs() < 1e-12);
            }
        }
    }

    #[test]
    fn answers_that_are_never_or_always_given_cost_no_infinities(pairs in pairs(400.0)) {
        let grows = |term: &PairLoss| matches!(term, PairLoss::Discopop);
        for loss in losses() {
            if loss.terms.iter().any(|(term, _)| grows(term)) || loss.divergence != ScoreDivergence::ReverseKl {
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
fn a_pair_without_a_margin_costs_log_two() {
    let columns = vec![-1.0, -2.0];
    let one = |at: Range<usize>| std::iter::once(at).collect();
    let pairs =
        Pairs { log_probs: columns.clone(), reference: columns, squares: vec![0.0; 2], chosen: one(0..1), rejected: one(1..2) };
    let output = pairs.evaluate(&Preference::default());
    assert_eq!((output.loss, output.accuracy(), output.margin()), (2f64.ln(), 0.0, 0.0));
    assert_eq!(output.grad, [-0.05, 0.05]);
}

#[test]
fn no_pairs_cost_nothing() {
    let pairs = Pairs { log_probs: vec![], reference: vec![], squares: vec![], chosen: vec![], rejected: vec![] };
    losses().iter().for_each(|loss| assert_eq!(pairs.evaluate(loss), PairOutput::default(), "{loss:?}"));
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
