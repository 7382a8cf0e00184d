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
