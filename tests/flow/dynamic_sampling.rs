//! Dynamic sampling: what a filter rejects is replaced, as often as it takes and no oftener than it
//! may.
//!
//! Laws F1 and F3: whatever is rejected, the run ends, with all its steps or with an error that
//! says why. D4: every group is accounted for.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::support::rehearsal::{Rehearsal, assert_sound};
use proptest::prelude::*;
use rollflow::algo::filters::Verdict;
use rollflow::observe::Metric;
use rollflow::prelude::*;
use rollflow::rollout::{Fate, Progress};
use rollflow::stages::filter::Fallback;

const STALENESS: u64 = 1;

/// Verdicts and broken rewards repeat with a period.
fn rehearsal(rejected: Vec<bool>, broken: Vec<bool>, patience: u64, fallback: Fallback, groups: usize) -> Rehearsal {
    let steps = 6;
    // Between two groups that are trained there are fewer than this many others; a loop would exceed it.
    let most = (steps * groups as u64 + 1) * 2 * (patience + broken.len() as u64 + rejected.len() as u64 + 1);
    let judged = AtomicU64::new(0);
    let verdict = move |group: &Group| {
        assert!(judged.fetch_add(1, Ordering::Relaxed) < most, "an endless loop");
        Verdict::keep_if(!rejected[group.id() as usize % rejected.len()], "rejected")
    };
    Rehearsal {
        groups,
        max_staleness: STALENESS,
        over_sample: 1.0,
        window: (STALENESS + 1) * groups as u64,
        steps,
        verdict: Arc::new(verdict),
        patience,
        fallback,
        broken: Arc::new(move |id| broken[id as usize % broken.len()]),
        ..Rehearsal::default()
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn any_filter_ends_in_full_batches_or_in_an_error_that_says_why(
        rejected in prop::collection::vec(prop::bool::weighted(0.8), 1..9),
        broken in prop::collection::vec(prop::bool::weighted(0.3), 1..5),
        patience in 1_u64..12,
        keeps in any::<bool>(),
        groups in 1_usize..4,
    ) {
        let fallback = if keeps { Fallback::Keep } else { Fallback::Error };
        let all_broken = broken.iter().all(|broken| *broken);
        let rehearsal = rehearsal(rejected.clone(), broken, patience, fallback, groups);
        match rehearsal.run() {
            Ok((seen, totals)) => {
                assert_sound(&rehearsal, &seen);
                prop_assert_eq!(seen.len() as u64, rehearsal.steps);
                prop_assert_eq!(totals.imbalance(), (0, 0));
                let dropped = totals.entered - totals.open_groups - totals.groups[&Fate::Trained];
                prop_assert_eq!(dropped, seen.iter().map(|step| step.dropped.len() as u64).sum::<u64>());
                for step in &seen {
                    let spared: Vec<u64> = step.ids.iter().copied().filter(|id| rejected[*id as usize % rejected.len()]).collect();
                    prop_assert_eq!(&step.spared, &spared);
                    prop_assert_eq!(step.row[Metric::SparedGroups.key()], spared.len() as f64);
                    prop_assert!(keeps || spared.is_empty());
                }
            }
            Err(error) => {
                prop_assert!(error.to_string().contains(&format!("dropped {patience} groups in a row")), "{}", error);
                // What keeps is exhausted only by broken rewards in a row, of which there are at most three unless all are.
                prop_assert!(!keeps || all_broken || patience < 4);
            }
        }
    }
}

#[test]
fn a_filter_that_rejects_everything_is_passed_over_until_it_passes_one_again() {
    let mut rejected = vec![true; 20];
    rejected[12] = false;
    let (seen, _) = rehearsal(rejected, vec![false], 4, Fallback::Keep, 2).run().unwrap();
    let trained: Vec<u64> = seen.iter().flat_map(|step| step.ids.clone()).collect();
    // Four are dropped, then all are kept up to the one that passes; patience begins anew.
    assert_eq!(trained, [4, 5, 6, 7, 8, 9, 10, 11, 12, 17, 18, 19]);
    let spared: Vec<u64> = seen.iter().flat_map(|step| step.spared.clone()).collect();
    assert_eq!(spared, [4, 5, 6, 7, 8, 9, 10, 11, 17, 18, 19]);
}

#[test]
fn c2_a_filter_that_keeps_what_it_rejects_continues_so_after_a_resume() {
    let rehearsal = rehearsal(vec![true], vec![false], 4, Fallback::Keep, 2);
    let (mut seen, admission) = rehearsal.run_on(Progress::default(), 0, 3).unwrap();
    let saved = serde_json::to_string(&admission.progress()).unwrap();
    let (rest, _) = rehearsal.run_on(serde_json::from_str(&saved).unwrap(), 3, rehearsal.steps).unwrap();
    seen.extend(rest);
    let trained: Vec<u64> = seen.iter().flat_map(|step| step.ids.clone()).collect();
    assert_eq!(trained, (4..16).collect::<Vec<u64>>(), "only the first four are dropped");
}

/// Law F3: the group is named, and nothing after it is trained.
#[test]
fn a_filter_that_panics_ends_the_run_with_its_group_and_message() {
    let trained = Arc::new(AtomicU64::new(0));
    let seen = trained.clone();
    let verdict = move |group: &Group| {
        assert!(group.id() != 5, "odd lengths: {:?}", group.rewards());
        seen.fetch_max(group.id(), Ordering::Relaxed);
        Verdict::Keep
    };
    let whole = Rehearsal { groups: 2, over_sample: 1.0, window: 4, max_staleness: 1, steps: 6, ..Rehearsal::default() };
    let error = Rehearsal { verdict: Arc::new(verdict), ..whole }.run().unwrap_err();
    assert_eq!(trained.load(Ordering::Relaxed), 4, "no group after it is judged");
    let said = error.to_string();
    let panicked = "the filter panicked on group 5: odd lengths: [0.0, 1.0]";
    assert!(said.contains("stage \"filter\"") && said.contains(panicked), "{said}");
}

#[test]
fn rewards_that_all_fail_end_the_run_whatever_the_fallback() {
    for fallback in [Fallback::Error, Fallback::Keep] {
        let error = rehearsal(vec![false], vec![true], 5, fallback, 2).run().unwrap_err().to_string();
        assert!(error.contains("dropped 5 groups in a row (poisoned: 5)"), "{error}");
    }
}
