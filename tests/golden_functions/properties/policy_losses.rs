//! Derivatives against finite differences, properties of methods, extremes, and refused settings.

use std::ops::Range;

use proptest::prelude::*;
use rollflow::algo::{
    BinaryDivergence, Cispo, ClipCov, CrossEntropy, Dpo, Dppo, Dro, GeoMean, Grpo, Gspo, KlCov, KlForm, KlLoss, Level, Loss,
    LossChoice, LossError, LossInputs, LossOutput, PolicyLoss, Sapo, Vespo,
};
use rollflow::recipe::NoKeys;

/// Columns of some tokens in a few sequences.
#[derive(Clone, Debug)]
struct Columns {
    log_probs: Vec<f64>,
    behaviour: Vec<f64>,
    reference: Vec<f64>,
    importance: Vec<f64>,
    kept: Vec<bool>,
    entropies: Vec<f64>,
    advantages: Vec<f64>,
    weights: Vec<f64>,
    sequences: Vec<Range<usize>>,
}

impl Columns {
    /// Tokens of weight 1 and entropy 0.
    fn of(log_probs: &[f64], behaviour: &[f64], advantages: &[f64], sequences: &[Range<usize>]) -> Self {
        let [log_probs, behaviour, advantages] = [log_probs, behaviour, advantages].map(<[f64]>::to_vec);
        let (ones, zeros, sequences) = (vec![1.0; log_probs.len()], vec![0.0; log_probs.len()], sequences.to_vec());
        let (reference, entropies, kept) = (zeros.clone(), zeros, vec![true; log_probs.len()]);
        let (importance, weights) = (ones.clone(), ones);
        Columns { log_probs, behaviour, reference, importance, kept, entropies, advantages, weights, sequences }
    }

    fn evaluate(&self, loss: &dyn Loss) -> LossOutput {
        self.part(loss, &self.sequences).unwrap()
    }

    fn part(&self, loss: &dyn Loss, sequences: &[Range<usize>]) -> Result<LossOutput, LossError> {
        let pick = |column: &[f64]| -> Vec<f64> { sequences.iter().flat_map(|at| column[at.clone()].to_vec()).collect() };
        let mut packed = Vec::new();
        for at in sequences {
            let start = packed.last().map_or(0, |last: &Range<usize>| last.end);
            packed.push(start..start + at.len());
        }
        loss.evaluate(&LossInputs {
            log_probs: &pick(&self.log_probs),
            behaviour: Some(&pick(&self.behaviour)),
            reference: Some(&pick(&self.reference)),
            importance: Some(&pick(&self.importance)),
            kept: Some(&sequences.iter().flat_map(|at| self.kept[at.clone()].to_vec()).collect::<Vec<bool>>()),
            entropies: &pick(&self.entropies),
            advantages: &pick(&self.advantages),
            weights: &pick(&self.weights),
            sequences: &packed,
            batch_tokens: self.log_probs.len(),
            ..LossInputs::default()
        })
    }

    /// Log-ratios on which a bound might lie: of each token, and the means of each sequence.
    fn log_ratios(&self) -> Vec<f64> {
        let own: Vec<f64> = self.log_probs.iter().zip(&self.behaviour).map(|(theta, b)| theta - b).collect();
        let sums = self.sequences.iter().map(|at| own[at.clone()].iter().sum::<f64>());
        let means = self.sequences.iter().map(|at| own[at.clone()].iter().sum::<f64>() / at.len().max(1) as f64);
        own.iter().copied().chain(sums).chain(means).collect()
    }

    fn is_at_a_kink(&self) -> bool {
        let edges = [0.6f64.ln(), 0.8f64.ln(), 1.28f64.ln(), 1.5f64.ln(), 3f64.ln(), -0.4, 0.4];
        self.log_ratios().iter().any(|log_ratio| edges.iter().any(|edge| (log_ratio - edge).abs() < 1e-4))
    }
}

