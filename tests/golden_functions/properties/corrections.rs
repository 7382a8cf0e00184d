//! Properties of every correction, and of the gap that it corrects. Golden cases compare the numbers with TRL's and verl's.

use std::ops::Range;

use proptest::prelude::*;
use rollflow::algo::{ComparedToken, Divergence, Importance, Level, LogProbGap, OffPolicy, Over, Proximal, Rejection};

const LEVELS: [Level; 3] = [Level::Token, Level::Sequence, Level::Geometric];
const DIVERGENCES: [Divergence; 3] = [Divergence::K1, Divergence::K2, Divergence::K3];
const OVERS: [Over; 4] = [Over::Token, Over::Sum, Over::Mean, Over::Max];

/// Log-ratios of whole sequences, end to end, and where each lies.
fn columns() -> impl Strategy<Value = (Vec<f64>, Vec<Range<usize>>)> {
    prop::collection::vec(prop::collection::vec(-1.5f64..1.5, 1..6), 1..6)
        .prop_map(|sequences| {
            let mut at = 0;
            let ranges = sequences.iter().map(|tokens| {
                at += tokens.len();
                at - tokens.len()..at
            });
            (ranges.collect(), sequences.concat())
        })
        .prop_map(|(ranges, tokens): (Vec<Range<usize>>, Vec<f64>)| (tokens, ranges))
}

fn zeros(tokens: &[f64]) -> Vec<f64> {
    vec![0.0; tokens.len()]
}

proptest! {
    #[test]
    fn on_policy_every_weight_is_one_and_nothing_is_rejected((tokens, sequences) in columns(), max in 1.0f64..4.0) {
        let on_policy = zeros(&tokens);
        for level in LEVELS {
            for weigh in [Importance::truncated(level, max), Importance::masked(level, 1.0 / max, max)] {
                for normalize in [false, true] {
                    let (weights, spread) = Importance { normalize, ..weigh }.weights(&on_policy, &sequences);
                    // Means are guarded against division by zero, which a normalised weight shows.
                    prop_assert!(weights.iter().all(|weight| (weight - 1.0).abs() < 1e-7));
                    prop_assert!((spread.effective_sample_share() - 1.0).abs() < 1e-6 && spread.units.high() == 0.0);
                }
            }
        }
        for (divergence, over) in DIVERGENCES.iter().flat_map(|d| OVERS.map(|over| (*d, over))) {
            let (keep, _) = Rejection { divergence, over, min: None, max }.judge(&on_policy, &sequences);
            prop_assert!(keep.iter().all(|keep| *keep));
        }
    }

    #[test]
    fn truncated_weights_stay_in_bounds_and_masked_ones_are_the_ratio_or_zero(
        (tokens, sequences) in columns(), min in 0.1f64..1.0, max in 1.0f64..3.0
    ) {
        for level in LEVELS {
            let free = Importance::truncated(level, f64::INFINITY).weights(&tokens, &sequences).0;
            let cut = Importance::truncated(level, max).weights(&tokens, &sequences).0;
            let both = Importance { min: Some(min), ..Importance::truncated(level, max) };
            let both = both.weights(&tokens, &sequences).0;
            let masked = Importance::masked(level, min, max).weights(&tokens, &sequences).0;
            for at in 0..tokens.len() {
                prop_assert!(cut[at] <= max && cut[at] == free[at].min(max));
                prop_assert!((min..=max).contains(&both[at]));
                prop_assert!(masked[at] == 0.0 || masked[at] == free[at]);
                // Masked is what truncation left alone.
                prop_assert_eq!(masked[at] != 0.0, both[at] == free[at]);
            }
        }
    }

    #[test]
    fn a_sequence_shares_one_weight_and_one_verdict((tokens, sequences) in columns(), max in 1.0f64..3.0) {
        for level in [Level::Sequence, Level::Geometric] {
            let weights = Importance::truncated(level, max).weights(&tokens, &sequences).0;
            prop_assert!(sequences.iter().all(|at| weights[at.clone()].iter().all(|weight| *weight == weights[at.start])));
        }
        for over in [Over::Sum, Over::Mean, Over::Max] {
            let keep = Rejection { divergence: Divergence::K3, over, min: None, max: max - 1.0 }.judge(&tokens, &sequences).0;
            prop_assert!(sequences.iter().all(|at| keep[at.clone()].iter().all(|kept| *kept == keep[at.start])));
        }
    }

    /// N1: a part's factors and counts are those it has in the whole batch.
    #[test]
    fn parts_get_the_factors_of_the_whole((tokens, sequences) in columns(), cut in 0usize..6, max in 0.1f64..2.0) {
        let cut = cut.min(sequences.len());
        let start = sequences.get(cut).map_or(tokens.len(), |at| at.start);
        let (left, right) = sequences.split_at(cut);
        let right: Vec<Range<usize>> = right.iter().map(|at| at.start - start..at.end - start).collect();
        for level in LEVELS {
            let correction = OffPolicy {
                weigh: Some(Importance::masked(level, 0.5, 1.0 + max)),
                reject: vec![Rejection { divergence: Divergence::K2, over: Over::Max, min: None, max }],
                ..OffPolicy::default()
            };
            let apply = |tokens: &[f64], sequences: &[Range<usize>]| correction.factors(tokens, tokens, &zeros(tokens), sequences);
            let (whole, all) = apply(&tokens, &sequences);
            let (first, mut counts) = apply(&tokens[..start], left);
            let (second, rest) = apply(&tokens[start..], &right);
            prop_assert_eq!(whole, [first, second].concat());
            counts.merge(&rest);
            prop_assert_eq!((all.dropped_tokens, all.dropped_sequences), (counts.dropped_tokens, counts.dropped_sequences));
            prop_assert!((all.weights.mean() - counts.weights.mean()).abs() < 1e-9);
            prop_assert_eq!((all.weights.units.min, all.weights.units.max), (counts.weights.units.min, counts.weights.units.max));
        }
    }

    #[test]
    fn rejecting_more_keeps_a_subset((tokens, sequences) in columns(), max in 0.01f64..1.0, stricter in 0.1f64..1.0) {
        for (divergence, over) in DIVERGENCES.iter().flat_map(|d| OVERS.map(|over| (*d, over))) {
            let bound = |max: f64| if divergence == Divergence::K1 { 1.0 + max } else { max };
            let rejection = |max| Rejection { divergence, over, min: None, max: bound(max) };
            let factors = |reject| {
                let correction = OffPolicy { reject, ..OffPolicy::default() };
                correction.factors(&tokens, &tokens, &zeros(&tokens), &sequences).0
            };
            let (loose, tight) = (factors(vec![rejection(max)]), factors(vec![rejection(max * stricter)]));
            let both = factors(vec![rejection(max), rejection(max * stricter)]);
            prop_assert!(tight.iter().zip(&loose).all(|(tight, loose)| tight <= loose));
            prop_assert_eq!(both, tight);
        }
    }
}

