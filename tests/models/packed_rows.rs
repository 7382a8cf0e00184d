//! Laws: N1 (samples that share a row teach what each teaches alone). Rows and steps are those that supervised pipelines train on.

use std::collections::BTreeMap;
use std::sync::Arc;

use proptest::prelude::*;
use rollflow::algo::{Aggregation, CrossEntropy, Schedule};
use rollflow::data::Sample;
use rollflow::data::packing::{OverlongPolicy, Packing, pack};
use rollflow::flow::Source;
use rollflow::stages::source::Supervised;
use rollflow::train::{AdamW, LocalBackend, LocalConfig, TrainingBackend, collate};
use tch::Tensor;

fn backend(micro_batch_tokens: usize, threads: usize) -> LocalBackend {
    // With so large an epsilon a first step goes along the gradient itself.
    let adamw = AdamW { epsilon: 1e3, ..AdamW::default() };
    let config = LocalConfig {
        adamw,
        micro_batch_tokens,
        threads: Some(threads),
        ..LocalConfig::new(CrossEntropy, Schedule::constant(1e3))
    };
    LocalBackend::new(LocalConfig { max_grad_norm: None, ..config }, crate::tiny::model(), crate::tiny::weights(1)).unwrap()
}

/// The loss, the gradient's norm, and how a step along the gradient moves the weights.
fn learn(samples: &[&Sample], backend: &LocalBackend) -> (f64, f64, Tensor) {
    let before = crate::tiny::weights(1).flat;
    let batch = Arc::new(collate(samples, Aggregation::TokenMean).unwrap());
    let seen = backend.forward_backward(batch).wait().unwrap();
    let norm = backend.optim_step().wait().unwrap().grad_norm;
    (seen.loss, norm, backend.snapshot().wait().unwrap().weights.read().flat - before)
}

/// Samples with prompts, some of them in common, so that what rows begin with is computed once.
fn samples() -> impl Strategy<Value = Vec<Sample>> {
    let sample =
        (0usize..3, prop::collection::vec(0u32..crate::tiny::VOCAB, 0..9), prop::collection::vec(0u32..crate::tiny::VOCAB, 1..9));
    let system = [vec![], vec![3, 5, 7], vec![3, 5, 2, 2, 9]];
    let of = move |(common, prompt, answer): (usize, Vec<u32>, Vec<u32>)| {
        Sample::supervised(&[&[4], &system[common][..], &prompt].concat(), &answer)
    };
    prop::collection::vec(sample.prop_map(of), 1..9)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(16))]
    #[test]
    fn n1_rows_of_best_fit_teach_what_each_sample_teaches_alone(
        samples in samples(), room in 22usize..60, tokens in 20usize..100, micro_batch_tokens in 1usize..100, threads in 1usize..3,
    ) {
        let count = samples.len();
        let packed = pack(samples.clone(), room, Packing::BestFit, OverlongPolicy::Drop);
        prop_assert_eq!(packed.rows.iter().map(Vec::len).sum::<usize>(), count, "no sample is longer than a row");
        let rows = packed.rows.len();
        // One round through all of them: steps are complete when as many groups have come as there are rows.
        let mut source = Supervised::by_tokens("SFT", packed.rows, tokens, |length| length as f64, u64::MAX).unwrap();
        let (mut groups, mut seen) = (Vec::new(), BTreeMap::new());
        while groups.len() < rows {
            let batch = source.next().unwrap().unwrap();
            let held: usize = batch.samples().map(|sample| sample.tokens.len()).sum();
            prop_assert!(held <= tokens || batch.groups.len() == 1, "a step of {held} tokens");
            groups.extend(batch.groups);
        }
        prop_assert_eq!(groups.len(), rows, "a round ends with a step");
        groups.iter().flat_map(|group| &group.samples).for_each(|sample| *seen.entry(sample.tokens.clone()).or_insert(0) += 1);
        samples.iter().for_each(|sample| *seen.entry(sample.tokens.clone()).or_insert(0) -= 1);
        prop_assert!(seen.values().all(|count| *count == 0), "every sample once");

        let in_rows: Vec<&Sample> = groups.iter().flat_map(|group| &group.samples).collect();
        let together = learn(&in_rows, &backend(micro_batch_tokens, threads));
        let alone = learn(&samples.iter().collect::<Vec<_>>(), &backend(1, 1));
        prop_assert!((together.0 - alone.0).abs() < 1e-5, "losses {} and {}", together.0, alone.0);
        prop_assert!((together.1 - alone.1).abs() < 1e-5 * alone.1.max(1.0), "norms {} and {}", together.1, alone.1);
        let (differ, moved) = ((together.2 - &alone.2).abs().max().double_value(&[]), alone.2.abs().max().double_value(&[]));
        prop_assert!(differ < 2e-5 * moved.max(1e-3), "gradients differ by {differ:e} of {moved:e}");
    }
}

/// By their nature: a wrapped row is one sequence.
#[test]
fn tokens_of_a_wrapped_row_see_the_sample_before_theirs() {
    let samples = vec![Sample::supervised(&[4, 5], &[6, 7]), Sample::supervised(&[8, 9], &[10, 11])];
    let scores = |samples: &[Sample]| -> Vec<f64> {
        let batch = collate(samples, Aggregation::TokenMean).unwrap();
        backend(100, 1).score(Arc::new(batch)).wait().unwrap().concat()
    };
    let row = pack(samples.clone(), 8, Packing::Wrapped, OverlongPolicy::default()).rows.concat();
    let (wrapped, apart) = (scores(&row), scores(&samples));
    assert_eq!((row.len(), wrapped.len()), (1, 4));
    assert!((wrapped[0] - apart[0]).abs() < 1e-5 && (wrapped[2] - apart[2]).abs() > 1e-3, "{wrapped:?} {apart:?}");
}
