//! All advantage estimators that a recipe can name, one line each.

use super::estimator::{AdvantageError, Estimator, Missing, Rules, ScoredGroup, over_scored};
use super::group::{GroupMean, LeaveOneOut, leave_one_out};
use super::whitened::{reinforce_plus_plus_baseline, reinforce_plus_plus_outcome};
use crate::algo::zoo::{
    BestOfGroup, Normalized, best_of_group, gpg, normalized, optimal_baseline, rank_based, subtract_baseline,
};
use crate::settings::declare::{section, tagged};
use crate::settings::params::Custom;
use crate::settings::section::NoKeys;
use crate::settings::setting::FINITE;

tagged! {
    /// Advantage estimator: what a reward is compared with.
    pub enum Advantage {
        /// the mean of its group (GRPO).
        "group_mean" => GroupMean(GroupMean),
        /// the mean of the others of its group (RLOO).
        "leave_one_out" => LeaveOneOut(LeaveOneOut),
        /// the mean over the batch's tokens, in units of their standard deviation (REINFORCE++).
        "reinforce_plus_plus" => ReinforcePlusPlus(NoKeys),
        /// the mean of its group, in units of the standard deviation over the batch's tokens
        /// (REINFORCE++-baseline).
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
        "normalized" => Normalized(Normalized),
        /// a constant (REINFORCE).
        "constant" => Constant(Constant),
        /// an estimator that was registered by a name.
        "custom" => Custom(Custom),
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
    /// If true, a completion without others of its group gets no advantage.
    pub fn needs_siblings(&self) -> bool {
        !matches!(
            self,
            Advantage::ReinforcePlusPlus(_) | Advantage::Normalized(_) | Advantage::Constant(_) | Advantage::Custom(_)
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
            Advantage::LeaveOneOut(of) => leave_one_out(groups, rules, of.normalize.then_some(of.epsilon)),
            Advantage::ReinforcePlusPlus(_) => reinforce_plus_plus_outcome(groups, rules),
            Advantage::ReinforcePlusPlusBaseline(_) => reinforce_plus_plus_baseline(groups, rules),
            Advantage::OptimalBaseline(_) => optimal_baseline(groups, rules),
            Advantage::Gpg(_) => gpg(groups, rules, 1.0),
            Advantage::BestOfGroup(of) => best_of_group(groups, rules.missing, of.scale.then_some(of.epsilon)),
            Advantage::Rank(_) => rank_based(groups, rules.missing),
            Advantage::Normalized(of) => normalized(groups, rules.missing, of.epsilon),
            Advantage::Constant(of) => {
                over_scored(groups, Missing::Refuse, |_, group| subtract_baseline(&group.rewards, of.baseline))
            }
            Advantage::Custom(of) => {
                let name = &of.name;
                Err(AdvantageError::Custom(format!(
                    "the estimator `{name}` is registered by its name; take it from the registry"
                )))
            }
        }
    }

    fn is_by_group(&self) -> bool {
        match self {
            Advantage::GroupMean(of) => of.is_by_group(),
            Advantage::LeaveOneOut(of) => !of.normalize,
            Advantage::OptimalBaseline(_) | Advantage::BestOfGroup(_) | Advantage::Rank(_) | Advantage::Constant(_) => true,
            Advantage::ReinforcePlusPlus(_)
            | Advantage::ReinforcePlusPlusBaseline(_)
            | Advantage::Gpg(_)
            | Advantage::Normalized(_)
            | Advantage::Custom(_) => false,
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::group::Scale;
    use super::*;

    /// Every estimator of the library, in its variants.
    fn all() -> [Advantage; 12] {
        [
            Advantage::GroupMean(GroupMean { std: Scale::Batch, ..GroupMean::default() }),
            Advantage::LeaveOneOut(LeaveOneOut::default()),
            Advantage::LeaveOneOut(LeaveOneOut { normalize: true, ..LeaveOneOut::default() }),
            Advantage::ReinforcePlusPlus(NoKeys),
            Advantage::ReinforcePlusPlusBaseline(NoKeys),
            Advantage::OptimalBaseline(NoKeys),
            Advantage::Gpg(NoKeys),
            Advantage::BestOfGroup(BestOfGroup { scale: false, ..BestOfGroup::default() }),
            Advantage::BestOfGroup(BestOfGroup::default()),
            Advantage::Rank(NoKeys),
            Advantage::Normalized(Normalized::default()),
            Advantage::Constant(Constant { baseline: 0.5 }),
        ]
    }

    #[test]
    fn a_registered_estimator_is_not_one_of_the_library() {
        let custom = Advantage::Custom(Custom { name: "mine".to_owned(), ..Custom::default() });
        assert!(estimate(&custom, &[], &[]).unwrap_err().to_string().contains("`mine`"));
    }

    fn estimate(advantage: &dyn Estimator, rewards: &[Vec<f64>], lengths: &[Vec<f64>]) -> Result<Vec<Vec<f64>>, AdvantageError> {
        let groups = rewards.iter().zip(lengths).map(|(rewards, lengths)| ScoredGroup { rewards, lengths });
        advantage.estimate(&groups.collect::<Vec<_>>())
    }

    #[test]
    fn each_refuses_a_reward_that_is_no_number_by_name_and_takes_an_empty_batch() {
        for advantage in all() {
            let error = estimate(&advantage, &[vec![1.0, f64::NAN]], &[vec![1.0; 2]]).unwrap_err();
            assert!(matches!(error, AdvantageError::NonFinite { group: 0, sample: 1, .. }), "{advantage:?}: {error}");
            assert_eq!(estimate(&advantage, &[], &[]).unwrap(), [[0.0; 0]; 0], "{advantage:?}");
            assert_eq!(estimate(&advantage, &[vec![]], &[vec![]]).unwrap(), [[0.0; 0]], "{advantage:?}");
        }
    }

    #[test]
    fn what_is_by_group_is_the_same_for_each_group_alone() {
        let rewards = [vec![1.0, 0.0, 0.0], vec![0.5, 0.25], vec![2.0, 2.0, -1.0, 0.0]];
        let lengths = rewards.clone().map(|group| group.iter().map(|reward| 3.0 + reward).collect::<Vec<f64>>());
        for advantage in all() {
            let together = estimate(&advantage, &rewards, &lengths).unwrap();
            let alone = |at: usize| estimate(&advantage, &rewards[at..=at], &lengths[at..=at]).unwrap().remove(0);
            let same = (0..3).map(alone).collect::<Vec<_>>() == together;
            assert!(same || !advantage.is_by_group(), "{advantage:?}");
        }
    }

    #[test]
    fn a_closure_is_an_estimator() {
        let halved = |groups: &[ScoredGroup]| -> Result<Vec<Vec<f64>>, AdvantageError> {
            Ok(groups.iter().map(|group| group.rewards.iter().map(|reward| reward / 2.0).collect()).collect())
        };
        assert_eq!(estimate(&halved, &[vec![1.0, 3.0]], &[vec![1.0; 2]]).unwrap(), [[0.5, 1.5]]);
    }

    proptest! {
        /// Law N4, for every number that a float can hold.
        #[test]
        fn each_is_finite_or_names_the_sample_whose_reward_is_no_use(
            rewards in prop::collection::vec(prop::collection::vec(prop_oneof![
                prop::num::f64::ANY,
                prop::sample::select(vec![f64::MAX, f64::MIN, 1e300, -1e300, 1e100, -1e100, 5e-324, 0.0, 1.0]),
            ], 1..5), 1..4),
        ) {
            let lengths: Vec<Vec<f64>> = rewards.iter().map(|group| vec![3.0; group.len()]).collect();
            for advantage in all() {
                match estimate(&advantage, &rewards, &lengths) {
                    Ok(values) => prop_assert!(values.iter().flatten().all(|value| value.is_finite()), "{advantage:?}: {values:?}"),
                    Err(AdvantageError::NonFinite { group, sample, .. }) => {
                        prop_assert!(!crate::data::is_reward(rewards[group][sample]), "{advantage:?} blames {}", rewards[group][sample]);
                    }
                    Err(error) => prop_assert!(false, "{advantage:?}: {error}"),
                }
            }
        }

        #[test]
        fn each_is_finite_aligned_and_blind_to_all_equal_rewards(
            samples in prop::collection::vec(prop::collection::vec((-5.0f64..5.0, 0.0f64..9.0), 0..6), 0..5), same in -5.0f64..5.0,
        ) {
            let column = |of: fn(&(f64, f64)) -> f64| samples.iter().map(|group| group.iter().map(of).collect()).collect::<Vec<Vec<f64>>>();
            let (rewards, lengths) = (column(|sample| sample.0), column(|sample| sample.1.floor()));
            let equal: Vec<Vec<f64>> = rewards.iter().map(|group| vec![same; group.len()]).collect();
            for advantage in all() {
                let values = estimate(&advantage, &rewards, &lengths).unwrap();
                prop_assert!(values.iter().flatten().all(|value| value.is_finite()), "{advantage:?}: {values:?}");
                prop_assert!(values.iter().map(Vec::len).eq(rewards.iter().map(Vec::len)), "{advantage:?}");
                if !matches!(advantage, Advantage::Constant(_)) {
                    let values = estimate(&advantage, &equal, &lengths).unwrap();
                    prop_assert!(values.iter().flatten().all(|value| value.abs() < 1e-9), "{advantage:?}: {values:?}");
                }
            }
        }
    }
}
