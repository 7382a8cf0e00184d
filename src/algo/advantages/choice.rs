//! All advantage estimators that a recipe can name, one line each.

use super::estimator::{AdvantageError, Estimator, Missing, Rules, ScoredGroup, over_scored};
use super::group::{GroupMean, leave_one_out};
use super::whitened::{reinforce_plus_plus_baseline, reinforce_plus_plus_outcome};
use crate::algo::zoo::{best_of_group, gpg, normalized, optimal_baseline, rank_based, subtract_baseline};
use crate::settings::declare::tagged;
use crate::settings::params::Custom;
use crate::settings::setting::{FINITE, POSITIVE};

tagged! {
    /// Advantage estimator: what a reward is compared with.
    pub enum Advantage {
        /// the mean of its group (GRPO).
        "group_mean" => GroupMean(GroupMean),
        /// the mean of the others of its group (RLOO).
        "leave_one_out" => LeaveOneOut {
            /// If true, advantages are divided by their standard deviation over the batch.
            normalize: bool = false;
            /// ε added to that standard deviation.
            epsilon: f64 = 1e-4, POSITIVE;
        },
        /// the mean over the batch's tokens, in units of their standard deviation (REINFORCE++).
        "reinforce_plus_plus" => ReinforcePlusPlus,
        /// the mean of its group, in units of the standard deviation over the batch's tokens
        /// (REINFORCE++-baseline).
        "reinforce_plus_plus_baseline" => ReinforcePlusPlusBaseline,
        /// the mean of its group, weighted by length (OPO).
        "optimal_baseline" => OptimalBaseline,
        /// the mean of its group, scaled by the share of the batch's rewards that are not 0 (GPG).
        "gpg" => Gpg,
        /// the second best of its group, for the best; all others get 0 (pass@k).
        "best_of_group" => BestOfGroup {
            /// If true, it is divided by the group's standard deviation.
            scale: bool = true;
            /// ε added to that standard deviation.
            epsilon: f64 = 1e-6, POSITIVE;
        },
        /// the others of its group by rank, from -1 to 1.
        "rank" => Rank,
        /// the mean of the batch, in units of its standard deviation.
        "normalized" => Normalized {
            /// ε added to the batch's standard deviation.
            epsilon: f64 = 1e-4, POSITIVE;
        },
        /// a constant (REINFORCE).
        "constant" => Constant {
            /// The constant.
            baseline: f64 = 0.0, FINITE;
        },
        /// an estimator that was registered by a name.
        "custom" => Custom(Custom),
    }
}

impl Advantage {
    /// If true, a completion without others of its group gets no advantage.
    pub fn needs_siblings(&self) -> bool {
        !matches!(
            self,
            Advantage::ReinforcePlusPlus | Advantage::Normalized { .. } | Advantage::Constant { .. } | Advantage::Custom(_)
        )
    }
}

/// NaN rewards are an error that names the sample. A sample without siblings gets 0 if its
/// estimator needs some.
impl Estimator for Advantage {
    fn estimate(&self, groups: &[ScoredGroup]) -> Result<Vec<Vec<f64>>, AdvantageError> {
        let rules = Rules::default();
        match self {
            Advantage::GroupMean(of) => of.estimate(groups),
            Advantage::LeaveOneOut { normalize, epsilon } => leave_one_out(groups, rules, normalize.then_some(*epsilon)),
            Advantage::ReinforcePlusPlus => reinforce_plus_plus_outcome(groups, rules),
            Advantage::ReinforcePlusPlusBaseline => reinforce_plus_plus_baseline(groups, rules),
            Advantage::OptimalBaseline => optimal_baseline(groups, rules),
            Advantage::Gpg => gpg(groups, rules, 1.0),
            Advantage::BestOfGroup { scale, epsilon } => best_of_group(groups, rules.missing, scale.then_some(*epsilon)),
            Advantage::Rank => rank_based(groups, rules.missing),
            Advantage::Normalized { epsilon } => normalized(groups, rules.missing, *epsilon),
            Advantage::Constant { baseline } => {
                over_scored(groups, Missing::Refuse, |_, group| subtract_baseline(&group.rewards, *baseline))
            }
            Advantage::Custom(Custom { name, .. }) => {
                let problem = format!("the estimator `{name}` is registered by its name; take it from the registry");
                Err(AdvantageError::Custom(problem))
            }
        }
    }

    fn is_by_group(&self) -> bool {
        match self {
            Advantage::GroupMean(of) => of.is_by_group(),
            Advantage::LeaveOneOut { normalize, .. } => !normalize,
            Advantage::OptimalBaseline | Advantage::BestOfGroup { .. } | Advantage::Rank | Advantage::Constant { .. } => true,
            Advantage::ReinforcePlusPlus
            | Advantage::ReinforcePlusPlusBaseline
            | Advantage::Gpg
            | Advantage::Normalized { .. }
            | Advantage::Custom(_) => false,
        }
    }
}
