//! `[pairs]`: which answers are held against each other.

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
