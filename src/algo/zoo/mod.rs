//! Losses and advantages that few runs use, one file each. A first reading can skip this folder.

mod baselines;
mod best_of_group;
mod covariance;
mod dppo;
mod dro;
mod geo_mean;
mod rank;
mod sapo;
mod several;
mod vespo;

pub use baselines::{gpg, optimal_baseline, subtract_baseline};
pub use best_of_group::{BestOfGroup, best_of_group};
pub use covariance::{ClipCov, KlCov};
pub use dppo::{BinaryDivergence, Dppo};
pub use dro::Dro;
pub use geo_mean::GeoMean;
pub use rank::{Normalized, normalized, rank_based};
pub use sapo::Sapo;
pub use several::{combine_rewards, normalize_then_sum};
pub use vespo::Vespo;
