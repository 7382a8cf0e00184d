//! Law N1: loss and gradient do not depend on how a batch is cut, ordered, packed or chunked, for every aggregation, trust region and
//! correction.

use std::sync::Arc;

use proptest::prelude::*;
use rollflow::algo::{
    Aggregation, ClipCov, CrossEntropy, Distilled, Divergence, GeoMean, Grpo, Importance, KlCov, Level, Loss, OffPolicy, Over,
    PolicyLoss, Proximal, Rejection, Schedule, TeacherDivergence, Vespo,
};
use rollflow::data::{Sample, TopTokens};
use rollflow::model::{Decoder, ModelConfig, Packed, Weights};
use rollflow::train::{AdamW, LocalBackend, LocalConfig, TrainBatch, TrainingBackend, collate};
use tch::{Device, Kind, Tensor};

use crate::objective::objective;

fn losses() -> Vec<Arc<dyn Loss>> {
    vec![
        Arc::new(CrossEntropy),
        Arc::new(Grpo::default()),
        Arc::new(PolicyLoss { top_entropy: 0.6, entropy_coef: 0.1, off_policy_threshold: Some(0.5), ..PolicyLoss::default() }),
        Arc::new(Grpo { level: Level::Geometric, ..Grpo::default() }),
        Arc::new(PolicyLoss::from(GeoMean::default())),
        Arc::new(PolicyLoss::from(Vespo::default())),
        Arc::new(PolicyLoss::from(ClipCov { share: 0.2, min: -10.0, max: 10.0, ..ClipCov::default() })),
        Arc::new(PolicyLoss::from(KlCov { share: 0.2, coef: 0.5 })),
    ]
}

/// Losses, and GRPO with tokens of another policy corrected in every way that looks beyond a token.
fn objectives() -> Vec<(Arc<dyn Loss>, OffPolicy)> {
    let off_policy = |proximal, weigh, reject| OffPolicy { proximal, weigh: Some(weigh), reject };
    let worst = Rejection { divergence: Divergence::K2, over: Over::Max, min: None, max: 1.0 };
    let normalized = Importance { normalize: true, ..Importance::masked(Level::Token, 0.2, 4.0) };
    let corrected = [
        off_policy(Proximal::Recompute, Importance::truncated(Level::Sequence, 2.0), vec![worst]),
        off_policy(Proximal::LogLinear, normalized, Vec::new()),
        off_policy(
            Proximal::Recompute,
            Importance { normalize: true, ..Importance::truncated(Level::Geometric, 2.0) },
            Vec::new(),
        ),
    ];
    let plain = losses().into_iter().map(|loss| (loss, OffPolicy::default()));
    plain.chain(corrected.map(|off_policy| (Arc::new(Grpo::default()) as Arc<dyn Loss>, off_policy))).collect()
}

fn config(loss: Arc<dyn Loss>) -> LocalConfig {
    // With β₁ = β₂ = 0, huge ε and no clipping, an update is −lr · gradient / ε: the flat gradient, read off the weights.
    let adamw = AdamW { beta1: 0.0, beta2: 0.0, epsilon: 1e6, ..AdamW::default() };
    LocalConfig { loss, adamw, max_grad_norm: None, threads: Some(1), ..LocalConfig::new(CrossEntropy, Schedule::constant(1e6)) }
}

/// The loss, the gradient's norm and the flat gradient of a batch.
fn learn(config: LocalConfig, batch: TrainBatch) -> (f64, f64, Tensor) {
    learn_with(&crate::tiny::model(), config, batch)
}

fn learn_with(model: &ModelConfig, config: LocalConfig, batch: TrainBatch) -> (f64, f64, Tensor) {
    let before = Weights::random(model, 5);
    let backend = LocalBackend::new(config, model.clone(), before.copy()).unwrap();
    let seen = backend.forward_backward(Arc::new(batch)).wait().unwrap();
    let norm = backend.optim_step().wait().unwrap().grad_norm;
    let after = backend.snapshot().wait().unwrap().weights.read();
    (seen.loss, norm, before.flat - after.flat)
}

fn norm(x: &Tensor) -> f64 {
    x.to_kind(Kind::Double).norm().double_value(&[])
}

fn distance(a: &Tensor, b: &Tensor) -> f64 {
    // A gradient that is read off f32 weights has their rounding, near 1e-6 in all: a small one has few digits left.
    norm(&(a - b)) / (1e-2 + norm(b))
}

