//! Sequences whose advantages are all zero take no pass where the loss has no other term for them, and the step is the same *to the bit*: loss,
//! gradient norm, weights and, over several steps, the optimizer's moments behind them.
//!
//! Law N1: denominators are those of the whole batch either way. The equality is exact because such sequences never share a micro-batch with
//! others: with or without them, all others are packed, rounded and summed alike, and what is added for them is exactly zero.

use std::sync::Arc;

use proptest::prelude::*;
use rollflow::algo::{
    Aggregation, CrossEntropy, GeoMean, Grpo, Importance, KlLoss, Level, Loss, LossChoice, LossError, LossInputs, LossOutput,
    OffPolicy, PolicyLoss, Proximal, Schedule, Vespo,
};
use rollflow::data::Sample;
use rollflow::recipe::NoKeys;
use rollflow::train::{ForwardBackward, LocalBackend, LocalConfig, TrainingBackend, collate};

/// The same loss, but computed for everything.
struct Thorough(Arc<dyn Loss>);

impl Loss for Thorough {
    fn evaluate(&self, inputs: &LossInputs) -> Result<LossOutput, LossError> {
        self.0.evaluate(inputs)
    }
}

fn losses() -> [Arc<dyn Loss>; 6] {
    let clip = Grpo { delta: Some(2.0), ..Grpo::default() };
    let careful = PolicyLoss { off_policy_threshold: Some(0.5), ..clip.into() };
    let gspo = Grpo { level: Level::Geometric, ..Grpo::default() };
    let reinforce = PolicyLoss::from(LossChoice::Gpg(NoKeys));
    let (vespo, geo_mean) = (PolicyLoss::from(Vespo::default()), PolicyLoss::from(GeoMean::default()));
    [Arc::new(Grpo::default()), Arc::new(careful), Arc::new(reinforce), Arc::new(gspo), Arc::new(vespo), Arc::new(geo_mean)]
}

/// A few steps on the same samples: what was seen, the gradient's norm, and the weights' bits after each.
fn learn(
    loss: Arc<dyn Loss>,
    samples: &[Sample],
    micro_batch_tokens: usize,
    threads: usize,
) -> Vec<(ForwardBackward, f64, Vec<u32>)> {
    let config = LocalConfig {
        loss,
        micro_batch_tokens,
        threads: Some(threads),
        ..LocalConfig::new(CrossEntropy, Schedule::constant(0.01))
    };
    let backend = LocalBackend::new(config, crate::tiny::model(), crate::tiny::weights(5)).unwrap();
    let batch = Arc::new(collate(samples, Aggregation::SeqMeanTokenMean).unwrap());
    let step = |_| {
        let seen = backend.forward_backward(Arc::clone(&batch)).wait().unwrap();
        let norm = backend.optim_step().wait().unwrap().grad_norm;
        let flat = backend.snapshot().wait().unwrap().weights.read().flat;
        (seen, norm, Vec::<f32>::try_from(&flat).unwrap().into_iter().map(f32::to_bits).collect())
    };
    (0..3).map(step).collect()
}

/// Every other group without an advantage, or all of them.
fn samples(shapes: &[(usize, usize)], seed: u64, all: bool) -> Vec<Sample> {
    let mut samples = crate::tiny::rollouts(shapes, seed);
    for sample in samples.iter_mut().filter(|sample| all || sample.group_index % 2 == 0) {
        sample.advantage = Some(0.0);
    }
    samples
}

fn assert_equal_to_the_bit(samples: &[Sample], micro_batch_tokens: usize, threads: usize) {
    for loss in losses() {
        let lean = learn(Arc::clone(&loss), samples, micro_batch_tokens, threads);
        let thorough = learn(Arc::new(Thorough(loss)), samples, micro_batch_tokens, threads);
        for ((lean, norm, weights), (thorough, their_norm, their_weights)) in lean.iter().zip(&thorough) {
            assert_eq!(lean.loss.to_bits(), thorough.loss.to_bits());
            assert_eq!(norm.to_bits(), their_norm.to_bits());
            assert!(weights == their_weights, "weights differ");
            assert_eq!((lean.input_tokens + lean.saved_tokens, thorough.saved_tokens), (thorough.input_tokens, 0));
            assert!(lean.saved_tokens > 0 && lean.entropy.is_finite());
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 8, failure_persistence: None, ..ProptestConfig::default() })]
    #[test]
    fn the_step_is_the_same_to_the_bit_with_and_without_the_passes(
        shapes in prop::collection::vec((1usize..6, 1usize..7), 2..12), seed in any::<u64>(), most in 4_usize..60, threads in 1_usize..3,
    ) {
        assert_equal_to_the_bit(&samples(&shapes, seed, false), most, threads);
    }
}

/// Momentum moves the weights all the same.
#[test]
fn a_step_without_any_advantage_takes_no_pass_and_is_a_step_all_the_same() {
    let samples = samples(&[(2, 3), (1, 5), (4, 2)], 3, true);
    assert_equal_to_the_bit(&samples, 8192, 1);
    let (seen, norm, _) = learn(Arc::new(Grpo::default()), &samples, 8192, 1).remove(0);
    assert_eq!((seen.loss, norm, seen.tokens, seen.micro_batches), (0.0, 0.0, 0, 0));
}

#[test]
fn a_loss_with_another_term_computes_everything() {
    let samples = samples(&[(2, 3), (1, 5), (4, 2)], 3, true);
    let bonus = PolicyLoss { entropy_coef: 0.1, ..PolicyLoss::default() };
    let (seen, norm, _) = learn(Arc::new(bonus.clone()), &samples, 8192, 1).remove(0);
    assert!(norm > 0.0 && seen.saved_tokens == 0 && seen.tokens == 10);
    let penalty = PolicyLoss { kl_loss: Some(KlLoss::default()), ..PolicyLoss::default() };
    let other_terms = [bonus, penalty, PolicyLoss { top_entropy: 0.5, ..PolicyLoss::default() }];
    assert!(other_terms.iter().all(|loss| !loss.ignores_zero_advantage()) && !CrossEntropy.ignores_zero_advantage());
}

/// Law N1: weights are divided by their mean over the whole batch, to which sequences without an advantage belong.
#[test]
fn a_correction_that_looks_at_the_whole_batch_computes_everything() {
    let weigh = Importance { normalize: true, ..Importance::truncated(Level::Token, 2.0) };
    let off_policy = OffPolicy { proximal: Proximal::Recompute, weigh: Some(weigh), reject: Vec::new() };
    let config = LocalConfig { off_policy, threads: Some(1), ..LocalConfig::new(Grpo::default(), Schedule::constant(0.01)) };
    let backend = LocalBackend::new(config, crate::tiny::model(), crate::tiny::weights(5)).unwrap();
    let batch = collate(&samples(&[(2, 3), (1, 5), (4, 2)], 3, false), Aggregation::SeqMeanTokenMean).unwrap();
    let seen = backend.forward_backward(Arc::new(batch)).wait().unwrap();
    assert_eq!((seen.saved_tokens, seen.tokens), (0, 10));
}
