//! Synthetic task that a tiny model learns in minutes: `a+b=` with numbers of up to `digits`
//! digits, at most 18. Deterministic; needs no file.

use super::shuffle::{Draws, permutation};
use super::{Pair, RankedPair};

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

/// Splits `items` into a share, such as that of a supervised warm-up, and the rest. The share is
/// `fraction` of them (0 to 1, rounded up). `seed` chooses and orders both.
pub fn split<T: Clone>(items: &[T], fraction: f64, seed: u64) -> (Vec<T>, Vec<T>) {
    let count = (items.len() as f64 * fraction).ceil() as usize;
    let mut shuffled: Vec<T> = permutation(items.len(), seed, 0).into_iter().map(|at| items[at].clone()).collect();
    let rest = shuffled.split_off(count.min(items.len()));
    (shuffled, rest)
}

/// Digits most of all.
const BABBLE: &[u8] = b"00112233445566778899+-*/=() .,:;?!<>abcdefghijklmnopqrstuvwxyz";

/// Pairs each sum with `each` wrong answers drawn by `seed`. Wrong answers alternate: one that is
/// off by at most 3, any number of up to two digits more than the right one, and up to four
/// arbitrary characters. All sums come once before any comes again.
pub fn ranked(sums: &[Pair], each: usize, seed: u64) -> Vec<RankedPair> {
    let mut draws = Draws::new(seed, u64::from(u32::MAX));
    let pair = |(round, Pair { prompt, completion, .. }): (usize, &Pair)| {
        let right: u64 = completion.parse().unwrap_or(0);
        let rejected = loop {
            let wrong = match round % 3 {
                0 => (right + draws.below(7)).saturating_sub(3).to_string(),
                1 => {
                    let digits = 1 + draws.below(completion.len() as u64 + 2);
                    draws.below(bound(digits.min(18) as u32)).to_string()
                }
                _ => (0..draws.below(5)).map(|_| char::from(BABBLE[draws.below(BABBLE.len() as u64) as usize])).collect(),
            };
            if wrong != *completion {
                break wrong;
            }
        };
        RankedPair { prompt: prompt.clone(), chosen: completion.clone(), rejected, ..RankedPair::default() }
    };
    (0..each).flat_map(|round| sums.iter().map(move |sum| (round, sum))).map(pair).collect()
}

/// Numbers of up to `digits` digits are below this.
fn bound(digits: u32) -> u64 {
    10_u64.pow(digits)
}

fn sum(a: u64, b: u64) -> Pair {
    Pair { prompt: format!("{a}+{b}=").into(), completion: (a + b).to_string(), ..Pair::default() }
}
