//! Our kernels on NVIDIA GPUs (`kernels.cu`, `gpu.cpp`): f16 and bf16, from the Ampere generation on, where
//! NVRTC is found. Elsewhere libtorch's operations do the same in more passes over memory.

use std::ffi::c_char;

use tch::{Device, Kind, Tensor};
use torch_sys::C_tensor;

use super::{Heads, call, check, raw, taken};

unsafe extern "C" {
    fn rollflow_gpu_generation(device: i64, generation: *mut i64) -> *mut c_char;
    fn rollflow_gpu_problem(device: i64, text: *const c_char, first: *mut bool) -> *mut c_char;
    fn rollflow_gpu_add_rms_norm(
        sum: *mut *mut C_tensor,
        normed: *mut *mut C_tensor,
        x: *mut C_tensor,
        y: *mut C_tensor,
        weight: *mut C_tensor,
        eps: f64,
    ) -> *mut c_char;
    fn rollflow_gpu_nf4(
        codes: *mut C_tensor,
        scales: *mut C_tensor,
        outer: *mut C_tensor,
        tables: *mut C_tensor,
        outer_block: i64,
        offset: f64,
        out: *mut C_tensor,
    ) -> *mut c_char;
    fn rollflow_gpu_swiglu(out: *mut *mut C_tensor, gate_up: *mut C_tensor) -> *mut c_char;
    #[allow(clippy::too_many_arguments)]
    fn rollflow_gpu_delta_step(
        out: *mut *mut C_tensor,
        projected: *mut C_tensor,
        conv: *mut C_tensor,
        inputs: *mut C_tensor,
        states: *mut C_tensor,
        step_bias: *mut C_tensor,
        decay: *mut C_tensor,
        norm: *mut C_tensor,
        eps: f64,
    ) -> *mut c_char;
    fn rollflow_gpu_send(out: *mut *mut C_tensor, x: *mut C_tensor, sources: *mut C_tensor, places: *mut C_tensor)
    -> *mut c_char;
    fn rollflow_gpu_combine(
        out: *mut *mut C_tensor,
        rows: *mut C_tensor,
        places: *mut C_tensor,
        weights: *mut C_tensor,
    ) -> *mut c_char;
    fn rollflow_gpu_rotate(out: *mut *mut C_tensor, x: *mut C_tensor, cos: *mut C_tensor, sin: *mut C_tensor) -> *mut c_char;
    fn rollflow_gpu_softmax(out: *mut *mut C_tensor, logits: *mut C_tensor, targets: *mut C_tensor) -> *mut c_char;
    fn rollflow_gpu_softmax_gradient(
        out: *mut *mut C_tensor,
        logits: *mut C_tensor,
        targets: *mut C_tensor,
        found: *mut C_tensor,
        slopes: *mut C_tensor,
        entropy_slopes: *mut C_tensor,
        half: bool,
    ) -> *mut c_char;
    fn rollflow_gpu_draw(out: *mut *mut C_tensor, logits: *mut C_tensor, settings: *mut C_tensor) -> *mut c_char;
    #[allow(clippy::too_many_arguments)]
    fn rollflow_gpu_attend(
        out: *mut *mut C_tensor,
        qkv: *mut C_tensor,
        cos: *mut C_tensor,
        sin: *mut C_tensor,
        cache: *mut C_tensor,
        positions: *mut C_tensor,
        table: *mut C_tensor,
        q_norm: *mut C_tensor,
        k_norm: *mut C_tensor,
        sinks: *mut C_tensor,
        page: i64,
        heads: i64,
        longest: i64,
        window: i64,
        scale: f64,
        cap: f64,
        eps: f64,
    ) -> *mut c_char;
}

/// With the zero that ends a text of C.
const SOURCE: &str = concat!(include_str!("kernel_args.h"), include_str!("kernels.cu"), "\0");

/// Returns true if this device runs the kernels. The first question compiles them, in about a second; a
/// reason against it is logged once.
pub fn runs_kernels(device: Device) -> bool {
    let Device::Cuda(index) = device else { return false };
    let mut first = false;
    // SAFETY: the text ends with a zero, and the call copies it.
    let problem = unsafe { rollflow_gpu_problem(index as i64, SOURCE.as_ptr().cast(), &mut first) };
    let Err(why) = taken(problem) else { return true };
    if first {
        tracing::warn!("rollflow's own GPU kernels are not used on cuda:{index}, which costs speed: {why}");
    }
    false
}

/// Returns true if the kernels take this tensor: 16 bits, its last dimension contiguous, vectors of 8 numbers at
/// aligned addresses.
fn takes(x: &Tensor) -> bool {
    let halves = matches!(x.kind(), Kind::BFloat16 | Kind::Half);
    halves && x.device() != Device::Cpu && (x.data_ptr() as usize).is_multiple_of(16) && runs_kernels(x.device())
}

