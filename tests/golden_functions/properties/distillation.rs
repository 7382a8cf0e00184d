//! Divergences from a teacher, in doubles: definitions, bounds and derivatives.

use proptest::prelude::*;
use rollflow::algo::TeacherDivergence;

fn log_softmax(logits: &[f64]) -> Vec<f64> {
    let sum = logits.iter().map(|logit| logit.exp()).sum::<f64>().ln();
    logits.iter().map(|logit| logit - sum).collect()
}

/// The divergence over a vocabulary of which the first `k` tokens are compared.
fn over(student: &[f64], teacher: &[f64], k: usize, beta: f64) -> (f64, Vec<f64>) {
    let (own, theirs) = (log_softmax(student), log_softmax(teacher));
    TeacherDivergence { beta }.evaluate(&own[..k], &theirs[..k], k == own.len())
}

proptest! {
    #[test]
    fn its_slopes_are_its_derivatives_by_the_logits(
        logits in prop::collection::vec((-4.0..4.0_f64, -4.0..4.0_f64), 2..9),
        beta in prop_oneof![Just(0.0), Just(1.0), 0.01..0.99_f64],
        kept in 0.0..1.0_f64,
    ) {
        let (student, teacher): (Vec<f64>, Vec<f64>) = logits.into_iter().unzip();
        let k = 1 + ((student.len() - 1) as f64 * kept).round() as usize;
        let (value, slopes) = over(&student, &teacher, k, beta);
        prop_assert!(value > -1e-12, "a divergence is not negative: {value}");
        let probs: Vec<f64> = log_softmax(&student).iter().map(|log_prob| log_prob.exp()).collect();
        let sum: f64 = slopes.iter().sum();
        for token in 0..student.len() {
            let step = 1e-5;
            let moved = |by: f64| {
                let mut moved = student.clone();
                moved[token] += by;
                over(&moved, &teacher, k, beta).0
            };
            let numeric = (moved(step) - moved(-step)) / (2.0 * step);
            let closed = slopes.get(token).unwrap_or(&0.0) - probs[token] * sum;
            prop_assert!((numeric - closed).abs() < 1e-6, "token {token}: {numeric} {closed}");
        }
    }

    /// Fewer tokens tell distributions apart no better: the divergence of a part is a lower bound.
    #[test]
    fn fewer_tokens_give_a_smaller_divergence_and_equal_distributions_none(
        logits in prop::collection::vec((-4.0..4.0_f64, -4.0..4.0_f64), 3..9),
        beta in 0.0..=1.0_f64,
    ) {
        let (student, teacher): (Vec<f64>, Vec<f64>) = logits.into_iter().unzip();
        let values: Vec<f64> = (1..=student.len()).map(|k| over(&student, &teacher, k, beta).0).collect();
        prop_assert!(values.windows(2).all(|pair| pair[0] <= pair[1] + 1e-6), "{values:?}");
        let same = over(&teacher, &teacher, 2, beta);
        prop_assert!(same.0.abs() < 1e-9 && same.1.iter().sum::<f64>().abs() < 1.0, "{same:?}");
    }
}

/// TRL's `add_tail_bucket` bounds the mass of the likeliest tokens, and the rest has no gradient there.
#[test]
fn a_rest_of_bounded_mass_has_no_slope() {
    let theirs = [0.5_f64.ln(), 0.25_f64.ln()];
    for beta in [0.0, 0.5, 1.0] {
        let at = |own: f64| TeacherDivergence { beta }.evaluate(&[own, -30.0], &theirs, false);
        let (own, step) = (-3e-8, 2e-8);
        let (numeric, slope) = ((at(own + step).0 - at(own - step).0) / (2.0 * step), at(own).1[0]);
        assert!((numeric - slope).abs() < 1e-6, "{beta}: {numeric} {slope}");
    }
}

#[test]
fn a_token_that_the_policy_never_samples_costs_nothing_in_reverse() {
    let (own, theirs) = ([0.0, f64::NEG_INFINITY], [0.5_f64.ln(), 0.5_f64.ln()]);
    let (value, slopes) = TeacherDivergence { beta: 1.0 }.evaluate(&own, &theirs, true);
    assert!((value - 2.0_f64.ln()).abs() < 1e-12 && slopes[0].is_finite(), "{value} {slopes:?}");
}
