//! Pairs of completions of one prompt with different rewards. Pure.
//!
//! A selector is any `Fn(&Group) -> Vec<PairOf>`, a pure function of the group.

use crate::data::Group;
use crate::data::shuffle::Draws;
use crate::settings::declare::{choices, section};

section! {
    /// Pairs of a group's completions with different rewards, for `train.loss.kind = "dpo"`. Groups
    /// without any are dropped.
    pub struct Pairs {
        /// Selection of pairs.
        select: Select = Select::default();
    }
}

choices! {
    /// Selection of pairs.
    pub enum Select {
        /// the best against the worst.
        "best_worst" => BestWorst,
        /// one pair, drawn by the seed.
        "random" => Random,
        /// every completion against every worse one.
        "all" => All,
    }
}

/// Two samples of a group, by their places in it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct PairOf {
    /// Place of the better completion.
    pub chosen: usize,
    /// Place of the worse completion.
    pub rejected: usize,
}

/// Selector of pairs of a scored group, implemented by every closure `Fn(&Group) -> Vec<PairOf>`.
pub trait PairSelector: Fn(&Group) -> Vec<PairOf> + Send + Sync + 'static {}

impl<F: Fn(&Group) -> Vec<PairOf> + Send + Sync + 'static> PairSelector for F {}

/// The first sample against the second, whatever their rewards: pairs of a data set.
pub fn first_against_second(group: &Group) -> Vec<PairOf> {
    if group.samples.len() == 2 { vec![PairOf { chosen: 0, rejected: 1 }] } else { Vec::new() }
}

/// The best completion against the worst, the first of each among equals; none if all rewards are
/// equal.
pub fn best_against_worst(group: &Group) -> Vec<PairOf> {
    let rewards = group.rewards();
    let extreme = |is_better: fn(f64, f64) -> bool| {
        (0..rewards.len()).reduce(|best, at| if is_better(rewards[at], rewards[best]) { at } else { best })
    };
    let pair = extreme(|a, b| a > b).zip(extreme(|a, b| a < b));
    pair.filter(|(best, worst)| rewards[*best] > rewards[*worst])
        .map(|(chosen, rejected)| PairOf { chosen, rejected })
        .into_iter()
        .collect()
}

/// Every completion against every worse one, in the order of the group; ties give none.
pub fn all_pairs(group: &Group) -> Vec<PairOf> {
    let rewards = group.rewards();
    let places = || 0..rewards.len();
    let worse = |chosen: usize| places().filter(move |rejected| *rejected != chosen).map(move |rejected| (chosen, rejected));
    let all = places().flat_map(worse).filter(|(chosen, rejected)| rewards[*chosen] > rewards[*rejected]);
    all.map(|(chosen, rejected)| PairOf { chosen, rejected }).collect()
}

/// One of [`all_pairs`], drawn by `seed` and the group's id.
pub fn random_pair(seed: u64) -> impl PairSelector {
    move |group: &Group| {
        let mut pairs = all_pairs(group);
        if pairs.is_empty() {
            return pairs;
        }
        let drawn = Draws::new(seed, group.id()).below(pairs.len() as u64) as usize;
        vec![pairs.swap_remove(drawn)]
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use proptest::prelude::*;

    use super::*;
    use crate::data::{Prompt, Sample};

    fn group(ordinal: u64, rewards: &[f64]) -> Group {
        let samples = rewards.iter().map(|reward| Sample { reward: Some(*reward), ..Sample::default() }).collect();
        Group { prompt: Arc::new(Prompt { ordinal, ..Prompt::default() }), samples, ..Group::default() }
    }

    #[test]
    fn r166_ties_give_no_pair() {
        let tied = group(0, &[0.5, 0.5, 0.5]);
        assert!(best_against_worst(&tied).is_empty() && all_pairs(&tied).is_empty() && random_pair(1)(&tied).is_empty());
        assert!(best_against_worst(&group(0, &[])).is_empty());
        let differing = group(1, &[0.0, 1.0, 0.5, 1.0, 0.0]);
        assert_eq!(best_against_worst(&differing), [PairOf { chosen: 1, rejected: 0 }]);
        assert_eq!(all_pairs(&differing).len(), 8, "6 of a 1 against less, 2 of the 0.5");
    }

    #[test]
    fn a_random_pair_is_the_same_for_the_same_group_and_seed_and_any_of_them() {
        let rewards = [0.0, 1.0, 0.5];
        let drawn: Vec<PairOf> = (0..200).flat_map(|id| random_pair(7)(&group(id, &rewards))).collect();
        assert_eq!(drawn, (0..200).flat_map(|id| random_pair(7)(&group(id, &rewards))).collect::<Vec<_>>());
        for pair in all_pairs(&group(0, &rewards)) {
            let share = drawn.iter().filter(|other| **other == pair).count() as f64 / 200.0;
            assert!((share - 1.0 / 3.0).abs() < 0.12, "{pair:?}: {share}");
        }
    }

    proptest! {
        #[test]
        fn the_chosen_one_always_earned_more(rewards in prop::collection::vec(-2.0f64..2.0, 0..9), seed in any::<u64>()) {
            let group = group(seed, &rewards);
            for pair in [best_against_worst(&group), all_pairs(&group), random_pair(seed)(&group)].concat() {
                prop_assert!(rewards[pair.chosen] > rewards[pair.rejected]);
            }
        }
    }
}