/// Returns true if [`multiply_groups`] takes these matrices `[groups, n, k]`, alone and with a gradient: bf16, contiguous or
/// transposed, on a GPU of the Hopper or Blackwell generation, for which libtorch 2.11 has kernels. On others it asks the host.
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

/// Rows `[rows, k]` times the matrix of their group, transposed: those of a group end where `ends` says, `[groups]` in
/// i32. `matrices`: `[groups, n, k]`.
pub fn multiply_groups(rows: &Tensor, matrices: &Tensor, ends: &Tensor) -> Tensor {
    rows.internal_grouped_mm(&matrices.transpose(1, 2), Some(ends), None, None)
}

/// One token of each sequence in a gated delta net, if the kernels take it: projections `[sequences, …]` → `[sequences,
/// values]`. The convolution's inputs and the heads' states become those after the token. `by_head`: bias of the step,
/// logarithm of the decay, and factors of the norm.
pub fn delta_step(
    projected: &Tensor,
    conv: &Tensor,
    (inputs, states): (&Tensor, &Tensor),
    [step_bias, decay, norm]: [&Tensor; 3],
    eps: f64,
) -> Option<Tensor> {
    let (key_dim, value_dim) = (states.size()[2], states.size()[3]);
    let alike = [conv, inputs, step_bias, decay, norm].iter().all(|of| of.kind() == projected.kind());
    let fits = key_dim <= 256 && key_dim % 2 == 0 && value_dim <= 512 && alike && takes(projected);
    fits.then(|| {
        call(|out| unsafe {
            let (inputs, states, step_bias) = (raw(inputs), raw(states), raw(step_bias));
            rollflow_gpu_delta_step(out, raw(projected), raw(conv), inputs, states, step_bias, raw(decay), raw(norm), eps)
        })
    })
}

/// Rows `sources` of `x` `[tokens, width]`, if the kernels take it; with gradients. `places` `[tokens, each]`: where each
/// token's are.
pub fn send(x: &Tensor, sources: &Tensor, places: &Tensor) -> Option<Tensor> {
    takes_rows(x).then(|| call(|out| unsafe { rollflow_gpu_send(out, raw(x), raw(sources), raw(places)) }))
}

/// Sum of each token's rows, weighed, if the kernels take them; with gradients. `rows`: `[tokens · each, width]`;
/// `places`: which are a token's, `[tokens, each]`, of which each row is one; `weights`: the same in f32.
pub fn combine(rows: &Tensor, places: &Tensor, weights: &Tensor) -> Option<Tensor> {
    takes_rows(rows).then(|| call(|out| unsafe { rollflow_gpu_combine(out, raw(rows), raw(places), raw(weights)) }))
}

/// Returns true if the kernels take rows of this width.
fn takes_rows(x: &Tensor) -> bool {
    x.size().last().is_some_and(|width| width % 8 == 0) && takes(x)
}

/// `x + y` `[rows, width]`, and its RMS norm by `weight`, if the kernels take them; with gradients.
pub fn add_rms_norm(x: &Tensor, y: &Tensor, weight: &Tensor, eps: f64) -> Option<(Tensor, Tensor)> {
    if x.kind() != y.kind() || x.kind() != weight.kind() || ![x, y, weight].into_iter().all(takes_rows) {
        return None;
    }
    let mut normed = std::ptr::null_mut();
    let sum = call(|sum| unsafe { rollflow_gpu_add_rms_norm(sum, &mut normed, raw(x), raw(y), raw(weight), eps) });
    Some((sum, unsafe { Tensor::from_ptr(normed) }))
}

/// [`nf4`](super::nf4), if the kernels take it.
pub(super) fn nf4([codes, scales, outer, tables]: [&Tensor; 4], outer_block: i64, offset: f64, out: &Tensor) -> bool {
    let fits = out.numel().is_multiple_of(64) && takes(out);
    if fits {
        check(unsafe { rollflow_gpu_nf4(raw(codes), raw(scales), raw(outer), raw(tables), outer_block, offset, raw(out)) });
    }
    fits
}

/// [`swiglu`](super::swiglu), if the kernels take it.
pub(super) fn swiglu(gate_up: &Tensor) -> Option<Tensor> {
    let fits = gate_up.dim() == 2 && gate_up.size()[1] % 16 == 0 && takes(gate_up);
    fits.then(|| call(|out| unsafe { rollflow_gpu_swiglu(out, raw(gate_up)) }))
}