prop_compose! {
    fn columns(drift: f64)(n in 2usize..12)(
        log_probs in prop::collection::vec(-4.0f64..-0.1, n),
        drift in prop::collection::vec(-drift..drift, n),
        reference in prop::collection::vec(-4.0f64..-0.1, n),
        importance in prop::collection::vec(0.5f64..2.0, n),
        entropies in prop::collection::vec(0.0f64..3.0, n),
        advantages in prop::collection::vec(-2.0f64..2.0, n),
        weights in prop::collection::vec(0.01f64..1.0, n),
    ) -> Columns {
        let behaviour = log_probs.iter().zip(&drift).map(|(log_prob, drift)| log_prob - drift).collect();
        let n = log_probs.len();
        let (kept, sequences) = (vec![true; n], vec![0..n / 2, n / 2..n / 2, n / 2..n]);
        Columns { log_probs, behaviour, reference, importance, kept, entropies, advantages, weights, sequences }
    }
}

fn clip() -> Grpo {
    Grpo { epsilon_high: 0.28, ..Grpo::default() }
}

/// A clip that no ratio reaches.
fn wide() -> Grpo {
    Grpo { epsilon: 1.0 - f64::EPSILON, epsilon_high: 1e300, ..Grpo::default() }
}

fn policy_gradient() -> PolicyLoss {
    LossChoice::Gpg(NoKeys).into()
}

fn dppo(divergence: BinaryDivergence) -> PolicyLoss {
    Dppo { divergence, max_ratio: 3.0, ..Dppo::default() }.into()
}

fn penalty(unbiased: bool, estimator: KlForm, confidence: f64) -> Option<KlLoss> {
    Some(KlLoss { beta: 0.1, estimator, unbiased, confidence, ..KlLoss::default() })
}

/// Losses whose value moves with every log-probability as their derivative says.
fn differentiable() -> Vec<PolicyLoss> {
    let mut losses = vec![
        Grpo { delta: Some(1.5), ..clip() }.into(),
        Grpo { dual_clip: Some(3.0), ..clip() }.into(),
        wide().into(),
        Sapo::default().into(),
        policy_gradient(),
        Dro { beta: 0.3 }.into(),
        GeoMean::default().into(),
    ];
    for level in [Level::Token, Level::Sequence, Level::Geometric] {
        let at = || PolicyLoss::from(Grpo { level, ..clip() });
        losses.push(at());
        losses.push(Sapo { level, ..Sapo::default() }.into());
        losses.push(PolicyLoss { kl_loss: penalty(true, KlForm::K3, 0.0), ..at() });
        losses.push(PolicyLoss { kl_loss: penalty(false, KlForm::K3, 0.0), ..at() });
        losses.push(PolicyLoss { kl_loss: penalty(true, KlForm::K2, 0.3), ..at() });
        losses.push(PolicyLoss { kl_loss: penalty(false, KlForm::K1, 0.0), ..at() });
        losses.push(PolicyLoss { top_entropy: 0.5, ..at() });
        losses.push(PolicyLoss { entropy_coef: 0.3, ..at() });
    }
    losses
}

/// Losses that are linear in log-probabilities, with factors that count as constants.
fn detached() -> Vec<PolicyLoss> {
    let mut losses =
        vec![dppo(BinaryDivergence::TotalVariation), dppo(BinaryDivergence::Kl), Vespo::default().into(), policy_gradient()];
    let levels = [Level::Token, Level::Sequence, Level::Geometric];
    losses.extend(levels.map(|level| PolicyLoss::from(Cispo { epsilon: 0.4, epsilon_high: 0.5, level })));
    losses
}

/// Losses that compare the tokens of a batch.
fn comparing() -> Vec<PolicyLoss> {
    vec![
        ClipCov { epsilon_high: 0.28, share: 0.3, min: -1.0, ..ClipCov::default() }.into(),
        KlCov { share: 0.3, coef: 0.5 }.into(),
        PolicyLoss { top_entropy: 0.5, entropy_coef: 0.1, ..PolicyLoss::default() },
    ]
}

