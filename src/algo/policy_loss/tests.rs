//! Derivatives against finite differences, and the properties that clipping promises.

use proptest::prelude::*;

use super::*;

/// Columns of `n` tokens in two sequences.
#[derive(Clone, Debug)]
struct Columns {
    log_probs: Vec<f64>,
    behaviour: Vec<f64>,
    reference: Vec<f64>,
    importance: Vec<f64>,
    entropies: Vec<f64>,
    advantages: Vec<f64>,
    weights: Vec<f64>,
}

impl Columns {
    fn evaluate(&self, loss: &dyn Loss) -> LossOutput {
        let n = self.log_probs.len();
        let inputs = LossInputs {
            log_probs: &self.log_probs,
            behaviour: Some(&self.behaviour),
            proximal: None,
            reference: Some(&self.reference),
            importance: Some(&self.importance),
            entropies: &self.entropies,
            advantages: &self.advantages,
            weights: &self.weights,
            sequences: &[0..n / 2, n / 2..n],
            batch_tokens: n,
        };
        loss.evaluate(&inputs).unwrap()
    }
}

prop_compose! {
    fn columns()(n in 2usize..12)(
        log_probs in prop::collection::vec(-4.0f64..-0.1, n),
        drift in prop::collection::vec(-0.6f64..0.6, n),
        reference in prop::collection::vec(-4.0f64..-0.1, n),
        importance in prop::collection::vec(0.5f64..2.0, n),
        entropies in prop::collection::vec(0.0f64..3.0, n),
        advantages in prop::collection::vec(-2.0f64..2.0, n),
        weights in prop::collection::vec(0.01f64..1.0, n),
    ) -> Columns {
        let behaviour = log_probs.iter().zip(&drift).map(|(log_prob, drift)| log_prob - drift).collect();
        Columns { log_probs, behaviour, reference, importance, entropies, advantages, weights }
    }
}

fn losses() -> Vec<Box<dyn Loss>> {
    let grpo = Grpo { clip_high: 0.28, ..Grpo::default() };
    vec![
        Box::new(PolicyGradient),
        Box::new(crate::algo::CrossEntropy),
        Box::new(grpo),
        Box::new(Grpo { delta: Some(1.5), ..grpo }),
        Box::new(Grpo { beta: 0.1, ..grpo }),
        Box::new(Grpo { beta: 0.1, unbiased_kl: false, ..grpo }),
        Box::new(Grpo { top_entropy: 0.5, ..grpo }),
        Box::new(Grpo { entropy_coef: 0.3, ..grpo }),
    ]
}

proptest! {
    #[test]
    fn derivatives_equal_finite_differences(columns in columns()) {
        let h = 1e-6;
        for loss in losses() {
            let output = columns.evaluate(loss.as_ref());
            for t in 0..columns.log_probs.len() {
                let log_ratio = columns.log_probs[t] - columns.behaviour[t];
                let at_a_kink = [0.8f64, 1.28, 1.5].iter().any(|edge| (log_ratio - edge.ln()).abs() < 1e-4);
                if at_a_kink {
                    continue;
                }
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
    fn an_entropy_bonus_has_the_slope_it_reports(columns in columns()) {
        let loss = Grpo { entropy_coef: 0.3, ..Grpo::default() };
        let output = columns.evaluate(&loss);
        let mut moved = columns.clone();
        moved.entropies[0] += 1.0;
        let slope = moved.evaluate(&loss).loss - output.loss;
        prop_assert!((slope - output.entropy_grad.unwrap()[0]).abs() < 1e-12);
    }

    #[test]
    fn on_policy_the_gradient_is_the_plain_policy_gradient(mut columns in columns()) {
        columns.behaviour = columns.log_probs.clone();
        columns.importance.fill(1.0);
        prop_assert_eq!(columns.evaluate(&Grpo::default()).grad, columns.evaluate(&PolicyGradient).grad);
    }

    #[test]
    fn a_clipped_token_has_no_gradient_and_is_counted(columns in columns()) {
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
}

#[test]
fn a_divergence_without_reference_is_refused_with_the_setting_named() {
    let inputs = LossInputs {
        log_probs: &[],
        behaviour: None,
        proximal: None,
        reference: None,
        importance: None,
        entropies: &[],
        advantages: &[],
        weights: &[],
        sequences: &[],
        batch_tokens: 0,
    };
    let refused = Grpo { beta: 0.1, ..Grpo::default() }.evaluate(&inputs).unwrap_err();
    assert_eq!(refused.to_string(), "grpo needs reference log-probabilities for beta above 0, and the batch has none");
}

#[test]
fn drifted_sequences_of_negative_advantage_are_dropped_and_others_stay() {
    let columns = Columns {
        log_probs: vec![-2.0, -2.0, -1.0, -1.0],
        behaviour: vec![-1.0, -1.0, -1.0, -1.0],
        reference: vec![0.0; 4],
        importance: vec![1.0; 4],
        entropies: vec![0.0; 4],
        advantages: vec![-1.0, 1.0, -1.0, 1.0],
        weights: vec![1.0; 4],
    };
    let masked = Grpo { off_policy_threshold: Some(0.5), clip_low: 0.9, ..Grpo::default() };
    let grad = columns.evaluate(&masked).grad;
    assert_eq!(grad[0], 0.0);
    assert!(grad[1..].iter().all(|slope| *slope != 0.0));
}
