//! AdamW and global-norm clipping in one pass over plain slices.
//!
//! Parameters, gradients and moments are one flat buffer each. An update is a single fused loop:
//! four streams read, three written, nothing allocated. Training uses `f32`; references use `f64`.

use std::ops::{Add, Div, Mul, Sub};

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
    /// λ: decoupled weight decay of the tensors in [`ParamGroups`](super::ParamGroups).
    pub weight_decay: f64,
    /// Divides by the largest mean square seen rather than the current one.
    pub amsgrad: bool,
}

impl Default for AdamW {
    fn default() -> Self {
        AdamW { beta1: 0.9, beta2: 0.999, epsilon: 1e-8, weight_decay: 0.0, amsgrad: false }
    }
}

/// The moments of some parameters, all of equal length. `max` is empty unless `amsgrad`.
#[derive(Debug)]
pub struct Moments<'a, T> {
    /// m.
    pub mean: &'a mut [T],
    /// v.
    pub square: &'a mut [T],
    /// The largest v so far.
    pub max: &'a mut [T],
}

/// `f32` and `f64`, as far as an update needs them.
pub trait Real: Copy + Add<Output = Self> + Sub<Output = Self> + Mul<Output = Self> + Div<Output = Self> + PartialOrd {
    /// Rounds a double.
    fn of(value: f64) -> Self;
    /// Widens to a double.
    fn wide(self) -> f64;
    /// √.
    fn root(self) -> Self;
}

macro_rules! real {
    ($($float:ty),*) => {$(
        impl Real for $float {
            fn of(value: f64) -> Self {
                value as $float
            }
            fn wide(self) -> f64 {
                f64::from(self)
            }
            fn root(self) -> Self {
                self.sqrt()
            }
        }
    )*};
}
real!(f32, f64);

impl AdamW {
    /// Update number `step` (from 1) with rate `lr`, every gradient multiplied by `scale` first.
    pub fn update<T: Real>(&self, step: u64, lr: f64, scale: f64, params: &mut [T], grad: &[T], moments: Moments<T>) {
        let constants = self.constants(step, lr, scale);
        let Moments { mean, square, max } = moments;
        let columns = params.iter_mut().zip(grad).zip(mean).zip(square);
        if self.amsgrad {
            for ((((param, grad), mean), square), max) in columns.zip(max) {
                let v = constants.moments(*grad, mean, square);
                if v > *max {
                    *max = v;
                }
                constants.apply(param, *mean, *max);
            }
        } else {
            for (((param, grad), mean), square) in columns {
                let v = constants.moments(*grad, mean, square);
                constants.apply(param, *mean, v);
            }
        }
    }

    fn constants<T: Real>(&self, step: u64, lr: f64, scale: f64) -> Constants<T> {
        let correction = |beta: f64| 1.0 - beta.powf(step as f64);
        Constants {
            scale: T::of(scale),
            beta1: T::of(self.beta1),
            rest1: T::of(1.0 - self.beta1),
            beta2: T::of(self.beta2),
            rest2: T::of(1.0 - self.beta2),
            root2: T::of(correction(self.beta2).sqrt()),
            epsilon: T::of(self.epsilon),
            rate: T::of(lr / correction(self.beta1)),
            keep: T::of(1.0 - lr * self.weight_decay),
        }
    }
}

/// Constants of one update.
struct Constants<T> {
    scale: T,
    beta1: T,
    rest1: T,
    beta2: T,
    rest2: T,
    root2: T,
    epsilon: T,
    rate: T,
    keep: T,
}

impl<T: Real> Constants<T> {
    #[inline(always)]
    fn moments(&self, grad: T, mean: &mut T, square: &mut T) -> T {
        let grad = grad * self.scale;
        *mean = *mean * self.beta1 + grad * self.rest1;
        *square = *square * self.beta2 + grad * grad * self.rest2;
        *square
    }

    #[inline(always)]
    fn apply(&self, param: &mut T, mean: T, square: T) {
        *param = *param * self.keep - self.rate * mean / (square.root() / self.root2 + self.epsilon);
    }
}

/// Euclidean norm, summed in doubles block by block; NaN or infinite when an entry is.
pub fn norm<T: Real>(values: &[T]) -> f64 {
    // Independent lanes allow vector registers; blocks keep single-precision sums short.
    const LANES: usize = 16;
    let mut total = 0.0;
    for block in values.chunks(4096) {
        let mut sums = [T::of(0.0); LANES];
        for row in block.chunks(LANES) {
            for (sum, value) in sums.iter_mut().zip(row) {
                *sum = *sum + *value * *value;
            }
        }
        total += sums.iter().map(|sum| sum.wide()).sum::<f64>();
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

        #[test]
        fn clipping_never_scales_up_and_holds_the_bound(length in 0.0f64..100.0, bound in 0.1f64..10.0) {
            let scale = clip_scale(length, bound);
            prop_assert!(scale <= 1.0 && length * scale <= bound);
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
