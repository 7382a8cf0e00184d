//! Minibatches of a step.
//!
//! A minibatch is an optimizer step with its own denominators, as in verl. Advantages, values
//! and proximal log-probabilities come from the whole batch. Groups stay together (law D2), and
//! (seed, step, pass) draws them, so that a resumed run repeats the draw (law C2). A single
//! minibatch is the whole batch, in order.

use std::ops::Range;
use std::sync::Arc;

use crate::algo::Aggregation;
use crate::data::{Sample, permutation};
use crate::train::{TrainBatch, TrainError, TrainSequence, collate};

/// Separates these draws from those of prompts.
const DOMAIN: u64 = 0x6d69_6e69_6261_7463;

/// Draws `count` minibatches (0 means 1) of groups with these numbers of samples, and returns the
/// samples' indices. `stream` differs between passes.
pub(super) fn draw(count: usize, seed: u64, groups: impl Iterator<Item = usize>, stream: u64) -> Vec<Vec<usize>> {
    let mut samples = 0;
    let place = |size: usize| {
        samples += size;
        samples - size..samples
    };
    let groups: Vec<Range<usize>> = groups.map(place).collect();
    let count = count.max(1);
    let order = if count > 1 { permutation(groups.len(), seed ^ DOMAIN, stream) } else { (0..groups.len()).collect() };
    // As even as possible; with fewer groups than minibatches, some are empty.
    let cut = |at: usize| at * order.len() / count;
    let minibatch = |at: usize| {
        let mut chosen = order[cut(at)..cut(at + 1)].to_vec();
        chosen.sort_unstable();
        chosen.into_iter().flat_map(|group| groups[group].clone()).collect::<Vec<_>>()
    };
    (0..count).map(minibatch).filter(|places| !places.is_empty()).collect()
}

/// Sequences at `places` with the minibatch's own denominators; `None` if none of their tokens is
/// trained.
pub(super) fn minibatch(
    whole: &Arc<TrainBatch>,
    samples: &[&Sample],
    places: &[usize],
    aggregation: Aggregation,
) -> Result<Option<Arc<TrainBatch>>, TrainError> {
    if places.len() == samples.len() {
        return Ok(Some(whole.clone()));
    }
    let chosen: Vec<&Sample> = places.iter().map(|&at| samples[at]).collect();
    let own = match collate(&chosen, aggregation) {
        Err(TrainError::NothingToTrain(_)) => return Ok(None),
        own => own?,
    };
    let column = |(own, &at): (TrainSequence, &usize)| TrainSequence { weights: own.weights, ..whole.sequences[at].clone() };
    let sequences = own.sequences.into_iter().zip(places).map(column).collect();
    Ok(Some(Arc::new(TrainBatch { sequences, batch_tokens: own.batch_tokens, ..TrainBatch::clone(whole) })))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn every_sample_is_in_one_minibatch_of_a_pass_with_its_group(
            sizes in prop::collection::vec(1usize..4, 1..20), count in 1usize..8, seed in any::<u64>(), stream in 0u64..9
        ) {
            let drawn = draw(count, seed, sizes.iter().copied(), stream);
            prop_assert_eq!(&drawn, &draw(count, seed, sizes.iter().copied(), stream), "law C2");
            prop_assert_eq!(drawn.len(), count.min(sizes.len()));
            let mut all = drawn.concat();
            all.sort_unstable();
            prop_assert_eq!(all, (0..sizes.iter().sum()).collect::<Vec<_>>());
            let ends = sizes.iter().scan(0, |end, size| { *end += size; Some(*end) });
            for (end, size) in ends.zip(&sizes) {
                let met = |places: &Vec<usize>| (end - size..end).filter(|at| places.contains(at)).count();
                prop_assert!(drawn.iter().all(|places| [0, *size].contains(&met(places))), "law D2");
            }
        }
    }

    #[test]
    fn passes_meet_in_different_minibatches_and_a_single_one_is_the_batch_as_it_is() {
        let draw = |count, stream| draw(count, 3, [1; 16].into_iter(), stream);
        assert_ne!(draw(4, 1), draw(4, 2));
        assert_eq!(draw(1, 1), [(0..16).collect::<Vec<_>>()]);
    }
}
