//! A synthetic task that a tiny model learns in minutes: `a+b=` with numbers of up to `digits` digits, 18 at most. Deterministic; it
//! needs no file.

use super::Pair;
use super::shuffle::{Draws, permutation};

/// Every sum of two numbers of up to `digits` digits, `100^digits` of them, in counting order.
///
/// ```
/// let pairs = rollflow::data::arithmetic::addition(1);
/// assert_eq!(pairs.len(), 100);
/// assert_eq!(pairs[95].prompt, "9+5=".into());
/// assert_eq!(pairs[95].completion, "14");
/// ```
pub fn addition(digits: u32) -> Vec<Pair> {
    let bound = bound(digits);
    (0..bound).flat_map(|a| (0..bound).map(move |b| sum(a, b))).collect()
}

/// `count` sums drawn by `seed`, with replacement, for tasks whose full list is too long.
pub fn drawn_addition(digits: u32, count: usize, seed: u64) -> Vec<Pair> {
    let (bound, mut draws) = (bound(digits), Draws::new(seed, u64::from(digits)));
    (0..count)
        .map(|_| {
            let a = draws.below(bound);
            sum(a, draws.below(bound))
        })
        .collect()
}

/// The share of `pairs` that supervised warm-up may see: `fraction` of them (0 to 1, rounded up), chosen and ordered by `seed`. The
/// rest is left for reinforcement to discover.
pub fn share(pairs: &[Pair], fraction: f64, seed: u64) -> Vec<Pair> {
    let count = (pairs.len() as f64 * fraction).ceil() as usize;
    permutation(pairs.len(), seed, 0).into_iter().take(count).map(|at| pairs[at].clone()).collect()
}

/// Numbers of up to `digits` digits are below this.
fn bound(digits: u32) -> u64 {
    10_u64.pow(digits)
}

fn sum(a: u64, b: u64) -> Pair {
    Pair { prompt: format!("{a}+{b}=").into(), completion: (a + b).to_string() }
}
