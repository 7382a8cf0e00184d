//! Products of 16-bit numbers with f32 results (law N5).
//!
//! Libraries accumulate in f32 and round the sum to 16 bits. Attention scores and logits must not
//! be rounded: for scores in the hundreds, the last place of bf16 is 1 nat. On CUDA the product is
//! written in f32 at no cost; on a CPU, products of 16-bit numbers have f32 results anyway. None of these
//! products is differentiated in 16 bits.

use tch::{Device, Kind, Tensor};

use super::fused::half;

/// Rows of a weight that are widened at a time on a CPU.
const WIDENED_ROWS: i64 = 8192;

/// Rows of `of`, each as often as `rows` has it. On CUDA gradients of copies are summed as those of
/// embeddings are: in f32 by block, and always in the same order. `index_select` would add each in 16 bits,
/// in any order.
pub(super) fn gathered(of: &Tensor, rows: &Tensor) -> Tensor {
    if !of.device().is_cuda() {
        return of.index_select(0, rows);
    }
    let shape: Vec<i64> = rows.size().into_iter().chain(of.size().into_iter().skip(1)).collect();
    Tensor::embedding(&of.reshape([of.size()[0], -1]), rows, -1, false, false).view(shape.as_slice())
}

/// `a · b` of matrices in batches, `[batch, n, k]` and `[batch, k, m]`, in f32.
pub(super) fn bmm(a: &Tensor, b: &Tensor) -> Tensor {
    match (a.kind(), a.device()) {
        (Kind::Float, _) => a.bmm(b),
        (_, Device::Cuda(_)) => a.bmm_dtype(b, Kind::Float),
        _ => a.to_kind(Kind::Float).bmm(&b.to_kind(Kind::Float)),
    }
}

/// `a · b` of matrices, in f32.
pub fn mm(a: &Tensor, b: &Tensor) -> Tensor {
    match (a.kind(), a.device()) {
        (Kind::Float, Device::Cuda(_)) if b.kind() == Kind::Float => a.mm(b),
        (_, Device::Cuda(_)) => a.mm_dtype(b, Kind::Float),
        _ => half::product(a, b),
    }
}

/// `a · b` of matrices in the format of `b`: in f32 on a CPU.
pub fn matmul(a: &Tensor, b: &Tensor) -> Tensor {
    if b.device() == Device::Cpu { mm(a, b) } else { a.mm(b) }
}

/// `x · weightᵀ` in f32: `[n, k]` and `[m, k]` → `[n, m]`.
pub fn linear(x: &Tensor, weight: &Tensor) -> Tensor {
    match (weight.kind(), x.device()) {
        (Kind::Float, _) => half::linear(x, weight, None),
        (_, Device::Cuda(_)) => mm(x, &weight.tr()),
        (kind, _) if half::rounds(kind) => half::linear(&x.to_kind(Kind::Float), weight, None),
        _ => {
            let x = x.to_kind(Kind::Float);
            let products = weight.split(WIDENED_ROWS, 0).into_iter().map(|rows| half::linear(&x, &rows, None));
            Tensor::cat(&products.collect::<Vec<_>>(), 1)
        }
    }
}
