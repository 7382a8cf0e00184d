//! Losses and advantages that few runs use. A first reading can skip this folder.

mod advantages;
mod covariance;
mod surrogates;

pub use advantages::{best_of_group, gpg, normalized, optimal_baseline, rank_based, subtract_baseline};
pub use covariance::{ClipCov, KlCov};
pub use surrogates::{BinaryDivergence, Dppo, Dro, GeoMean, Sapo, Vespo};
