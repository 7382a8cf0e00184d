//! Admission of prompts and the ledger of their tokens, without a graph.

use std::collections::BTreeMap;
use std::sync::Arc;

use proptest::prelude::*;
use rollflow::data::{Answer, Batch, Group, POISONED, Prompt, Sample, SampledToken, Scored, Status, Version};
use rollflow::rollout::{Admission, Fate, Ledger, OpenGroup, Pace, STALE, TRUNCATED};
use serde_json::json;

proptest! {
    /// Law V2: the largest lag over all groups is `worst_lag`, for any window.
    #[test]
    fn no_group_lags_more_than_the_worst_case(groups_per_version in 1u64..9, in_flight in 1u64..40) {
        let pace = Pace { groups_per_version, in_flight, total: None };
        let entered_under = |rank: u64| (1..).find(|version| pace.limit(*version, 0) >= rank).unwrap();
        // A window narrower than a version's groups would wait for a publish that never comes.
        prop_assume!(in_flight >= groups_per_version);
        let worst = (1..200).map(|rank| pace.trained_under(rank - 1) - entered_under(rank)).max().unwrap();
        prop_assert_eq!(worst, pace.worst_lag());
    }
}

#[test]
fn a_prompt_enters_only_after_the_first_publish_and_within_the_window() {
    let pace = Pace { groups_per_version: 32, in_flight: 64, total: Some(80) };
    assert_eq!(pace.limit(0, 0), 0, "law V4: no rollout before the first publish");
    assert_eq!(pace.limit(1, 0), 64);
    assert_eq!(pace.limit(1, 1), 65, "a dropped group gives its place back");
    assert_eq!(pace.limit(2, 1), 81, "no more than the run trains, and what was dropped");
}

/// Groups 0 to 5 in flight, two of them trained under each version, with a largest lag of 1.
fn open() -> Admission {
    let admission = Admission::max_staleness(1, 2);
    admission.published(1);
    (0..6).for_each(|ordinal| admission.enter(&Prompt { ordinal, ..Prompt::default() }));
    admission
}

/// The prompts as they re-enter after an interruption.
fn interrupted(admission: &Admission) -> Vec<Prompt> {
    admission.progress().ledger.open().map(OpenGroup::reentering).collect()
}

fn answer(version: Version) -> Answer {
    let mut answer = Answer::new(0);
    answer.push(7, -0.5, version);
    answer
}

#[test]
fn v2_an_answer_expires_when_it_would_be_too_old_in_its_turn() {
    let admission = open();
    let expired: Vec<_> = (0..6).filter(|ordinal| admission.expires(*ordinal, &answer(1), 1)).collect();
    assert_eq!(expired, [4, 5], "they are trained under version 3, when a token of version 1 is 2 behind");
    assert!(!admission.expires(4, &Answer::new(0), 1), "what has not begun can't");
    assert!(admission.expires(0, &answer(1), 3) && !admission.expires(0, &answer(2), 3), "nor is it trained under the past");
    admission.judged(0, 2);
    assert!(!admission.expires(5, &answer(1), 1), "dropped groups delay no other group");
    assert!(!Admission::new(2, 6, None).expires(5, &answer(1), 9), "without a bound nothing is too old");
}

#[test]
fn d4_what_is_not_resumed_is_counted_as_truncated() {
    let admission = open();
    for index in 0..3 {
        let status = if index == 2 { Status::Completed } else { Status::Pending };
        admission.sampled([SampledToken { ordinal: 0, index, token: 7, log_prob: -0.5, version: 1, status, routes: None }]);
    }
    let reentering = || interrupted(&admission).remove(0);
    let resumed = |version, usable: fn(&Answer) -> bool| {
        let mut prompt = reentering();
        let kept = admission.resume(&mut prompt, version, usable);
        assert!(prompt.partial.is_empty(), "they are off the prompt");
        kept.completions.into_iter().map(|answer| answer.index).collect::<Vec<_>>()
    };
    assert_eq!(resumed(1, |answer| answer.index != 1), [0, 2]);
    assert!(resumed(3, |_| true).is_empty(), "two versions later both are too old, the one that has ended too");
    let totals = admission.totals();
    assert_eq!((totals.tokens[&Fate::Truncated], totals.open_tokens, totals.imbalance()), (3, 0, (0, 0)));
}

#[test]
fn d7_partial_completions_that_a_prompt_brings_from_elsewhere_are_in_the_ledger_from_its_entry() {
    let admission = Admission::max_staleness(1, 2);
    admission.published(2);
    let mut prompt = Prompt { ordinal: 0, ..Prompt::default() };
    prompt.partial.completions = vec![answer(2)];
    admission.enter(&prompt);
    let totals = admission.totals();
    assert_eq!((totals.generated, totals.open_tokens, totals.imbalance()), (1, 1, (0, 0)), "law D4");
    assert_eq!(interrupted(&admission), [prompt.clone()], "a checkpoint has them");
    admission.enter(&prompt);
    assert_eq!(admission.totals(), totals, "a prompt that re-enters is counted once");
    assert_eq!(admission.resume(&mut prompt, 2, |_| true).completions, [answer(2)]);
}