prop_compose! {
    /// No two tokens have the same context or, but in one sample, the same advantage: of tokens that are equal in rank, rounding decides which
    /// one a loss picks.
    fn batches()(shapes in prop::collection::vec((1usize..6, 0usize..7), 2..9), seed in any::<u64>(), order in any::<u64>())
        -> (Vec<Sample>, Vec<Sample>) {
        let mut samples = crate::tiny::rollouts(&shapes, seed);
        for (at, sample) in samples.iter_mut().enumerate() {
            let start = [at as u32, crate::tiny::VOCAB - 1 - at as u32];
            sample.tokens.iter_mut().zip(start).for_each(|(token, start)| *token = start);
            sample.advantage = sample.advantage.map(|advantage| advantage + 0.1 * f64::from(at as u32 + 1).sqrt());
        }
        let mut reordered = samples.clone();
        let n = reordered.len();
        for i in (1..n).rev() {
            reordered.swap(i, (order >> i) as usize % (i + 1));
        }
        (samples, reordered)
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, failure_persistence: None, ..ProptestConfig::default() })]
    #[test]
    fn loss_and_gradient_ignore_cuts_order_and_chunks(
        (samples, reordered) in batches(), micro_batch_tokens in 1usize..40, logits_chunk in 1usize..200, threads in 1usize..4,
        copies in 0usize..3
    ) {
        prop_assume!(samples.iter().filter(|sample| sample.response_length() > 0).count() > 1);
        let modes = [
            Aggregation::TokenMean, Aggregation::SeqMeanTokenMean, Aggregation::SeqMeanTokenSum, Aggregation::DrGrpo { max_len: 7 },
        ];
        for (loss, off_policy) in objectives() {
            for aggregation in modes {
                let config = || LocalConfig { off_policy: off_policy.clone(), ..config(loss.clone()) };
                // The rollouts are version 1's, so that they lag by 3.
                let batch = |samples: &[Sample]| TrainBatch { version: 4, ..collate(samples, aggregation).unwrap() };
                let whole = learn(config(), batch(&samples));
                let replica_devices = vec![Device::Cpu; copies];
                let logits_chunk = Some(logits_chunk);
                let cut = LocalConfig { micro_batch_tokens, logits_chunk, threads: Some(threads), replica_devices, ..config() };
                let parts = learn(cut, batch(&reordered));
                prop_assert!((whole.0 - parts.0).abs() <= 1e-5 * (1.0 + whole.0.abs()), "{} {:?} {:?}: loss {} {}", loss.name(), aggregation, off_policy, whole.0, parts.0);
                prop_assert!((whole.1 - parts.1).abs() <= 2e-5 * (1e-3 + whole.1), "{} {:?} {:?}: norm {} {}", loss.name(), aggregation, off_policy, whole.1, parts.1);
                prop_assert!(distance(&parts.2, &whole.2) < 1e-4, "{} {:?} {:?}: gradient {}", loss.name(), aggregation, off_policy, distance(&parts.2, &whole.2));
            }
        }
    }
}

/// A teacher's tokens come along where a correction is normalised over the whole batch.
#[test]
fn a_divergence_from_a_teacher_ignores_cuts_under_a_correction_of_the_whole_batch() {
    let mut samples = crate::tiny::rollouts(&[(2, 3), (1, 5), (4, 1), (3, 3)], 1);
    for sample in &mut samples {
        let positions = sample.tokens.len() as u32 - 1;
        let ids = (0..positions).flat_map(|at| [3 * at, 3 * at + 5]).map(|id| id % crate::tiny::VOCAB).collect();
        let log_probs = (0..positions).flat_map(|_| [-0.7, -1.4]).collect();
        sample.teacher = Some(TopTokens { first: 1, k: 2, ids, log_probs });
    }
    let batch = || TrainBatch { version: 4, ..collate(&samples, Aggregation::TokenMean).unwrap() };
    let weigh = Some(Importance { normalize: true, ..Importance::truncated(Level::Token, 2.0) });
    for divergence in [TeacherDivergence { beta: 0.0 }, TeacherDivergence { beta: 0.5 }] {
        let loss = Arc::new(Distilled { loss: Arc::new(Grpo::default()), divergence, coef: 0.7 });
        let off_policy = OffPolicy { proximal: Proximal::Recompute, weigh, reject: Vec::new() };
        let of = || LocalConfig { off_policy: off_policy.clone(), ..config(loss.clone()) };
        let whole = learn(of(), batch());
        let cut = learn(LocalConfig { micro_batch_tokens: 1, logits_chunk: Some(40), ..of() }, batch());
        assert!((whole.0 - cut.0).abs() <= 1e-5 * (1.0 + whole.0.abs()), "loss {} {}", whole.0, cut.0);
        assert!(whole.1 > 1e-3 && (whole.1 - cut.1).abs() <= 2e-5 * (1e-3 + whole.1), "norm {} {}", whole.1, cut.1);
        assert!(distance(&cut.2, &whole.2) < 1e-4, "gradient {}", distance(&cut.2, &whole.2));
    }
}

