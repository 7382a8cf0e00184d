//! Rewards that panic, err or give no number (laws F6, N4): they are called again a bounded number of times, then their group is a dead
//! letter and the run goes on, without the group where the reward has a defect, without the sample where that was lost; the sample is named, the policy decides, nothing is lost and nothing waits for ever.

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex};

use proptest::prelude::*;
use rollflow::algo::filters::Verdict;
use rollflow::data::POISONED;
use rollflow::flow::Capacity;
use rollflow::flow::from_iter;
use rollflow::flow::{Report, RunError};
use rollflow::observe::Metric;
use rollflow::observe::logs::{DEAD_LETTERS, DeadLetter, Failure, FailureKind, dead_letters, read_lines};
use rollflow::prelude::*;
use rollflow::rollout::Admission;
use rollflow::rollout::LOST;
use rollflow::stages::reward::{FailurePolicy, OnFailure, OnLostSample, RewardOutput};

fn group(id: u64) -> Group {
    let prompt = Prompt { ordinal: id, ..Prompt::from(format!("prompt {id}")) };
    let sample = |index| {
        let mut sample = Sample::begin(&prompt, index, &[1, 2]);
        sample.push(3, -0.5, 1);
        sample.response = format!("answer {index}");
        sample
    };
    Group { samples: (0..4).map(sample).collect(), prompt: Arc::new(prompt), ..Group::default() }
}

/// Id, why it was dropped, rewards.
type Scores = Vec<(u64, Option<String>, Vec<f64>)>;

/// Scores `groups` groups over the narrowest edges; gives what arrived behind the reward.
fn score(groups: u64, reward: Reward) -> (Result<Report, RunError>, Scores) {
    let scores: Arc<Mutex<Scores>> = Arc::default();
    let seen = Arc::clone(&scores);
    let mut flow = Flow::new("rewards");
    flow.capacity(Capacity::items(1));
    let groups = flow.source("groups", from_iter((0..groups).map(group)));
    let scored = flow.stage("judge", groups, reward);
    flow.sink("seen", scored, move |scored: Scored| {
        let why = scored.dropped().map(str::to_owned);
        seen.lock().unwrap().push((scored.group().id(), why, scored.group().rewards()));
    });
    let result = flow.run(Until::finished());
    let scores = std::mem::take(&mut *scores.lock().unwrap());
    (result, scores)
}

pub(crate) fn letters(folder: &Path) -> Vec<DeadLetter> {
    read_lines::<DeadLetter>(folder.join(DEAD_LETTERS)).unwrap().map(Result::unwrap).collect()
}

/// Fails in its own way at sample 1 of group 2.
fn failing(how: Way) -> impl Fn(&Sample) -> f64 + Send + Sync + 'static {
    move |sample| if (sample.group_index, sample.index) == (2, 1) { how() } else { f64::from(sample.index) }
}

/// The default policy, with letters in this folder.
fn letters_to(folder: &Path) -> FailurePolicy {
    FailurePolicy { dead_letters: Some(dead_letters(folder)), ..FailurePolicy::default() }
}

type Way = fn() -> f64;

const WAYS: [(Way, &str); 5] = [
    (|| panic!("no such key"), "it panicked: no such key"),
    (|| f64::NAN, "it gave NaN, not a finite number"),
    (|| f64::INFINITY, "it gave inf, not a finite number"),
    (|| f64::NEG_INFINITY, "it gave -inf, not a finite number"),
    (|| 1.7e308, "it gave 1.7e308, and a reward is at most 1e100 either way"),
];