fn all() -> Vec<PolicyLoss> {
    let by_token = Gspo { epsilon: 0.2, epsilon_high: 0.2, by_token: true }.into();
    differentiable().into_iter().chain(detached()).chain(comparing()).chain([by_token]).collect()
}

/// If true, each token has its own ratio, or moves the common one like its own.
fn is_by_token(loss: &PolicyLoss) -> bool {
    match &loss.surrogate {
        LossChoice::Grpo(Grpo { level, .. }) | LossChoice::Cispo(Cispo { level, .. }) | LossChoice::Sapo(Sapo { level, .. }) => {
            *level == Level::Token
        }
        LossChoice::Gspo(of) => of.by_token,
        surrogate => !matches!(surrogate, LossChoice::GeoMean(_)),
    }
}

proptest! {
    #[test]
    fn derivatives_equal_finite_differences(columns in columns(0.6)) {
        prop_assume!(!columns.is_at_a_kink());
        let h = 1e-6;
        let delta_with_penalty = PolicyLoss { kl_loss: penalty(true, KlForm::K3, 0.0), ..Grpo { delta: Some(1.5), ..clip() }.into() };
        let composed = differentiable().into_iter().chain([delta_with_penalty]).map(|loss| Box::new(loss) as Box<dyn Loss>);
        for loss in composed.chain([Box::new(clip()) as Box<dyn Loss>, Box::new(CrossEntropy)]) {
            let output = columns.evaluate(loss.as_ref());
            for t in 0..columns.log_probs.len() {
                let moved = |by: f64| {
                    let mut columns = columns.clone();
                    columns.log_probs[t] += by;
                    columns.evaluate(loss.as_ref()).loss
                };
                let slope = (moved(h) - moved(-h)) / (2.0 * h);
                prop_assert!((slope - output.grad[t]).abs() < 1e-6 * (1.0 + slope.abs()), "{}: {slope} {}", loss.name(), output.grad[t]);
            }
        }
    }

    #[test]
    fn where_factors_are_constants_the_loss_is_linear_in_log_probabilities(columns in columns(0.6)) {
        for loss in detached() {
            let output = columns.evaluate(&loss);
            let linear: f64 = output.grad.iter().zip(&columns.log_probs).map(|(slope, theta)| slope * theta).sum();
            prop_assert!((linear - output.loss).abs() < 1e-12 * (1.0 + linear.abs()), "{}", loss.name());
        }
    }

    #[test]
    fn covariance_losses_differ_from_their_surrogate_at_the_chosen_tokens_alone(columns in columns(0.1)) {
        let n = columns.log_probs.len();
        let most = ((0.3 * n as f64) as usize).max(1);
        for (loss, plain) in comparing().into_iter().zip([clip(), wide()]) {
            let (output, plain) = (columns.evaluate(&loss), columns.evaluate(&PolicyLoss::from(plain)));
            let differing = (0..n).filter(|&t| output.grad[t] != plain.grad[t]).count();
            prop_assert!(differing <= most, "{}: {differing} of {n}", loss.name());
        }
    }

    #[test]
    fn an_entropy_bonus_has_the_slope_it_reports(columns in columns(0.6)) {
        let loss = PolicyLoss { entropy_coef: 0.3, ..PolicyLoss::default() };
        let output = columns.evaluate(&loss);
        let mut moved = columns.clone();
        moved.entropies[0] += 1.0;
        let slope = moved.evaluate(&loss).loss - output.loss;
        prop_assert!((slope - output.entropy_grad.unwrap()[0]).abs() < 1e-12);
    }

    #[test]
    fn on_policy_the_gradient_is_the_plain_policy_gradient(mut columns in columns(0.6)) {
        columns.behaviour = columns.log_probs.clone();
        columns.importance.fill(1.0);
        let plain = columns.evaluate(&policy_gradient()).grad;
        prop_assert_eq!(&columns.evaluate(&Grpo::default()).grad, &plain);
        let sapo = PolicyLoss::from(Sapo { tau_neg: 1.0, ..Sapo::default() });
        for loss in [Cispo::default().into(), sapo, dppo(BinaryDivergence::Kl), Vespo::default().into()] {
            let grad = columns.evaluate(&loss).grad;
            prop_assert!(grad.iter().zip(&plain).all(|(a, b)| (a - b).abs() < 1e-12), "{}: {grad:?} {plain:?}", loss.name());
        }
    }

    #[test]
    fn a_clipped_token_has_no_gradient_and_is_counted(columns in columns(0.6)) {
        let output = columns.evaluate(&Grpo::default());
        let log_ratio = |t: usize| columns.log_probs[t] - columns.behaviour[t];
        let clipped = |t: &usize| {
            let (ratio, advantage) = (log_ratio(*t).exp(), columns.advantages[*t]);
            (ratio > 1.2 && advantage > 0.0) || (ratio < 0.8 && advantage < 0.0)
        };
        let clipped: Vec<usize> = (0..columns.log_probs.len()).filter(clipped).collect();
        prop_assert!(clipped.iter().all(|&t| output.grad[t] == 0.0));
        prop_assert_eq!(output.metrics.clipped_low + output.metrics.clipped_high, clipped.len());
    }

    #[test]
    fn gspo_by_token_equals_gspo_where_a_sequence_is_of_a_piece(mut columns in columns(0.6)) {
        for at in columns.sequences.clone().into_iter().filter(|at| !at.is_empty()) {
            for t in at.clone() {
                (columns.advantages[t], columns.weights[t], columns.importance[t]) =
                    (columns.advantages[at.start], columns.weights[at.start], columns.importance[at.start]);
            }
        }
        let gspo = |by_token| columns.evaluate(&PolicyLoss::from(Gspo { epsilon: 0.2, epsilon_high: 0.2, by_token }));
        let (whole, by_token) = (gspo(false), gspo(true));
        prop_assert_eq!(whole.loss, by_token.loss);
        prop_assert!(whole.grad.iter().zip(&by_token.grad).all(|(a, b)| (a - b).abs() < 1e-12));
    }

    /// Law N1: weights are given; parts add up, or are refused.
    #[test]
    fn parts_add_up_to_the_whole_or_are_refused(columns in columns(0.6)) {
        for loss in all() {
            let whole = columns.evaluate(&loss);
            let parts: Result<Vec<LossOutput>, LossError> =
                columns.sequences.iter().map(|at| columns.part(&loss, std::slice::from_ref(at))).collect();
            let parts = match parts {
                Ok(parts) => parts,
                Err(error) => {
                    prop_assert!(loss.whole_batch() && matches!(error, LossError::Part { .. }), "{}: {error}", loss.name());
                    continue;
                }
            };
            prop_assert!(!loss.whole_batch());
            prop_assert!((parts.iter().map(|part| part.loss).sum::<f64>() - whole.loss).abs() < 1e-12, "{}", loss.name());
            let grad: Vec<f64> = parts.into_iter().flat_map(|part| part.grad).collect();
            prop_assert!(grad.iter().zip(&whole.grad).all(|(a, b)| (a - b).abs() < 1e-12), "{}", loss.name());
        }
    }

    #[test]
    fn the_order_of_sequences_changes_nothing(columns in columns(0.6)) {
        let reversed: Vec<Range<usize>> = columns.sequences.iter().rev().cloned().collect();
        for loss in all() {
            let (there, back) = (columns.evaluate(&loss), columns.part(&loss, &reversed).unwrap());
            prop_assert!((there.loss - back.loss).abs() < 1e-12, "{}: {} {}", loss.name(), there.loss, back.loss);
        }
    }

    #[test]
    fn a_token_without_weight_has_no_gradient_where_tokens_stand_alone(mut columns in columns(0.6)) {
        columns.weights[0] = 0.0;
        for loss in all().iter().filter(|loss| is_by_token(loss)) {
            prop_assert_eq!(columns.evaluate(loss).grad[0], 0.0, "{}", loss.name());
        }
        columns.weights.fill(0.0);
        for loss in all() {
            prop_assert!(columns.evaluate(&loss).grad.iter().all(|slope| *slope == 0.0), "{}", loss.name());
        }
    }

    /// verl takes rejected tokens out of `response_mask`. The number of trained tokens, by which an
    /// entropy bonus is divided, stays.
    #[test]
    fn a_rejected_token_is_as_good_as_absent(columns in columns(0.6)) {
        let last = columns.log_probs.len() - 1;
        let (mut rejected, mut absent) = (columns.clone(), columns);
        (rejected.kept[last], rejected.importance[last]) = (false, 0.0);
        absent.log_probs.truncate(last);
        absent.sequences[2].end = last;
        for loss in all().iter().filter(|loss| loss.entropy_coef == 0.0 && loss.top_entropy == 1.0) {
            let (found, expected) = (rejected.evaluate(loss), absent.evaluate(loss));
            prop_assert!((found.loss - expected.loss).abs() < 1e-12, "{loss:?}: {} {}", found.loss, expected.loss);
            prop_assert_eq!(found.grad[last], 0.0, "{:?}", loss);
            let close = |(found, expected): (&f64, &f64)| (found - expected).abs() < 1e-12;
            prop_assert!(found.grad.iter().zip(&expected.grad).all(close), "{loss:?}: {:?} {:?}", found.grad, expected.grad);
        }
    }

    #[test]
    fn what_is_ignored_for_its_zero_advantage_is_exactly_zero(mut columns in columns(0.6)) {
        columns.advantages.fill(0.0);
        for loss in all().iter().filter(|loss| loss.ignores_zero_advantage()) {
            let output = columns.evaluate(loss);
            prop_assert!(output.loss == 0.0 && output.grad.iter().all(|slope| *slope == 0.0), "{}", loss.name());
        }
    }

    #[test]
    fn ratios_of_any_size_stay_finite(columns in columns(20.0), far in columns(800.0)) {
        for columns in [columns, far] {
            for loss in all() {
                let output = columns.evaluate(&loss);
                prop_assert!(output.loss.is_finite() && output.grad.iter().all(|slope| slope.is_finite()), "{}: {output:?}", loss.name());
            }
        }
    }

    /// Law N4.
    #[test]
    fn a_log_probability_that_is_no_number_shows(mut columns in columns(0.6)) {
        columns.log_probs[0] = f64::NAN;
        for loss in all() {
            let output = columns.evaluate(&loss);
            // Comparing losses may leave the token out.
            prop_assert!(loss.whole_batch() || output.loss.is_nan() || output.grad.iter().any(|slope| slope.is_nan()), "{loss:?}");
        }
    }
}

