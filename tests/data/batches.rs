//! Batches (laws D2, D6): whole groups, ordered by id whatever the order in which they were finished; what was dropped is remembered.

use std::sync::{Arc, Mutex};

use proptest::prelude::*;
use rollflow::algo::filters::Verdict;
use rollflow::flow::from_iter;
use rollflow::prelude::*;

fn scored(id: u64, dropped: bool) -> Scored {
    let prompt = Prompt { ordinal: id, ..Prompt::default() };
    let sample = |index| {
        let mut sample = Sample::begin(&prompt, index, &[1]);
        sample.push(2, -0.5, 1);
        Sample { reward: Some(id as f64 + f64::from(index) / 10.0), ..sample }
    };
    let samples = (0..3).map(sample).collect();
    let scored = Scored::new(Group { samples, prompt: Arc::new(prompt), ..Group::default() }).unwrap();
    if dropped { scored.drop_for("zero_std".into()) } else { scored }
}

fn batches(arriving: Vec<Scored>, batcher: Batcher) -> Vec<Batch> {
    let batches = Arc::new(Mutex::new(Vec::new()));
    let seen = Arc::clone(&batches);
    let mut flow = Flow::new("batches");
    let scored = flow.source("scored", from_iter(arriving));
    let batched = flow.stage("batch", scored, batcher);
    flow.sink("seen", batched, move |batch: Batch| seen.lock().unwrap().push(batch));
    flow.run(Until::finished()).unwrap();
    std::mem::take(&mut *batches.lock().unwrap())
}

/// What the parts of a batch make together.
fn joined(parts: Vec<Batch>) -> Vec<Batch> {
    let mut whole: Vec<Batch> = Vec::new();
    for part in parts {
        match whole.last_mut().filter(|batch| batch.more) {
            Some(batch) => batch.append(part),
            None => whole.push(part),
        }
    }
    whole.iter_mut().for_each(Batch::sort);
    whole
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn batches_hold_whole_groups_in_order_and_lose_none(
        arriving in prop::collection::vec(prop::bool::weighted(0.3), 0..40)
            .prop_map(|dropped| dropped.into_iter().enumerate().map(|(id, dropped)| (id as u64, dropped)).collect::<Vec<_>>())
            .prop_shuffle(),
        size in 1_usize..6,
        in_order in any::<bool>(),
    ) {
        let batcher = if in_order { Batcher::groups(size) } else { Batcher::groups(size).over_sample(1e3) };
        let found = batches(arriving.iter().map(|&(id, dropped)| scored(id, dropped)).collect(), batcher);
        for batch in &found {
            for group in &batch.groups {
                prop_assert!(group == scored(group.id(), false).group());
            }
            for dropped in &batch.dropped {
                let was = scored(dropped.id, false).group().clone();
                prop_assert_eq!((&dropped.rewards, dropped.generated()), (&was.rewards(), was.generated()));
            }
            prop_assert_eq!(batch.rewards().count(), 3 * (batch.groups.len() + batch.dropped.len()));
        }
        let ids = |batch: &Batch| (batch.groups.iter().map(Group::id).collect(), batch.dropped.iter().map(|it| it.id).collect());
        let mut taken = arriving.clone();
        if in_order {
            taken.sort();
        }
        prop_assert_eq!(found.iter().map(ids).collect::<Vec<_>>(), expected(&taken, size));
    }
}

/// Ids of the groups of each batch and of those dropped meanwhile: the first `size` to be taken, then the next, each in order.
fn expected(taken: &[(u64, bool)], size: usize) -> Vec<(Vec<u64>, Vec<u64>)> {
    let (mut full, mut kept, mut dropped) = (Vec::new(), Vec::new(), Vec::new());
    for &(id, is_dropped) in taken {
        if is_dropped { &mut dropped } else { &mut kept }.push(id);
        if kept.len() == size {
            kept.sort();
            dropped.sort();
            full.push((std::mem::take(&mut kept), std::mem::take(&mut dropped)));
        }
    }
    full
}