#[test]
fn by_default_a_poisoned_group_becomes_a_letter_that_says_all_and_the_run_goes_on() {
    let kinds =
        [FailureKind::Panicked, FailureKind::NotFinite, FailureKind::NotFinite, FailureKind::NotFinite, FailureKind::TooLarge];
    let texts = ["no such key", "NaN", "inf", "-inf", "1.7e308"];
    for ((how, _), (kind, text)) in WAYS.into_iter().zip(kinds.into_iter().zip(texts)) {
        let folder = tempfile::tempdir().unwrap();
        let metrics = Metrics::new();
        let reward =
            Reward::each(failing(how)).failures(FailurePolicy { metrics: Some(metrics.clone()), ..letters_to(folder.path()) });
        let (result, scores) = score(5, reward);
        result.unwrap();
        let dropped: Vec<Option<&str>> = scores.iter().map(|(_, why, _)| why.as_deref()).collect();
        assert_eq!(dropped, [None, None, Some(POISONED), None, None], "law D2: whole groups");

        let [letter] = letters(folder.path()).try_into().unwrap();
        assert_eq!(letter.stage, "judge", "by its name in the graph");
        assert_eq!(letter.failures, [Failure { sample: 1, attempts: 3, kind, text: text.into() }]);
        assert!(letter.time > 1.6e9, "seconds since 1970");
        let mut lost = group(2);
        lost.samples.iter_mut().for_each(|sample| sample.reward = (sample.index != 1).then(|| f64::from(sample.index)));
        assert_eq!(letter.group(), lost, "prompt, tokens, log-probabilities, spans, metadata, and what the others earned");
        assert_eq!(metrics.newest(Metric::DeadLetters, &["judge"]), Some(1.0));
        assert_eq!(metrics.newest(Metric::RewardFailures, &[]), Some(3.0));
    }
}

/// An alert sees no growth in a counter that begins with its first failures.
#[test]
fn dead_letters_are_counted_from_0_before_any_failure() {
    let metrics = Metrics::new();
    let reward = Reward::each(|_: &Sample| 1.0);
    score(1, reward.failures(FailurePolicy { metrics: Some(metrics.clone()), ..FailurePolicy::default() })).0.unwrap();
    assert_eq!(metrics.newest(Metric::DeadLetters, &["judge"]), Some(0.0));
}

#[test]
fn a_reward_that_errs_is_a_failure_with_its_text() {
    let folder = tempfile::tempdir().unwrap();
    let reward = |sample: &Sample| sample.answer().map(|_| 1.0).ok_or("no answer to compare with");
    let reward = Reward::each(reward).retries(0).failures(letters_to(folder.path()));
    score(1, reward).0.unwrap();
    let failures = &letters(folder.path())[0].failures;
    assert_eq!(failures.len(), 4, "all samples that failed are named");
    assert_eq!(failures[3].to_string(), "it refused: no answer to compare with (1 attempt)");
}

/// Loses these samples of group 2.
fn losing(lost: &'static [u32]) -> Reward {
    Reward::each(move |sample: &Sample| match sample.group_index == 2 && lost.contains(&sample.index) {
        true => Err("the sandbox is gone"),
        false => Ok(f64::from(sample.index)),
    })
}

/// The scored groups, by a sink of their own.
fn scored(reward: Reward) -> Vec<Scored> {
    let all: Arc<Mutex<Vec<Scored>>> = Arc::default();
    let seen = Arc::clone(&all);
    let mut flow = Flow::new("lost");
    let groups = flow.source("groups", from_iter((0..5).map(group)));
    let scored = flow.stage("judge", groups, reward);
    flow.sink("seen", scored, move |scored: Scored| seen.lock().unwrap().push(scored));
    flow.run(Until::finished()).unwrap();
    std::mem::take(&mut *all.lock().unwrap())
}

