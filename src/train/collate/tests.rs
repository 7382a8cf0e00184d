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

fn supervised(length: usize) -> Sample {
    Sample::supervised(&[1], &vec![2; length])
}

/// Cost of a sequence without attention.
fn tokens(length: usize) -> f64 {
    length as f64
}

fn batch(samples: &[Sample]) -> TrainBatch {
    collate(samples, Aggregation::TokenMean).unwrap()
}

#[test]
fn a_row_predicts_the_token_after_it_and_takes_its_columns() {
    let collated = batch(&[rollout()]);
    let sequence = &collated.sequences[0];
    assert_eq!(sequence.inputs, [10, 11, 12]);
    assert_eq!(sequence.rows, [1, 2]);
    assert_eq!(sequence.targets, [12, 13]);
    assert_eq!(sequence.weights, [0.5, 0.5]);
    assert_eq!(sequence.behaviour, Some(vec![-0.5, -0.25]));
    assert_eq!(sequence.advantages, [2.0, 2.0]);
    assert_eq!((sequence.name().as_str(), collated.batch_tokens), ("sample 2 of group 7", 2));

    // Nothing is read past the last trained token, and the first is never a target.
    let sample = Sample { tokens: vec![1, 2, 3, 4, 5], loss_mask: vec![1.0, 0.0, 0.5, 0.0, 0.0], ..Sample::default() };
    let sequence = &batch(&[sample]).sequences[0];
    assert_eq!((&sequence.inputs[..], &sequence.targets[..], &sequence.weights[..]), (&[1, 2][..], &[3][..], &[1.0][..]));
    assert!(sequence.behaviour.is_none() && sequence.advantages[0].is_nan());
}

/// A pair is judged as one, also where one of its answers has nothing to train.
#[test]
fn denominators_come_from_the_whole_batch_whatever_is_cut_and_no_cut_divides_a_pair() {
    let apart = batch(&(1..6).map(supervised).collect::<Vec<_>>());
    assert!(apart.sequences.iter().flat_map(|sequence| &sequence.weights).all(|weight| *weight == 1.0 / 15.0));
    let masked = Sample { loss_mask: vec![0.0; 3], ..supervised(2) };
    let lengths = [3, 1, 2, 5, 1, 1, 1].map(supervised);
    let pairs = batch(&lengths.into_iter().chain([masked]).collect::<Vec<_>>());
    let pairs = TrainBatch { pairs: true, ..pairs };
    for (max_tokens, least) in (1..20).flat_map(|most| [(most, 1), (most, 3)]) {
        for (batch, together) in [(&apart, 1), (&pairs, 2)] {
            let parts = batch.micro_batches(max_tokens, least, tokens);
            assert_eq!(parts.concat(), batch.all());
            for part in parts {
                let size: usize = part.iter().map(|&at| batch.sequences[at].inputs.len()).sum();
                assert!(size <= max_tokens || part.len() == together);
                assert!(part.chunks(together).all(|run| run.len() == together && run[0] % together == 0), "{part:?}");
            }
        }
    }
}

/// Two rollouts, of which the second has two parts.
#[test]
fn the_parts_of_a_rollout_weigh_as_one_completion() {
    let further = Sample { index: 3, part: 1, ..rollout() };
    let samples = [rollout(), Sample { index: 3, ..rollout() }, further];
    let collated = collate(&samples, Aggregation::SeqMeanTokenMean).unwrap();
    let weights: Vec<&[f64]> = collated.sequences.iter().map(|sequence| &sequence.weights[..]).collect();
    assert_eq!(weights, [[0.25; 2], [0.125; 2], [0.125; 2]]);
    let (part, weight_sum) = collate_part(&samples[1..], Aggregation::SeqMeanTokenMean).unwrap();
    assert_eq!((part.unwrap().sequences[1].weights.as_slice(), weight_sum), (&[0.25; 2][..], 1.0), "law N1");
}

/// Law N1: of two halves that are cut by hand, an entropy bonus is a mean over the whole, and a loss
/// that compares all sequences refuses a half.
#[test]
fn parts_cut_by_hand_know_the_tokens_of_the_whole_batch() {
    use crate::algo::{BradleyTerry, PolicyLoss};
    let samples = [rollout(), Sample { index: 3, ..rollout() }];
    let size = BatchSize::of(&masks(&samples));
    let bonus = PolicyLoss { entropy_coef: 0.5, ..PolicyLoss::default() };
    let loss = |batch: &TrainBatch, loss: &dyn Loss| {
        let tokens = batch.sequences.iter().map(|sequence| sequence.rows.len()).sum();
        let (log_probs, entropies) = (vec![-0.5; tokens], vec![2.0; tokens]);
        batch.evaluate(&batch.all(), loss, &OffPolicy::default(), &log_probs, &entropies, None)
    };
    let halves = samples.chunks(1).map(|half| collate_in(half, Aggregation::TokenMean, &size).unwrap());
    let halves: Vec<TrainBatch> = halves.collect();
    let whole = loss(&batch(&samples), &bonus).unwrap();
    let parts: Vec<LossOutput> = halves.iter().map(|half| loss(half, &bonus).unwrap()).collect();
    assert!((parts[0].loss + parts[1].loss - whole.loss).abs() < 1e-12);
    assert_eq!(parts[0].entropy_grad, whole.entropy_grad.map(|grad| grad[..2].to_vec()));
    assert!(matches!(loss(&halves[0], &BradleyTerry::default()), Err(LossError::Part { seen: 2, of: 4, .. })));
}