#[test]
fn threads_never_make_a_gradient_depend_on_who_was_faster() {
    let batch =
        collate(&crate::tiny::rollouts(&[(2, 3), (1, 5), (4, 1), (3, 3), (2, 6), (1, 4)], 1), Aggregation::TokenMean).unwrap();
    let side_by_side = || LocalConfig { threads: Some(3), micro_batch_tokens: 5, ..config(Arc::new(Grpo::default())) };
    let first = learn(side_by_side(), batch.clone());
    for _ in 0..20 {
        let again = learn(side_by_side(), batch.clone());
        assert_eq!((again.0, again.1), (first.0, first.1));
        assert!(again.2.equal(&first.2), "bit for bit");
    }
}

#[test]
fn a_prompt_that_a_group_shares_is_computed_once_and_gives_the_same_gradient() {
    let prompt = [3, 1, 4, 1, 5];
    let mut samples = crate::tiny::rollouts(&[(5, 3), (5, 1), (5, 6), (5, 2), (5, 4), (5, 5)], 2);
    for (at, sample) in samples.iter_mut().enumerate() {
        sample.tokens[..5].copy_from_slice(&prompt);
        (sample.group_index, sample.index) = (at as u64 / 3, at as u32 % 3);
    }
    let mut apart = samples.clone();
    apart.iter_mut().enumerate().for_each(|(at, sample)| sample.group_index = at as u64);
    for model in [crate::tiny::model(), crate::tiny::nets()] {
        let gradient = |loss: &Arc<dyn Loss>, samples: &[Sample]| {
            learn_with(&model, config(loss.clone()), collate(samples, Aggregation::TokenMean).unwrap())
        };
        // The terms of a policy's gradient cancel and their rounding does not: it is compared with a gradient whose terms add up.
        let terms = norm(&gradient(&(Arc::new(CrossEntropy) as Arc<dyn Loss>), &apart).2);
        for loss in losses() {
            let (shared, single) = (gradient(&loss, &samples), gradient(&loss, &apart));
            let differ = norm(&(shared.2 - single.2)) / terms;
            // A net's unit lengths magnify the rounding of short keys, by another factor on each kind of processor.
            assert!((shared.0 - single.0).abs() < 1e-6 && differ < 1e-5, "{} of {:?}: {differ:e}", loss.name(), model.family);
        }
    }
}

#[test]
fn several_commands_accumulate_to_the_gradient_of_one() {
    let batch = collate(&crate::tiny::rollouts(&[(2, 3), (1, 5), (4, 1), (3, 3)], 1), Aggregation::TokenMean).unwrap();
    let whole = learn(config(Arc::new(Grpo::default())), batch.clone());
    let before = crate::tiny::weights(5);
    let backend = LocalBackend::new(config(Arc::new(Grpo::default())), crate::tiny::model(), before.copy()).unwrap();
    let part = |sequence: &_| TrainBatch { sequences: vec![Clone::clone(sequence)], ..batch.clone() };
    let losses: Vec<f64> =
        batch.sequences.iter().map(|sequence| backend.forward_backward(Arc::new(part(sequence))).wait().unwrap().loss).collect();
    assert!((losses.iter().sum::<f64>() - whole.0).abs() < 1e-5);
    backend.optim_step().wait().unwrap();
    let after = backend.snapshot().wait().unwrap().weights.read();
    assert!(distance(&(before.flat - after.flat), &whole.2) < 1e-4);
}

#[test]
fn the_backend_computes_the_reference_objective() {
    let samples = crate::tiny::rollouts(&[(2, 3), (1, 5), (4, 1)], 9);
    let weights = crate::tiny::weights(5);
    let decoder = Decoder::new(&crate::tiny::model(), weights.layout.clone());
    let logits: Vec<Vec<f64>> = samples
        .iter()
        .map(|sample| {
            let packed = Packed::new([&sample.tokens[..]]);
            let views = decoder.views(&weights.flat);
            let logits = decoder.logits(&views, &decoder.hidden(&views, &packed)).to_kind(Kind::Double).reshape([-1]);
            Vec::try_from(logits).unwrap()
        })
        .collect();
    for loss in losses() {
        let batch = collate(&samples, Aggregation::SeqMeanTokenMean).unwrap();
        let expected = objective(&batch, &logits, crate::tiny::VOCAB as usize, loss.as_ref()).unwrap().0;
        let (found, ..) = learn(config(loss.clone()), batch);
        assert!((found - expected.loss).abs() < 1e-5, "{}: {found} {}", loss.name(), expected.loss);
    }
}
