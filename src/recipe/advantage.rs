//! `[train.advantage]`: what rewards are compared with.

pub use crate::algo::Scale;
use crate::settings::declare::{section, tagged};
use crate::settings::params::Custom;
use crate::settings::section::NoKeys;
use crate::settings::setting::{FINITE, POSITIVE};

tagged! {
    /// Advantage estimator: what a reward is compared with.
    pub enum Advantage {
        /// the mean of its group (GRPO).
        "group_mean" => GroupMean(GroupMean),
        /// the mean of the others of its group (RLOO).
        "leave_one_out" => LeaveOneOut(LeaveOneOut),
        /// the mean over the batch's tokens, in units of their standard deviation (REINFORCE++).
        "reinforce_plus_plus" => ReinforcePlusPlus(NoKeys),
        /// the mean of its group, in units of the standard deviation over the batch's tokens (REINFORCE++-baseline).
        "reinforce_plus_plus_baseline" => ReinforcePlusPlusBaseline(NoKeys),
        /// the mean of its group, weighted by length (OPO).
        "optimal_baseline" => OptimalBaseline(NoKeys),
        /// the mean of its group, scaled by the share of the batch's rewards that are not 0 (GPG).
        "gpg" => Gpg(NoKeys),
        /// the second best of its group, for the best; all others get 0 (pass@k).
        "best_of_group" => BestOfGroup(BestOfGroup),
        /// the others of its group by rank, from -1 to 1.
        "rank" => Rank(NoKeys),
        /// the mean of the batch, in units of its standard deviation.
        "normalized" => Normalized(NoKeys),
        /// a constant (REINFORCE).
        "constant" => Constant(Constant),
        /// an estimator that was registered by a name.
        "custom" => Custom(Custom),
    }
}

section! {
    /// Difference from the group's mean.
    pub struct GroupMean {
        /// Divisor of the difference.
        std: Scale = Scale::default();
        /// ε added to the divisor.
        epsilon: f64 = 1e-4, POSITIVE;
    }
}

section! {
    /// Difference from the mean of the others.
    pub struct LeaveOneOut {
        /// If true, advantages are divided by their standard deviation over the batch.
        normalize: bool = false;
    }
}

section! {
    /// Difference between best and second best.
    pub struct BestOfGroup {
        /// If true, it is divided by the group's standard deviation.
        scale: bool = true;
    }
}

section! {
    /// Difference from a constant.
    pub struct Constant {
        /// The constant.
        baseline: f64 = 0.0, FINITE;
    }
}

impl Advantage {
    /// Whether an answer without others of its group teaches nothing.
    pub fn needs_siblings(&self) -> bool {
        !matches!(
            self,
            Advantage::ReinforcePlusPlus(_) | Advantage::Normalized(_) | Advantage::Constant(_) | Advantage::Custom(_)
        )
    }
}
