//! Supervised samples in rows, and lists cut into runs.

use std::ops::Range;

use proptest::prelude::*;
use rollflow::data::Sample;
use rollflow::data::packing::{OverlongPolicy, Packing, cost_of, cut_evenly, cut_rectangles, pack};

fn tokens_of(row: &[Sample]) -> usize {
    row.iter().map(|sample| sample.tokens.len()).sum()
}

proptest! {
    #[test]
    fn rectangles_hold_every_sequence_once_and_no_more_cells_than_asked_for(
        lengths in prop::collection::vec(1usize..40, 0..30), cells in 1usize..200
    ) {
        let runs = cut_rectangles(&lengths, cells);
        prop_assert!(runs.iter().cloned().flatten().eq(0..lengths.len()));
        for run in runs {
            let widest = lengths[run.clone()].iter().max().copied().unwrap_or(0);
            prop_assert!(run.len() == 1 || run.len() * widest <= cells);
        }
    }

    #[test]
    fn runs_are_whole_bounded_and_no_other_cut_of_as_many_is_cheaper(
        lengths in prop::collection::vec(1usize..9, 1..9), most in 1usize..20, least in 1usize..5,
    ) {
        let costs: Vec<f64> = lengths.iter().map(|&length| cost_of(length, 4.0)).collect();
        let runs = cut_evenly(&lengths, &costs, most, least);
        prop_assert_eq!(runs.iter().flat_map(Clone::clone).collect::<Vec<_>>(), (0..lengths.len()).collect::<Vec<_>>());
        let fits = |run: &Range<usize>| run.len() == 1 || lengths[run.clone()].iter().sum::<usize>() <= most;
        prop_assert!(runs.iter().all(fits), "{runs:?}");
        let costliest = |runs: &[Range<usize>]| {
            runs.iter().map(|run| costs[run.clone()].iter().sum::<f64>()).fold(0.0, f64::max)
        };
        // Every way to cut: bit i is a cut after item i.
        let all = (0..1u32 << (lengths.len() - 1)).map(|cuts| {
            let cut = |at: &usize| cuts >> (at - 1) & 1 == 1;
            let mut starts: Vec<usize> = [0].into_iter().chain((1..lengths.len()).filter(cut)).collect();
            starts.push(lengths.len());
            starts.windows(2).map(|ends| ends[0]..ends[1]).collect::<Vec<_>>()
        });
        let all: Vec<Vec<Range<usize>>> = all.filter(|runs| runs.iter().all(fits)).collect();
        let count = all.iter().map(Vec::len).min().unwrap().max(least.min(lengths.len()));
        let cheapest = all.iter().filter(|other| other.len() <= count).map(|other| costliest(other)).fold(f64::INFINITY, f64::min);
        prop_assert!(runs.len() <= count && costliest(&runs) <= cheapest * (1.0 + 1e-5), "{runs:?} costs {}, {cheapest} is possible", costliest(&runs));
    }

    #[test]
    fn packing_loses_no_token_uncounted(
        lengths in prop::collection::vec(1usize..20, 1..12), room in 1usize..12, way in 0usize..3, long in 0usize..3,
    ) {
        let way = [Packing::Apart, Packing::BestFit, Packing::Wrapped][way];
        let long = [OverlongPolicy::Drop, OverlongPolicy::Truncate, OverlongPolicy::Split][long];
        let samples = lengths.iter().map(|&length| Sample::supervised(&[7], &vec![8; length])).collect();
        let packed = pack(samples, room, way, long).teaching();
        let kept: usize = packed.rows.iter().map(|row| tokens_of(row)).sum();
        prop_assert_eq!(kept + packed.lost_tokens, lengths.iter().map(|length| length + 1).sum::<usize>());
        prop_assert!(packed.rows.iter().all(|row| tokens_of(row) <= room && !row.is_empty()));
        prop_assert_eq!(packed.too_long, lengths.iter().filter(|length| **length + 1 > room).count());
    }
}
