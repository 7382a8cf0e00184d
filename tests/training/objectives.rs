//! The reference objective against hand-computed values and finite differences.

use proptest::prelude::*;
use rollflow::algo::{Aggregation, CrossEntropy, Loss, LossChoice, PolicyLoss};
use rollflow::data::Sample;
use rollflow::recipe::NoKeys;
use rollflow::train::collate;

use crate::objective::objective;

/// Two sequences over three tokens; the hand-computed value of the first is −(ln ½ + ln ¼)/2 · 2.
#[test]
fn the_grpo_loss_equals_the_hand_computed_one() {
    let half = [0.5f64.ln(), 0.25f64.ln(), 0.25f64.ln()];
    let logits = vec![half.repeat(3), half.repeat(3)];
    let sample = |tokens: [u32; 4], mask: [f32; 4], advantage| Sample {
        tokens: tokens.to_vec(),
        loss_mask: mask.to_vec(),
        advantage: Some(advantage),
        ..Sample::default()
    };
    let samples = [sample([2, 2, 0, 1], [0.0, 0.0, 1.0, 1.0], 2.0), sample([1, 0, 0, 0], [0.0, 1.0, 0.0, 0.0], -1.0)];
    let batch = collate(&samples, Aggregation::SeqMeanTokenMean).unwrap();
    let (output, logits_grad) = objective(&batch, &logits, 3, &PolicyLoss::from(LossChoice::Gpg(NoKeys))).unwrap();
    let first = (0.5f64.ln() + 0.25f64.ln()) / 2.0 * 2.0;
    let second = -(0.5f64.ln());
    assert!((output.loss + (first + second) / 2.0).abs() < 1e-15);
    // Row 0 of sequence 0 predicts token 1, which is masked; row 1 predicts token 2, which is trained.
    assert_eq!(logits_grad[0][..3], [0.0; 3]);
    assert!(logits_grad[0][3..].iter().all(|slope| *slope != 0.0));
    assert!(logits_grad[1][3..].iter().all(|slope| *slope == 0.0));
}

proptest! {
    #[test]
    fn derivatives_by_logits_equal_finite_differences(
        logits in prop::collection::vec(-2.0f64..2.0, 12), tokens in prop::collection::vec(0u32..4, 4), advantage in -1.0f64..1.0
    ) {
        let sample = |advantage| Sample {
            tokens: tokens.clone(),
            loss_mask: vec![0.0, 0.0, 1.0, 0.5],
            advantage: Some(advantage),
            ..Sample::default()
        };
        // On policy GRPO's ratio is one by definition and its value stands still; without advantage its bonus alone remains.
        let bonus = PolicyLoss { entropy_coef: 0.5, ..PolicyLoss::default() };
        let plain = PolicyLoss::from(LossChoice::Gpg(NoKeys));
        for (loss, advantage) in [(&plain as &dyn Loss, advantage), (&CrossEntropy, advantage), (&bonus, 0.0)] {
            let batch = collate(&[sample(advantage)], Aggregation::TokenMean).unwrap();
            let value = |at: usize, by: f64| {
                let mut logits = logits.clone();
                logits[at] += by;
                objective(&batch, &[logits], 4, loss).unwrap()
            };
            for at in 0..logits.len() {
                let slope = (value(at, 1e-5).0.loss - value(at, -1e-5).0.loss) / 2e-5;
                prop_assert!((slope - value(at, 0.0).1[0][at]).abs() < 1e-8, "{}", loss.name());
            }
        }
    }
}