#[test]
fn a_lost_sample_costs_itself_and_its_group_goes_on_with_the_others() {
    let folder = tempfile::tempdir().unwrap();
    let metrics = Metrics::new();
    let all = scored(losing(&[1]).failures(FailurePolicy { metrics: Some(metrics.clone()), ..letters_to(folder.path()) }));
    assert!(all.iter().all(|scored| scored.dropped().is_none()));
    let lessened = all[2].group();
    assert_eq!(lessened.samples.iter().map(|sample| sample.index).collect::<Vec<_>>(), [0, 2, 3]);
    let dropped: Vec<_> = lessened.dropped.iter().map(|lost| (lost.index, lost.reason.as_str(), lost.generated)).collect();
    assert_eq!(dropped, [(1, LOST, 1)], "law D4: its tokens have a fate of their own");
    let mut batch = Batch { groups: vec![lessened.clone()], ..Batch::default() };
    rollflow::train::assign_advantages(&mut batch, &GroupMean::default()).unwrap();
    let advantages: Vec<f64> = batch.samples().map(|sample| sample.advantage.unwrap()).collect();
    assert!(advantages.iter().sum::<f64>().abs() < 1e-9 && advantages[2] > 0.0, "compared among themselves: {advantages:?}");

    let [letter] = letters(folder.path()).try_into().unwrap();
    let text = "the sandbox is gone".to_owned();
    assert_eq!(letter.failures, [Failure { sample: 1, attempts: 3, kind: FailureKind::Refused, text }]);
    assert_eq!(letter.group().samples.len(), 4, "law F6: the whole group can be scored again");
    assert_eq!(metrics.newest(Metric::DeadLetters, &["judge"]), Some(1.0));
}

#[test]
fn a_group_that_is_left_with_fewer_than_two_samples_or_must_stay_whole_is_dropped_as_lost() {
    for (lost, on_lost_sample, dropped) in [
        (&[0, 3][..], OnLostSample::DropSample, None),
        (&[0, 1, 3], OnLostSample::DropSample, Some(LOST)),
        (&[0, 1, 2, 3], OnLostSample::DropSample, Some(LOST)),
        (&[3], OnLostSample::DropGroup, Some(LOST)),
    ] {
        let all = scored(losing(lost).failures(FailurePolicy { on_lost_sample, ..FailurePolicy::default() }));
        assert_eq!(all[2].dropped(), dropped, "{lost:?} {on_lost_sample:?}");
        assert_eq!(all[2].group().samples.len(), if dropped.is_some() { 4 } else { 4 - lost.len() });
    }
}

#[test]
fn a_lost_sample_earns_nothing_or_ends_the_run_where_that_is_asked_for() {
    let all = scored(losing(&[1]).on_failure(OnFailure::Zero));
    assert_eq!(all[2].group().rewards(), [0.0, 0.0, 2.0, 3.0]);
    let (result, _) = score(1000, losing(&[1]).on_failure(OnFailure::Fail));
    assert!(result.unwrap_err().to_string().contains("sample 1 of group 2"));
}

#[test]
fn samples_that_an_engine_or_an_environment_lost_are_not_judged() {
    let groups = (0..2).map(|id| {
        let mut group = group(id);
        let key = if id == 0 { "refused" } else { "environment_failure" };
        group.samples[2].status = Status::Aborted;
        group.samples[2].metadata.insert(key.to_owned(), "it went away".into());
        group
    });
    let all: Arc<Mutex<Vec<Scored>>> = Arc::default();
    let seen = Arc::clone(&all);
    let folder = tempfile::tempdir().unwrap();
    let mut flow = Flow::new("lost before");
    let groups = flow.source("groups", from_iter(groups));
    let reward = Reward::each(|_: &Sample| 1.0).failures(letters_to(folder.path()));
    let scored = flow.stage("judge", groups, reward);
    flow.sink("seen", scored, move |scored: Scored| seen.lock().unwrap().push(scored));
    flow.run(Until::finished()).unwrap();
    assert!(all.lock().unwrap().iter().all(|scored| scored.dropped().is_none() && scored.group().samples.len() == 3));
    for letter in letters(folder.path()) {
        let failure = &letter.failures[0];
        assert_eq!((letter.failures.len(), failure.kind), (1, FailureKind::Lost));
        assert_eq!(failure.to_string(), "it was lost: it went away (1 attempt)");
    }
}

