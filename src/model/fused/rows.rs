//! Norms, gates and softmax of logits, row by row (`rows.cpp`).

use std::ffi::c_char;

use tch::{Kind, Tensor};
use torch_sys::C_tensor;

use super::{applies, call, gpu, raw};

unsafe extern "C" {
    fn rollflow_rms_norm(out: *mut *mut C_tensor, x: *mut C_tensor, weight: *mut C_tensor, eps: f64) -> *mut c_char;
    fn rollflow_swiglu(out: *mut *mut C_tensor, gate_up: *mut C_tensor) -> *mut c_char;
    fn rollflow_softmax(out: *mut *mut C_tensor, logits: *mut C_tensor, targets: *mut C_tensor) -> *mut c_char;
    fn rollflow_softmax_gradient(
        out: *mut *mut C_tensor,
        logits: *mut C_tensor,
        targets: *mut C_tensor,
        found: *mut C_tensor,
        slopes: *mut C_tensor,
        entropy_slopes: *mut C_tensor,
    ) -> *mut c_char;
}

/// RMS norm over the last dimension (Zhang and Sennrich, 2019): `x / sqrt(mean(x²) + eps) ·
/// weight`. `x` is `[.., H]`, `weight` `[H]`.
pub fn rms_norm(x: &Tensor, weight: &Tensor, eps: f64) -> Tensor {
    if !applies(x) || !applies(weight) {
        return x.rms_norm([weight.size()[0]], Some(weight), eps);
    }
    call(|out| unsafe { rollflow_rms_norm(out, raw(x), raw(weight), eps) })
}

/// `silu(gate) · up`, gate and up side by side: `gate_up` `[N, 2·I]` → `[N, I]`.
pub fn swiglu(gate_up: &Tensor) -> Tensor {
    if let Some(gated) = gpu::swiglu(gate_up) {
        return gated;
    }
    if !applies(gate_up) {
        let halves = gate_up.chunk(2, -1);
        return halves[0].silu() * &halves[1];
    }
    call(|out| unsafe { rollflow_swiglu(out, raw(gate_up)) })
}

/// Returns true if [`softmax`] and [`softmax_gradient`] take these logits, for a gradient in `kind`: f32,
/// contiguous; on a GPU, 16 bits of the gradient.
pub fn takes_logits(logits: &Tensor, kind: Kind) -> bool {
    applies(logits) || (kind != Kind::Float && gpu::takes_logits(logits))
}

/// Log-probability of the target, entropy and log-sum-exp of each row of logits: `[N, 3]` from
/// logits `[N, V]` and targets `[N]`. Requires [`takes_logits`]. Without gradients.
pub fn softmax(logits: &Tensor, targets: &Tensor) -> Tensor {
    if !applies(logits) {
        return gpu::softmax(logits, targets);
    }
    call(|out| unsafe { rollflow_softmax(out, raw(logits), raw(targets)) })
}

/// Gradient by the logits, in `kind`, from a loss's derivatives by log-probabilities and entropies,
/// `[N]` each. `found` is the result of [`softmax`].
pub fn softmax_gradient(
    logits: &Tensor,
    targets: &Tensor,
    found: &Tensor,
    slopes: &Tensor,
    entropy_slopes: Option<&Tensor>,
    kind: Kind,
) -> Tensor {
    if !applies(logits) {
        return gpu::softmax_gradient([logits, targets, found, slopes], entropy_slopes, kind);
    }
    let by_entropy = entropy_slopes.map_or(std::ptr::null_mut(), raw);
    call(|out| unsafe { rollflow_softmax_gradient(out, raw(logits), raw(targets), raw(found), raw(slopes), by_entropy) })
        .to_kind(kind)
}
