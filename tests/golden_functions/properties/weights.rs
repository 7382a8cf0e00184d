//! Weights of tokens, and sums over masked tokens.

use proptest::prelude::*;
use rollflow::algo::{Aggregation, BatchSize, masked_mean, masked_sum, masked_variance, whiten};

const ALL: [Aggregation; 5] = [
    Aggregation::TokenMean,
    Aggregation::SeqMeanTokenMean,
    Aggregation::SeqMeanTokenSum,
    Aggregation::DrGrpo { max_len: 10 },
    Aggregation::TokenSum,
];

/// Weights of a whole batch.
fn weights<M: AsRef<[f32]>>(aggregation: Aggregation, masks: &[M]) -> Vec<Vec<f64>> {
    aggregation.token_weights(masks, &BatchSize::of(masks))
}

fn masks(lowest: f32, fewest: usize) -> impl Strategy<Value = Vec<Vec<f32>>> {
    prop::collection::vec(prop::collection::vec(lowest..2.0, 1..9), fewest..9)
}

fn close(a: &[f64], b: &[f64]) -> bool {
    a.len() == b.len() && a.iter().zip(b).all(|(a, b)| (a - b).abs() < 1e-12)
}

#[test]
fn each_mode_divides_by_its_own_denominator() {
    let masks: [&[f32]; 3] = [&[0.0, 1.0, 1.0, 1.0], &[1.0], &[0.0, 0.0]];
    let sums = ALL.map(|aggregation| weights(aggregation, &masks).iter().map(|of| of.iter().sum()).collect::<Vec<f64>>());
    let third = 1.0 / 3.0;
    assert_eq!(sums, [[0.75, 0.25, 0.0], [third, third, 0.0], [1.0, third, 0.0], [0.1, 1.0 / 30.0, 0.0], [3.0, 1.0, 0.0]]);
}

proptest! {
    #[test]
    fn n1_parts_weigh_by_their_weight_sum_what_they_weigh_in_the_whole(masks in masks(0.0, 2), cut in 1usize..8) {
        let parts = masks.split_at(cut.min(masks.len() - 1));
        for aggregation in &ALL[..4] {
            let (first, second) = (aggregation.weight_sum(parts.0).unwrap(), aggregation.weight_sum(parts.1).unwrap());
            prop_assume!(first > 0.0 && second > 0.0);
            let scaled = |part: &[Vec<f32>], sum: f64| {
                weights(*aggregation, part).concat().iter().map(|weight| weight * sum / (first + second)).collect::<Vec<f64>>()
            };
            prop_assert!(close(&weights(*aggregation, &masks).concat(), &[scaled(parts.0, first), scaled(parts.1, second)].concat()));
        }
    }

    #[test]
    fn n1_ranks_are_one_more_cut_of_the_batch(masks in masks(0.0, 1), cuts in prop::collection::vec(0usize..9, 0..4)) {
        let mut cuts: Vec<usize> = cuts.into_iter().map(|cut| cut.min(masks.len())).chain([0, masks.len()]).collect();
        cuts.sort_unstable();
        let (ranks, size) = (cuts.len() - 1, BatchSize::of(&masks));
        for aggregation in ALL {
            let summed = |of: &BatchSize| -> Vec<f64> {
                cuts.windows(2).flat_map(|cut| aggregation.token_weights(&masks[cut[0]..cut[1]], of).concat()).collect()
            };
            let whole = weights(aggregation, &masks).concat();
            prop_assert_eq!(&summed(&size), &whole);
            let averaged = summed(&BatchSize { averaged_ranks: ranks, ..size });
            prop_assert!(close(&whole, &averaged.iter().map(|part| part / ranks as f64).collect::<Vec<_>>()));
        }
    }

    #[test]
    fn means_weigh_one_in_total_and_fractions_count_as_fractions(masks in masks(0.1, 1)) {
        for aggregation in [Aggregation::TokenMean, Aggregation::SeqMeanTokenMean] {
            let weights = weights(aggregation, &masks);
            prop_assert!((weights.iter().flatten().sum::<f64>() - 1.0).abs() < 1e-12);
            for (mask, weights) in masks.iter().zip(&weights) {
                let share = weights[0] / f64::from(mask[0]);
                prop_assert!(close(weights, &mask.iter().map(|&m| share * f64::from(m)).collect::<Vec<_>>()));
            }
        }
    }
}

#[test]
fn what_is_hidden_does_not_count_even_as_nan() {
    let (values, mask) = ([1.0, f64::NAN, 3.0], [1.0, 0.0, 1.0]);
    assert_eq!(masked_sum(&values, &mask), 4.0);
    assert!((masked_mean(&values, &mask) - 2.0).abs() < 1e-7);
    assert!((masked_variance(&values, &mask, true) - 2.0).abs() < 1e-7);
    assert!((masked_variance(&values, &mask, false) - 1.0).abs() < 1e-7);
}

#[test]
fn an_empty_mask_a_lone_token_and_equal_values_whiten_to_zero() {
    assert_eq!(masked_mean(&[5.0, 6.0], &[0.0; 2]), 0.0);
    assert_eq!(masked_variance(&[5.0, 6.0], &[0.0; 2], true), 0.0);
    assert_eq!(whiten(&[5.0, 6.0], &[0.0; 2], true), [0.0; 2]);
    assert_eq!(whiten(&[], &[], true), [0.0; 0]);
    assert_eq!(whiten(&[5.0], &[1.0], true), [0.0]);
    assert_eq!(whiten(&[0.1; 9], &[1.0; 9], true), [0.0; 9]);
    assert!(whiten(&[0.1; 9], &[1.0; 9], false).iter().all(|value| (value - 0.1).abs() < 1e-8));
}