#[test]
fn without_a_file_a_poisoned_group_is_dropped_and_counted_all_the_same() {
    let metrics = Metrics::new();
    let (result, scores) = score(
        5,
        Reward::each(failing(WAYS[0].0)).failures(FailurePolicy { metrics: Some(metrics.clone()), ..FailurePolicy::default() }),
    );
    result.unwrap();
    assert_eq!((scores.len(), scores[2].1.as_deref()), (5, Some(POISONED)));
    assert_eq!(metrics.newest(Metric::DeadLetters, &["judge"]), Some(1.0));
}

#[test]
fn no_letter_no_file() {
    let folder = tempfile::tempdir().unwrap();
    score(5, Reward::each(|_: &Sample| 1.0).failures(letters_to(folder.path()))).0.unwrap();
    assert!(!folder.path().join(DEAD_LETTERS).exists());
}

#[test]
fn a_reward_that_succeeds_when_called_again_costs_nothing() {
    for (how, _) in WAYS {
        let calls = Arc::new(AtomicU32::new(0));
        let counted = Arc::clone(&calls);
        let reward = move |sample: &Sample| match (sample.group_index, sample.index) {
            (2, 1) if counted.fetch_add(1, Relaxed) == 0 => how(),
            _ => f64::from(sample.index),
        };
        let metrics = Metrics::new();
        let (result, scores) = score(
            5,
            Reward::each(reward)
                .retries(1)
                .failures(FailurePolicy { metrics: Some(metrics.clone()), ..FailurePolicy::default() }),
        );
        result.unwrap();
        assert!(scores.iter().all(|(_, why, rewards)| why.is_none() && rewards == &[0.0, 1.0, 2.0, 3.0]), "{scores:?}");
        assert_eq!(calls.load(Relaxed), 2);
        assert_eq!(metrics.newest(Metric::RewardFailures, &[]), Some(1.0), "and is seen all the same");
    }
}

#[test]
fn a_failing_reward_is_called_once_and_once_a_retry() {
    for retries in [0, 1, 4] {
        let mut group = group(7);
        group.samples.truncate(1);
        let calls = AtomicU32::new(0);
        let reward = |_: &Sample| if calls.fetch_add(1, Relaxed) < u32::MAX { f64::NAN } else { 0.0 };
        let failures = rollflow::stages::reward::score(&mut group, reward, retries, retries > 0);
        assert_eq!((calls.load(Relaxed), failures[0].attempts), (retries + 1, retries + 1));
    }
}

#[test]
fn a_part_without_a_number_is_a_failure_and_leaves_no_parts_behind() {
    let mut group = group(7);
    let reward = |sample: &Sample| {
        let part = if sample.index == 1 { f64::NAN } else { 0.5 };
        RewardOutput { reward: 1.0, parts: [("form".to_owned(), part)].into() }
    };
    let failures = rollflow::stages::reward::score(&mut group, reward, 0, false);
    assert_eq!(failures.iter().map(|failure| (failure.sample, failure.kind)).collect::<Vec<_>>(), [(1, FailureKind::NotFinite)]);
    let parts: Vec<Option<f64>> = group.samples.iter().map(|sample| sample.reward_parts.get("form").copied()).collect();
    assert_eq!((parts, group.samples[1].reward), (vec![Some(0.5), None, Some(0.5), Some(0.5)], None));
}

#[test]
fn a_run_that_shall_fail_names_the_sample_and_what_it_said() {
    for (how, said) in WAYS {
        let (result, _) = score(1000, Reward::each(failing(how)).on_failure(OnFailure::Fail));
        let error = result.unwrap_err().to_string();
        for part in ["stage \"judge\"", "sample 1 of group 2", said, "\"prompt 2\"", "\"answer 1\"", "3 attempts"] {
            assert!(error.contains(part), "{part} is missing: {error}");
        }
    }
}

