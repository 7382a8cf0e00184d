//! Products of few rows with a matrix on a CPU (`few_rows.cpp`), as in a step of decoding.

use std::ffi::c_char;

use tch::{Device, Kind, Tensor};
use torch_sys::C_tensor;

use super::{call, raw};

unsafe extern "C" {
    fn rollflow_few_rows_supported() -> bool;
    fn rollflow_few_rows(out: *mut *mut C_tensor, x: *mut C_tensor, weight: *mut C_tensor) -> *mut c_char;
}

/// Numbers of rows for which it takes no longer than libtorch's product: 1.0 to 3.7 times as fast on two cores of an AMD
/// EPYC, 1.0 to 2.0 times on one.
const ROWS: std::ops::RangeInclusive<i64> = 4..=128;

/// Least size of the matrix: rearranging rows takes longest with small ones.
const NUMBERS: i64 = 80_000;

/// `x · weightᵀ` in f32, `[rows, depth]` and `[columns, depth]` → `[rows, columns]`, without gradients. `None` if
/// libtorch's product is faster, or has gradients.
pub(super) fn linear(x: &Tensor, weight: &Tensor) -> Option<Tensor> {
    let is_plain = |of: &Tensor| {
        of.device() == Device::Cpu && of.kind() == Kind::Float && of.dim() == 2 && !of.requires_grad() && of.is_contiguous()
    };
    let suits = is_plain(x) && is_plain(weight) && ROWS.contains(&x.size()[0]) && weight.numel() as i64 >= NUMBERS;
    // SAFETY: asks for the processor's instructions.
    (suits && unsafe { rollflow_few_rows_supported() }).then(|| product(x, weight))
}

fn product(x: &Tensor, weight: &Tensor) -> Tensor {
    call(|out| unsafe { rollflow_few_rows(out, raw(x), raw(weight)) })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::use_threads;

    /// Numbers that the seed and the place determine: libtorch's generator is shared by tests.
    fn numbers(shape: [i64; 2], seed: i64) -> Tensor {
        let of = |at: i64| ((at * 37 + seed * 101) as f32 * 0.618).sin();
        Tensor::from_slice(&(0..shape[0] * shape[1]).map(of).collect::<Vec<_>>()).view(shape)
    }

    fn is_supported() -> bool {
        unsafe { rollflow_few_rows_supported() }
    }

    /// Single ones, odd ones, those that fill vectors and one more.
    #[test]
    fn n5_products_of_few_rows_are_f64_s_to_the_precision_of_f32() {
        if !is_supported() {
            return;
        }
        for rows in [1, 2, 7, 8, 9, 15, 16, 17, 31, 32, 33, 48, 65, 128] {
            for (columns, depth) in [(1, 1), (5, 3), (12, 64), (13, 65), (100, 257), (6, 1000)] {
                let (x, weight) = (numbers([rows, depth], 1), numbers([columns, depth], 2));
                let [wide_x, wide] = [&x, &weight].map(|of| of.to_kind(Kind::Double));
                let found = product(&x, &weight).to_kind(Kind::Double);
                let gaps = (found - wide_x.mm(&wide.tr())).abs() / wide_x.abs().mm(&wide.abs().tr());
                let gap = gaps.max().double_value(&[]);
                assert!(gap < 3e-6, "{rows} × {depth} × {columns}: {gap}");
            }
        }
    }

    /// Law V3: a completion does not depend on those that are computed with it.
    #[test]
    fn the_number_of_rows_and_threads_changes_no_bit_of_a_row() {
        if !is_supported() {
            return;
        }
        let by = |threads: usize, rows: i64| {
            let computed = move || {
                use_threads(threads);
                let (x, weight) = (numbers([128, 300], 3).narrow(0, 0, rows), numbers([350, 300], 4));
                Vec::<f32>::try_from(product(&x, &weight).get(0)).unwrap()
            };
            std::thread::spawn(computed).join().unwrap()
        };
        let alone = by(1, 1);
        for (threads, rows) in [(1, 8), (1, 9), (1, 40), (2, 16), (2, 128)] {
            assert_eq!(by(threads, rows), alone, "{threads} threads, {rows} rows");
        }
    }

    #[test]
    fn products_with_gradients_and_of_other_sizes_are_libtorchs() {
        let (x, weight) = (numbers([32, 300], 5), numbers([300, 300], 6));
        assert_eq!(linear(&x, &weight).is_some(), is_supported());
        for (x, weight) in [
            (x.shallow_clone(), weight.detach().copy().set_requires_grad(true)),
            (x.repeat([8, 1]), weight.shallow_clone()),
            (x.narrow(0, 0, 2), weight.shallow_clone()),
            (x.narrow(1, 0, 100), weight.narrow(1, 0, 100)),
            (x.to_kind(Kind::Double), weight.to_kind(Kind::Double)),
        ] {
            assert!(linear(&x, &weight).is_none(), "{x:?} {weight:?}");
        }
    }
}
