//! The estimators that a trainer can apply to a batch: one advantage per sample, from rewards and lengths.

use serde::{Deserialize, Serialize};

use super::centred::{gpg, optimal_baseline, subtract_baseline};
use super::error::AdvantageError;
use super::group::{AdvantageConfig, Scale, advantages};
use super::leave_one_out::leave_one_out;
use super::pass_at_k::best_of_group;
use super::rank::{normalized, rank_based};
use super::rules::{Missing, Rules, over_scored, zero_missing};
use super::whitened::{reinforce_plus_plus_baseline, reinforce_plus_plus_outcome};

/// One group, as an [`Estimator`] sees it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ScoredGroup<'a> {
    /// What each sample earned; NaN where nobody scored it.
    pub rewards: &'a [f64],
    /// How many tokens of each are trained.
    pub lengths: &'a [f64],
}

impl AsRef<[f64]> for ScoredGroup<'_> {
    fn as_ref(&self) -> &[f64] {
        self.rewards
    }
}

/// Turns the rewards of a batch into one advantage per sample. Pure: same inputs, same output.
///
/// Closures `Fn(&[ScoredGroup]) -> Result<Vec<Vec<f64>>, AdvantageError>` are estimators too.
pub trait Estimator: Send + Sync {
    /// Advantages by group, aligned with the rewards.
    fn estimate(&self, groups: &[ScoredGroup]) -> Result<Vec<Vec<f64>>, AdvantageError>;

    /// Whether a group's advantages depend on that group alone, so that a batch may be learned from in parts.
    fn is_by_group(&self) -> bool {
        false
    }
}

impl<F> Estimator for F
where
    F: Fn(&[ScoredGroup]) -> Result<Vec<Vec<f64>>, AdvantageError> + Send + Sync,
{
    fn estimate(&self, groups: &[ScoredGroup]) -> Result<Vec<Vec<f64>>, AdvantageError> {
        self(groups)
    }
}

impl Estimator for AdvantageConfig {
    fn estimate(&self, groups: &[ScoredGroup]) -> Result<Vec<Vec<f64>>, AdvantageError> {
        advantages(groups, self)
    }

    fn is_by_group(&self) -> bool {
        self.scale != Scale::Batch
    }
}

/// The estimators that need no critic and no second answer. NaN rewards are refused by name; a sample without siblings that needs some
/// gets 0.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum Advantage {
    /// [`advantages`]: against the group's mean (GRPO, Dr. GRPO).
    GroupMean(AdvantageConfig),
    /// [`leave_one_out`]: against the mean of the others (RLOO).
    LeaveOneOut {
        /// Added to the batch's standard deviation, by which advantages are divided; `None` leaves them as they are.
        normalize: Option<f64>,
    },
    /// [`reinforce_plus_plus_outcome`]: against the batch's mean, by its deviation over tokens.
    ReinforcePlusPlus,
    /// [`reinforce_plus_plus_baseline`]: against the group's mean, by the batch's deviation over tokens.
    ReinforcePlusPlusBaseline,
    /// [`optimal_baseline`]: against the group's mean weighted by length (OPO).
    OptimalBaseline,
    /// [`gpg`]: against the group's mean, stretched by how few rewards say anything.
    Gpg,
    /// [`best_of_group`]: what the best adds to the second best (pass@k).
    BestOfGroup {
        /// Added to the group's standard deviation, by which that is divided; `None` leaves it as it is.
        scale: Option<f64>,
    },
    /// [`rank_based`]: the place within the group, from −1 to 1.
    Rank,
    /// [`normalized`]: against the batch's mean, by its deviation over samples.
    Normalized {
        /// Added to the standard deviation.
        epsilon: f64,
    },
    /// [`subtract_baseline`]: against a constant (REINFORCE).
    Constant {
        /// That constant.
        baseline: f64,
    },
}

impl Default for Advantage {
    fn default() -> Self {
        Advantage::GroupMean(AdvantageConfig::default())
    }
}

