//! Mixtures of experts on NVIDIA GPUs: routing, products by groups, and what comes back to a token.

use std::ffi::c_char;

use tch::{Device, Kind, Tensor};
use torch_sys::C_tensor;

use super::{call, check, maybe, raw, runs_kernels, several, takes, takes_logits, takes_rows};

unsafe extern "C" {
    fn rollflow_gpu_generation(device: i64, generation: *mut i64) -> *mut c_char;
    fn rollflow_gpu_send(out: *mut *mut C_tensor, x: *mut C_tensor, sources: *mut C_tensor, places: *mut C_tensor)
    -> *mut c_char;
    fn rollflow_gpu_combine(
        out: *mut *mut C_tensor,
        rows: *mut C_tensor,
        places: *mut C_tensor,
        weights: *mut C_tensor,
    ) -> *mut c_char;
    #[allow(clippy::too_many_arguments)]
    fn rollflow_gpu_combine_all(
        out: *mut *mut C_tensor,
        rows: *mut C_tensor,
        places: *mut C_tensor,
        weights: *mut C_tensor,
        bias: *mut C_tensor,
        experts: *mut C_tensor,
        shared: *mut C_tensor,
        gates: *mut C_tensor,
    ) -> *mut c_char;
    fn rollflow_gpu_router(out: *mut *mut C_tensor, x: *mut C_tensor, matrix: *mut C_tensor, bias: *mut C_tensor) -> *mut c_char;
    fn rollflow_gpu_likeliest(results: *mut *mut C_tensor, logits: *mut C_tensor, each: i64, normalized: bool) -> *mut c_char;
    fn rollflow_gpu_sort_by_expert(results: *mut *mut C_tensor, chosen: *mut C_tensor, experts: i64) -> *mut c_char;
    fn rollflow_gpu_bounded_gate(
        out: *mut *mut C_tensor,
        gate_up: *mut C_tensor,
        bias: *mut C_tensor,
        experts: *mut C_tensor,
        alpha: f64,
        limit: f64,
    ) -> *mut c_char;
}

/// Logits of a router for rows `x` in f32, `[rows, experts]`, if the kernels take them; with gradients, in
/// f32. `matrix`: `[experts, width]`.
pub fn router(x: &Tensor, matrix: &Tensor, bias: Option<&Tensor>) -> Option<Tensor> {
    let alike = |of: &Tensor| of.kind() == x.kind() && takes(of);
    let fits = takes_rows(x) && [Some(matrix), bias].into_iter().flatten().all(alike);
    fits.then(|| call(|out| unsafe { rollflow_gpu_router(out, raw(x), raw(matrix), maybe(bias)) }))
}

/// Weights and numbers of the likeliest `each` by f32 logits `[rows, experts]`, the likeliest first,
/// `[rows, each]`, if the kernels take them; without gradients. Weights are probabilities among all, or,
/// `normalized`, among the chosen.
pub fn likeliest(logits: &Tensor, each: usize, normalized: bool) -> Option<[Tensor; 2]> {
    let fits = each <= 32 && logits.size()[1] <= 512 && !logits.requires_grad() && takes_logits(logits);
    fits.then(|| several(|results| unsafe { rollflow_gpu_likeliest(results, raw(logits), each as i64, normalized) }))
}

/// Orders what experts compute, if the device runs kernels. `chosen` `[tokens, each]`: experts of each
/// token, of `experts`. Gives the token and the expert of each row, the row of each entry of `chosen`, and
/// in i32 where each expert's rows end.
pub fn sort_by_expert(chosen: &Tensor, experts: usize) -> Option<[Tensor; 4]> {
    // The kernel counts in f32.
    let fits = chosen.numel() < 1 << 24 && runs_kernels(chosen.device());
    fits.then(|| several(|results| unsafe { rollflow_gpu_sort_by_expert(results, raw(chosen), experts as i64) }))
}