#[test]
fn zero_gives_that_sample_nothing_and_keeps_the_others() {
    for (how, _) in WAYS {
        let (result, scores) = score(5, Reward::each(failing(how)).on_failure(OnFailure::Zero));
        result.unwrap();
        assert_eq!(scores.len(), 5);
        assert_eq!(scores[2], (2, None, vec![0.0, 0.0, 2.0, 3.0]));
        assert_eq!(scores[3], (3, None, vec![0.0, 1.0, 2.0, 3.0]));
    }
}

#[test]
fn drop_takes_the_whole_group_out_and_says_why() {
    for (how, _) in WAYS {
        let (result, scores) = score(5, Reward::each(failing(how)).on_failure(OnFailure::Drop));
        result.unwrap();
        let dropped: Vec<Option<&str>> = scores.iter().map(|(_, why, _)| why.as_deref()).collect();
        assert_eq!(dropped, [None, None, Some(POISONED), None, None], "law D2: whole groups");
    }
}

#[test]
fn a_reward_that_always_fails_blocks_nothing() {
    for (on_failure, arrive) in [(OnFailure::Fail, 0), (OnFailure::Zero, 40), (OnFailure::Drop, 40), (OnFailure::DeadLetter, 40)]
    {
        let reward = Reward::each(|_: &Sample| -> f64 { panic!("always") }).retries(0).on_failure(on_failure);
        let (result, scores) = score(40, reward);
        assert_eq!((result.is_err(), scores.len()), (on_failure == OnFailure::Fail, arrive));
    }
}

#[test]
fn more_poisoned_groups_in_a_row_than_allowed_end_the_run_and_each_of_them_has_its_letter() {
    for (on_failure, written) in [(OnFailure::DeadLetter, 4), (OnFailure::Drop, 0), (OnFailure::Zero, 0)] {
        let folder = tempfile::tempdir().unwrap();
        let reward = Reward::each(|_: &Sample| -> f64 { panic!("no such host") }).retries(0);
        let failures = FailurePolicy { on_failure, max_poisoned: 3, ..letters_to(folder.path()) };
        let (result, _) = score(1000, reward.failures(failures));
        let error = result.unwrap_err().to_string();
        for part in ["4 groups in a row", "max_poisoned", "at most 3", "it panicked: no such host"] {
            assert!(error.contains(part), "{part} is missing: {error}");
        }
        assert_eq!(error.contains(DEAD_LETTERS), written > 0, "{error}");
        let ids = |letters: Vec<DeadLetter>| letters.into_iter().map(|letter| letter.prompt.ordinal).collect::<Vec<_>>();
        let found = if written > 0 { ids(letters(folder.path())) } else { Vec::new() };
        assert_eq!(found, (0..written).collect::<Vec<u64>>());
    }
}

#[test]
fn a_group_that_earns_starts_the_count_anew() {
    let reward = |sample: &Sample| if sample.group_index % 4 == 3 { 1.0 } else { f64::NAN };
    let (result, scores) =
        score(40, Reward::each(reward).retries(0).failures(FailurePolicy { max_poisoned: 3, ..FailurePolicy::default() }));
    result.unwrap();
    assert_eq!(scores.iter().filter(|(_, why, _)| why.is_none()).count(), 10);
}

#[test]
fn a_dropped_group_gives_its_place_back_so_that_the_batch_still_fills() {
    let admission = Admission::max_staleness(0, 4);
    admission.published(1);
    let mut flow = Flow::new("places").admission(&admission);
    let prompts = flow.source("prompts", Prompts::addition(1, 0).unwrap());
    let groups = flow.stage("generate", prompts, map(|prompt: Prompt| group(prompt.ordinal)));
    let reward = |sample: &Sample| if sample.group_index.is_multiple_of(3) { f64::NAN } else { 1.0 };
    let scored = flow.stage("reward", groups, Reward::each(reward));
    let batches = flow.stage("batch", scored, Batcher::groups(4));
    let batch = Arc::new(Mutex::new(Batch::default()));
    let seen = Arc::clone(&batch);
    flow.sink("seen", batches, move |batch: Batch| *seen.lock().unwrap() = batch);
    flow.run(Until::items("seen", 1)).unwrap();
    let batch = batch.lock().unwrap();
    assert_eq!(batch.groups.iter().map(Group::id).collect::<Vec<_>>(), [1, 2, 4, 5]);
    assert_eq!(batch.dropped.iter().map(|dropped| dropped.id).collect::<Vec<_>>(), [0, 3], "law D4: remembered");
}

