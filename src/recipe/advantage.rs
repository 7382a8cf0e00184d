//! `[train.advantage]`: what rewards are compared with.

pub use crate::algo::Scale;
use crate::settings::declare::{section, tagged};
use crate::settings::params::Custom;
use crate::settings::section::NoKeys;
use crate::settings::setting::{FINITE, POSITIVE};

tagged! {
    /// What a reward is compared with: how much better an answer was than expected.
    pub enum Advantage {
        /// the mean of its group (GRPO).
        "group_mean" => GroupMean(GroupMean),
        /// the mean of the others of its group (RLOO).
        "leave_one_out" => LeaveOneOut(LeaveOneOut),
        /// the mean over the batch's tokens, in units of their standard deviation (REINFORCE++).
        "reinforce_plus_plus" => ReinforcePlusPlus(NoKeys),
        /// the mean of its group, in units of the standard deviation over the batch's tokens (REINFORCE++-baseline).
        "reinforce_plus_plus_baseline" => ReinforcePlusPlusBaseline(NoKeys),
        /// the mean of its group, where longer answers weigh more (OPO).
        "optimal_baseline" => OptimalBaseline(NoKeys),
        /// the mean of its group, stretched by the share of the batch's rewards that are not 0 (GPG).
        "gpg" => Gpg(NoKeys),
        /// the second best of its group, for the best; all others are 0 (pass@k).
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
    /// Against the group's mean.
    pub struct GroupMean {
        /// What the distance is divided by.
        std: Scale = Scale::default();
        /// Added to that.
        epsilon: f64 = 1e-4, POSITIVE;
    }
}

section! {
    /// Against the mean of the others.
    pub struct LeaveOneOut {
        /// Whether advantages are put in units of their standard deviation over the batch.
        normalize: bool = false;
    }
}

section! {
    /// Best against second best.
    pub struct BestOfGroup {
        /// Whether the distance is put in units of the group's standard deviation.
        scale: bool = true;
    }
}

section! {
    /// Against a constant.
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