impl Estimator for Advantage {
    fn estimate(&self, groups: &[ScoredGroup]) -> Result<Vec<Vec<f64>>, AdvantageError> {
        let lengths: Vec<&[f64]> = groups.iter().map(|group| group.lengths).collect();
        let rules = Rules::default();
        match *self {
            Advantage::GroupMean(config) => advantages(groups, &config),
            Advantage::LeaveOneOut { normalize } => leave_one_out(groups, rules, normalize),
            Advantage::ReinforcePlusPlus => reinforce_plus_plus_outcome(groups, &lengths, rules),
            Advantage::ReinforcePlusPlusBaseline => reinforce_plus_plus_baseline(groups, &lengths, rules),
            Advantage::OptimalBaseline => optimal_baseline(groups, &lengths, rules),
            Advantage::Gpg => gpg(groups, rules, 1.0),
            Advantage::BestOfGroup { scale } => best_of_group(groups, rules.missing, scale),
            Advantage::Rank => rank_based(groups, rules.missing),
            Advantage::Normalized { epsilon } => normalized(groups, rules.missing, epsilon),
            Advantage::Constant { baseline } => {
                let values = over_scored(groups, Missing::Refuse, |_, group| subtract_baseline(&group.rewards, baseline))?;
                Ok(zero_missing(values))
            }
        }
    }

    fn is_by_group(&self) -> bool {
        match self {
            Advantage::GroupMean(config) => config.is_by_group(),
            Advantage::LeaveOneOut { normalize } => normalize.is_none(),
            Advantage::OptimalBaseline | Advantage::BestOfGroup { .. } | Advantage::Rank | Advantage::Constant { .. } => true,
            Advantage::ReinforcePlusPlus
            | Advantage::ReinforcePlusPlusBaseline
            | Advantage::Gpg
            | Advantage::Normalized { .. } => false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const ALL: [Advantage; 12] = [
        Advantage::GroupMean(AdvantageConfig {
            scale: Scale::Batch,
            epsilon: 1e-4,
            missing: Missing::Refuse,
            lone: super::super::Lone::Itself,
        }),
        Advantage::LeaveOneOut { normalize: None },
        Advantage::LeaveOneOut { normalize: Some(1e-4) },
        Advantage::ReinforcePlusPlus,
        Advantage::ReinforcePlusPlusBaseline,
        Advantage::OptimalBaseline,
        Advantage::Gpg,
        Advantage::BestOfGroup { scale: None },
        Advantage::BestOfGroup { scale: Some(1e-6) },
        Advantage::Rank,
        Advantage::Normalized { epsilon: 1e-4 },
        Advantage::Constant { baseline: 0.5 },
    ];

    fn estimate(advantage: &dyn Estimator, rewards: &[Vec<f64>], lengths: &[Vec<f64>]) -> Result<Vec<Vec<f64>>, AdvantageError> {
        let groups = rewards.iter().zip(lengths).map(|(rewards, lengths)| ScoredGroup { rewards, lengths });
        advantage.estimate(&groups.collect::<Vec<_>>())
    }

    #[test]
    fn each_refuses_a_reward_that_is_no_number_by_name() {
        for advantage in ALL {
            let error = estimate(&advantage, &[vec![1.0, f64::NAN]], &[vec![1.0; 2]]).unwrap_err();
            assert!(matches!(error, AdvantageError::NonFinite { group: 0, sample: 1, .. }), "{advantage:?}: {error}");
        }
    }

    #[test]
    fn nothing_is_nothing_to_compare() {
        for advantage in ALL {
            assert_eq!(estimate(&advantage, &[], &[]).unwrap(), [[0.0; 0]; 0], "{advantage:?}");
            assert_eq!(estimate(&advantage, &[vec![]], &[vec![]]).unwrap(), [[0.0; 0]], "{advantage:?}");
        }
    }

    #[test]
    fn what_is_by_group_is_the_same_for_each_group_alone() {
        let rewards = [vec![1.0, 0.0, 0.0], vec![0.5, 0.25], vec![2.0, 2.0, -1.0, 0.0]];
        let lengths = rewards.clone().map(|group| group.iter().map(|reward| 3.0 + reward).collect::<Vec<f64>>());
        for advantage in ALL {
            let together = estimate(&advantage, &rewards, &lengths).unwrap();
            let alone = rewards.iter().zip(&lengths).map(|(rewards, lengths)| {
                estimate(&advantage, std::slice::from_ref(rewards), std::slice::from_ref(lengths)).unwrap().remove(0)
            });
            let same = alone.collect::<Vec<_>>() == together;
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
            for advantage in ALL {
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
            for advantage in ALL {
                let values = estimate(&advantage, &rewards, &lengths).unwrap();
                prop_assert!(values.iter().flatten().all(|value| value.is_finite()), "{advantage:?}: {values:?}");
                prop_assert!(values.iter().map(Vec::len).eq(rewards.iter().map(Vec::len)), "{advantage:?}");
                if !matches!(advantage, Advantage::Constant { .. }) {
                    let values = estimate(&advantage, &equal, &lengths).unwrap();
                    prop_assert!(values.iter().flatten().all(|value| value.abs() < 1e-9), "{advantage:?}: {values:?}");
                }
            }
        }
    }
}
