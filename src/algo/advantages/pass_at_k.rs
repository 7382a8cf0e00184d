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