#[test]
fn nothing_costs_nothing() {
    for loss in all() {
        let inputs = LossInputs { reference: Some(&[]), sequences: std::slice::from_ref(&(0..0)), ..LossInputs::default() };
        let output = loss.evaluate(&inputs).unwrap();
        assert_eq!((output.loss, output.grad), (0.0, vec![]), "{}", loss.name());
    }
}

#[test]
fn a_divergence_without_reference_is_refused_with_the_setting_named() {
    let refused =
        PolicyLoss { kl_loss: Some(KlLoss::default()), ..PolicyLoss::default() }.evaluate(&LossInputs::default()).unwrap_err();
    assert_eq!(refused.to_string(), "grpo needs reference log-probabilities for its KL penalty, and the batch has none");
}

/// On policy, where ρ is 1, the gradient is the divergence's own either way: k1 with its score
/// function equals k2 plus a constant whose mean over samples is 0; straight-through it is k2's.
#[test]
fn a_divergence_that_is_unbiased_pulls_as_k2_does_whatever_its_value() {
    let columns = Columns {
        reference: vec![-1.5, -0.5],
        ..Columns::of(&[-1.0, -2.0], &[-1.0, -2.0], &[0.0; 2], std::slice::from_ref(&(0..2)))
    };
    let pull = |straight_through, unbiased| {
        let kl_loss = KlLoss { beta: 2.0, estimator: KlForm::K1, straight_through, unbiased, ..KlLoss::default() };
        let output = columns.evaluate(&PolicyLoss { kl_loss: Some(kl_loss), ..PolicyLoss::default() });
        assert_eq!(output.metrics.kl_coef, Some(2.0));
        (output.metrics.kl(), output.grad)
    };
    assert_eq!(pull(false, true), (-0.5, vec![2.0 * 1.5, 2.0 * -0.5]), "d + 1");
    assert_eq!([pull(true, true), pull(true, false)], [(-0.5, vec![1.0, -3.0]), (-0.5, vec![1.0, -3.0])]);
}

