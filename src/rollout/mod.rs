//! Rollouts: when a prompt may enter, and the fate of every token that was sampled for it.

mod admission;

pub(crate) use admission::Due;
pub use admission::{
    Admission, Fate, LOST, Ledger, LedgerImbalance, OpenGroup, Pace, Progress, STALE, SURPLUS, TRUNCATED, TokensMissing, Totals,
    TrainingFlow,
};