#[test]
fn a_sample_that_no_reference_scored_leaves_no_half_column() {
    let scored = Sample { ref_log_probs: vec![0.0, 0.0, -1.0, -2.0], ..rollout() };
    let batch = batch(&[scored, rollout()]);
    assert_eq!(batch.sequences[0].reference, Some(vec![-1.0, -2.0]));
    let seen = |part: &[usize]| {
        let seen = std::sync::Mutex::new(None);
        let look = |inputs: &LossInputs| {
            *seen.lock().unwrap() = Some(inputs.reference.map(<[f64]>::to_vec));
            Ok(LossOutput { grad: vec![0.0; inputs.log_probs.len()], ..LossOutput::default() })
        };
        let zeros = vec![0.0; 2 * part.len()];
        batch.evaluate(part, &look, &OffPolicy::default(), &zeros, &zeros, None).unwrap();
        seen.into_inner().unwrap().unwrap()
    };
    assert_eq!((seen(&[0]), seen(&[0, 1])), (Some(vec![-1.0, -2.0]), None));
}

#[test]
fn sequences_without_trained_tokens_are_not_read() {
    let given = Sample { tokens: vec![1, 2], loss_mask: vec![0.0, 0.0], ..Sample::default() };
    let batch = collate(&[given.clone(), supervised(1)], Aggregation::SeqMeanTokenMean).unwrap();
    assert_eq!(batch.micro_batches(100, 1, tokens), [[1]]);
    assert_eq!(batch.sequences[1].weights, [0.5]);
    for samples in [vec![given], Vec::new()] {
        let error = collate(&samples, Aggregation::TokenMean).unwrap_err();
        assert!(matches!(error, TrainError::NothingToTrain(found) if found == samples.len()), "{error}");
    }
}

#[test]
fn a_bad_sample_is_refused_by_name() {
    let changed = |change: fn(&mut Sample)| {
        let mut sample = rollout();
        change(&mut sample);
        sample
    };
    let cases = [
        (changed(|sample| sample.log_probs.truncate(3)), "log_probs has 3 entries"),
        (changed(|sample| sample.advantage = Some(f64::NAN)), "its advantage is NaN; it must be a finite number"),
        (
            changed(|sample| sample.log_probs[3] = f32::NEG_INFINITY),
            "its behaviour log-probability is -inf; it must be a finite number",
        ),
        (
            changed(|sample| sample.ref_log_probs = vec![0.0, 0.0, f32::NAN, -2.0]),
            "its reference log-probability is NaN; it must be a finite number",
        ),
    ];
    for (sample, problem) in cases {
        let error = collate(&[sample], Aggregation::TokenMean).unwrap_err().to_string();
        assert!(error.starts_with(&format!("sample 2 of group 7: {problem}")), "{error}");
    }
}

#[test]
fn tokens_that_no_policy_sampled_are_on_policy_and_not_in_the_gap() {
    let batch = batch(&[rollout(), supervised(1)]);
    let gap = batch.gap(&[1, 0], &[-9.0, -1.0, -0.25]);
    assert_eq!((gap.tokens, gap.max()), (2, 0.5));
    let seen = |inputs: &LossInputs| {
        assert_eq!((inputs.behaviour, inputs.sequences), (Some(&[-9.0, -0.5, -0.25][..]), &[0..1, 1..3][..]));
        Ok(LossOutput { grad: vec![0.0; inputs.log_probs.len()], ..LossOutput::default() })
    };
    batch.evaluate(&[1, 0], &seen, &OffPolicy::default(), &[-9.0, -1.0, -0.25], &[0.0; 3], None).unwrap();
}

