//! Samples, version spans, groups and batches: what they hold, refuse and turn into (laws D1, D2, D3, D5).

use proptest::prelude::*;
use rollflow::data::{Batch, ChatMessage, Group, Prompt, PromptText, RolloutBatch, Sample, Spans, Status};
use rollflow::flow::Message;
use serde_json::json;

fn sampled() -> Sample {
    let mut sample = Sample::begin(&Prompt { ordinal: 4, ..Prompt::from("2+2=") }, 1, &[10, 11, 12]);
    sample.push(20, -0.5, 7);
    sample.push(1, -0.25, 8);
    sample
}

#[test]
fn a_sampled_token_carries_log_probability_version_and_weight() {
    let sample = sampled();
    assert_eq!(sample.tokens, [10, 11, 12, 20, 1]);
    assert_eq!(sample.loss_mask, [0.0, 0.0, 0.0, 1.0, 1.0]);
    assert_eq!(sample.log_probs, [0.0, 0.0, 0.0, -0.5, -0.25]);
    assert_eq!(sample.versions.per_token().collect::<Vec<_>>(), [None, None, None, Some(7), Some(8)]);
    assert_eq!((sample.group_index, sample.generated(), sample.response_length()), (4, 2, 2));
    sample.validate().unwrap();
}

#[test]
fn tokens_of_older_weights_can_be_masked_and_given_ones_stay_what_they_were() {
    let mut sample = sampled();
    sample.loss_mask[0] = 0.5;
    sample.mask_older();
    assert_eq!(sample.loss_mask, [0.5, 0.0, 0.0, 0.0, 1.0]);
    let mut given = Sample::supervised(&[1], &[2]);
    given.mask_older();
    assert_eq!(given, Sample::supervised(&[1], &[2]));
}

#[test]
fn a_truncated_sample_can_be_masked_and_a_complete_one_stays_what_it_was() {
    for (status, mask) in [(Status::Truncated, [0.0; 5]), (Status::Completed, [0.0, 0.0, 0.0, 1.0, 1.0])] {
        let mut sample = Sample { status, ..sampled() };
        sample.mask_truncated();
        assert_eq!((&sample.loss_mask[..], sample.generated()), (&mask[..], 2), "what was sampled stays counted");
    }
}

#[test]
fn a_mask_of_another_length_is_refused_with_both_lengths() {
    let sample = Sample { loss_mask: vec![1.0; 3], ..sampled() };
    let error = sample.validate().unwrap_err();
    assert_eq!(error.to_string(), "sample 1 of group 4: loss_mask has 3 entries for 5 tokens; they must be equally many");
}

#[test]
fn other_columns_are_empty_or_as_long_as_the_tokens() {
    for (sample, expected) in [
        (Sample { ref_log_probs: vec![0.0], ..sampled() }, "ref_log_probs has 1 entries for 5 tokens"),
        (Sample { log_probs: vec![0.0], ..sampled() }, "log_probs has 1 entries for 5 tokens"),
        (Sample { versions: Spans::given(6), ..sampled() }, "versions has 6 entries for 5 tokens"),
    ] {
        let error = sample.validate().unwrap_err().to_string();
        assert!(error.contains(&format!(": {expected}")), "{error}");
    }
    let supervised = Sample::supervised(&[1, 2], &[3]);
    supervised.validate().unwrap();
    assert_eq!(supervised.loss_mask, [0.0, 0.0, 1.0]);
}

#[test]
fn mask_weights_may_be_fractions_but_not_negative_or_unreal() {
    Sample { loss_mask: vec![0.0, 0.25, 0.5, 1.0, 2.0], ..sampled() }.validate().unwrap();
    for value in [-0.5, f32::NAN, f32::INFINITY] {
        let error = Sample { loss_mask: vec![0.0, 0.0, 0.0, value, 1.0], ..sampled() }.validate().unwrap_err();
        assert!(error.to_string().contains("loss_mask[3]"), "{error}");
    }
}

#[test]
fn statuses_are_lower_case_words() {
    let words = [Status::Pending, Status::Completed, Status::Truncated, Status::Aborted].map(|status| json!(status));
    assert_eq!(words, ["pending", "completed", "truncated", "aborted"]);
}