/// Rotated heads `[rows, heads, d]` by each row's cosines and sines `[rows, 1, d]`, if the kernels take them; with
/// gradients.
pub fn rotate(x: &Tensor, cos: &Tensor, sin: &Tensor) -> Option<Tensor> {
    let size = x.size();
    let fits = size.len() == 3 && size[2] % 4 == 0 && cos.size() == [size[0], 1, size[2]] && takes(x);
    fits.then(|| call(|out| unsafe { rollflow_gpu_rotate(out, raw(x), raw(cos), raw(sin)) }))
}

/// Returns true if [`softmax`], [`softmax_gradient`] and [`draw`] take these logits.
pub fn takes_logits(logits: &Tensor) -> bool {
    // The kernels find a row's first number by positions in f32.
    let narrow = logits.size().last().is_some_and(|width| *width < 1 << 24);
    narrow && logits.kind() == Kind::Float && logits.is_contiguous() && runs_kernels(logits.device())
}

/// [`softmax`](super::softmax).
pub(super) fn softmax(logits: &Tensor, targets: &Tensor) -> Tensor {
    let targets = targets.contiguous();
    call(|out| unsafe { rollflow_gpu_softmax(out, raw(logits), raw(&targets)) })
}

/// [`softmax_gradient`](super::softmax_gradient), in f16 or bf16.
pub(super) fn softmax_gradient(
    [logits, targets, found, slopes]: [&Tensor; 4],
    entropy_slopes: Option<&Tensor>,
    kind: Kind,
) -> Tensor {
    let targets = targets.contiguous();
    let by_entropy = entropy_slopes.map_or(std::ptr::null_mut(), raw);
    let half = kind == Kind::Half;
    call(|out| unsafe {
        rollflow_gpu_softmax_gradient(out, raw(logits), raw(&targets), raw(found), raw(slopes), by_entropy, half)
    })
}

/// Draws a token from each row of f32 logits `[rows, vocabulary]`. `settings` `[rows, 5]`, f64: the temperature, or
/// 0 for the likeliest token; a uniform number in [0, 1); top-k or 0, top-p or 1, min-p or 0, applied in this order
/// as [`warp`](crate::engine::sampling::warp) does. Returns tokens and log-probabilities, `[rows, 2]` in f64; a row
/// that is not finite has no such log-probability. Requires [`takes_logits`].
pub fn draw(logits: &Tensor, settings: &Tensor) -> Tensor {
    call(|out| unsafe { rollflow_gpu_draw(out, raw(logits), raw(settings)) })
}

/// Returns true if [`attend`] takes heads of this shape.
pub fn attends_slots(heads: Heads, dim: usize, kind: Kind, device: Device) -> bool {
    let shared = (heads.queries / heads.keys) as usize;
    let room = shared.next_multiple_of(8) * dim <= 2048;
    matches!(kind, Kind::BFloat16 | Kind::Half) && dim.is_multiple_of(16) && shared <= 16 && room && runs_kernels(device)
}

/// Where each slot of a paged cache is, on the device.
pub struct Slots {
    /// `[slots]`, i64; less than 0 for a slot that is not in use, whose row of the result is zero.
    pub positions: Tensor,
    /// Pages of each slot, `[slots, width]`, i64.
    pub table: Tensor,
    /// Rows of a page, a multiple of 16.
    pub page: i64,
    /// The largest position, and one.
    pub longest: i64,
}

/// Rotary attention of one token in each of `slots`, as [`attend`](super::attend) does it. `cache` `[rows, 2, keys, d]` gets
/// their keys and values. Requires [`attends_slots`]. `norms`: weights by which each query and key head is normed first, and
/// the norms' epsilon. `sinks` as for [`attention`](super::attention), of any type.
pub fn attend(
    qkv: &Tensor,
    (cos, sin): (&Tensor, &Tensor),
    cache: &Tensor,
    slots: &Slots,
    heads: Heads,
    norms: Option<(&Tensor, &Tensor, f64)>,
    (window, sinks): (Option<usize>, Option<&Tensor>),
) -> Tensor {
    let Heads { queries, scale, cap, .. } = heads;
    let (q_norm, k_norm, eps) =
        norms.map_or((std::ptr::null_mut(), std::ptr::null_mut(), 0.0), |(q, k, eps)| (raw(q), raw(k), eps));
    let (window, cap) = (window.unwrap_or(0) as i64, cap.unwrap_or(0.0));
    let wide = sinks.map(|sinks| sinks.to_kind(Kind::Float).contiguous());
    let sinks = wide.as_ref().map_or(std::ptr::null_mut(), raw);
    call(|out| unsafe {
        let [qkv, cos, sin, cache, positions, table] = [qkv, cos, sin, cache, &slots.positions, &slots.table].map(raw);
        let Slots { page, longest, .. } = *slots;
        rollflow_gpu_attend(
            out, qkv, cos, sin, cache, positions, table, q_norm, k_norm, sinks, page, queries, longest, window, scale, cap, eps,
        )
    })
}

#[cfg(test)]
mod tests;