/// Returns true if [`multiply_groups`] takes these matrices `[groups, n, k]`, alone and with a gradient:
/// bf16, contiguous or transposed, on a GPU of the Hopper or Blackwell generation, for which libtorch 2.11
/// has kernels. On others it asks the host.
pub fn multiplies_groups(matrices: &Tensor) -> bool {
    let Device::Cuda(index) = matrices.device() else { return false };
    let aligned = matrices.size()[1..].iter().all(|size| size % 8 == 0);
    let is_dense = matrices.is_contiguous() || matrices.transpose(1, 2).is_contiguous();
    if matrices.kind() != Kind::BFloat16 || !aligned || !is_dense || !takes(matrices) {
        return false;
    }
    let mut generation = 0;
    check(unsafe { rollflow_gpu_generation(index as i64, &mut generation) });
    matches!(generation / 10, 9 | 10)
}

/// Rows `[rows, k]` times the matrix of their group, transposed: those of a group end where `ends` says,
/// `[groups]` in i32. `matrices`: `[groups, n, k]`.
pub fn multiply_groups(rows: &Tensor, matrices: &Tensor, ends: &Tensor) -> Tensor {
    rows.internal_grouped_mm(&matrices.transpose(1, 2), Some(ends), None, None)
}

/// Rows `sources` of `x` `[tokens, width]`, if the kernels take it; with gradients. `places` `[tokens,
/// each]`: where each token's are.
pub fn send(x: &Tensor, sources: &Tensor, places: &Tensor) -> Option<Tensor> {
    takes_rows(x).then(|| call(|out| unsafe { rollflow_gpu_send(out, raw(x), raw(sources), raw(places)) }))
}

/// Sum of each token's rows, weighed, if the kernels take them; with gradients. `rows`: `[tokens · each,
/// width]`; `places`: which are a token's, `[tokens, each]`, of which each row is one; `weights`: the same
/// in f32.
pub fn combine(rows: &Tensor, places: &Tensor, weights: &Tensor) -> Option<Tensor> {
    takes_rows(rows).then(|| call(|out| unsafe { rollflow_gpu_combine(out, raw(rows), raw(places), raw(weights)) }))
}

/// What is added to each token's sum.
#[derive(Clone, Copy, Default)]
pub struct Added<'a> {
    /// Biases `[experts, width]`, to the rows of each expert, and which these are, `[tokens, each]`.
    pub biases: Option<[&'a Tensor; 2]>,
    /// Rows `[tokens, width]`, by the sigmoids of `[tokens, 1]`.
    pub shared: Option<[&'a Tensor; 2]>,
}

/// [`combine`] with more, without gradients.
pub fn sum_of_rows(rows: &Tensor, places: &Tensor, weights: &Tensor, more: Added) -> Option<Tensor> {
    let alike = |of: &Tensor| of.kind() == rows.kind() && of.is_contiguous() && !of.requires_grad();
    let biases = more.biases.is_none_or(|[biases, _]| takes_rows(biases) && alike(biases));
    let shared = more.shared.is_none_or(|[shared, gates]| takes_rows(shared) && alike(shared) && alike(gates));
    let fits = biases && shared && takes_rows(rows) && !rows.requires_grad() && !weights.requires_grad();
    let at = |pair: Option<[&Tensor; 2]>, at: usize| maybe(pair.map(|pair| pair[at]));
    fits.then(|| {
        call(|out| unsafe {
            let [rows, places, weights] = [rows, places, weights].map(raw);
            rollflow_gpu_combine_all(
                out,
                rows,
                places,
                weights,
                at(more.biases, 0),
                at(more.biases, 1),
                at(more.shared, 0),
                at(more.shared, 1),
            )
        })
    })
}

/// gpt-oss's activation of rows `[rows, 2 · width]`, if the kernels take them; without gradients. `biases`:
/// `[experts, 2 · width]`, and the expert of each row.
pub fn bounded_gate(gate_up: &Tensor, [biases, experts]: [&Tensor; 2], alpha: f64, limit: f64) -> Option<Tensor> {
    let fits = takes_rows(gate_up) && takes(biases) && biases.kind() == gate_up.kind() && !gate_up.requires_grad();
    fits.then(|| call(|out| unsafe { rollflow_gpu_bounded_gate(out, raw(gate_up), raw(biases), raw(experts), alpha, limit) }))
}

#[cfg(test)]
mod tests;
