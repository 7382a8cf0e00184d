//! Groups: filters, pairs, problems of a batch.

use std::sync::Arc;

use proptest::prelude::*;
use rollflow::algo::filters::{GroupFilter, Verdict, any_completed, diversity, length, min_reward, nonzero_std, std_above};
use rollflow::algo::rollouts::{batch_issues, inspect_sample};
use rollflow::algo::{PairOf, all_pairs, best_against_worst, random_pair};
use rollflow::data::{Batch, Group, Prompt, Sample, Status};

/// A group of these rewards. Samples have two trained tokens; every second one has the same tokens,
/// and the first alone is completed.
fn group(ordinal: u64, rewards: &[f64]) -> Group {
    let sample = |(i, &reward): (usize, &f64)| Sample {
        reward: Some(reward),
        tokens: vec![i as u32 % 2; 3],
        loss_mask: vec![0.0, 1.0, 1.0],
        status: if i == 0 { Status::Completed } else { Status::Truncated },
        ..Sample::default()
    };
    let samples = rewards.iter().enumerate().map(sample).collect();
    Group { prompt: Arc::new(Prompt { ordinal, ..Prompt::default() }), samples, ..Group::default() }
}

/// Verdict of a filter on a group with these rewards: the reason, or "kept".
fn verdict(filter: impl GroupFilter, rewards: &[f64]) -> String {
    match filter(&group(0, rewards)) {
        Verdict::Keep => "kept".to_owned(),
        Verdict::Drop(reason) => reason.into_owned(),
    }
}

#[test]
fn only_groups_whose_rewards_differ_teach() {
    assert_eq!(verdict(nonzero_std, &[0.0, 1.0]), "kept");
    for constant in [&[0.1; 7][..], &[1.0], &[], &[1.0, 1.0 + 1e-7], &[1.0, f64::NAN]] {
        assert_eq!(verdict(nonzero_std, constant), "zero_std", "{constant:?}");
    }
}

#[test]
fn d2_the_parts_of_a_rollout_count_once_in_the_spread_of_its_group() {
    let mut group = group(0, &[0.0, 1.0]);
    let last = group.samples[1].clone();
    group.samples.extend((1..7).map(|part| Sample { part, ..last.clone() }));
    assert!(std_above(0.4)(&group).kept(), "the standard deviation of two rollouts is 0.5");
}

#[test]
fn each_filter_keeps_its_bound_and_says_why_it_drops() {
    let reward = |least| min_reward(least).unwrap();
    assert_eq!((verdict(reward(0.5), &[0.51, 0.1]), verdict(reward(0.5), &[0.5, 0.1])), ("kept".into(), "low_reward".into()));
    let distinct = |ratio| verdict(diversity(ratio).unwrap(), &[1.0; 4]);
    assert_eq!((distinct(0.5), distinct(0.51)), ("kept".into(), "low_diversity".into()));
    let long = |min, max| verdict(length(min, max).unwrap(), &[1.0]);
    assert_eq!((long(2, 2), long(3, 9)), ("kept".into(), "length".into()));
    assert_eq!((verdict(any_completed, &[0.0; 2]), verdict(any_completed, &[])), ("kept".into(), "none_completed".into()));
}

#[test]
fn closures_combine_and_reasons_survive() {
    let lone = |group: &Group| Verdict::keep_if(group.samples.len() > 1, "lone");
    let both = || lone.and(min_reward(0.5).unwrap());
    assert_eq!((verdict(both(), &[1.0]), verdict(both(), &[0.0, 0.0])), ("lone".into(), "low_reward".into()));
    let either = || lone.or(min_reward(0.5).unwrap());
    assert_eq!([verdict(either(), &[1.0]), verdict(either(), &[0.0, 0.0])], ["kept", "kept"]);
    assert_eq!(verdict(either(), &[0.0]), "lone_and_low_reward");
}

#[test]
fn bounds_that_make_no_sense_are_refused() {
    assert!(min_reward(f64::NAN).is_err());
    assert!(diversity(0.0).is_err() && diversity(1.1).is_err());
    assert_eq!(length(5, 4).err().unwrap().to_string(), "length bounds 5..=4 are empty; give min ≤ max and max ≥ 1");
    assert!(length(0, 0).is_err());
}

#[test]
fn r166_ties_give_no_pair() {
    let tied = group(0, &[0.5, 0.5, 0.5]);
    assert!(best_against_worst(&tied).is_empty() && all_pairs(&tied).is_empty() && random_pair(1)(&tied).is_empty());
    assert!(best_against_worst(&group(0, &[])).is_empty());
    let differing = group(1, &[0.0, 1.0, 0.5, 1.0, 0.0]);
    assert_eq!(best_against_worst(&differing), [PairOf { chosen: 1, rejected: 0 }]);
    assert_eq!(all_pairs(&differing).len(), 8, "6 of a 1 against less, 2 of the 0.5");
}

