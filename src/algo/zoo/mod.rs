//! Losses and advantages that few runs use. A first reading can skip this folder.

mod advantages;
mod covariance;
mod surrogates;

pub use advantages::{
    BestOfGroup, Normalized, best_of_group, combine_rewards, gpg, normalize_then_sum, normalized, optimal_baseline, rank_based,
    subtract_baseline,
};
pub use covariance::{ClipCov, KlCov};
pub use surrogates::{BinaryDivergence, Dppo, Dro, GeoMean, Sapo, Vespo};
