//! Products on a CPU with weights in 16 bits (`half.cpp`): activations, sums and results are f32.

use std::ffi::c_char;

use tch::{Device, Kind, Tensor};
use torch_sys::C_tensor;

use super::{call, products, raw};
use crate::util::cores::multiplies_bf16;

unsafe extern "C" {
    fn rollflow_half_linear(out: *mut *mut C_tensor, x: *mut C_tensor, weight: *mut C_tensor, narrow: bool) -> *mut c_char;
    fn rollflow_half_product(out: *mut *mut C_tensor, a: *mut C_tensor, b: *mut C_tensor) -> *mut c_char;
}

/// Format of activations between layers whose weights have this format. On a CPU products alone are in 16
/// bits.
pub fn activations(weights: Kind, device: Device) -> Kind {
    match (weights, device) {
        (Kind::BFloat16 | Kind::Half, Device::Cpu) => Kind::Float,
        _ => weights,
    }
}

/// `x · weightᵀ + bias`, `[n, k]` and `[m, k]` → `[n, m]`, with gradients. On a CPU the weight may be in 16
/// bits, with `x` and the bias in f32: then `x` is rounded to bf16 where [`rounds`] says so, and the
/// weight is widened elsewhere.
pub fn linear(x: &Tensor, weight: &Tensor, bias: Option<&Tensor>) -> Tensor {
    if x.kind() == weight.kind() {
        return products::linear(x, weight, bias).unwrap_or_else(|| x.linear(weight, bias));
    }
    let projected = half_linear(x, weight, rounds(weight.kind()));
    bias.map_or_else(|| projected.shallow_clone(), |bias| &projected + bias)
}

/// Returns true if the operands of products with weights of this format are rounded to bf16, and false if the
/// weights are widened.
pub fn rounds(weights: Kind) -> bool {
    weights == Kind::BFloat16 && multiplies_bf16()
}

fn half_linear(x: &Tensor, weight: &Tensor, narrow: bool) -> Tensor {
    call(|out| unsafe { rollflow_half_linear(out, raw(x), raw(weight), narrow) })
}

/// `a · b` of matrices on a CPU in f32, whatever their formats. Without gradients.
pub fn product(a: &Tensor, b: &Tensor) -> Tensor {
    let narrow = [a, b].iter().any(|of| rounds(of.kind()));
    let kind = if narrow { Kind::BFloat16 } else { Kind::Float };
    let [a, b] = [a, b].map(|of| of.to_kind(kind));
    if !narrow {
        return products::product(&a, &b).unwrap_or_else(|| a.mm(&b));
    }
    call(|out| unsafe { rollflow_half_product(out, raw(&a), raw(&b)) })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Rows, depth and columns: single ones, odd ones, and more than a block and a sum's part of each.
    const SIZES: [(i64, i64, i64); 7] =
        [(1, 2, 1), (3, 7, 5), (64, 64, 64), (65, 130, 17), (300, 48, 70), (17, 2051, 33), (257, 33, 129)];

    fn largest(of: &Tensor) -> f64 {
        of.abs().max().double_value(&[])
    }

    fn random(shape: [i64; 2], kind: Kind) -> Tensor {
        Tensor::randn(shape, (Kind::Float, Device::Cpu)).to_kind(kind)
    }

    /// The operand as the product takes it, in f64.
    fn taken(x: &Tensor, narrow: bool) -> Tensor {
        if narrow { x.to_kind(Kind::BFloat16).to_kind(Kind::Double) } else { x.to_kind(Kind::Double) }
    }

    /// On a processor without bf16 only what widens is tested.
    fn ways() -> Vec<(Kind, bool)> {
        let all = [(Kind::Half, false), (Kind::BFloat16, false), (Kind::BFloat16, true)];
        all.into_iter().filter(|(_, narrow)| !narrow || multiplies_bf16()).collect()
    }

    #[test]
    fn n5_products_with_weights_in_16_bits_are_f64_s_of_the_rounded_operands_to_the_precision_of_f32() {
        tch::manual_seed(3);
        for ((rows, depth, columns), (kind, narrow)) in
            SIZES.into_iter().flat_map(|size| ways().into_iter().map(move |way| (size, way)))
        {
            let x = random([rows, depth], Kind::Float).set_requires_grad(true);
            let weight = random([columns, depth], kind).set_requires_grad(true);
            let found = half_linear(&x, &weight, narrow);
            let wide = taken(&weight, false);
            let expected = taken(&x, narrow).mm(&wide.tr());
            let gap = largest(&(found.to_kind(Kind::Double) - &expected)) / (depth as f64).sqrt();
            assert!(gap < 1e-5, "{rows} × {depth} × {columns} in {kind:?}: {gap}");

            let along = random([rows, columns], Kind::Float);
            let gradients = Tensor::run_backward(&[(&found * &along).sum(Kind::Float)], &[&x, &weight], false, false);
            let by_found = taken(&along, narrow);
            let gap = largest(&(gradients[0].to_kind(Kind::Double) - by_found.mm(&wide))) / (columns as f64).sqrt();
            assert!(gap < 1e-5, "by x, {rows} × {depth} × {columns} in {kind:?}: {gap}");
            // The gradient by a weight is in its format.
            let by_weight = by_found.tr().mm(&taken(&x, narrow));
            let gap = largest(&((gradients[1].to_kind(Kind::Double) - &by_weight) / (by_weight.abs() + 1.0)));
            assert!(gradients[1].kind() == kind && gap < 5e-3, "by the weight, {rows} × {depth} × {columns} in {kind:?}: {gap}");
        }
    }

    #[test]
    fn n5_products_of_bf16_matrices_are_not_rounded() {
        tch::manual_seed(4);
        for (rows, depth, columns) in SIZES {
            let (a, b) = (random([depth, rows], Kind::BFloat16).tr(), random([depth, columns], Kind::BFloat16));
            let expected = taken(&a, false).mm(&taken(&b, false));
            let (found, rounded) = (product(&a, &b), a.mm(&b));
            let gap = |of: &Tensor| largest(&(of.to_kind(Kind::Double) - &expected)) / (depth as f64).sqrt();
            assert!(gap(&found) < 1e-5, "{rows} × {depth} × {columns}: {}", gap(&found));
            assert!(rows * columns < 100 || gap(&rounded) > 1e-4, "libtorch's are: {}", gap(&rounded));
        }
        let empty = product(&random([0, 4], Kind::BFloat16), &random([4, 3], Kind::BFloat16));
        assert_eq!(empty.size(), [0, 3]);
    }

    #[test]
    fn threads_change_no_bit_of_a_product() {
        let numbers = |len: i64| (0..len).map(|at| (at as f32 * 0.37).sin()).collect::<Vec<f32>>();
        let by = |threads: usize| {
            let computed = move || {
                crate::model::use_threads(threads);
                let [x, weight] = [200, 330].map(|rows| Tensor::from_slice(&numbers(rows * 96)).view([rows, 96]));
                Vec::<f32>::try_from(linear(&x, &weight.to_kind(Kind::BFloat16), None).reshape([-1])).unwrap()
            };
            std::thread::spawn(computed).join().unwrap()
        };
        assert_eq!(by(1), by(2));
    }
}