#[test]
fn a_filter_looks_at_no_poisoned_group() {
    let looked = Arc::new(AtomicUsize::new(0));
    let (counted, reasons) = (Arc::clone(&looked), Arc::new(Mutex::new(Vec::new())));
    let seen = Arc::clone(&reasons);
    let mut flow = Flow::new("filtered");
    let groups = flow.source("groups", from_iter((0..4).map(group)));
    let scored = flow.stage("reward", groups, Reward::each(failing(|| f64::NAN)));
    let filter = move |_: &Group| {
        counted.fetch_add(1, Relaxed);
        Verdict::Drop("mine".into())
    };
    let kept = flow.stage("filter", scored, Filter::by(filter));
    flow.sink("seen", kept, move |scored: Scored| seen.lock().unwrap().push(scored.settle().unwrap_err()));
    flow.run(Until::finished()).unwrap();
    let dropped = reasons.lock().unwrap();
    assert_eq!(dropped.iter().map(|dropped| dropped.reason.as_str()).collect::<Vec<_>>(), ["mine", "mine", POISONED, "mine"]);
    assert_eq!(dropped[2].rewards, [0.0, 2.0, 3.0], "what was earned, and no NaN in the curves");
    assert_eq!((dropped[2].generated(), looked.load(Relaxed)), (4, 3), "law D4: its tokens are remembered");
}

#[test]
fn a_damaged_letter_is_named_by_file_and_line_and_the_others_are_read() {
    let folder = tempfile::tempdir().unwrap();
    let reward = |_: &Sample| f64::NAN;
    score(2, Reward::each(reward).failures(letters_to(folder.path()))).0.unwrap();
    let path = folder.path().join(DEAD_LETTERS);
    let written = std::fs::read_to_string(&path).unwrap();
    let (first, second) = written.split_once('\n').unwrap();
    let damages: [Vec<u8>; 3] =
        [first[..first.len() / 2].into(), b"\xff\xfe".to_vec(), first.replacen("\"tokens\":[1,2,3]", "\"tokens\":[1]", 1).into()];
    for damage in damages {
        std::fs::write(&path, [b"\n", damage.as_slice(), b"\n", second.as_bytes()].concat()).unwrap();
        let read: Vec<_> = read_lines::<DeadLetter>(&path).unwrap().collect();
        let error = read[0].as_ref().unwrap_err().to_string();
        assert!(error.starts_with(&format!("{}, line 2: ", path.display())), "{error}");
        assert_eq!((read.len(), read[1].as_ref().unwrap().prompt.ordinal), (2, 1));
    }
}

