//! Over-sampling: a step takes the first groups to finish, and what it leaves is neither lost nor
//! older than allowed.
//!
//! Laws V2 (no token older than the bound is trained), D2, D4 and D6 (groups are whole, accounted
//! for and in order), on the real runner with a scripted generator that keeps stragglers back as
//! long as it can.

use std::sync::Arc;

use crate::support::rehearsal::{Pace, Rehearsal, assert_sound};
use proptest::prelude::*;
use rollflow::algo::filters::Verdict;
use rollflow::observe::Metric;
use rollflow::prelude::*;
use rollflow::rollout::{Fate, Progress};
use rollflow::stages::train::OnStale;

/// A number that depends on nothing but these two.
fn hash(seed: u64, id: u64) -> u64 {
    let mixed = (seed ^ id.wrapping_mul(0x9E37_79B9_7F4A_7C15)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    (mixed ^ (mixed >> 29)).wrapping_mul(0x94D0_49BB_1331_11EB) >> 33
}

/// So many percent of the groups are late or dropped, drawn by `seed`.
fn unlucky(seed: u64, stragglers: u64, dropped: u64) -> Rehearsal {
    let pace = move |id| if hash(seed, id) % 100 < stragglers { Pace::Last } else { Pace::After(hash(seed, !id) % 7) };
    Rehearsal {
        pace: Arc::new(pace),
        verdict: Arc::new(move |group| Verdict::keep_if(hash(seed + 1, group.id()) % 100 >= dropped, "unlucky")),
        ..Rehearsal::default()
    }
}

/// A loop whose window holds what its steps choose from, and no more than its bound allows.
fn any_rehearsal() -> impl Strategy<Value = Rehearsal> {
    let sizes = (1_usize..5, 1_u64..4, 1_u64..4, 0.0..=1.0_f64, 0.0..=1.0_f64, 3_u64..10);
    (sizes, any::<u64>(), 0_u64..40, 0_u64..40).prop_map(|(sizes, seed, stragglers, dropped)| {
        let (groups, sync_every, max_staleness, more, wider, steps) = sizes;
        let per_version = groups as u64 * sync_every;
        let most = (max_staleness + 1) * per_version;
        let others = per_version - groups as u64;
        let chosen_from = (groups as u64 + (more * (most - per_version) as f64) as u64).max(groups as u64);
        let least = others + chosen_from;
        Rehearsal {
            groups,
            sync_every,
            max_staleness,
            over_sample: chosen_from as f64 / groups as f64,
            window: least + (wider * (most - least) as f64) as u64,
            steps,
            older: seed % 2 == 1,
            ..unlucky(seed, stragglers, dropped)
        }
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]

    /// The trainer itself asserts the bound (on_stale = wait), so that a run which ends without an
    /// error kept it.
    #[test]
    fn every_group_is_trained_or_dropped_once_in_full_batches_within_the_bound(rehearsal in any_rehearsal()) {
        let (seen, totals) = rehearsal.run().unwrap();
        assert_sound(&rehearsal, &seen);
        prop_assert_eq!(seen.len() as u64, rehearsal.steps);
        prop_assert_eq!(totals.imbalance(), (0, 0));
        prop_assert_eq!(totals.open_groups, 0, "nothing is left behind");
        prop_assert_eq!(totals.groups[&Fate::Trained], rehearsal.steps * rehearsal.groups as u64);
    }

    #[test]
    fn a_resumed_run_keeps_the_bound_and_trains_nothing_twice(rehearsal in any_rehearsal(), at in 0.0..1.0_f64) {
        let from = 1 + (at * (rehearsal.steps - 1) as f64) as u64;
        let (mut seen, admission) = rehearsal.run_on(Progress::default(), 0, from).unwrap();
        let (rest, admission) = rehearsal.run_on(admission.progress(), from, rehearsal.steps).unwrap();
        seen.extend(rest);
        assert_sound(&rehearsal, &seen);
        prop_assert_eq!(seen.len() as u64, rehearsal.steps);
        let totals = admission.totals();
        prop_assert_eq!((totals.imbalance(), totals.open_groups), ((0, 0), 0));
    }

    /// Law D4: a sample that a stage dropped has its fate before and after the resume, and once.
    #[test]
    fn a_resumed_run_accounts_for_the_samples_that_were_dropped_before_and_after_it(
        rehearsal in any_rehearsal(), at in 0.0..1.0_f64, unwanted in prop::collection::vec(any::<bool>(), 1..6),
    ) {
        let period = unwanted.len() as u64;
        let drops = unwanted.clone();
        let drops = move |sample: &Sample| sample.index == 1 && drops[(sample.group_index % period) as usize];
        let rehearsal = Rehearsal { unwanted: Arc::new(drops), ..rehearsal };
        let from = 1 + (at * (rehearsal.steps - 1) as f64) as u64;
        let (mut seen, admission) = rehearsal.run_on(Progress::default(), 0, from).unwrap();
        // As a checkpoint holds it.
        let saved = serde_json::to_string(&admission.progress()).unwrap();
        let (rest, admission) = rehearsal.run_on(serde_json::from_str(&saved).unwrap(), from, rehearsal.steps).unwrap();
        seen.extend(rest);
        assert_sound(&rehearsal, &seen);
        let totals = admission.totals();
        prop_assert_eq!((totals.imbalance(), totals.open_groups), ((0, 0), 0));
        // Two tokens were sampled for each.
        let trained: Vec<u64> = seen.iter().flat_map(|step| step.ids.clone()).collect();
        let dropped = trained.iter().filter(|id| unwanted[(**id % period) as usize]).count() as u64;
        let of = |fate| totals.tokens.get(&fate).copied().unwrap_or(0);
        prop_assert_eq!(of(Fate::Trained), 2 * (2 * trained.len() as u64 - dropped));
        prop_assert!(of(Fate::Filtered) >= 2 * dropped, "{:?}", totals);
    }

    /// Whatever the window lets in, and however late it comes.
    #[test]
    fn dropping_and_masking_keep_the_bound_too(
        rehearsal in any_rehearsal(), masks in any::<bool>(), wider in 0_u64..20, held_until in 2_u64..9,
    ) {
        let pace = Arc::clone(&rehearsal.pace);
        let rehearsal = Rehearsal {
            on_stale: if masks { OnStale::Mask } else { OnStale::Drop },
            window: rehearsal.window + wider,
            // Only where steps can do without it; the version that it waits for must come.
            pace: if rehearsal.over_sample > 1.0 {
                let last = rehearsal.steps / rehearsal.sync_every;
                Arc::new(move |id| if id == 1 && held_until < last { Pace::At(held_until) } else { pace(id) })
            } else {
                pace
            },
            ..rehearsal
        };
        let (seen, totals) = rehearsal.run().unwrap();
        for step in &seen {
            prop_assert!(step.lag <= rehearsal.max_staleness, "law V2: {:?}", step);
        }
        if !masks {
            assert_sound(&rehearsal, &seen);
        }
        prop_assert_eq!(totals.imbalance(), (0, 0));
    }
}

#[test]
fn a_straggler_holds_nobody_up_until_it_is_due() {
    let rehearsal = Rehearsal { pace: Arc::new(|id| if id == 0 { Pace::Last } else { Pace::After(0) }), ..Rehearsal::default() };
    let (seen, _) = rehearsal.run().unwrap();
    let trained_in = seen.iter().position(|step| step.ids.contains(&0)).unwrap();
    assert_eq!(seen[0].ids, [1, 2, 3, 4], "the first to finish go first");
    assert!((1..=2).contains(&trained_in), "it entered under version 1, and 2 more are allowed: {seen:?}");
}

#[test]
fn what_a_step_leaves_goes_first_in_the_next_oldest_first() {
    let order = [3, 5, 4, 2, 1, 0];
    let pace = move |id| Pace::After(order.iter().position(|other| *other == id).unwrap_or(6) as u64);
    let (seen, _) = Rehearsal { pace: Arc::new(pace), ..Rehearsal::default() }.run().unwrap();
    assert_eq!(seen[0].ids, [2, 3, 4, 5]);
    assert_eq!(seen[1].ids[..2], [0, 1]);
}

/// Held back until it is older than allowed.
fn too_late(on_stale: OnStale) -> Rehearsal {
    let pace = |id| if id == 0 { Pace::At(5) } else { Pace::After(0) };
    Rehearsal { on_stale, pace: Arc::new(pace), ..Rehearsal::default() }
}

#[test]
fn what_comes_too_late_expires_gives_its_place_back_and_shows_in_the_lengths() {
    let rehearsal = too_late(OnStale::Drop);
    let (seen, totals) = rehearsal.run().unwrap();
    assert_sound(&rehearsal, &seen);
    let expired: Vec<_> = seen.iter().flat_map(|step| &step.dropped).collect();
    assert_eq!(expired, [&(0, "stale".to_owned())]);
    assert_eq!((totals.groups[&Fate::Stale], totals.groups[&Fate::Trained]), (1, 32), "another took its place");
    let row = &seen.iter().find(|step| !step.dropped.is_empty()).unwrap().row;
    let of = |metric: Metric| row[metric.key()];
    assert_eq!((of(Metric::LengthTrainedMean), of(Metric::LengthFinishedUpperDecile)), (2.0, 2.0));
}

#[test]
fn what_comes_too_late_is_trained_without_its_old_tokens() {
    let (seen, totals) = too_late(OnStale::Mask).run().unwrap();
    let step = seen.iter().find(|step| step.ids.contains(&0)).unwrap();
    assert!(step.lag <= 2 && step.dropped.is_empty(), "{step:?}");
    assert_eq!(totals.tokens[&Fate::Masked], 2, "the first token of both answers");
    assert!(
        step.row[Metric::LengthTrainedMean.key()] < step.row[Metric::LengthFinishedMean.key()],
        "masking makes what is trained shorter"
    );
}

/// A synchronous loop whose rounds have more groups than their steps train.
fn any_round() -> impl Strategy<Value = Rehearsal> {
    let sizes = (1_usize..5, 1_u64..4, 1_u64..5, 2_u64..8);
    (sizes, any::<u64>(), 0_u64..40, 0_u64..60).prop_map(|((groups, sync_every, more, versions), seed, stragglers, dropped)| {
        let chosen_from = groups as u64 + more;
        Rehearsal {
            groups,
            sync_every,
            max_staleness: 0,
            over_sample: chosen_from as f64 / groups as f64,
            window: (sync_every - 1) * groups as u64 + chosen_from,
            steps: versions * sync_every,
            ..unlucky(seed, stragglers, dropped)
        }
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]

    /// Laws V2, V3 and D4: what a step takes of a round depends on ids and the filter alone, and
    /// what is left over has its fate.
    #[test]
    fn a_synchronous_step_takes_the_oldest_kept_groups_of_its_round_and_drops_the_surplus(rehearsal in any_round()) {
        let (seen, totals) = rehearsal.run().unwrap();
        assert_sound(&rehearsal, &seen);
        prop_assert_eq!(seen.len() as u64, rehearsal.steps);
        prop_assert_eq!((totals.imbalance(), totals.open_groups), ((0, 0), 0));
        let kept = |id: u64| {
            let group = Group { prompt: Arc::new(Prompt { ordinal: id, ..Prompt::default() }), ..Group::default() };
            (rehearsal.verdict)(&group) == Verdict::Keep
        };
        for version in seen.chunks(rehearsal.sync_every as usize) {
            let trained: Vec<u64> = version.iter().flat_map(|step| step.ids.clone()).collect();
            prop_assert!(trained.is_sorted(), "the oldest first: {:?}", trained);
            for (id, reason) in version.iter().flat_map(|step| &step.dropped) {
                prop_assert_eq!(reason.as_str(), if kept(*id) { "surplus" } else { "unlucky" });
                prop_assert!(!kept(*id) || Some(id) > trained.last(), "group {} is older than one that was trained", id);
            }
        }
        let surplus = seen.iter().flat_map(|step| &step.dropped).filter(|(_, reason)| reason == "surplus").count() as u64;
        prop_assert_eq!(totals.groups.get(&Fate::Surplus).copied().unwrap_or(0), surplus);
        prop_assert_eq!(totals.tokens.get(&Fate::Surplus).copied().unwrap_or(0), 4 * surplus, "two tokens of two samples each");
    }

    #[test]
    fn a_synchronous_run_that_over_samples_and_is_resumed_takes_the_same_groups(rehearsal in any_round(), at in 0.0..1.0_f64) {
        let versions = rehearsal.steps / rehearsal.sync_every;
        let from = (1 + (at * (versions - 1) as f64) as u64) * rehearsal.sync_every;
        let (whole, _) = rehearsal.run().unwrap();
        let (mut seen, admission) = rehearsal.run_on(Progress::default(), 0, from).unwrap();
        let (rest, admission) = rehearsal.run_on(admission.progress(), from, rehearsal.steps).unwrap();
        seen.extend(rest);
        let ids = |seen: &[crate::support::rehearsal::Seen]| seen.iter().map(|step| step.ids.clone()).collect::<Vec<_>>();
        prop_assert_eq!(ids(&seen), ids(&whole));
        let totals = admission.totals();
        prop_assert_eq!((totals.imbalance(), totals.open_groups), ((0, 0), 0));
    }
}
