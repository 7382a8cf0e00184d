//! `[pairs]`: which answers are held against each other.

use crate::settings::declare::{choices, section};

section! {
    /// Pairs of a group's answers, of which one earned more, for `train.loss.kind = "dpo"`. Groups without any are dropped.
    pub struct Pairs {
        /// Which.
        select: Select = Select::default();
    }
}

choices! {
    /// Which answers are held against each other.
    pub enum Select {
        /// the best against the worst.
        "best_worst" => BestWorst,
        /// one pair, drawn by the seed.
        "random" => Random,
        /// every answer against every worse one.
        "all" => All,
    }
}
