//! Losses of critics and reward models, perplexity.

use proptest::prelude::*;
use rollflow::algo::{BradleyTerry, Loss, LossError, LossInputs, ValueLoss, pairwise_reward, perplexity, value_loss};

#[test]
fn a_critic_learns_returns_from_its_old_values_and_parts_add_up() {
    let (values, old, returns, weights) = ([0.9, -0.9, 0.1], [0.0; 3], [1.0, -1.0, 1.0], [0.5, 0.25, 0.25]);
    let part = |of: std::ops::Range<usize>| {
        let (log_probs, advantages) = (&values[of.clone()], &returns[of.clone()]);
        let (behaviour, weights) = (Some(&old[of.clone()]), &weights[of]);
        let inputs = LossInputs { log_probs, behaviour, advantages, weights, ..LossInputs::default() };
        ValueLoss { clip: Some(0.2) }.evaluate(&inputs).unwrap()
    };
    let (whole, first, second) = (part(0..3), part(0..1), part(1..3));
    assert_eq!((whole.metrics.clipped_low, whole.metrics.clipped_high, whole.metrics.tokens), (1, 1, 3));
    assert_eq!(whole.grad, [0.0, 0.0, 0.25 * -0.9]);
    assert!((first.loss + second.loss - whole.loss).abs() < 1e-12, "law N1");
    assert_eq!([first.grad, second.grad].concat(), whole.grad, "law N1");
    assert!(!ValueLoss::default().ignores_zero_advantage(), "a return of 0 is a lesson, too");
    assert!(value_loss(&[1.0], &[], &[1.0], &[1.0], None).is_err());
    let masked = value_loss(&[f64::NAN, 1.0], &[0.0; 2], &[0.0; 2], &[0.0, 1.0], None).unwrap();
    assert_eq!((masked.loss, masked.grad), (0.5, vec![0.0, 1.0]), "a masked token counts for nothing");
}

proptest! {
    #[test]
    fn slopes_of_values_are_the_finite_differences(tokens in prop::collection::vec((-2.0f64..2.0, -2.0f64..2.0, -2.0f64..2.0, 0.0f64..1.0), 1..9), clip in prop::option::of(0.1f64..1.0)) {
        const STEP: f64 = 1e-6;
        let column = |of: fn(&(f64, f64, f64, f64)) -> f64| tokens.iter().map(of).collect::<Vec<f64>>();
        let (values, old, returns, weights) = (column(|t| t.0), column(|t| t.1), column(|t| t.2), column(|t| t.3));
        let loss = |values: &[f64]| value_loss(values, &old, &returns, &weights, clip).unwrap();
        let grad = loss(&values).grad;
        for t in 0..values.len() {
            let clip = clip.unwrap_or(f64::INFINITY);
            let bend = |at: f64| (values[t] - at).abs() < 1e-3;
            // Bends: the clip's edges, and the prediction as far on the other side of the return as an edge.
            let edges = [old[t] - clip, old[t] + clip];
            if edges.into_iter().any(|edge| bend(edge) || bend(2.0 * returns[t] - edge)) {
                continue;
            }
            let at = |by: f64| { let mut moved = values.clone(); moved[t] += by; loss(&moved).loss };
            prop_assert!((grad[t] - (at(STEP) - at(-STEP)) / (2.0 * STEP)).abs() < 1e-7);
        }
    }
}

#[test]
fn a_uniform_guess_over_n_tokens_has_perplexity_n() {
    assert!((perplexity(8f64.ln()) - 8.0).abs() < 1e-12);
}

#[test]
fn equal_scores_cost_log_two() {
    assert_eq!(pairwise_reward(&[0.7], &[0.7], None, 0.0, 1).loss, 2f64.ln());
    assert_eq!(pairwise_reward(&[], &[], None, 0.0, 0).loss, 0.0);
}

#[test]
fn answers_of_a_batch_are_paired_as_they_come_and_what_is_no_pair_is_refused() {
    let scores = [2.0, 1.0, -1.0, 0.5];
    let (weights, sequences) = ([0.25; 4], [0..1, 1..2, 2..3, 3..4]);
    let inputs =
        LossInputs { log_probs: &scores, weights: &weights, sequences: &sequences, batch_tokens: 4, ..LossInputs::default() };
    let output = BradleyTerry::default().evaluate(&inputs).unwrap();
    let expected = pairwise_reward(&[2.0, -1.0], &[1.0, 0.5], None, 0.0, 2);
    assert_eq!((output.loss, output.grad[1], output.grad[2]), (expected.loss, expected.rejected[0], expected.chosen[1]));
    assert_eq!((output.metrics.pairs.accuracy(), output.metrics.pairs.margin()), (0.5, -0.25));
    let apart = LossInputs { advantages: &[0.75, f64::NAN, f64::NAN, f64::NAN], ..inputs };
    let with_margin = pairwise_reward(&[2.0, -1.0], &[1.0, 0.5], Some(&[0.75, 0.0]), 0.0, 2);
    assert_eq!(BradleyTerry::default().evaluate(&apart).unwrap().loss, with_margin.loss);

    let part = BradleyTerry::default().evaluate(&LossInputs { batch_tokens: 6, ..inputs }).unwrap_err();
    assert!(matches!(part, LossError::Part { seen: 4, of: 6, .. }), "{part}");
    for sequences in [&[0..1, 1..2, 2..4][..], &[0..2, 2..4], &[0..1, 1..2, 2..3]] {
        let error = BradleyTerry::default().evaluate(&LossInputs { sequences, ..inputs }).unwrap_err().to_string();
        assert!(error.contains("no pair of answers"), "{error}");
    }
}

proptest! {
    #[test]
    fn slopes_of_scores_are_the_finite_differences_and_pairs_add_up(
        pairs in prop::collection::vec((-3.0f64..3.0, -3.0f64..3.0, -1.0f64..1.0), 1..6), center in 0.0f64..0.5
    ) {
        let column = |of: fn(&(f64, f64, f64)) -> f64| pairs.iter().map(of).collect::<Vec<_>>();
        let (chosen, rejected, margins) = (column(|p| p.0), column(|p| p.1), column(|p| p.2));
        let n = pairs.len();
        let whole = pairwise_reward(&chosen, &rejected, Some(&margins), center, n);
        let h = 1e-6;
        for at in 0..n {
            let moved = |by: (f64, f64)| {
                let (mut chosen, mut rejected) = (chosen.clone(), rejected.clone());
                (chosen[at], rejected[at]) = (chosen[at] + by.0, rejected[at] + by.1);
                pairwise_reward(&chosen, &rejected, Some(&margins), center, n).loss
            };
            prop_assert!(((moved((h, 0.0)) - moved((-h, 0.0))) / (2.0 * h) - whole.chosen[at]).abs() < 1e-7);
            prop_assert!(((moved((0.0, h)) - moved((0.0, -h))) / (2.0 * h) - whole.rejected[at]).abs() < 1e-7);
        }
        let part = |at: usize| pairwise_reward(&chosen[at..=at], &rejected[at..=at], Some(&margins[at..=at]), center, n).loss;
        prop_assert!(((0..n).map(part).sum::<f64>() - whole.loss).abs() < 1e-12);
    }

    #[test]
    fn extreme_scores_stay_finite(won in -1e4f64..1e4, lost in -1e4f64..1e4) {
        let output = pairwise_reward(&[won], &[lost], None, 0.0, 1);
        prop_assert!(output.loss.is_finite() && output.loss >= 0.0);
        prop_assert!(output.chosen[0] <= 0.0 && output.rejected[0] >= 0.0);
    }
}