/// A recorded group of four samples of `index + 1` tokens.
fn sampled(ledger: &mut Ledger, ordinal: u64) -> Group {
    let prompt = Prompt { ordinal, ..Prompt::default() };
    ledger.enter(&prompt, 1);
    let sample = |index: u32| {
        let mut sample = Sample::begin(&prompt, index, &[5]);
        (0..=index).for_each(|_| sample.push(7, -1.0, 1));
        sample.reward = Some(f64::from(index));
        sample
    };
    let samples: Vec<Sample> = (0..4).map(sample).collect();
    for sample in &samples {
        let status = Status::Pending;
        let token = SampledToken { ordinal, index: sample.index, token: 7, log_prob: -1.0, version: 1, status, routes: None };
        (0..=sample.index).for_each(|_| ledger.sampled(token.clone()));
    }
    Group { samples, prompt: Arc::new(prompt), ..Group::default() }
}

#[test]
fn d4_tokens_of_dropped_samples_have_the_fate_that_their_reason_names() {
    let mut ledger = Ledger::default();
    let (mut trained, mut rejected) = (sampled(&mut ledger, 0), sampled(&mut ledger, 1));
    assert_eq!(trained.drop_samples(POISONED, |sample| sample.index == 3), 1);
    assert_eq!(trained.drop_samples("duplicate", |sample| sample.index == 1), 1);
    rejected.drop_samples(TRUNCATED, |sample| sample.index == 0);
    let rejected = *Scored::new(rejected).unwrap().drop_for("zero_std".into()).settle().unwrap_err();
    let batch = Batch { groups: vec![trained], dropped: vec![rejected], ..Batch::default() };
    ledger.settle(&batch);
    let totals = ledger.totals();
    let tokens = [(Fate::Trained, 1 + 3), (Fate::Filtered, 2 + 9), (Fate::Truncated, 1), (Fate::Poisoned, 4)];
    assert_eq!((totals.tokens.clone(), totals.imbalance()), (BTreeMap::from(tokens), (0, 0)));
    assert_eq!(batch.dropped_samples().count(), 3);
}

#[test]
fn a_group_that_lost_all_samples_is_dropped_for_the_same_reason() {
    let mut ledger = Ledger::default();
    let mut group = sampled(&mut ledger, 0);
    group.drop_samples("odd", |sample| sample.index < 3);
    let mut scored = Scored::new(group).unwrap();
    assert_eq!(scored.dropped(), None);
    assert_eq!(scored.drop_samples(STALE, |_| true), 1);
    assert_eq!(scored.dropped(), Some(STALE));
    let dropped = *scored.settle().unwrap_err();
    ledger.settle(&Batch { dropped: vec![dropped], ..Batch::default() });
    let totals = ledger.totals();
    assert_eq!((totals.groups, totals.open_tokens), (BTreeMap::from([(Fate::Stale, 1)]), 0));
    assert_eq!(totals.tokens, BTreeMap::from([(Fate::Filtered, 6), (Fate::Stale, 4)]));
}

/// Law C1: the sums stand next to the open groups, as in the checkpoints of earlier versions.
#[test]
fn a_ledger_is_read_in_its_written_form_and_a_missing_sum_is_an_error() {
    let sums = json!({"entered": 3, "groups": {"trained": 2, "stale": 1}, "generated": 9, "tokens": {"trained": 7, "stale": 2}});
    let mut written = json!({"next": 3, "open": {}});
    written.as_object_mut().unwrap().extend(sums.as_object().unwrap().clone());
    let ledger: Ledger = serde_json::from_str(&written.to_string()).unwrap();
    let totals = ledger.totals();
    assert_eq!((totals.entered, totals.generated, totals.imbalance()), (3, 9, (0, 0)));
    assert_eq!(totals.groups, BTreeMap::from([(Fate::Trained, 2), (Fate::Stale, 1)]));
    assert_eq!(serde_json::to_value(&ledger).unwrap(), written, "no key is added or renamed");
    for key in ["next", "entered", "open", "groups", "generated", "tokens"] {
        let mut without = written.clone();
        without.as_object_mut().unwrap().remove(key);
        let error = serde_json::from_str::<Ledger>(&without.to_string()).unwrap_err().to_string();
        assert!(error.contains(&format!("missing field `{key}`")), "{error}");
    }
    let mut open = Ledger::default();
    sampled(&mut open, 7);
    let again: Ledger = serde_json::from_slice(&serde_json::to_vec(&open).unwrap()).unwrap();
    assert_eq!(again, open);
}