#[test]
fn a_batch_has_one_row_a_sample_in_every_column() {
    let chat = vec![ChatMessage::new("user", "hi")];
    let mut first = Sample { reward: Some(1.0), response: "4".into(), ..sampled() };
    first.prompt = "2+2=".into();
    first.metadata.insert("correct".into(), true.into());
    let mut second = Sample { prompt: PromptText::Chat(chat), loss_mask: vec![0.0, 0.5, 0.0, 0.0, 0.0], ..sampled() };
    second.metadata.insert("level".into(), 3.into());

    let batch = RolloutBatch::new(vec![first.clone(), second.clone()], 2, 9);
    assert_eq!(batch.samples, [first.clone(), second.clone()]);
    assert_eq!(batch.tokens, [first.tokens, second.tokens]);
    assert_eq!(batch.loss_masks, [first.loss_mask, second.loss_mask]);
    assert_eq!(batch.response_lengths, [2, 1], "tokens that weigh above zero");
    assert!(batch.rewards[0] == 1.0 && batch.rewards[1].is_nan());
    assert_eq!(
        json!(batch.metadata),
        json!({
            "epoch_id": 2, "step_id": 9, "batch_size": 2,
            "prompts": ["2+2=", "user: hi\nassistant: "], "responses": ["4", ""],
            "sample_correct": [true, null], "sample_level": [null, 3],
        })
    );
}

#[test]
fn an_empty_batch_has_empty_columns() {
    let batch = RolloutBatch::new(Vec::new(), 0, 0);
    assert!(batch.tokens.is_empty() && batch.rewards.is_empty() && batch.response_lengths.is_empty());
    assert_eq!(batch.metadata["batch_size"], 0);
}

#[test]
fn groups_and_batches_weigh_what_their_samples_weigh() {
    let group = Group {
        prompt: Prompt { ordinal: 4, ..Prompt::default() }.into(),
        samples: vec![sampled(), sampled()],
        ..Group::default()
    };
    let batch = Batch { groups: vec![group.clone(), group.clone()], ..Batch::default() };
    assert_eq!((group.id(), group.generated(), group.tokens()), (4, 4, 10));
    assert_eq!((batch.len(), batch.tokens(), batch.samples().count()), (4, 20, 4));
}

/// One origin per token, the way nobody wants to store it.
fn runs() -> impl Strategy<Value = Vec<(Option<u64>, usize)>> {
    prop::collection::vec((prop::option::of(0_u64..4), 0_usize..5), 0..12)
}

fn built(runs: &[(Option<u64>, usize)]) -> (Spans, Vec<Option<u64>>) {
    let mut spans = Spans::default();
    let mut naive = Vec::new();
    for &(version, len) in runs {
        spans.extend(version, len);
        naive.extend(std::iter::repeat_n(version, len));
    }
    (spans, naive)
}

proptest! {
    #[test]
    fn spans_say_what_a_list_of_origins_says(runs in runs(), keep in 0_usize..60) {
        let (mut spans, mut naive) = built(&runs);
        spans.truncate(keep);
        naive.truncate(keep);
        prop_assert_eq!(spans.per_token().collect::<Vec<_>>(), naive.clone());
        prop_assert_eq!((spans.len(), spans.is_empty()), (naive.len(), naive.is_empty()));
        prop_assert_eq!(spans.generated(), naive.iter().flatten().count());
        prop_assert_eq!(spans.oldest(), naive.iter().flatten().min().copied());
        prop_assert_eq!(spans.newest(), naive.iter().flatten().max().copied());
    }

    #[test]
    fn spans_merge_neighbours_so_that_equal_origins_are_equal_spans(runs in runs()) {
        let (spans, naive) = built(&runs);
        let mut one_by_one = Spans::default();
        for version in &naive {
            one_by_one.extend(*version, 1);
        }
        prop_assert_eq!(&spans, &one_by_one);
        let stored: Vec<_> = spans.iter().collect();
        prop_assert!(stored.iter().all(|(_, len)| *len > 0));
        prop_assert!(stored.windows(2).all(|pair| pair[0].0 != pair[1].0));
    }

    // Rewards here are short decimals: serde_json reads longer 64-bit ones to the last bit only with its feature `float_roundtrip`.
    #[test]
    fn a_sample_survives_json_exactly(
        runs in runs(), prompt in any::<String>(), response in any::<String>(), log_prob in -1e3_f32..0.0, weight in 0.0_f32..4.0,
        reward in prop::option::of(any::<i16>().prop_map(|n| f64::from(n) / 1024.0)), key in "\\PC{0,8}",
    ) {
        let (versions, naive) = built(&runs);
        let mut sample = Sample { prompt: prompt.into(), response, versions, status: Status::Truncated, ..Sample::default() };
        sample.tokens = (0..naive.len() as u32).collect();
        sample.loss_mask = vec![weight; naive.len()];
        sample.log_probs = vec![log_prob; naive.len()];
        sample.ref_log_probs = vec![log_prob - 1.0; naive.len()];
        (sample.reward, sample.advantage) = (reward, reward.map(|reward| -reward / 4.0));
        sample.metadata.insert(key, json!(reward));
        let untouched = sample.clone();
        let line = serde_json::to_string(&sample).unwrap();
        prop_assert_eq!(&serde_json::from_str::<Sample>(&line).unwrap(), &untouched);
        prop_assert_eq!(sample, untouched);
    }
}
