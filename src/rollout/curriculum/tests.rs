//! Laws C2 and V3 of the curriculum, and what each of its numbers does.

use proptest::prelude::*;

use super::*;
use crate::data::{Dropped, Group, Prompt, Sample};

const RECORDS: u64 = 40;

fn stream(number: u64) -> Place {
    Place { set: (number % 2) as usize, record: (number % RECORDS / 2) as usize, epoch: number / RECORDS }
}

fn curriculum(rule: CurriculumRule) -> Curriculum {
    Curriculum::new(rule, 7, &["even", "odd"], RECORDS as usize).unwrap()
}

/// A step whose groups have these rewards.
fn step(groups: &[(u64, Vec<f64>)]) -> Batch {
    let group = |(ordinal, rewards): &(u64, Vec<f64>)| Group {
        prompt: Prompt { ordinal: *ordinal, ..Prompt::default() }.into(),
        samples: rewards.iter().map(|reward| Sample { reward: Some(*reward), ..Sample::default() }).collect(),
        ..Group::default()
    };
    Batch { groups: groups.iter().map(group).collect(), ..Batch::default() }
}

/// Chooses one prompt, which then has this pass rate.
fn sees(of: &mut Curriculum, ordinal: u64, rate: impl Fn(Place) -> f64) -> Place {
    let place = of.choose(ordinal, stream);
    let passed = (rate(place) * 10.0).round() as usize;
    let rewards = (0..10).map(|nth| f64::from(u8::from(nth < passed))).collect();
    of.settle(&step(&[(ordinal, rewards)]));
    of.published();
    place
}

fn see_all(of: &mut Curriculum, prompts: u64, rate: impl Fn(Place) -> f64) {
    for ordinal in 0..prompts {
        sees(of, ordinal, &rate);
    }
}

/// How often each record was chosen after every record was seen once.
fn chosen(rule: CurriculumRule, draws: u64, rate: impl Fn(Place) -> f64) -> BTreeMap<u64, u64> {
    let (mut of, mut counts) = (curriculum(rule), BTreeMap::new());
    see_all(&mut of, RECORDS, &rate);
    for ordinal in RECORDS..RECORDS + draws {
        *counts.entry(sees(&mut of, ordinal, &rate).key()).or_default() += 1;
    }
    counts
}

#[test]
fn unseen_prompts_come_in_the_order_of_the_stream() {
    let mut of = curriculum(CurriculumRule::default());
    let places: Vec<Place> = (0..RECORDS).map(|ordinal| sees(&mut of, ordinal, |_| 1.0)).collect();
    assert_eq!(places, (0..RECORDS).map(stream).collect::<Vec<_>>());
    assert_eq!(of.census().ranges[RANGES.len() - 2], RECORDS);
}

#[test]
fn prompts_are_taken_with_the_probability_of_their_pass_rate() {
    let rule = CurriculumRule { hard: 0.5, easy: 0.1, retire_after: 0, ..CurriculumRule::default() };
    let rate = |place: Place| [0.0, 0.5, 1.0, 0.25][place.record % 4];
    let counts = chosen(rule.clone(), 20_000, rate);
    let of = |class: usize| {
        let counts = counts.iter().filter(|(key, _)| Place::of_key(**key, 0).record % 4 == class);
        counts.map(|(_, count)| *count as f64).sum::<f64>()
    };
    // In the band 1, hard 1/2, easy 1/10, in the band 1: the sum is 2.6.
    for (class, share) in [(0, 0.5), (1, 1.0), (2, 0.1), (3, 1.0)] {
        let (found, expected) = (of(class) / 20_000.0, share / 2.6);
        assert!((found - expected).abs() < 5.0 * (expected / 20_000.0).sqrt(), "{class}: {found}, expected {expected}");
    }
    let learnable = CurriculumRule { prefer: Prefer::Learnability, hard: 0.0, easy: 0.0, ..rule };
    let counts = chosen(learnable, 20_000, rate);
    let of =
        |class: usize| counts.iter().filter(|(key, _)| Place::of_key(**key, 0).record % 4 == class).map(|(_, n)| n).sum::<u64>();
    let (half, quarter) = (of(1) as f64, of(3) as f64);
    assert_eq!((of(0), of(2)), (0, 0));
    // 4 · 1/2 · 1/2 = 1, and 4 · 1/4 · 3/4 = 3/4; a quarter of ten samples is 0.3 here.
    assert!((quarter / half - 0.84).abs() < 0.05, "{quarter} {half}");
}