#[test]
fn a_filter_marks_what_it_drops_and_the_batcher_remembers_it() {
    let batches_seen = Arc::new(Mutex::new(Vec::new()));
    let seen = Arc::clone(&batches_seen);
    let mut flow = Flow::new("filtered");
    let scored = flow.source("scored", from_iter((0..4).map(|id| scored(id, false)).collect::<Vec<_>>()));
    let even = |group: &Group| Verdict::keep_if(group.id().is_multiple_of(2), "odd");
    let kept = flow.stage("filter", scored, Filter::by(even));
    let batched = flow.stage("batch", kept, Batcher::groups(2));
    flow.sink("seen", batched, move |batch: Batch| seen.lock().unwrap().push(batch));
    flow.run(Until::finished()).unwrap();
    let found = std::mem::take(&mut *batches_seen.lock().unwrap());
    let ids: Vec<u64> = found[0].groups.iter().map(Group::id).collect();
    let dropped: Vec<(u64, &str)> = found[0].dropped.iter().map(|dropped| (dropped.id, dropped.reason.as_str())).collect();
    assert_eq!((found.len(), ids, dropped), (1, vec![0, 2], vec![(1, "odd")]));
}

/// A filter that rejects everything would otherwise keep an endless source and the generators busy for ever.
#[test]
fn a_filter_that_rejects_everything_ends_the_run_and_says_why() {
    let mut flow = Flow::new("hopeless");
    let scored = flow.source("scored", from_iter((0..).map(|id| scored(id, false))));
    let kept = flow.stage("filter", scored, Filter::by(|_: &Group| Verdict::Drop("never".into())).patience(7));
    let batched = flow.stage("batch", kept, Batcher::groups(2));
    flow.sink("seen", batched, |batch: Batch| assert_eq!(batch.len(), 0, "nothing passes"));
    let error = flow.run(Until::finished()).unwrap_err().to_string();
    assert!(error.contains("dropped 7 groups in a row (never: 7)") && error.contains("loosen the filter"), "{error}");
}

/// Patience is for groups in a row: one that passes starts the count anew.
#[test]
fn a_group_that_passes_restores_the_patience() {
    let mut flow = Flow::new("patient");
    let scored = flow.source("scored", from_iter((0..40).map(|id| scored(id, false)).collect::<Vec<_>>()));
    let third = |group: &Group| Verdict::keep_if(group.id() % 3 == 2, "other");
    let kept = flow.stage("filter", scored, Filter::by(third).patience(3));
    flow.sink("seen", kept, |_: Scored| ());
    assert!(flow.run(Until::finished()).is_ok());
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn parts_of_a_batch_are_the_batch(
        arriving in prop::collection::vec(prop::bool::weighted(0.3), 0..40)
            .prop_map(|dropped| dropped.into_iter().enumerate().map(|(id, dropped)| (id as u64, dropped)).collect::<Vec<_>>())
            .prop_shuffle(),
        size in 1_usize..9,
        least in 0_usize..9,
    ) {
        let arriving = || arriving.iter().map(|&(id, dropped)| scored(id, dropped)).collect();
        let whole = batches(arriving(), Batcher::groups(size));
        let parts = batches(arriving(), Batcher::groups(size).in_parts(least));
        for part in &parts {
            prop_assert!(!part.more || part.groups.len() >= least.max(1), "no part is smaller than was asked for, but the last");
        }
        let mut joined = joined(parts);
        if joined.last().is_some_and(|batch| batch.more) {
            joined.pop();
        }
        prop_assert_eq!(joined, whole);
    }

    #[test]
    fn batches_that_choose_are_sent_whole(
        arriving in Just((0_u64..40).collect::<Vec<_>>()).prop_shuffle(), size in 1_usize..9,
    ) {
        for factor in [1.5, 1e3] {
            let arriving = arriving.iter().map(|id| scored(*id, false)).collect();
            let batcher = Batcher::groups(size).over_sample(factor).in_parts(1);
            prop_assert!(batches(arriving, batcher).iter().all(|batch| !batch.more));
        }
    }
}
