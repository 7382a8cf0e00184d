//! Advantages: laws of every estimator, rules for samples that can't be compared, returns by token.

use std::ops::Range;

use proptest::prelude::*;
use rollflow::algo::{
    Advantage, AdvantageError, Estimator, GroupMean, Lone, Missing, Rules, Scale, ScoredGroup, best_of_group, gae, gpg,
    group_mean, leave_one_out, normalized, optimal_baseline, pass_at_k, rank_based, reinforce_plus_plus,
    reinforce_plus_plus_baseline, reinforce_plus_plus_outcome, rewards_to_go, subtract_baseline,
};
use rollflow::data::is_reward;
use rollflow::recipe::Custom;

type Found = Result<Vec<Vec<f64>>, AdvantageError>;

/// Every estimator of the library, in its variants.
fn all() -> [Advantage; 12] {
    [
        Advantage::GroupMean(GroupMean { std: Scale::Batch, ..GroupMean::default() }),
        Advantage::LeaveOneOut { normalize: false, epsilon: 1e-4 },
        Advantage::LeaveOneOut { normalize: true, epsilon: 1e-4 },
        Advantage::ReinforcePlusPlus,
        Advantage::ReinforcePlusPlusBaseline,
        Advantage::OptimalBaseline,
        Advantage::Gpg,
        Advantage::BestOfGroup { scale: false, epsilon: 1e-6 },
        Advantage::BestOfGroup { scale: true, epsilon: 1e-6 },
        Advantage::Rank,
        Advantage::Normalized { epsilon: 1e-4 },
        Advantage::Constant { baseline: 0.5 },
    ]
}

fn estimate(advantage: &dyn Estimator, rewards: &[Vec<f64>], lengths: &[Vec<f64>]) -> Found {
    let groups = rewards.iter().zip(lengths).map(|(rewards, lengths)| ScoredGroup { rewards, lengths });
    advantage.estimate(&groups.collect::<Vec<_>>())
}

#[test]
fn each_refuses_a_reward_that_is_no_number_by_name_and_takes_an_empty_batch() {
    for advantage in all() {
        let error = estimate(&advantage, &[vec![1.0, f64::NAN]], &[vec![1.0; 2]]).unwrap_err();
        assert_eq!(
            error.to_string(),
            "the reward of sample 1 in group 0 is NaN; rewards are finite numbers of at most 1e100 either way"
        );
        assert_eq!(estimate(&advantage, &[], &[]).unwrap(), [[0.0; 0]; 0], "{advantage:?}");
        assert_eq!(estimate(&advantage, &[vec![]], &[vec![]]).unwrap(), [[0.0; 0]], "{advantage:?}");
    }
    let custom = Advantage::Custom(Custom { name: "mine".to_owned(), ..Custom::default() });
    assert!(estimate(&custom, &[], &[]).unwrap_err().to_string().contains("`mine`"));
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
    let halved = |groups: &[ScoredGroup]| -> Found {
        Ok(groups.iter().map(|group| group.rewards.iter().map(|reward| reward / 2.0).collect()).collect())
    };
    assert_eq!(estimate(&halved, &[vec![1.0, 3.0]], &[vec![1.0; 2]]).unwrap(), [[0.5, 1.5]]);
}