#[test]
fn solved_prompts_retire_until_they_are_forgotten() {
    let rule = CurriculumRule { retire_after: 1, forget_after: 60, ..CurriculumRule::default() };
    let mut of = curriculum(rule);
    let solved = |place: Place| if place.record == 3 { 1.0 } else { 0.5 };
    let mut at = |from: u64, to: u64| (from..to).filter(|ordinal| sees(&mut of, *ordinal, solved).record == 3).count();
    assert_eq!(at(0, RECORDS), 2);
    assert_eq!(at(RECORDS, 60), 0, "retired");
    assert!(at(60, 120) > 0, "forgotten");
    assert!(of.census().ranges[RANGES.len() - 1] <= 2);
    // If nothing is left, none is skipped.
    let mut all = curriculum(CurriculumRule { retire_after: 1, ..CurriculumRule::default() });
    see_all(&mut all, 3 * RECORDS, |_| 1.0);
    assert_eq!(all.census().ranges, [0, 0, 0, 0, 0, 0, 0, RECORDS]);
    assert_eq!((all.census().skipped, all.state.next, all.state.epoch), (0, 3 * RECORDS, 2));
    // One look at an epoch serves until the next publish.
    let mut looks = 0;
    let mut at = |number| {
        looks += 1;
        stream(number)
    };
    for ordinal in 1000..1010 {
        all.choose(ordinal, &mut at);
    }
    assert_eq!(looks, RECORDS + 10);
}

#[test]
fn hard_prompts_are_repeated_the_longest_unseen_first_and_none_that_is_open() {
    let rule = CurriculumRule { replay: 0.5, hard: 0.0, ..CurriculumRule::default() };
    let mut of = curriculum(rule);
    let hard = |place: Place| if place.record < 3 { 0.0 } else { 0.5 };
    see_all(&mut of, 2 * RECORDS, hard);
    // Six records are hard. Without results each can be repeated once.
    let before = of.census().replayed;
    let expected: Vec<u64> = of.hard.iter().map(|(_, record)| *record).collect();
    let places: Vec<Place> = (1000..1100).map(|ordinal| of.choose(ordinal, stream)).collect();
    let repeated: Vec<u64> = places.iter().map(|place| place.key()).filter(|key| expected.contains(key)).collect();
    assert_eq!((repeated, of.census().replayed - before), (expected, 6));
}

#[test]
fn shares_of_data_sets_change_over_the_steps() {
    let share = SourceShare { name: "odd".into(), from: 0.0, to: 3.0, begin: 100, end: 200 };
    let mut of = curriculum(CurriculumRule { source: vec![share], ..CurriculumRule::default() });
    let mut odd = |steps: u64| (0..steps).filter(|step| sees(&mut of, *step, |_| 0.5).set == 1).count();
    assert_eq!(odd(98), 0);
    odd(110);
    let later = odd(4000) as f64 / 4000.0;
    assert!((later - 0.75).abs() < 0.04, "{later}");
    let unknown =
        CurriculumRule { source: vec![SourceShare { name: "other".into(), ..Default::default() }], ..Default::default() };
    assert_eq!(Curriculum::new(unknown, 0, &["even"], 1).unwrap_err(), "other");
}

#[test]
fn dropped_groups_count_and_lost_ones_do_not() {
    let mut of = curriculum(CurriculumRule::default());
    let [first, second] = [0, 1].map(|ordinal| of.choose(ordinal, stream));
    let dropped = |id, rewards| Dropped { rewards, ..Dropped::new(&step(&[(id, vec![])]).groups[0], "nonzero_std") };
    of.settle(&Batch { dropped: vec![dropped(1, vec![]), dropped(0, vec![0.0, 1.0])], ..Batch::default() });
    assert_eq!(of.probability(first.key()), 1.0, "within its version nothing changes (law V3)");
    of.published();
    assert_eq!((of.known(first.key()).map(|seen| seen.rate), of.known(second.key())), (Some(0.5), None));
    assert!(of.state.open.is_empty());
}

proptest! {
    /// Laws C1 and C2: from any checkpoint on, a curriculum chooses what it would have chosen.
    #[test]
    fn a_saved_curriculum_goes_on_with_the_same_choices(
        rewards in prop::collection::vec(0_u8..5, 60),
        publishes in prop::collection::vec(any::<bool>(), 60),
        stop in 1_usize..60,
        (replay, forget_after, retire_after, decay) in (0.0..0.9, 0_u64..20, 0_u64..3, 0.0..0.99),
    ) {
        let rule = CurriculumRule { replay, forget_after, retire_after, decay, ..CurriculumRule::default() };
        let mut whole = curriculum(rule.clone());
        let mut resumed = None;
        for (at, (reward, publish)) in rewards.iter().zip(&publishes).enumerate() {
            if at == stop {
                let text = serde_json::to_string(whole.state()).unwrap();
                let mut of = curriculum(rule.clone());
                of.resume(serde_json::from_str(&text).unwrap());
                prop_assert_eq!((of.census(), &of.hard), (whole.census(), &whole.hard));
                resumed = Some(of);
            }
            let ordinal = at as u64;
            let result = (0..4).map(|nth| f64::from(u8::from(nth < *reward))).collect::<Vec<_>>();
            let go = |of: &mut Curriculum| {
                let place = of.choose(ordinal, stream);
                // Every third group stays open for a while.
                if at % 3 != 0 {
                    of.settle(&step(&[(ordinal, result.clone()), (ordinal.saturating_sub(2), result.clone())]));
                }
                if *publish {
                    of.published();
                }
                place
            };
            let expected = go(&mut whole);
            if let Some(of) = &mut resumed {
                prop_assert_eq!(go(of), expected);
                prop_assert_eq!(of.state(), whole.state());
            }
        }
    }
}
