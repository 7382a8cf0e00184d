//! Queries, keys and values of gated delta nets by chunk (`delta_inputs.cpp`).

use std::ffi::c_char;

use tch::{Device, Kind, Tensor};
use torch_sys::C_tensor;

use super::gpu::{several, takes};
use super::{applies, raw};
use crate::model::GatedDelta;

unsafe extern "C" {
    #[allow(clippy::too_many_arguments)]
    fn rollflow_delta_inputs(
        results: *mut *mut C_tensor,
        packed: *mut C_tensor,
        others: *mut C_tensor,
        conv: *mut C_tensor,
        sources: *mut C_tensor,
        key_heads: i64,
        shared: i64,
        key_dim: i64,
        value_dim: i64,
        chunk: i64,
    ) -> *mut c_char;
}

/// Queries, keys and values in f32 `[chunks, value heads, chunk, …]`, with gradients by `packed` and
/// `conv`: the convolution of inputs, its SiLU, and queries and keys of unit length, the former by 1/√(key
/// dim).
///
/// Inputs are `packed` `[tokens, mixed]`, and after them `others` `[rows, mixed]`; `sources` are those of
/// each chunk's tokens, after those that the convolution sees before them. `conv` `[mixed, kernel]`.
/// Returns `None` where neither the CPU's code nor the GPU's kernels take them.
pub fn delta_inputs(
    of: &GatedDelta,
    packed: &Tensor,
    others: &Tensor,
    conv: &Tensor,
    sources: &Tensor,
    chunk: i64,
) -> Option<[Tensor; 3]> {
    let [key_dim, value_dim, key_heads] = [of.key_dim, of.value_dim, of.key_heads].map(|size| size as i64);
    let pairs = [key_dim, value_dim, packed.stride()[0]].iter().all(|size| size % 2 == 0);
    let takes = match packed.device() {
        Device::Cpu => packed.kind() == Kind::Float && applies(conv) && applies(others),
        _ => pairs && key_dim <= 256 && value_dim <= 256 && of.kernel <= 8 && packed.kind() == conv.kind() && takes(packed),
    };
    takes.then(|| {
        several(|results| unsafe {
            let [packed, others, conv, sources] = [packed, others, conv, sources].map(raw);
            let shared = (of.value_heads / of.key_heads) as i64;
            rollflow_delta_inputs(results, packed, others, conv, sources, key_heads, shared, key_dim, value_dim, chunk)
        })
    })
}