#[test]
fn each_is_its_formula_and_leaves_unscored_and_lone_samples_out() {
    let nan = f64::NAN;
    let (refuse, zero) = (Rules::default(), Rules { missing: Missing::Zero, ..Rules::default() });
    let (alone, both) = (Rules { lone: Lone::Nothing, ..refuse }, Rules { lone: Lone::Nothing, ..zero });
    let mean = |rewards: &[f64], std, rules| group_mean(&[rewards], &GroupMean { std, epsilon: 1e-4 }, rules);
    let scored = |rewards, lengths| [ScoredGroup { rewards, lengths }];
    let one_unscored = [ScoredGroup { rewards: &[1.0, f64::NAN], lengths: &[2.0, 5.0] }];
    let shared = 4.0 / 3.0 - 1.0;
    let table: Vec<(&str, Found, Vec<Vec<f64>>)> = vec![
        ("group_mean, equal", mean(&[0.1; 7], Scale::Group, refuse), vec![vec![0.0; 7]]),
        ("group_mean, lone", mean(&[3.0], Scale::Group, refuse), vec![vec![0.0]]),
        ("group_mean, unscored", mean(&[1.0, nan, 0.0], Scale::None, zero), vec![vec![0.5, 0.0, -0.5]]),
        ("group_mean, all unscored", mean(&[nan, nan], Scale::None, zero), vec![vec![0.0; 2]]),
        ("leave_one_out", leave_one_out(&[[1.0, 0.0, 0.5]], refuse, None), vec![vec![0.75, -0.75, 0.0]]),
        (
            "leave_one_out, unscored",
            leave_one_out(&[vec![1.0, nan, 0.0], vec![nan, 2.0]], zero, None),
            vec![vec![1.0, 0.0, -1.0], vec![0.0; 2]],
        ),
        ("leave_one_out, lone", leave_one_out(&[[3.0]], refuse, None), vec![vec![0.0]]),
        ("leave_one_out, lone without baseline", leave_one_out(&[[3.0]], alone, None), vec![vec![3.0]]),
        ("leave_one_out, nothing", leave_one_out::<[f64; 0]>(&[], refuse, Some(1e-4)), vec![]),
        ("optimal_baseline", optimal_baseline(&scored(&[1.0, 0.0], &[3.0, 1.0]), refuse), vec![vec![0.25, -0.75]]),
        ("optimal_baseline, no tokens", optimal_baseline(&scored(&[1.0, 0.0], &[0.0; 2]), refuse), vec![vec![0.5, -0.5]]),
        ("optimal_baseline, unscored", optimal_baseline(&one_unscored, both), vec![vec![1.0, 0.0]]),
        ("optimal_baseline, lone", optimal_baseline(&one_unscored, zero), vec![vec![0.0; 2]]),
        ("gpg, unscored", gpg(&one_unscored, both, 1.0), vec![vec![1.0, 0.0]]),
        (
            "best_of_group",
            best_of_group(&[vec![0.1, 0.7, 0.3], vec![1.0, 0.0, 1.0], vec![0.5], vec![]], Missing::Refuse, None),
            vec![vec![0.0, 0.7 - 0.3, 0.0], vec![0.0; 3], vec![0.0], vec![]],
        ),
        ("best_of_group, equal", best_of_group(&[[0.1; 4]], Missing::Refuse, Some(1e-6)), vec![vec![0.0; 4]]),
        ("best_of_group, unscored", best_of_group(&[[nan, 2.0, 1.0]], Missing::Zero, None), vec![vec![0.0, 1.0, 0.0]]),
        (
            "rank_based",
            rank_based(&[vec![10.0, -3.0, 0.0], vec![1.0, 0.0, 1.0, 1.0], vec![0.1; 5], vec![9.0], vec![]], Missing::Refuse),
            vec![vec![1.0, -1.0, 0.0], vec![shared, -1.0, shared, shared], vec![0.0; 5], vec![0.0], vec![]],
        ),
        ("rank_based, unscored", rank_based(&[[1.0, nan, 0.0]], Missing::Zero), vec![vec![1.0, 0.0, -1.0]]),
        ("normalized", normalized(&[vec![1.0, 0.0], vec![2.0]], Missing::Refuse, 0.0), vec![vec![0.0, -1.0], vec![1.0]]),
        ("normalized, equal", normalized(&[[0.1; 3], [0.1; 3]], Missing::Refuse, 0.0), vec![vec![0.0; 3]; 2]),
        ("normalized, unscored", normalized(&[[nan, 4.0]], Missing::Zero, 0.0), vec![vec![0.0; 2]]),
        ("subtract_baseline", Ok(vec![subtract_baseline(&[1.0, 0.0, 0.5], 0.5)]), vec![vec![0.5, -0.5, 0.0]]),
    ];
    for (what, found, expected) in table {
        assert_eq!(found.unwrap(), expected, "{what}");
    }
    let missing = [
        mean(&[f64::INFINITY, 0.0], Scale::None, zero),
        leave_one_out(&[[1.0, nan]], refuse, None),
        gpg(&one_unscored, refuse, 1.0),
        best_of_group(&[[nan, 2.0]], Missing::Refuse, None),
        rank_based(&[[1.0, nan]], Missing::Refuse),
    ];
    assert!(missing.iter().all(|found| matches!(found, Err(AdvantageError::NonFinite { group: 0, .. }))), "{missing:?}");
}