#[test]
fn a_sequence_without_trained_tokens_moves_no_weight_and_is_not_judged() {
    let tokens = [0.5, 0.2, -0.4];
    let (without, with): ([Range<usize>; 2], [Range<usize>; 3]) = ([0..2, 2..3], [0..2, 2..2, 2..3]);
    for level in LEVELS {
        let weigh = Importance { normalize: true, ..Importance::truncated(level, 4.0) };
        let (own, seen) = weigh.weights(&tokens, &with);
        assert_eq!(own, weigh.weights(&tokens, &without).0, "{level:?}");
        assert_eq!(seen.sequences.min, 0.0, "verl's statistics count it");
    }
    for (divergence, over) in DIVERGENCES.iter().flat_map(|d| OVERS.map(|over| (*d, over))) {
        let rejection = Rejection { divergence, over, min: None, max: 1.2 };
        assert_eq!(rejection.judge(&tokens, &with), rejection.judge(&tokens, &without), "{rejection:?}");
    }
}

#[test]
fn icepop_is_masking_at_token_level() {
    let (weights, _) = Importance::icepop(0.5, 5.0)
        .weights(&[0.4f64.ln(), 0.5f64.ln() + 1e-9, 4.0f64.ln(), 6.0f64.ln()], std::slice::from_ref(&(0..4)));
    assert_eq!((weights[0], weights[3]), (0.0, 0.0));
    assert!((weights[1] - 0.5).abs() < 1e-8 && (weights[2] - 4.0).abs() < 1e-9);
}

#[test]
fn an_absurd_ratio_stays_finite() {
    for level in LEVELS {
        for log_ratio in [-900.0, 900.0] {
            let (weights, spread) = Importance::truncated(level, 2.0).weights(&[log_ratio, 0.0], std::slice::from_ref(&(0..2)));
            assert!(weights.iter().all(|weight| weight.is_finite()) && spread.units.max.is_finite() && spread.std().is_finite());
        }
    }
}

