//! Products of f32 matrices on a CPU (`products.cpp`), with gradients.

use std::ffi::c_char;

use tch::{Device, Kind, Tensor};
use torch_sys::C_tensor;

use super::{call, raw};

unsafe extern "C" {
    fn rollflow_products_supported() -> bool;
    fn rollflow_linear(out: *mut *mut C_tensor, x: *mut C_tensor, weight: *mut C_tensor, bias: *mut C_tensor) -> *mut c_char;
    fn rollflow_panels(out: *mut *mut C_tensor, weight: *mut C_tensor) -> *mut c_char;
    fn rollflow_linear_by_panels(
        out: *mut *mut C_tensor,
        x: *mut C_tensor,
        panels: *mut C_tensor,
        columns: i64,
        bias: *mut C_tensor,
    ) -> *mut c_char;
    fn rollflow_product(out: *mut *mut C_tensor, a: *mut C_tensor, b: *mut C_tensor) -> *mut c_char;
}

/// Least size of a matrix, and of a large one: libtorch's product of small ones takes no longer.
const NUMBERS: [usize; 2] = [8_192, 1 << 20];

/// Least number of rows, for a matrix and for a large one: with fewer, libtorch's product takes no longer.
const ROWS: [i64; 2] = [12, 4];

/// Most numbers of a matrix that is rearranged once for all its products. Rearranging rows for a product
/// with a larger one takes less than a twentieth of it.
const MOST_REARRANGED: usize = 1 << 18;

/// A matrix as products of few rows read it fastest.
pub struct Panels {
    numbers: Tensor,
    columns: i64,
}

impl Panels {
    /// Of the matrix of a linear layer without gradients. `None` where that is no gain.
    pub fn new(weight: &Tensor) -> Option<Self> {
        let suits = takes(&[weight]) && weight.is_contiguous() && (NUMBERS[0]..=MOST_REARRANGED).contains(&weight.numel());
        suits.then(|| Panels { numbers: call(|out| unsafe { rollflow_panels(out, raw(weight)) }), columns: weight.size()[0] })
    }

    /// Returns true if a product of `x` by panels is faster than libtorch's.
    pub fn suit(x: &Tensor) -> bool {
        takes(&[x]) && x.dim() == 2 && x.is_contiguous() && x.size()[0] >= ROWS[0]
    }

    /// The bits of [`linear`], without gradients, of rows that [`suit`](Self::suit).
    pub fn linear(&self, x: &Tensor, bias: Option<&Tensor>) -> Tensor {
        let bias = bias.map_or(std::ptr::null_mut(), raw);
        call(|out| unsafe { rollflow_linear_by_panels(out, raw(x), raw(&self.numbers), self.columns, bias) })
    }
}

/// `x · weightᵀ + bias` in f32, `[rows, depth]` and `[columns, depth]` → `[rows, columns]`. `None` if
/// libtorch's product is faster.
pub(super) fn linear(x: &Tensor, weight: &Tensor, bias: Option<&Tensor>) -> Option<Tensor> {
    let is_plain = |of: &Tensor| of.dim() == 2 && of.is_contiguous();
    let is_enough = |of: usize| weight.numel() >= NUMBERS[of] && x.size()[0] >= ROWS[of];
    let suits = takes(&[x, weight]) && is_plain(x) && is_plain(weight) && (is_enough(0) || is_enough(1));
    suits.then(|| linear_of(x, weight, bias))
}

/// `a · b` in f32, where `a` may be a transpose, without gradients. `None` where it isn't supported.
pub(super) fn product(a: &Tensor, b: &Tensor) -> Option<Tensor> {
    takes(&[a, b]).then(|| call(|out| unsafe { rollflow_product(out, raw(a), raw(b)) }))
}

fn takes(operands: &[&Tensor]) -> bool {
    // SAFETY: asks for the processor's instructions.
    operands.iter().all(|of| of.device() == Device::Cpu && of.kind() == Kind::Float) && unsafe { rollflow_products_supported() }
}