/// A correction is a constant for the gradient. With the trust region at the trainer itself the
/// ratio is 1. The slope is the policy gradient's times the weight, which is 0 for rejected tokens. A
/// ratio of the whole sequence is that of the tokens that are kept.
#[test]
fn corrections_scale_the_slope_and_have_none_of_their_own() {
    use crate::algo::{Divergence, Grpo, Importance, Level, Over, Proximal, Rejection};
    let batch = batch(&[rollout(), Sample { advantage: Some(2.0), ..supervised(1) }]);
    let weigh = Some(Importance::truncated(Level::Token, 1.2));
    let reject = vec![Rejection { divergence: Divergence::K2, over: Over::Token, min: None, max: 0.4 }];
    let off_policy = OffPolicy { proximal: Proximal::Recompute, weigh, reject };
    // Ratios exp(0.1), exp(-1) and, for the token that no policy sampled, 1.
    for level in [Level::Token, Level::Geometric] {
        let loss = Grpo { level, ..Grpo::default() };
        let output = batch.evaluate(&[0, 1], &loss, &off_policy, &[-0.4, -1.25, -7.0], &[0.0; 3], None).unwrap();
        let expected = [0.1f64.exp(), 0.0, 1.0].map(|weight| -2.0 / 3.0 * weight);
        for (found, expected) in output.grad.iter().zip(expected) {
            assert!((found - expected).abs() < 1e-12, "{level:?}: {:?}", output.grad);
        }
        let seen = &output.metrics.correction;
        assert_eq!((seen.tokens, seen.dropped_tokens, seen.sequences, seen.dropped_sequences), (3, 1, 2, 1));
    }
}

#[test]
fn a_token_lags_behind_the_version_that_is_trained() {
    let mut sample = rollout();
    sample.push(14, -1.0, 3);
    let batch = batch(&[sample, supervised(1)]);
    let gap = |batch: &TrainBatch| batch.gap(&[0, 1], &[-0.5, -0.25, -3.0, -1.0]);
    let lags = |gap: &LogProbGap| gap.by_lag.iter().map(|(lag, of)| (*lag, of.tokens)).collect::<Vec<_>>();
    assert_eq!(lags(&gap(&batch)), [(0, 1), (2, 2)], "by default, the newest version that sampled is the one trained");
    let gap = gap(&TrainBatch { version: 5, ..batch });
    assert_eq!(lags(&gap), [(2, 1), (4, 2)]);
    let worst = gap.worst.unwrap();
    assert_eq!((worst.group, worst.sample, worst.position, worst.token, worst.gap()), (7, 2, 4, 14, 2.0));
}

/// Padding is computed, too: a completion of 400 tokens among 15 of 30 would make a rectangle of
/// 6,400 tokens.
#[test]
fn rectangles_count_padding_and_keep_alike_lengths_together() {
    let lengths = (0..16).map(|at| if at == 7 { 400 } else { 30 });
    let long = batch(&lengths.map(supervised).collect::<Vec<_>>());
    let parts = long.rectangles(450, 1);
    let mut seen: Vec<usize> = parts.concat();
    seen.sort_unstable();
    assert_eq!(seen, long.all(), "law N1: every sequence once");
    assert_eq!(parts[0], [7], "the long one by itself");
    let cells = |part: &Vec<usize>| part.len() * part.iter().map(|at| long.sequences[*at].inputs.len()).max().unwrap();
    assert!(parts.iter().all(|part| cells(part) <= 450) && parts.len() == 2, "{parts:?}");
    assert_eq!(long.rectangles(10_000, 4).len(), 4, "as many as compute at the same time");
    let mixed = batch(&[3, 9, 1, 5, 2].map(supervised));
    assert_eq!(mixed.rectangles(1000, 1), [vec![1, 3], vec![0, 2, 4]], "in the batch's order: a loss may compare neighbours");
}

#[test]
fn a_loss_that_gives_other_derivatives_than_one_a_token_or_panics_is_refused_by_name() {
    let batch = batch(&[rollout()]);
    let refused = |grad: usize, entropy_grad: Option<usize>| {
        let loss = move |inputs: &LossInputs| {
            assert!(grad < 9, "out of ideas at {} tokens", inputs.log_probs.len());
            let entropy_grad = entropy_grad.map(|entries| vec![0.0; entries]);
            Ok(LossOutput { grad: vec![0.0; grad], entropy_grad, ..LossOutput::default() })
        };
        batch
            .evaluate(&[0], &loss, &OffPolicy::default(), &[-1.0; 2], &[0.0; 2], None)
            .map(drop)
            .map_err(|error| error.to_string())
    };
    let text = |column: &str, found| {
        Err(format!("the loss `custom` gave {found} entries in `{column}` for 2 tokens; give one entry per token"))
    };
    assert_eq!((refused(2, None), refused(2, Some(2))), (Ok(()), Ok(())));
    assert_eq!((refused(1, None), refused(3, None)), (text("grad", 1), text("grad", 3)));
    assert_eq!(refused(2, Some(5)), text("entropy_grad", 5));
    assert_eq!(refused(9, None), Err("the loss `custom` panicked: out of ideas at 2 tokens".to_owned()));
}