#[test]
fn columns_that_do_not_belong_together_are_refused() {
    let refused = gae(&[1.0, 2.0], &[0.0], &[1.0; 2], &[], 1.0, 1.0).unwrap_err();
    assert_eq!(refused.to_string(), "values has 1 entries where 2 are needed; columns are aligned");
    assert!(rewards_to_go(&[1.0], &[], &whole(1), 1.0).is_err());
    let [short, none] = [&[3.0][..], &[]].map(|lengths| [ScoredGroup { rewards: &[1.0, 0.0], lengths }]);
    let refused = optimal_baseline(&short, Rules::default()).unwrap_err();
    assert_eq!(refused.to_string(), "lengths has 1 entries where 2 are needed; columns are aligned");
    assert!(reinforce_plus_plus_outcome(&none, Rules::default()).is_err());
}

#[test]
fn unscored_samples_stay_out_of_a_batch_that_is_whitened() {
    let rules = Rules { missing: Missing::Zero, ..Rules::default() };
    let of = |rewards, lengths| reinforce_plus_plus_baseline(&[ScoredGroup { rewards, lengths }], rules).unwrap().concat();
    let (with, without) = (of(&[1.0, 0.0, f64::NAN], &[2.0, 1.0, 9.0]), of(&[1.0, 0.0], &[2.0, 1.0]));
    assert_eq!(with, [without[0], without[1], 0.0]);
}

#[test]
fn an_outcome_is_a_return_of_every_token_without_discount() {
    let groups = [(&[1.0, 0.0], &[2.0, 1.0]), (&[0.25, 0.5], &[3.0, 1.0])];
    let groups = groups.map(|(rewards, lengths)| ScoredGroup { rewards, lengths });
    let outcome = reinforce_plus_plus_outcome(&groups, Rules::default()).unwrap().concat();
    let rewards = [0.0, 1.0, 0.0, 0.0, 0.0, 0.25, 0.5];
    let tokens = reinforce_plus_plus(&rewards, &[1.0; 7], &[0..2, 2..3, 3..6, 6..7], 1.0).unwrap();
    for (token, sample) in [0, 0, 1, 2, 2, 2, 3].into_iter().enumerate() {
        assert!((tokens.advantages[token] - outcome[sample]).abs() < 1e-12, "token {token}");
    }
}

#[test]
fn rewards_flow_back_within_a_sequence_only() {
    let rewards = [1.0, 2.0, 4.0];
    assert_eq!(rewards_to_go(&rewards, &[1.0; 3], &[0..2, 2..3], 0.5).unwrap(), [2.0, 2.0, 4.0]);
    // A token that is not trained is skipped, and takes no discount.
    assert_eq!(rewards_to_go(&rewards, &[1.0, 0.0, 1.0], &[0..3, 3..3], 0.5).unwrap(), [3.0, 0.0, 4.0]);
}

#[test]
fn draws_that_are_not_possible_have_no_probability() {
    assert_eq!([pass_at_k(4, 1, 0), pass_at_k(4, 1, 5), pass_at_k(4, 5, 2)], [None; 3]);
    assert_eq!([pass_at_k(4, 0, 2), pass_at_k(4, 3, 2), pass_at_k(4, 4, 1)], [Some(0.0), Some(1.0), Some(1.0)]);
    assert!(pass_at_k(100_000, 1, 50_000).is_some_and(|p| (p - 0.5).abs() < 1e-9));
}

fn whole(tokens: usize) -> Vec<Range<usize>> {
    std::iter::once(0..tokens).collect()
}

/// Rewards, values and mask of one sequence.
type Columns = (Vec<f64>, Vec<f64>, Vec<f32>);