#[test]
fn a_random_pair_is_the_same_for_the_same_group_and_seed_and_any_of_them() {
    let rewards = [0.0, 1.0, 0.5];
    let drawn: Vec<PairOf> = (0..200).flat_map(|id| random_pair(7)(&group(id, &rewards))).collect();
    assert_eq!(drawn, (0..200).flat_map(|id| random_pair(7)(&group(id, &rewards))).collect::<Vec<_>>());
    for pair in all_pairs(&group(0, &rewards)) {
        let share = drawn.iter().filter(|other| **other == pair).count() as f64 / 200.0;
        assert!((share - 1.0 / 3.0).abs() < 0.12, "{pair:?}: {share}");
    }
}

proptest! {
    #[test]
    fn the_chosen_one_always_earned_more(rewards in prop::collection::vec(-2.0f64..2.0, 0..9), seed in any::<u64>()) {
        let group = group(seed, &rewards);
        for pair in [best_against_worst(&group), all_pairs(&group), random_pair(seed)(&group)].concat() {
            prop_assert!(rewards[pair.chosen] > rewards[pair.rejected]);
        }
    }
}

/// A valid sample of four tokens, two of them sampled.
fn scored(group: u64, index: u32) -> Sample {
    let mut sample = Sample::begin(&Prompt { ordinal: group, ..Prompt::from("3+4=") }, index, &[1, 2]);
    sample.push(3, -0.5, 1);
    sample.push(4, -0.25, 1);
    Sample { reward: Some(1.0), status: Status::Completed, ..sample }
}

/// A batch of one group.
fn batch(samples: Vec<Sample>) -> Batch {
    Batch { groups: vec![Group { samples, ..Group::default() }], ..Batch::default() }
}

#[test]
fn all_problems_of_a_sample_are_reported_together() {
    let mut sample = scored(0, 0);
    assert_eq!(batch_issues(&batch(vec![sample.clone()])), [""; 0]);
    let mut unknown = sample.clone();
    unknown.versions.truncate(0);
    unknown.versions.extend(None, unknown.tokens.len());
    assert!(batch_issues(&batch(vec![unknown]))[0].ends_with("is trained, but no version of the weights sampled it"));
    sample.loss_mask.pop();
    sample.loss_mask[0] = f32::NAN;
    sample.log_probs[1] = 0.5;
    sample.reward = Some(f64::INFINITY);
    let expected = [
        "loss_mask has 3 entries for 4 tokens; they must be equally many",
        "loss_mask[0] is NaN; a mask weight is a finite number ≥ 0",
        "log_probs[1] is 0.5, not the logarithm of a probability",
        "its reward is inf, not a finite number",
    ];
    assert_eq!(batch_issues(&batch(vec![sample])), expected.map(|problem| format!("sample 0 of group 0: {problem}")));
    let given = Sample::begin(&"3+4=".into(), 0, &[1, 2]);
    assert_eq!(batch_issues(&batch(vec![given])), ["sample 0 of group 0: it has no trained token"]);
}

#[test]
fn a_batch_names_groups_that_are_not_what_they_should_be() {
    let group = |id| Group {
        prompt: Arc::new(Prompt { ordinal: id, ..Prompt::from("3+4=") }),
        samples: (0..2).map(|index| scored(id, index)).collect(),
        ..Group::default()
    };
    let mut batch = Batch { groups: (0..4).map(group).collect(), ..Batch::default() };
    assert!(batch_issues(&batch).is_empty());
    let mut uneven = batch.clone();
    uneven.groups[0].samples.remove(0);
    uneven.groups[1].samples[1] = Sample { part: 1, ..scored(1, 0) };
    assert!(batch_issues(&uneven).is_empty(), "a sample was dropped, and a rollout has two parts");
    uneven.groups[1].samples[1].part = 0;
    assert_eq!(batch_issues(&uneven), ["sample 0 of group 1: it is there twice"]);
    batch.groups.swap(0, 1);
    batch.groups[2].samples.clear();
    batch.groups[3].samples[0].group_index = 9;
    batch.groups[3].samples.swap(0, 1);
    let last = batch.groups[3].clone();
    batch.groups.push(last);
    let issues = batch_issues(&batch);
    assert_eq!(
        issues[..4],
        [
            "group 0: it follows a group of a larger id",
            "group 2: it has no sample",
            "sample 0 of group 3: it belongs to group 9",
            "sample 0 of group 3: it follows sample 1",
        ]
    );
    assert!(issues.contains(&"group 3: it is there twice".to_owned()));
}

#[test]
fn a_page_has_a_line_for_every_token() {
    let mut sample = Sample::begin(&"3+4=".into(), 1, &[5, 6]);
    sample.push(7, -0.25, 3);
    sample.reward = Some(1.0);
    sample.reward_parts.insert("form".to_owned(), 0.5);
    let page = inspect_sample(&sample);
    let lines: Vec<&str> = page.lines().collect();
    assert_eq!(lines[0], "sample 1 of group 0 (Pending)");
    assert_eq!(lines[4], "    form 0.5");
    assert_eq!(lines[6], "  tokens     3: 1 sampled, 1 trained");
    assert_eq!(
        lines[8..],
        [
            "      0        5    0.00    0.0000        -",
            "      1        6    0.00    0.0000        -",
            "      2        7    1.00   -0.2500        3"
        ]
    );
}
