//! Looking at samples by hand: what a batch is like, some of its samples, what is wrong with them, how two differ, and ones made up.
//!
//! ```
//! use rollflow::algo::rollouts::{Pick, batch_issues, batch_statistics, filter_by_reward, mock_batch, sample_batch};
//! use rollflow::data::Sample;
//!
//! let batch = mock_batch(4, 8, 42);
//! assert!(batch_issues(&batch).is_empty());
//! println!("{}", batch_statistics(batch.samples()));
//!
//! let samples: Vec<Sample> = batch.samples().cloned().collect();
//! let right = filter_by_reward(&samples, 0.5..);
//! let best = sample_batch(&samples, 3, Pick::Top);
//! assert!(best.iter().all(|sample| right.contains(sample)));
//! ```

mod check;
mod divergence;
mod mock;
mod pick;
mod show;
mod statistics;

pub use check::{Issue, batch_issues, sample_issues};
pub use divergence::{BatchKl, compute_batch_kl, filter_by_kl};
pub use mock::{mock_batch, mock_sample};
pub use pick::{Pick, filter_by_reward, sample_batch};
pub use show::{compare_samples, inspect_sample};
pub use statistics::{BatchStatistics, Spread, batch_statistics};