fn linear_of(x: &Tensor, weight: &Tensor, bias: Option<&Tensor>) -> Tensor {
    let bias = bias.map_or(std::ptr::null_mut(), raw);
    call(|out| unsafe { rollflow_linear(out, raw(x), raw(weight), bias) })
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

    unsafe extern "C" {
        fn rollflow_has_fast_library() -> bool;
    }

    fn is_supported() -> bool {
        unsafe { rollflow_products_supported() }
    }

    /// The largest difference from a product in f64, in parts of the sum of its absolute terms.
    fn gap(found: &Tensor, a: &Tensor, b: &Tensor) -> f64 {
        let [a, b] = [a, b].map(|of| of.to_kind(Kind::Double));
        let gaps = (found.to_kind(Kind::Double) - a.mm(&b)).abs() / (a.abs().mm(&b.abs()) + 1e-9);
        gaps.max().double_value(&[])
    }

    /// Whole blocks of rows, columns and depth, one more, and one fewer of each, whichever operand is transposed.
    #[test]
    fn n5_products_and_their_gradients_are_f64_s_to_the_precision_of_f32() {
        if !is_supported() {
            return;
        }
        let many =
            [(512, 512, 128), (513, 129, 65), (449, 513, 127), (257, 640, 63), (800, 33, 200), (2048, 64, 40), (130, 96, 500)];
        let few = [
            (4, 300, 300),
            (15, 64, 128),
            (17, 1025, 65),
            (64, 2100, 63),
            (128, 129, 513),
            (129, 700, 900),
            (1, 1, 1),
            (9, 3, 5),
        ];
        for (rows, depth, columns) in many.into_iter().chain(few) {
            let [x, weight] =
                [[rows, depth], [columns, depth]].map(|shape| numbers(shape, rows + shape[0]).set_requires_grad(true));
            let found = linear_of(&x, &weight, None);
            let along = numbers([rows, columns], 3);
            let gradients = Tensor::run_backward(&[(&found * &along).sum(Kind::Float)], &[&x, &weight], false, false);
            let [x, weight] = [x, weight].map(|of| of.detach());
            let gaps = [
                gap(&found.detach(), &x, &weight.tr()),
                gap(&gradients[0], &along, &weight),
                gap(&gradients[1], &along.tr(), &x),
                gap(&product(&along.tr(), &x).unwrap(), &along.tr(), &x),
                gap(&product(&along, &weight).unwrap(), &along, &weight),
            ];
            assert!(gaps.iter().all(|gap| *gap < 3e-6), "{rows} × {depth} × {columns}: {gaps:?}");
        }
    }

    #[test]
    fn a_bias_is_added_and_has_a_gradient_and_frozen_weights_have_none() {
        if !is_supported() {
            return;
        }
        for rows in [20, 300] {
            let (x, weight) = (numbers([rows, 128], 1).set_requires_grad(true), numbers([257, 128], 2));
            let bias = numbers([1, 257], 3).view([-1]).set_requires_grad(true);
            let found = linear_of(&x, &weight, Some(&bias));
            let expected = x.to_kind(Kind::Double).mm(&weight.to_kind(Kind::Double).tr()) + &bias;
            assert!((found.to_kind(Kind::Double) - expected).abs().max().double_value(&[]) < 2e-4);
            let gradients = Tensor::run_backward(&[found.sum(Kind::Float)], &[&x, &bias], false, false);
            assert_eq!(Vec::<f32>::try_from(&gradients[1]).unwrap(), vec![rows as f32; 257]);
            assert!(gap(&gradients[0], &Tensor::ones([rows, 257], (Kind::Float, Device::Cpu)), &weight) < 3e-6);
        }
    }

    /// Law V3: neither a completion nor its log-probabilities depend on what is computed with it.
    #[test]
    fn the_number_of_rows_and_threads_changes_no_bit_of_a_row() {
        if !is_supported() {
            return;
        }
        for depth in [300, 1300] {
            let by = |threads: usize, rows: i64| {
                let computed = move || {
                    use_threads(threads);
                    let (x, weight) = (numbers([900, depth], 3).narrow(0, 0, rows), numbers([350, depth], 4));
                    Vec::<f32>::try_from(linear_of(&x, &weight, None).get(0)).unwrap()
                };
                std::thread::spawn(computed).join().unwrap()
            };
            let alone = by(1, 1);
            for (threads, rows) in [(1, 8), (1, 9), (1, 40), (2, 16), (2, 128), (1, 500), (2, 900)] {
                assert!(by(threads, rows) == alone, "{threads} threads, {rows} rows of {depth}");
            }
        }
    }

    /// Law V3: it does not matter which path computes a row.
    #[test]
    fn panels_change_no_bit_of_a_product() {
        let panels = |columns: i64, depth: i64| Panels::new(&numbers([columns, depth], 4));
        assert_eq!(panels(350, 300).is_some(), is_supported());
        assert!(panels(20, 30).is_none() && panels(513, 512).is_none(), "small and large matrices");
        if !is_supported() {
            return;
        }
        for (rows, depth, columns) in
            [(12, 128, 64), (16, 129, 65), (17, 300, 350), (32, 128, 512), (95, 200, 65), (900, 33, 257)]
        {
            let (x, weight, bias) =
                (numbers([rows, depth], 3), numbers([columns, depth], 4), numbers([1, columns], 5).view([-1]));
            let panels = Panels::new(&weight).unwrap();
            for bias in [None, Some(&bias)] {
                let [found, expected] = [panels.linear(&x, bias), linear_of(&x, &weight, bias)];
                assert!(found.equal(&expected), "{rows} × {depth} × {columns}");
            }
            assert!(Panels::suit(&x) && !Panels::suit(&x.narrow(0, 0, 11)), "libtorch's is faster for few rows");
        }
    }

    /// Where libtorch computes gradients, long sums are its own.
    #[test]
    fn the_number_of_threads_changes_no_bit_of_a_gradient() {
        if !is_supported() || unsafe { rollflow_has_fast_library() } {
            return;
        }
        let by = |threads: usize| {
            let computed = move || {
                use_threads(threads);
                let [x, weight] = [numbers([700, 300], 4), numbers([350, 300], 5)].map(|of| of.set_requires_grad(true));
                let loss = linear_of(&x, &weight, None).square().sum(Kind::Double);
                let gradients = Tensor::run_backward(&[loss], &[&x, &weight], false, false);
                gradients.iter().flat_map(|of| Vec::<f32>::try_from(of.reshape([-1])).unwrap()).collect::<Vec<_>>()
            };
            std::thread::spawn(computed).join().unwrap()
        };
        let alone = by(1);
        for threads in [2, 5] {
            assert!(by(threads) == alone, "{threads} threads");
        }
    }

    #[test]
    fn products_of_fewer_rows_small_matrices_and_other_formats_are_libtorchs() {
        let (x, weight) = (numbers([300, 128], 6), numbers([128, 128], 7));
        assert_eq!(linear(&x, &weight, None).is_some(), is_supported());
        assert_eq!(linear(&x.narrow(0, 0, 4), &numbers([8192, 128], 7), None).is_some(), is_supported());
        for (x, weight) in [
            (x.narrow(0, 0, 11), weight.shallow_clone()),
            (x.narrow(1, 0, 16).contiguous(), weight.narrow(1, 0, 16).contiguous()),
            (numbers([128, 300], 6).tr(), weight.shallow_clone()),
            (x.to_kind(Kind::Double), weight.to_kind(Kind::Double)),
        ] {
            assert!(linear(&x, &weight, None).is_none(), "{x:?} {weight:?}");
        }
    }
}
