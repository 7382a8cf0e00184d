//! Our kernels on NVIDIA GPUs (`gpu/`): f16 and bf16, from the Ampere generation on, where
//! NVRTC is found. Elsewhere libtorch's operations do the same in more passes over memory.

use std::ffi::c_char;

use tch::{Device, Kind, Tensor};
use torch_sys::C_tensor;

use super::{Heads, call, check, raw, taken};

mod experts;

pub use experts::{
    Added, bounded_gate, combine, likeliest, multiplies_groups, multiply_groups, router, send, sort_by_expert, sum_of_rows,
};

unsafe extern "C" {
    fn rollflow_gpu_problem(device: i64, text: *const c_char, first: *mut bool) -> *mut c_char;
    fn rollflow_gpu_rms_norm(
        results: *mut *mut C_tensor,
        x: *mut C_tensor,
        y: *mut C_tensor,
        weight: *mut C_tensor,
        eps: f64,
        more: f64,
    ) -> *mut c_char;
    fn rollflow_gpu_four_bits(
        codes: *mut C_tensor,
        scales: *mut C_tensor,
        outer: *mut C_tensor,
        tables: *mut C_tensor,
        block: i64,
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
        rotated: i64,
        gated: bool,
        scale: f64,
        cap: f64,
        eps: f64,
        more: f64,
    ) -> *mut c_char;
}

/// All kernels, with the zero that ends a text of C.
const SOURCE: &str = concat!(
    include_str!("gpu/args.h"),
    include_str!("gpu/common.cu"),
    include_str!("gpu/rows.cu"),
    include_str!("gpu/experts.cu"),
    include_str!("gpu/draw.cu"),
    include_str!("gpu/delta.cu"),
    include_str!("gpu/attend.cu"),
    "\0"
);

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

/// Tensors that a call gives.
pub(super) fn several<const N: usize>(function: impl FnOnce(*mut *mut C_tensor) -> *mut c_char) -> [Tensor; N] {
    let mut results = [std::ptr::null_mut(); N];
    check(function(results.as_mut_ptr()));
    // SAFETY: the call made them.
    results.map(|result| unsafe { Tensor::from_ptr(result) })
}

/// A tensor, or none.
pub(super) fn maybe(of: Option<&Tensor>) -> *mut C_tensor {
    of.map_or(std::ptr::null_mut(), raw)
}

/// Returns true if the kernels take this tensor: 16 bits, its last dimension contiguous, vectors of 8
/// numbers at aligned addresses.
pub(super) fn takes(x: &Tensor) -> bool {
    let halves = matches!(x.kind(), Kind::BFloat16 | Kind::Half);
    halves && x.device() != Device::Cpu && (x.data_ptr() as usize).is_multiple_of(16) && runs_kernels(x.device())
}

/// One token of each sequence in a gated delta net, if the kernels take it: projections `[sequences, …]` →
/// `[sequences, values]`. The convolution's inputs and the heads' states become those after the token.
/// `by_head`: bias of the step, logarithm of the decay, and factors of the norm.
pub fn delta_step(
    projected: &Tensor,
    conv: &Tensor,
    (inputs, states): (&Tensor, &Tensor),
    [step_bias, decay, norm]: [&Tensor; 3],
    eps: f64,
) -> Option<Tensor> {
    let (key_dim, value_dim) = (states.size()[2], states.size()[3]);
    let alike = [conv, inputs, step_bias, decay, norm].iter().all(|of| of.kind() == projected.kind());
    // Two threads a column hold half of its numbers each, next to some 48 others. Of much more than a block's 65,536
    // registers, too much would go into slow memory.
    let registers = (key_dim / 2 + 48) * ((2 * value_dim + 31) / 32 * 32);
    let fits = key_dim <= 256 && key_dim % 2 == 0 && value_dim <= 512 && registers <= 1 << 16 && alike && takes(projected);
    fits.then(|| {
        call(|out| unsafe {
            let (inputs, states, step_bias) = (raw(inputs), raw(states), raw(step_bias));
            rollflow_gpu_delta_step(out, raw(projected), raw(conv), inputs, states, step_bias, raw(decay), raw(norm), eps)
        })
    })
}

/// Returns true if the kernels take rows of this width.
fn takes_rows(x: &Tensor) -> bool {
    x.size().last().is_some_and(|width| width % 8 == 0) && takes(x)
}

/// The factors of an RMS norm are `more` and a weight.
#[derive(Clone, Copy)]
pub struct NormBy<'a> {
    pub weight: &'a Tensor,
    pub more: f64,
    /// Added to the mean square.
    pub eps: f64,
}

/// `x + y` `[rows, width]`, and its RMS norm, if the kernels take them; with gradients.
pub fn add_rms_norm(x: &Tensor, y: &Tensor, by: NormBy) -> Option<(Tensor, Tensor)> {
    if x.kind() != y.kind() || !takes_rows(y) || !takes_norm(x, by) {
        return None;
    }
    let [sum, normed] =
        several(|results| unsafe { rollflow_gpu_rms_norm(results, raw(x), raw(y), raw(by.weight), by.eps, by.more) });
    Some((sum, normed))
}