fn columns() -> impl Strategy<Value = Columns> {
    let token = (-2.0f64..2.0, -2.0f64..2.0, prop::bool::weighted(0.8).prop_map(|trained| f32::from(u8::from(trained))));
    prop::collection::vec(token, 0..12).prop_map(|tokens| tokens.into_iter().collect())
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
                    prop_assert!(!is_reward(rewards[group][sample]), "{advantage:?} blames {}", rewards[group][sample]);
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
            if !matches!(advantage, Advantage::Constant { .. }) {
                let values = estimate(&advantage, &equal, &lengths).unwrap();
                prop_assert!(values.iter().flatten().all(|value| value.abs() < 1e-9), "{advantage:?}: {values:?}");
            }
        }
    }

    #[test]
    fn baselines_are_means_and_ranks_ignore_any_rising_transform(
        rewards in prop::collection::vec(-5.0f64..5.0, 2..12), length in 1.0f64..9.0, shift in -3.0f64..3.0
    ) {
        let n = rewards.len() as f64;
        let mean = rewards.iter().sum::<f64>() / n;
        let left_out = leave_one_out(&[&rewards[..]], Rules::default(), None).unwrap().remove(0);
        let lengths = vec![length; rewards.len()];
        let weighed = optimal_baseline(&[ScoredGroup { rewards: &rewards, lengths: &lengths }], Rules::default()).unwrap().remove(0);
        let grouped = |rewards: &[f64]| group_mean(&[rewards], &GroupMean::default(), Rules::default()).unwrap().remove(0);
        let (values, shifted) = (grouped(&rewards), grouped(&rewards.iter().map(|reward| reward + shift).collect::<Vec<_>>()));
        prop_assert!(values.iter().sum::<f64>().abs() < 1e-6);
        for (i, reward) in rewards.iter().enumerate() {
            prop_assert!((left_out[i] - (reward - mean) * n / (n - 1.0)).abs() < 1e-12);
            prop_assert!((weighed[i] - (reward - mean)).abs() < 1e-12);
            prop_assert!((values[i] - shifted[i]).abs() < 1e-6);
            prop_assert!((0..rewards.len()).all(|j| *reward <= rewards[j] || values[i] >= values[j]), "the order is kept");
        }
        let plain: Vec<f64> = rewards.iter().map(|reward| reward.round()).collect();
        let warped: Vec<f64> = plain.iter().map(|reward| reward.exp() * 7.0 - 2.0).collect();
        let ranks = rank_based(&[&plain[..], &warped[..]], Missing::Refuse).unwrap();
        prop_assert!(ranks[0].iter().sum::<f64>().abs() < 1e-12);
        prop_assert_eq!(&ranks[0], &ranks[1]);
    }

    /// At λ = γ = 1.
    #[test]
    fn r168_an_advantage_is_the_return_less_the_value((rewards, values, mask) in columns()) {
        let of = gae(&rewards, &values, &mask, &whole(rewards.len()), 1.0, 1.0).unwrap();
        for t in (0..rewards.len()).filter(|&t| mask[t] > 0.0) {
            let to_go: f64 = (t..rewards.len()).map(|k| rewards[k] * f64::from(mask[k])).sum();
            prop_assert!((of.advantages[t] - (to_go - values[t])).abs() < 1e-12);
            prop_assert!((of.returns[t] - to_go).abs() < 1e-12);
        }
    }

    #[test]
    fn tokens_that_are_not_trained_might_as_well_not_be_there((rewards, values, mask) in columns(), gamma in 0.0f64..1.0, lambda in 0.0f64..1.0) {
        let kept = |column: &[f64]| -> Vec<f64> { column.iter().zip(&mask).filter(|(_, mask)| **mask > 0.0).map(|(of, _)| *of).collect() };
        let with = gae(&rewards, &values, &mask, &whole(rewards.len()), gamma, lambda).unwrap();
        let (rewards, values) = (kept(&rewards), kept(&values));
        let without = gae(&rewards, &values, &vec![1.0; rewards.len()], &whole(rewards.len()), gamma, lambda).unwrap();
        prop_assert_eq!(kept(&with.advantages), without.advantages);
    }

    #[test]
    fn pass_at_k_is_the_share_of_draws_with_a_right_answer(n in 1usize..9, correct in 0usize..9, k in 1usize..9) {
        prop_assume!(correct <= n && k <= n);
        let draws = (0u32..1 << n).filter(|draw| draw.count_ones() as usize == k);
        let (hits, all) = draws.fold((0, 0), |(hits, all), draw| (hits + i32::from(draw & ((1 << correct) - 1) != 0), all + 1));
        prop_assert!((pass_at_k(n, correct, k).unwrap() - f64::from(hits) / f64::from(all)).abs() < 1e-12);
    }
}