/// Proximal log-probabilities and importance weights of three tokens, 0, 1 and 4 versions old.
fn anchors(proximal: Proximal, weigh: Option<Importance>) -> (Option<Vec<f64>>, Option<Vec<f64>>) {
    let off_policy = OffPolicy { proximal, weigh, reject: Vec::new() };
    let anchors = off_policy.anchors(&[-1.0; 3], &[-1.2; 3], &[-2.0; 3], &[0, 1, 4], std::slice::from_ref(&(0..3)));
    (anchors.proximal, anchors.importance)
}

#[test]
fn the_trust_region_lies_where_it_was_asked_for() {
    let of = |proximal| anchors(proximal, None).0;
    assert_eq!(of(Proximal::Behaviour), None);
    assert_eq!(of(Proximal::Recompute), Some(vec![-1.2; 3]));
    // AReaL's test: versions 0, current 2 gives the middle; here lag 4 gives three quarters.
    assert_eq!(of(Proximal::LogLinear), Some(vec![-2.0, -2.0, -1.25]));
}

#[test]
fn weights_span_from_behaviour_to_proximal_and_never_count_twice() {
    let weights = |proximal| anchors(proximal, Some(Importance::truncated(Level::Token, 1e9))).1.unwrap();
    assert_eq!(weights(Proximal::Behaviour), [1.0; 3]);
    weights(Proximal::Recompute).iter().for_each(|weight| assert!((weight - 0.8f64.exp()).abs() < 1e-12));
    assert_eq!(weights(Proximal::LogLinear), [1.0, 1.0, 0.75f64.exp()]);
}

fn sequence(tokens: &[(f64, f64)]) -> Vec<ComparedToken> {
    let token = |(position, &(trainer, behaviour)): (usize, &(f64, f64))| ComparedToken {
        position,
        lag: position as u64 % 2,
        trainer,
        behaviour,
        ..Default::default()
    };
    tokens.iter().enumerate().map(token).collect()
}

fn gap(sequences: &[&[(f64, f64)]]) -> LogProbGap {
    let mut gap = LogProbGap::default();
    sequences.iter().for_each(|tokens| gap.add_sequence(&sequence(tokens)));
    gap
}

#[test]
fn equal_policies_have_no_gap() {
    let same = gap(&[&[(-1.0, -1.0), (-2.0, -2.0)]]);
    assert_eq!((same.mean(), same.ratio(), same.approx_kl(), same.max(), same.k1()), (0.0, 1.0, 0.0, 0.0, 0.0));
    assert!(same.chi2().abs() < 1e-8 && (same.effective_sample_share() - 1.0).abs() < 1e-12);
    let nothing = gap(&[&[]]);
    assert_eq!((nothing.ratio(), nothing.effective_sample_share(), nothing.chi2(), nothing.max()), (1.0, 1.0, 0.0, 0.0));
}

#[test]
fn the_worst_token_and_every_lag_are_named() {
    let seen = gap(&[&[(-1.0, -1.5), (-2.0, -1.0)], &[(-1.0, -0.5)]]);
    assert_eq!((seen.mean(), seen.max()), (2.0 / 3.0, 1.0));
    assert_eq!(seen.worst.map(|worst| (worst.position, worst.behaviour)), Some((1, -1.0)));
    let close = |lag: u64, ratio: f64| assert!((seen.by_lag[&lag].ratio() - ratio).abs() < 1e-12);
    close(0, f64::midpoint(0.5f64.exp(), (-0.5f64).exp()));
    close(1, (-1.0f64).exp());
}

proptest! {
    /// N1: what is measured does not depend on how a batch is cut.
    #[test]
    fn parts_add_up(tokens in prop::collection::vec((-5.0f64..0.0, -5.0f64..0.0), 2..20), cut in 1usize..19) {
        let cut = cut.min(tokens.len() - 1);
        let (left, right) = tokens.split_at(cut);
        let whole = gap(&[left, right]);
        let mut parts = gap(&[left]);
        parts.merge(&gap(&[right]));
        prop_assert_eq!(whole.worst, parts.worst);
        for (a, b) in [
            (whole.mean(), parts.mean()), (whole.ratio(), parts.ratio()), (whole.approx_kl(), parts.approx_kl()),
            (whole.chi2(), parts.chi2()), (whole.effective_sample_share(), parts.effective_sample_share()),
            (whole.sequences.perplexity_ratio(), parts.sequences.perplexity_ratio()),
        ] {
            prop_assert!((a - b).abs() <= 1e-9 * a.abs().max(1.0), "{} {}", a, b);
        }
        prop_assert!(whole.effective_sample_share() <= 1.0 + 1e-12 && whole.approx_kl() >= 0.0);
    }
}