/// RMS norm over the last dimension, if the kernels take it; with gradients.
pub fn rms_norm(x: &Tensor, by: NormBy) -> Option<Tensor> {
    let none = std::ptr::null_mut();
    takes_norm(x, by).then(|| call(|out| unsafe { rollflow_gpu_rms_norm(out, raw(x), none, raw(by.weight), by.eps, by.more) }))
}

fn takes_norm(x: &Tensor, by: NormBy) -> bool {
    x.kind() == by.weight.kind() && takes_rows(x) && takes_rows(by.weight)
}

/// [`four_bits`](super::four_bits), if the kernels take it.
pub(super) fn four_bits(stored: [&Tensor; 4], [block, outer_block]: [i64; 2], offset: f64, out: &Tensor) -> bool {
    let [codes, scales, outer, tables] = stored.map(raw);
    let fits = out.numel().is_multiple_of(64) && takes(out);
    if fits {
        check(unsafe { rollflow_gpu_four_bits(codes, scales, outer, tables, block, outer_block, offset, raw(out)) });
    }
    fits
}

/// [`swiglu`](super::swiglu), if the kernels take it.
pub(super) fn swiglu(gate_up: &Tensor) -> Option<Tensor> {
    let fits = gate_up.dim() == 2 && gate_up.size()[1] % 16 == 0 && takes(gate_up);
    fits.then(|| call(|out| unsafe { rollflow_gpu_swiglu(out, raw(gate_up)) }))
}

/// Rotated heads `[rows, heads, d]` by each row's cosines and sines `[rows, 1, d]`, if the kernels take
/// them; with gradients.
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
    let by_entropy = maybe(entropy_slopes);
    let half = kind == Kind::Half;
    call(|out| unsafe {
        rollflow_gpu_softmax_gradient(out, raw(logits), raw(&targets), raw(found), raw(slopes), by_entropy, half)
    })
}

/// Draws a token from each row of f32 logits `[rows, vocabulary]`. `settings` `[rows, 5]`, f64: the
/// temperature, or 0 for the likeliest token; a uniform number in [0, 1); top-k or 0, top-p or 1, min-p or
/// 0, applied in this order as [`warp`](crate::engine::sampling::warp) does. Returns tokens and
/// log-probabilities, `[rows, 2]` in f64; a row that is not finite has no such log-probability. Requires
/// [`takes_logits`].
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

/// Fused projections of one token of each slot.
pub struct Projected<'a> {
    /// Queries, keys and values, `[slots, …]`.
    pub qkv: &'a Tensor,
    /// Whether each head's query is followed by the gate of its output, which is multiplied by the gate's
    /// sigmoid.
    pub gated: bool,
    /// Columns of a head that are rotated, the first ones. Where those are not all, queries and keys get
    /// another order of columns, that of [`Decoder::paired`](crate::model::Decoder).
    pub rotated: usize,
    /// How each query and each key head is normed first.
    pub norms: Option<[NormBy<'a>; 2]>,
}

/// Rotary attention of one token in each of `slots`, as [`attend`](super::attend) does it. `cache` `[rows,
/// 2, keys, d]` gets their keys and values. Requires [`attends_slots`]. `sinks` as for
/// [`attention`](super::attention), of any type.
pub fn attend(
    of: &Projected,
    (cos, sin): (&Tensor, &Tensor),
    cache: &Tensor,
    slots: &Slots,
    heads: Heads,
    (window, sinks): (Option<usize>, Option<&Tensor>),
) -> Tensor {
    let Heads { queries, scale, cap, .. } = heads;
    let (q_norm, k_norm) = (of.norms.map(|[q, _]| q.weight), of.norms.map(|[_, k]| k.weight));
    let (eps, more) = of.norms.map_or((0.0, 0.0), |[by, _]| (by.eps, by.more));
    let (window, cap, rotated) = (window.unwrap_or(0) as i64, cap.unwrap_or(0.0), of.rotated as i64);
    let wide = sinks.map(|sinks| sinks.to_kind(Kind::Float).contiguous());
    call(|out| unsafe {
        let [qkv, cos, sin, cache, positions, table] = [of.qkv, cos, sin, cache, &slots.positions, &slots.table].map(raw);
        let ([q_norm, k_norm, sinks], &Slots { page, longest, .. }) = ([q_norm, k_norm, wide.as_ref()].map(maybe), slots);
        rollflow_gpu_attend(
            out, qkv, cos, sin, cache, positions, table, q_norm, k_norm, sinks, page, queries, longest, window, rotated,
            of.gated, scale, cap, eps, more,
        )
    })
}

#[cfg(test)]
mod tests;
