//! Permutations that are the same on every machine and in every release: Fisher–Yates over ChaCha8,
//! whose output is specified.

use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{Rng, SeedableRng};

/// Keeps these draws apart from all others that are keyed by the run's seed, such as the sampler's (law N2).
const DOMAIN: &[u8; 16] = b"rollflow/shuffle";

/// Random numbers that are a pure function of `seed` and `stream`.
pub(crate) struct Draws(ChaCha8Rng);

impl Draws {
    /// Streams of one seed are independent of each other.
    pub(crate) fn new(seed: u64, stream: u64) -> Self {
        let mut key = [0; 32];
        key[..8].copy_from_slice(&seed.to_le_bytes());
        key[16..].copy_from_slice(DOMAIN);
        let mut rng = ChaCha8Rng::from_seed(key);
        rng.set_stream(stream);
        Draws(rng)
    }

    /// Uniform below `bound`, which is at least 1.
    pub(crate) fn below(&mut self, bound: u64) -> u64 {
        // The last, incomplete stretch of multiples would favour small numbers, so draws from it are repeated.
        let unfair = (u64::MAX % bound + 1) % bound;
        loop {
            let draw = self.0.next_u64();
            if draw <= u64::MAX - unfair {
                return draw % bound;
            }
        }
    }
}

/// Returns a permutation of `0..len`, drawn by (`seed`, `stream`).
pub fn permutation(len: usize, seed: u64, stream: u64) -> Vec<usize> {
    let mut draws = Draws::new(seed, stream);
    let mut order: Vec<usize> = (0..len).collect();
    for last in (1..len).rev() {
        order.swap(last, draws.below(last as u64 + 1) as usize);
    }
    order
}
