//! The best of a group: what pass@k is, and an advantage that rewards it.

use super::error::AdvantageError;
use super::rules::{Missing, over_scored, zero_missing};
use super::statistics::std;

/// The probability that some of `k` answers, drawn without replacement from `n` of which `correct` are right, is right:
/// `1 − C(n − c, k) / C(n, k)`, the unbiased estimator of pass@k (Chen et al., Evaluating Large Language Models Trained on Code, 2021).
///
/// `None` unless `1 ≤ k ≤ n` and `correct ≤ n`.
pub fn pass_at_k(n: usize, correct: usize, k: usize) -> Option<f64> {
    if k == 0 || k > n || correct > n {
        return None;
    }
    if n - correct < k {
        return Some(1.0);
    }
    // C(n − c, k) / C(n, k) as a product of factors below 1, which can't overflow.
    Some(1.0 - (n - correct + 1..=n).map(|i| 1.0 - k as f64 / i as f64).product::<f64>())
}

/// The best sample of a group gets `r_max − r_second`, with `scale = Some(ε)` over `std_group + ε`; all others get 0. Only what the best
/// adds to the group is learned from (Walder and Karkhanis, Pass@K Policy Optimization, 2025).
///
/// Shapes: groups × samples in, the same out. Of equal bests none earns anything, and neither does a lone sample. Equals verl 0.9's
/// `grpo_passk`, ε = 1e-6 (`norm_adv_by_std_in_grpo` off: `None`); it refuses groups of one.
pub fn best_of_group<G: AsRef<[f64]>>(
    groups: &[G],
    missing: Missing,
    scale: Option<f64>,
) -> Result<Vec<Vec<f64>>, AdvantageError> {
    let values = over_scored(groups, missing, |_, group| {
        let mut values = vec![0.0; group.rewards.len()];
        let mut order: Vec<usize> = (0..group.rewards.len()).collect();
        order.sort_by(|&a, &b| group.rewards[b].total_cmp(&group.rewards[a]));
        if let [best, second, ..] = order[..] {
            let divisor = scale.map_or(1.0, |epsilon| std(&group.rewards) + epsilon);
            values[best] = (group.rewards[best] - group.rewards[second]) / divisor;
        }
        values
    })?;
    Ok(zero_missing(values))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn only_a_sole_best_earns() {
        let groups = [vec![0.1, 0.7, 0.3], vec![1.0, 0.0, 1.0], vec![0.5], vec![]];
        let values = best_of_group(&groups, Missing::Refuse, None).unwrap();
        assert_eq!(values, [vec![0.0, 0.7 - 0.3, 0.0], vec![0.0; 3], vec![0.0], vec![]]);
        assert_eq!(best_of_group(&[[0.1; 4]], Missing::Refuse, Some(1e-6)).unwrap(), [[0.0; 4]]);
        assert_eq!(best_of_group(&[[f64::NAN, 2.0, 1.0]], Missing::Zero, None).unwrap(), [[0.0, 1.0, 0.0]]);
        assert!(best_of_group(&[[f64::NAN, 2.0]], Missing::Refuse, None).is_err());
    }

    #[test]
    fn what_can_not_be_drawn_has_no_probability() {
        assert_eq!([pass_at_k(4, 1, 0), pass_at_k(4, 1, 5), pass_at_k(4, 5, 2)], [None; 3]);
        assert_eq!([pass_at_k(4, 0, 2), pass_at_k(4, 3, 2), pass_at_k(4, 4, 1)], [Some(0.0), Some(1.0), Some(1.0)]);
        assert!(pass_at_k(100_000, 1, 50_000).is_some_and(|p| (p - 0.5).abs() < 1e-9));
    }

    proptest! {
        #[test]
        fn the_estimate_is_the_share_of_draws_with_a_right_answer(n in 1usize..9, correct in 0usize..9, k in 1usize..9) {
            prop_assume!(correct <= n && k <= n);
            let draws = (0u32..1 << n).filter(|draw| draw.count_ones() as usize == k);
            let (hits, all) = draws.fold((0, 0), |(hits, all), draw| (hits + i32::from(draw & ((1 << correct) - 1) != 0), all + 1));
            prop_assert!((pass_at_k(n, correct, k).unwrap() - f64::from(hits) / f64::from(all)).abs() < 1e-12);
        }
    }
}