/// Numbers as a broken model gives them, too.
fn log_prob() -> impl Strategy<Value = f32> {
    prop_oneof![-20.0..0.0_f32, prop::sample::select(vec![f32::NAN, f32::NEG_INFINITY, f32::INFINITY])]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, failure_persistence: None, ..ProptestConfig::default() })]
    /// Laws F6 and D4: whatever fails, and however often, each group that went in comes out once, without what it lost or dropped for it,
    /// and each that lost something lies in the file, whole.
    #[test]
    fn no_group_is_lost(
        fails in prop::collection::vec(prop::collection::vec(0_u32..5, 3), 1..30),
        log_probs in prop::collection::vec(log_prob(), 1..6),
        retries in 0_u32..3,
        max_poisoned in 0_u64..40,
        keeps_groups: bool,
    ) {
        let folder = tempfile::tempdir().unwrap();
        let groups: Vec<Group> = (0..fails.len() as u64).map(|id| {
            let prompt = Prompt { ordinal: id, ..Prompt::from("p") };
            let sample = |index| {
                let mut sample = Sample::begin(&prompt, index, &[1]);
                log_probs.iter().for_each(|&log_prob| sample.push(2, log_prob, 1 + u64::from(index)));
                sample
            };
            Group { samples: (0..3).map(sample).collect(), prompt: Arc::new(prompt), ..Group::default() }
        }).collect();
        // How often each sample still fails before it earns.
        let left: Vec<Vec<AtomicU32>> =
            fails.iter().map(|group| group.iter().map(|&fails| AtomicU32::new(fails)).collect()).collect();
        let reward = move |sample: &Sample| {
            let left = &left[sample.group_index as usize][sample.index as usize];
            match left.fetch_update(Relaxed, Relaxed, |left| left.checked_sub(1)) {
                Ok(_) => Err("not yet"),
                Err(_) => Ok(1.0),
            }
        };
        let on_lost_sample = if keeps_groups { OnLostSample::DropSample } else { OnLostSample::DropGroup };
        let failures = FailurePolicy { max_poisoned, on_lost_sample, ..letters_to(folder.path()) };
        let reward = Reward::each(reward).retries(retries);

        let arrived: Arc<Mutex<Vec<Scored>>> = Arc::default();
        let seen = Arc::clone(&arrived);
        let mut flow = Flow::new("lost");
        let source = flow.source("groups", from_iter(groups.clone()));
        let scored = flow.stage("reward", source, reward.failures(failures));
        flow.sink("seen", scored, move |scored: Scored| seen.lock().unwrap().push(scored));
        let result = flow.run(Until::finished());

        let lost = |id: u64| fails[id as usize].iter().filter(|fails| **fails > retries).count();
        // Of three samples, two must be left.
        let dropped = |id: u64| if keeps_groups { lost(id) > 1 } else { lost(id) > 0 };
        let mut in_a_row = 0;
        let broken = (0..fails.len() as u64).find(|&id| {
            in_a_row = if dropped(id) { in_a_row + 1 } else { 0 };
            in_a_row > max_poisoned
        });
        prop_assert_eq!(result.is_err(), broken.is_some());
        let went_in: BTreeSet<u64> = (0..broken.map_or(fails.len() as u64, |last| last + 1)).collect();
        let dead = if folder.path().join(DEAD_LETTERS).exists() { letters(folder.path()) } else { Vec::new() };
        let dead_ids: BTreeSet<u64> = dead.iter().map(|letter| letter.prompt.ordinal).collect();
        prop_assert_eq!(dead.len(), dead_ids.len(), "one letter a group");
        prop_assert_eq!(&dead_ids, &went_in.iter().copied().filter(|&id| lost(id) > 0).collect());
        for letter in dead {
            let mut group = letter.group();
            group.samples.iter_mut().for_each(|sample| sample.reward = None);
            // NaN differs from itself, but prints the same.
            prop_assert_eq!(format!("{group:?}"), format!("{:?}", groups[group.id() as usize]));
        }
        // A run that fails drops what is queued, so only one that finished shows all that it kept.
        if result.is_ok() {
            let arrived = arrived.lock().unwrap();
            prop_assert!(arrived.iter().map(|scored| scored.group().id()).eq(went_in), "each group comes once");
            for scored in arrived.iter() {
                let (id, group) = (scored.group().id(), scored.group());
                prop_assert_eq!(scored.dropped(), dropped(id).then_some(LOST));
                let gone = if dropped(id) { 0 } else { lost(id) };
                prop_assert_eq!((group.samples.len(), group.dropped.len()), (3 - gone, gone));
                prop_assert!(group.dropped.iter().all(|sample| sample.reason == LOST && sample.generated == log_probs.len()));
                prop_assert!(dropped(id) || group.samples.iter().all(|sample| sample.reward == Some(1.0)));
            }
        }
    }
}