/// Where a rank is a whole number but for rounding, the threshold is torch's, whose `quantile` works in single precision.
#[test]
fn the_tokens_of_highest_entropy_are_those_that_torchs_quantile_leaves() {
    for (share, tokens, left) in [(0.4, 46, 18), (0.4, 45, 18), (0.4, 51, 20), (0.0, 9, 1), (0.9, 9, 8)] {
        let (log_probs, advantages) = (vec![-1.0; tokens], vec![1.0; tokens]);
        let whole = 0..tokens;
        let mut columns = Columns::of(&log_probs, &log_probs, &advantages, &[whole]);
        columns.entropies = (1..=tokens).map(|at| 0.125 * at as f64).collect();
        let output = columns.evaluate(&PolicyLoss { top_entropy: share, ..PolicyLoss::default() });
        let kept = output.grad.iter().filter(|slope| **slope != 0.0).count();
        assert_eq!(kept, left, "{share} of {tokens}");
    }
}

#[test]
fn what_does_not_go_together_is_refused_with_the_reason() {
    let refused = |loss: PolicyLoss| loss.evaluate(&LossInputs::default()).unwrap_err().to_string();
    let geo_mean = || PolicyLoss::from(GeoMean::default());
    assert!(refused(PolicyLoss { top_entropy: 0.5, ..geo_mean() }).contains("none can be left out"));
    assert!(refused(PolicyLoss { off_policy_threshold: Some(0.1), ..geo_mean() }).contains("none can be left out"));
    assert_eq!(
        refused(Grpo { epsilon: -0.1, ..clip() }.into()),
        "grpo can't use this epsilon: `epsilon` is -0.1; it must be 0 or more, below 1"
    );
    assert!(refused(Grpo { dual_clip: Some(1.0), ..clip() }.into()).contains("above 1"));
    assert!(refused(Dro { beta: 0.0 }.into()).contains("above 0"));
    assert!(refused(Sapo { tau_pos: 0.0, ..Sapo::default() }.into()).contains("above 0"));
    assert!(refused(ClipCov { share: 0.1, min: 1.0, max: 1.0, ..ClipCov::default() }.into()).contains("no covariance"));
    assert!(refused(PolicyLoss { top_entropy: -0.1, ..PolicyLoss::default() }).contains("a share"));
    assert!(refused(LossChoice::Dpo(Dpo::default()).into()).contains("a loss of pairs"));
}

#[test]
fn a_sequence_without_tokens_has_no_share_of_clipped_ones() {
    let columns = Columns::of(&[-2.0; 2], &[-1.0; 2], &[-1.0; 2], &[0..1, 1..1, 1..2]);
    let metrics = columns.evaluate(&clip()).metrics;
    assert_eq!((metrics.clip_low_min, metrics.clip_high_max), (Some(1.0), Some(0.0)));
}

#[test]
fn drifted_sequences_of_negative_advantage_are_dropped_and_others_stay() {
    let columns = Columns::of(&[-2.0, -2.0, -1.0, -1.0], &[-1.0; 4], &[-1.0, 1.0, -1.0, 1.0], &[0..2, 2..4]);
    let clip = Grpo { epsilon: 0.9, ..Grpo::default() };
    let masked = PolicyLoss { off_policy_threshold: Some(0.5), ..clip.into() };
    let grad = columns.evaluate(&masked).grad;
    assert_eq!(grad[0], 0.0);
    assert!(grad[1..].iter().all(|slope| *slope != 0.0));
}
