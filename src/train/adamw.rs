//! AdamW and global-norm clipping in one pass over plain slices.
//!
//! Parameters, gradients and moments are one flat buffer each. An update is a single fused loop:
//! four streams read, three written, nothing allocated. Training uses `f32`; references use `f64`.

use num_traits::Float;
use serde::{Deserialize, Serialize};

/// AdamW (decoupled weight decay), equal to `torch.optim.AdamW`:
///
/// `m ← β₁m + (1−β₁)g;  v ← β₂v + (1−β₂)g²;  θ ← θ(1 − lr·λ) − lr · m̂ / (√v̂ + ε)`,
/// with m̂ = m/(1−β₁ᵗ) and v̂ = v/(1−β₂ᵗ). With `amsgrad`, v̂ comes from the largest v so far.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct AdamW {
    /// β₁: decay rate of the mean gradient.
    pub beta1: f64,
    /// β₂: decay rate of the mean square.
    pub beta2: f64,
    /// ε, against division by zero.
    pub epsilon: f64,
    /// λ: decoupled weight decay of the tensors in [`DecayScope`](super::DecayScope).
    pub weight_decay: f64,
    /// Divides by the largest mean square seen rather than the current one.
    pub amsgrad: bool,
}

impl Default for AdamW {
    fn default() -> Self {
        AdamW { beta1: 0.9, beta2: 0.999, epsilon: 1e-8, weight_decay: 0.0, amsgrad: false }
    }
}

/// A double, rounded to `T`.
fn rounded<T: Float>(value: f64) -> T {
    T::from(value).expect("a float type holds any double, rounded")
}

impl AdamW {
    /// Update number `step` (from 1) with rate `lr`, every gradient multiplied by `scale` first.
    ///
    /// `moments` are m, v and the largest v so far, each as long as `params`; the last is empty
    /// unless `amsgrad`.
    pub fn update<T: Float>(&self, step: u64, lr: f64, scale: f64, params: &mut [T], grad: &[T], moments: [&mut [T]; 3]) {
        let correction = |beta: f64| 1.0 - beta.powf(step as f64);
        let [beta1, rest1, beta2, rest2] = [self.beta1, 1.0 - self.beta1, self.beta2, 1.0 - self.beta2].map(rounded::<T>);
        let [scale, epsilon, root2] = [scale, self.epsilon, correction(self.beta2).sqrt()].map(rounded::<T>);
        let [rate, keep] = [lr / correction(self.beta1), 1.0 - lr * self.weight_decay].map(rounded::<T>);
        let moments_after = |grad: T, mean: &mut T, square: &mut T| {
            let grad = grad * scale;
            *mean = *mean * beta1 + grad * rest1;
            *square = *square * beta2 + grad * grad * rest2;
            *square
        };
        let apply = |param: &mut T, mean: T, square: T| {
            *param = *param * keep - rate * mean / (square.sqrt() / root2 + epsilon);
        };
        let [mean, square, max] = moments;
        let columns = params.iter_mut().zip(grad).zip(mean).zip(square);
        if self.amsgrad {
            for ((((param, grad), mean), square), max) in columns.zip(max) {
                let v = moments_after(*grad, mean, square);
                if v > *max {
                    *max = v;
                }
                apply(param, *mean, *max);
            }
        } else {
            for (((param, grad), mean), square) in columns {
                let v = moments_after(*grad, mean, square);
                apply(param, *mean, v);
            }
        }
    }
}

/// Euclidean norm, summed in doubles block by block; NaN or infinite when an entry is.
pub fn norm<T: Float + Into<f64>>(values: &[T]) -> f64 {
    // Independent lanes allow vector registers; blocks keep single-precision sums short.
    const LANES: usize = 16;
    let mut total = 0.0;
    for block in values.chunks(4096) {
        let mut sums = [T::zero(); LANES];
        for row in block.chunks(LANES) {
            for (sum, value) in sums.iter_mut().zip(row) {
                *sum = *sum + *value * *value;
            }
        }
        total += sums.into_iter().map(Into::into).sum::<f64>();
    }
    total.sqrt()
}

/// Factor that scales a gradient of norm `norm` down to `max_norm`, at most 1
/// (`torch.nn.utils.clip_grad_norm_`).
pub fn clip_scale(norm: f64, max_norm: f64) -> f64 {
    (max_norm / (norm + 1e-6)).min(1.0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn the_norm_is_the_root_of_the_sum_of_squares(values in prop::collection::vec(-10.0f32..10.0, 0..9000)) {
            let plain = values.iter().map(|value| f64::from(*value).powi(2)).sum::<f64>().sqrt();
            prop_assert!((norm(&values) - plain).abs() <= 1e-5 * plain);
        }
    }

    #[test]
    fn a_single_bad_entry_shows_in_the_norm() {
        let mut values = vec![1.0f32; 5000];
        values[4321] = f32::NAN;
        assert!(norm(&values).is_nan());
        values[4321] = f32::INFINITY;
        assert_eq!(norm(&values), f64::INFINITY);
    }
}
