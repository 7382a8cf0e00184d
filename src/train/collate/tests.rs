//! D5: one shift. N1: weights before splitting.

use super::*;
use crate::data::Prompt;

fn rollout() -> Sample {
    let prompt = Prompt { ordinal: 7, ..Prompt::default() };
    let mut sample = Sample::begin(&prompt, 2, &[10, 11]);
    sample.push(12, -0.5, 1);
    sample.push(13, -0.25, 1);
    sample.advantage = Some(2.0);
    sample
}

#[test]
fn a_row_predicts_the_token_after_it_and_takes_its_columns() {
    let batch = collate(&[rollout()], Aggregation::TokenMean).unwrap();
    let sequence = &batch.sequences[0];
    assert_eq!(sequence.inputs, [10, 11, 12]);
    assert_eq!(sequence.rows, [1, 2]);
    assert_eq!(sequence.targets, [12, 13]);
    assert_eq!(sequence.weights, [0.5, 0.5]);
    assert_eq!(sequence.behaviour, Some(vec![-0.5, -0.25]));
    assert_eq!(sequence.advantages, [2.0, 2.0]);
    assert_eq!(sequence.id.to_string(), "sample 2 of group 7");
    assert_eq!(batch.batch_tokens, 2);
}

#[test]
fn nothing_is_read_past_the_last_trained_token_and_the_first_is_never_a_target() {
    let sample = Sample { tokens: vec![1, 2, 3, 4, 5], loss_mask: vec![1.0, 0.0, 0.5, 0.0, 0.0], ..Sample::default() };
    let batch = collate(&[sample], Aggregation::TokenMean).unwrap();
    assert_eq!(batch.sequences[0].inputs, [1, 2]);
    assert_eq!((&batch.sequences[0].targets[..], &batch.sequences[0].weights[..]), (&[3][..], &[1.0][..]));
    assert_eq!(batch.sequences[0].behaviour, None);
    assert!(batch.sequences[0].advantages[0].is_nan());
}

#[test]
fn denominators_come_from_the_whole_batch_whatever_is_cut() {
    let samples: Vec<Sample> = (1..6).map(|n| Sample::supervised(&[1], &vec![2; n])).collect();
    let batch = collate(&samples, Aggregation::TokenMean).unwrap();
    assert!(batch.sequences.iter().flat_map(|sequence| &sequence.weights).all(|weight| *weight == 1.0 / 15.0));
    for (max_tokens, least) in (1..20).flat_map(|most| [(most, 1), (most, 3)]) {
        let parts = batch.micro_batches(max_tokens, least);
        assert_eq!(parts.concat(), [0, 1, 2, 3, 4]);
        for part in parts {
            let tokens: usize = part.iter().map(|&at| batch.sequences[at].inputs.len()).sum();
            assert!(tokens <= max_tokens || part.len() == 1);
        }
    }
}

/// A pair is judged as one, also where one of its answers has nothing to train.
#[test]
fn no_cut_divides_a_pair() {
    let masked = Sample { loss_mask: vec![0.0; 3], ..Sample::supervised(&[1], &[2, 2]) };
    let lengths = [3, 1, 2, 5, 1, 1].map(|n| Sample::supervised(&[1], &vec![2; n]));
    let samples: Vec<Sample> = lengths.into_iter().chain([Sample::supervised(&[1], &[2]), masked]).collect();
    let batch = collate(&samples, Aggregation::SeqMeanTokenMean).unwrap().in_pairs();
    for (max_tokens, least) in (1..20).flat_map(|most| [(most, 1), (most, 3)]) {
        let parts = batch.micro_batches(max_tokens, least);
        assert_eq!(parts.concat(), [0, 1, 2, 3, 4, 5, 6, 7]);
        assert!(parts.iter().flat_map(|part| part.chunks(2)).all(|pair| pair.len() == 2 && pair[0] % 2 == 0), "{parts:?}");
    }
}

#[test]
fn a_sample_that_no_reference_scored_leaves_no_half_column() {
    let scored = Sample { ref_log_probs: vec![0.0, 0.0, -1.0, -2.0], ..rollout() };
    let batch = collate(&[scored, rollout()], Aggregation::TokenMean).unwrap();
    assert_eq!(batch.sequences[0].reference, Some(vec![-1.0, -2.0]));
    let seen = |part: &[usize]| {
        let columns = PackedColumns::new(&batch, part);
        let seen = std::sync::Mutex::new(None);
        let look = |inputs: &LossInputs| {
            *seen.lock().unwrap() = Some(inputs.reference.map(<[f64]>::to_vec));
            Ok(LossOutput { grad: vec![0.0; inputs.log_probs.len()], ..LossOutput::default() })
        };
        let zeros = vec![0.0; columns.targets.len()];
        columns.evaluate(&look, &OffPolicy::default(), &zeros, &zeros, 4).unwrap();
        seen.into_inner().unwrap().unwrap()
    };
    assert_eq!((seen(&[0]), seen(&[0, 1])), (Some(vec![-1.0, -2.0]), None));
    let bad = Sample { ref_log_probs: vec![0.0, 0.0, f32::NAN, -2.0], ..rollout() };
    assert!(collate(&[bad], Aggregation::TokenMean).unwrap_err().to_string().contains("reference log-probability is NaN"));
}

