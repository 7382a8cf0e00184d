//! KL divergence: derivatives, estimators over samples, limits, the adaptive coefficient.

use proptest::prelude::*;
use rollflow::algo::{CrossEntropy, KlForm, KlFunction, KlLoss, KlReward, Loss, LossInputs, kl_per_token, token_kl, with_kl};
use rollflow::data::Sample;

#[test]
fn extremes_stay_finite_and_stop_pulling_where_they_are_cut() {
    assert_eq!([-1e3, -30.0, 1e3].map(|d| KlForm::LowVariance.token(d, 0.0)), [(10.0, 0.0); 3]);
    let truncated = KlLoss { estimator: KlForm::K1, truncate: Some(0.5), ..KlLoss::default() };
    assert_eq!([2.0, 0.25, -2.0].map(|d| truncated.token(d, 0.0)), [(0.5, 0.0), (0.25, 1.0), (-0.5, 0.0)]);
}

#[test]
fn a_reference_that_hardly_knows_the_token_has_little_to_say() {
    let adaptive = KlLoss { estimator: KlForm::K1, confidence: 0.5, ..KlLoss::default() };
    assert_eq!(adaptive.token(0.0, 0.6f64.ln()), KlForm::K1.token(0.0, 0.6f64.ln()));
    let (value, slope) = adaptive.token(0.0, 0.05f64.ln());
    assert!((value + 0.1 * 0.05f64.ln()).abs() < 1e-12 && (slope - 0.1).abs() < 1e-12);
}

#[test]
fn a_closure_measures_too() {
    let squared = |own: f64, other: f64| ((own - other).powi(2), 2.0 * (own - other));
    assert_eq!(kl_per_token(&[1.0, 2.0], &[0.0, 0.0], &squared), [(1.0, 2.0), (4.0, 4.0)]);
}

#[test]
fn a_closure_pulls_on_any_loss_and_needs_a_reference() {
    let held = with_kl(CrossEntropy, 0.5, |own: f64, other: f64| (own - other, 1.0));
    let inputs = LossInputs { log_probs: &[-1.0, -2.0], weights: &[0.25, 0.75], ..LossInputs::default() };
    let plain = CrossEntropy.evaluate(&inputs).unwrap();
    let output = held.evaluate(&LossInputs { reference: Some(&[-3.0, -2.0]), ..inputs }).unwrap();
    assert_eq!(output.loss, plain.loss + 0.25 * 0.5 * 2.0);
    assert_eq!(output.grad, [plain.grad[0] + 0.125, plain.grad[1] + 0.375]);
    assert_eq!((output.metrics.kl(), output.metrics.kl_coef), (1.0, Some(0.5)));
    assert!(held.evaluate(&inputs).unwrap_err().to_string().contains("reference log-probabilities"));
    assert!(!held.ignores_zero_advantage());
}

#[test]
fn masked_tokens_and_the_prompt_cost_nothing() {
    let sample = Sample {
        tokens: vec![1, 2, 3, 4],
        loss_mask: vec![0.0, 1.0, 0.0, 1.0],
        log_probs: vec![0.0, -1.0, -9.0, -2.0],
        ref_log_probs: vec![0.0, -2.0, 0.0, -2.5],
        ..Sample::default()
    };
    assert_eq!(token_kl(&sample, &KlForm::K1), Some(vec![1.0, 0.5]));
    assert_eq!(token_kl(&Sample { ref_log_probs: Vec::new(), ..sample }, &KlForm::K1), None);
}

#[test]
fn the_coefficient_rises_above_the_target_falls_below_and_rests_on_it() {
    let control = KlReward { target: Some(6.0), horizon: 100.0, ..KlReward::default() };
    let next = [(0.2, 6.0, 50), (0.5, 60.0, 100), (0.5, 0.0, 100)].map(|(coef, kl, n)| control.next_coef(coef, kl, n));
    assert_eq!(next, [0.2, 0.6, 0.4]);
    assert_eq!(KlReward::default().next_coef(0.5, 60.0, 100), 0.5);
}

#[test]
fn k1_and_k3_estimate_the_divergence_over_samples_and_k2_has_its_gradient() {
    // The exact expectation under a policy of three tokens; the gradient with respect to its logits is Σ_x p_x k(x) ∇log p_x.
    let (policy, reference) = ([0.5f64, 0.3, 0.2], [0.2f64, 0.5, 0.3]);
    let exact: f64 = policy.iter().zip(&reference).map(|(p, q)| p * (p / q).ln()).sum();
    let expected = |form: KlForm| -> f64 { policy.iter().zip(&reference).map(|(p, q)| p * form.token(p.ln(), q.ln()).0).sum() };
    assert!((expected(KlForm::K1) - exact).abs() < 1e-12 && (expected(KlForm::K3) - exact).abs() < 1e-12);
    for logit in 0..3 {
        let score = |x: usize| f64::from(u8::from(x == logit)) - policy[logit];
        let gradient = |kl: &dyn KlFunction| -> f64 {
            (0..3).map(|x| policy[x] * kl.token(policy[x].ln(), reference[x].ln()).1 * score(x)).sum()
        };
        let exact: f64 = (0..3).map(|x| policy[x] * ((policy[x] / reference[x]).ln() + 1.0) * score(x)).sum();
        assert!((gradient(&KlForm::K2) - exact).abs() < 1e-12);
        for estimator in [KlForm::K1, KlForm::Abs, KlForm::K3] {
            let straight_through = KlLoss { estimator, straight_through: true, ..KlLoss::default() };
            assert!((gradient(&straight_through) - exact).abs() < 1e-12, "{estimator:?}+");
        }
        assert!(gradient(&KlForm::K1).abs() < 1e-12, "k1's gradient vanishes on policy");
    }
}

proptest! {
    #[test]
    fn slopes_are_the_finite_differences(own in -6.0f64..0.0, other in -6.0f64..0.0, truncate in prop::option::of(0.1f64..3.0), confidence in 0.0f64..1.0) {
        const STEP: f64 = 1e-6;
        prop_assume!((own - other).abs() > 1e-3);
        for &estimator in KlForm::ALL {
            prop_assert_eq!(estimator.token(own, own).0, 0.0, "equal policies do not diverge");
            let kl = KlLoss { estimator, truncate, confidence, ..KlLoss::default() };
            let at = |own: f64| kl.token(own, other);
            let near_a_bend = [truncate, Some(10.0)].into_iter().flatten().any(|bend| (estimator.token(own, other).0.abs() - bend).abs() < 1e-3);
            if !near_a_bend {
                let difference = (at(own + STEP).0 - at(own - STEP).0) / (2.0 * STEP);
                prop_assert!((at(own).1 - difference).abs() < 1e-5 * difference.abs().max(1.0), "{kl:?}: {} {difference}", at(own).1);
            }
        }
    }

    #[test]
    fn the_coefficient_stays_positive_and_moves_by_a_fifth_a_horizon(coef in 1e-6f64..10.0, kl in 0.0f64..1e6, samples in 0u64..1000) {
        let next = KlReward { target: Some(1.0), horizon: 1000.0, ..KlReward::default() }.next_coef(coef, kl, samples);
        prop_assert!(next > 0.0 && (next / coef - 1.0).abs() <= 0.2 + 1e-12);
    }
}
