//! Estimator of pass@k.

/// Unbiased estimator of pass@k, `1 − C(n − c, k) / C(n, k)`, from `n` completions of which
/// `correct` are right (Chen et al., Evaluating Large Language Models Trained on Code, 2021).
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

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

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