/// Skipping them must not change the rounding of the others.
#[test]
fn sequences_without_advantage_share_no_micro_batch_with_others() {
    let advantages = [0.0, 1.0, -0.0, f64::NAN, -1.0];
    let samples: Vec<Sample> = advantages
        .iter()
        .map(|advantage| Sample { advantage: (!advantage.is_nan()).then_some(*advantage), ..rollout() })
        .collect();
    let batch = collate(&samples, Aggregation::TokenMean).unwrap();
    assert_eq!(batch.micro_batches(6, 1), [vec![1, 3], vec![4], vec![0, 2]]);
}

#[test]
fn sequences_without_trained_tokens_are_not_read() {
    let given = Sample { tokens: vec![1, 2], loss_mask: vec![0.0, 0.0], ..Sample::default() };
    let batch = collate(&[given.clone(), Sample::supervised(&[1], &[2])], Aggregation::SeqMeanTokenMean).unwrap();
    assert_eq!(batch.micro_batches(100, 1), [[1]]);
    assert_eq!(batch.sequences[1].weights, [0.5]);
    assert!(matches!(collate(&[given], Aggregation::TokenMean), Err(BatchError::NothingToTrain { samples: 1 })));
    assert!(matches!(collate::<Sample>(&[], Aggregation::TokenMean), Err(BatchError::NothingToTrain { samples: 0 })));
}

#[test]
fn a_contradictory_sample_is_refused_by_name() {
    let mut sample = rollout();
    sample.log_probs.pop();
    let refused = collate(&[sample], Aggregation::TokenMean).unwrap_err();
    assert!(refused.to_string().starts_with("sample 2 of group 7: log_probs has 3 entries"), "{refused}");
}

#[test]
fn a_number_that_is_not_finite_is_refused_by_name() {
    let refused = collate(&[Sample { advantage: Some(f64::NAN), ..rollout() }], Aggregation::TokenMean).unwrap_err();
    assert_eq!(refused.to_string(), "sample 2 of group 7: its advantage is NaN; it must be a finite number");
    let mut sample = rollout();
    sample.log_probs[3] = f32::NEG_INFINITY;
    let refused = collate(&[sample], Aggregation::TokenMean).unwrap_err();
    assert_eq!(refused.to_string(), "sample 2 of group 7: its behaviour log-probability is -inf; it must be a finite number");
}

#[test]
fn tokens_that_nobody_sampled_are_on_policy_and_not_in_the_gap() {
    let batch = collate(&[rollout(), Sample::supervised(&[1], &[2])], Aggregation::TokenMean).unwrap();
    let packed = PackedColumns::new(&batch, &[1, 0]);
    assert_eq!((&packed.targets[..], &packed.sequences[..]), (&[2, 12, 13][..], &[0..1, 1..3][..]));
    assert_eq!(packed.gap(&[-9.0, -1.0, -0.25]).tokens, 2);
    assert_eq!(packed.gap(&[-9.0, -1.0, -0.25]).max(), 0.5);
    let seen = |inputs: &LossInputs| {
        assert_eq!(inputs.behaviour, Some(&[-9.0, -0.5, -0.25][..]));
        Ok(LossOutput { grad: vec![0.0; inputs.log_probs.len()], ..LossOutput::default() })
    };
    packed.evaluate(&seen, &OffPolicy::default(), &[-9.0, -1.0, -0.25], &[0.0; 3], 3).unwrap();
}

#[test]
fn batches_are_cyclic_and_always_full() {
    assert_eq!(collate_batch(&[1, 2, 3], 2, 0), [&1, &2]);
    assert_eq!(collate_batch(&[1, 2, 3], 2, 1), [&3, &1]);
    assert_eq!(collate_batch(&[1, 2], 5, 1), [&2, &1, &2, &1, &2]);
    assert_eq!(collate_batch::<u8>(&[], 5, 1), [&0u8; 0]);
}

/// A correction is a constant for the gradient. With the trust region at the trainer itself the
/// ratio is 1. The slope is the policy gradient's times the weight, which is 0 for rejected tokens.
#[test]
fn corrections_scale_the_slope_and_have_none_of_their_own() {
    use crate::algo::{Divergence, Grpo, Importance, Level, Over, Proximal, Rejection};
    let batch = collate(&[rollout(), Sample::supervised(&[1], &[2])], Aggregation::TokenMean).unwrap();
    let columns = PackedColumns { advantages: vec![2.0; 3], ..PackedColumns::new(&batch, &[0, 1]) };
    let weigh = Some(Importance::truncated(Level::Token, 1.2));
    let reject = vec![Rejection { divergence: Divergence::K2, over: Over::Token, min: None, max: 0.4 }];
    let off_policy = OffPolicy { proximal: Proximal::Recompute, weigh, reject };
    // Ratios exp(0.1), exp(-1) and, for the token that no policy sampled, 1.
    let output = columns.evaluate(&Grpo::default(), &off_policy, &[-0.4, -1.25, -7.0], &[0.0; 3], 3).unwrap();
    let expected = [0.1f64.exp(), 0.0, 1.0].map(|weight| -2.0 / 3.0 * weight);
    for (found, expected) in output.grad.iter().zip(expected) {
        assert!((found - expected).abs() < 1e-12, "{:?}", output.grad);
    }
    let seen = &output.metrics.correction;
    assert_eq!((seen.tokens, seen.dropped_tokens, seen.sequences, seen.dropped_sequences), (3, 1, 2, 1));
}

#[test]
fn a_token_lags_behind_the_version_that_is_trained() {
    let mut sample = rollout();
    sample.push(14, -1.0, 3);
    let batch = collate(&[sample, Sample::supervised(&[1], &[2])], Aggregation::TokenMean).unwrap();
    let lags = |batch: &TrainBatch| PackedColumns::new(batch, &[0, 1]).lags;
    assert_eq!(lags(&batch), [2, 2, 0, 0], "the newest that sampled is the one that is trained, unless told otherwise");
    let gap = PackedColumns::new(&batch.at_version(5), &[0, 1]).gap(&[-0.5, -0.25, -3.0, -1.0]);
    assert_eq!(gap.by_lag.iter().map(|(lag, of)| (*lag, of.tokens)).collect::<Vec<_>>(), [(2, 1), (4, 2)]);
    let worst = gap.worst.unwrap();
    assert_eq!((worst.group, worst.sample, worst.position, worst.token, worst.gap()), (7, 2, 4, 14, 2.0));
}

/// Padding is computed, too: a completion of 400 tokens among 15 of 30 would make a rectangle of
/// 6,400 tokens.
#[test]
fn rectangles_count_padding_and_keep_alike_lengths_together() {
    let sample = |length: usize| Sample::supervised(&[1], &vec![2; length]);
    let lengths = (0..16).map(|at| if at == 7 { 400 } else { 30 });
    let batch = collate(&lengths.map(sample).collect::<Vec<_>>(), Aggregation::TokenMean).unwrap();
    let parts = batch.rectangles(450, 1);
    let mut seen: Vec<usize> = parts.concat();
    seen.sort_unstable();
    assert_eq!(seen, (0..16).collect::<Vec<_>>(), "law N1: every sequence once");
    assert_eq!(parts[0], [7], "the long one by itself");
    let cells = |part: &Vec<usize>| part.len() * part.iter().map(|at| batch.sequences[*at].inputs.len()).max().unwrap();
    assert!(parts.iter().all(|part| cells(part) <= 450) && parts.len() == 2, "{parts:?}");
    assert_eq!(batch.rectangles(10_000, 4).len(), 4, "as many as compute at the same time");
    let mixed = [3, 9, 1, 5, 2].map(sample);
    let mixed = collate(&mixed, Aggregation::TokenMean).unwrap();
    assert_eq!(mixed.rectangles(1000, 1), [vec![1, 3], vec![0, 2, 4]], "in the batch's order: a loss may compare neighbours");
}

#[test]
fn a_loss_that_gives_other_derivatives_than_one_a_token_or_panics_is_refused_by_name() {
    let batch = collate(&[rollout()], Aggregation::TokenMean).unwrap();
    let columns = PackedColumns::new(&batch, &[0]);
    let refused = |grad: usize, entropy_grad: Option<usize>| {
        let loss = move |inputs: &LossInputs| {
            assert!(grad < 9, "out of ideas at {} tokens", inputs.log_probs.len());
            let entropy_grad = entropy_grad.map(|entries| vec![0.0; entries]);
            Ok(LossOutput { grad: vec![0.0; grad], entropy_grad, ..LossOutput::default() })
        };
        columns.evaluate(&loss, &OffPolicy::default(), &[-1.0; 2], &[0.0; 2], 2).map(drop).map_err(|error| error.to_string())
    };
    let text = |column: &str, found| {
        Err(format!("the loss `custom` gave {found} entries in `{column}` for 2 tokens; give one entry per token"))
    };
    assert_eq!((refused(2, None), refused(2, Some(2))), (Ok(()), Ok(())));
    assert_eq!((refused(1, None), refused(3, None)), (text("grad", 1), text("grad", 3)));
    assert_eq!(refused(2, Some(5)), text("entropy_grad", 5));
    assert_eq!(refused(9, None), Err("the loss `custom` panicked: out of ideas at 2 tokens".to_owned()));
}
