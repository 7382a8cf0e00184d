//! Fused operations of a decoder layer, with gradients (`fused.cpp`), and the choice between them
//! and libtorch's.
//!
//! On one CPU core a small model spends as long in norms, gates and rotations as in matrix
//! products, because each is a chain of passes over memory. Fusing saves about a third of a
//! training step of the tiny recipe. Models in 16 bits use them, too, for only products are in 16 bits
//! there (`half`). Other devices and long sequences use libtorch's operations, and tests compare both.

use std::ffi::c_char;

use tch::{Device, Kind, Tensor};
use torch_sys::C_tensor;

use super::Packed;
use super::c_text::{check, taken};

mod delta_chunks;
mod delta_inputs;
pub mod gpu;
pub mod half;
mod products;

pub use delta_chunks::{Steps, delta_chunks};
pub use delta_inputs::delta_inputs;

unsafe extern "C" {
    fn rollflow_rms_norm(out: *mut *mut C_tensor, x: *mut C_tensor, weight: *mut C_tensor, eps: f64) -> *mut c_char;
    fn rollflow_nf4(
        codes: *mut C_tensor,
        scales: *mut C_tensor,
        outer: *mut C_tensor,
        tables: *mut C_tensor,
        outer_block: i64,
        offset: f64,
        out: *mut C_tensor,
    ) -> *mut c_char;
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
    #[allow(clippy::too_many_arguments)]
    fn rollflow_attention(
        out: *mut *mut C_tensor,
        qkv: *mut C_tensor,
        cos: *mut C_tensor,
        sin: *mut C_tensor,
        sinks: *mut C_tensor,
        sequences: *const i64,
        count: i64,
        heads: i64,
        kv_heads: i64,
        window: i64,
        scale: f64,
        cap: f64,
    ) -> *mut c_char;
    #[allow(clippy::too_many_arguments)]
    fn rollflow_attend(
        out: *mut *mut C_tensor,
        qkv: *mut C_tensor,
        cos: *mut C_tensor,
        sin: *mut C_tensor,
        sinks: *mut C_tensor,
        cache: *mut C_tensor,
        table: *const i64,
        width: i64,
        page: i64,
        of: *const i64,
        positions: *const i64,
        heads: i64,
        kv_heads: i64,
        window: i64,
        scale: f64,
        cap: f64,
    ) -> *mut c_char;
    #[allow(clippy::too_many_arguments)]
    fn rollflow_flash(
        out: *mut *mut C_tensor,
        q: *mut C_tensor,
        k: *mut C_tensor,
        v: *mut C_tensor,
        sinks: *mut C_tensor,
        q_ends: *mut C_tensor,
        k_ends: *mut C_tensor,
        most_q: i64,
        most_k: i64,
        scale: f64,
        window: i64,
    ) -> *mut c_char;
    fn rollflow_gpu_defaults(cudnn_attention: *mut bool, rounded_sums: *mut bool) -> *mut c_char;
    #[allow(clippy::too_many_arguments)]
    fn rollflow_copy_all(to: *const *mut C_tensor, from: *const *mut C_tensor, count: i64) -> *mut c_char;
    fn rollflow_adamw(
        params: *const *mut C_tensor,
        grads: *const *mut C_tensor,
        means: *const *mut C_tensor,
        squares: *const *mut C_tensor,
        maxima: *const *mut C_tensor,
        count: i64,
        step: *mut C_tensor,
        divisor: *mut C_tensor,
        lr: f64,
        beta1: f64,
        beta2: f64,
        weight_decay: f64,
        epsilon: f64,
    ) -> *mut c_char;
}

/// Longest sequence, in tokens, of the fused attention. Its backward pass keeps two squares of that
/// size per head, and its loops are not blocked. Bounded by memory (half a megabyte), not by
/// measurement.
pub const LONGEST_FUSED_SEQUENCE: usize = 256;

/// Returns true if the fused operations accept this tensor: f32, on the CPU, contiguous.
pub fn applies(x: &Tensor) -> bool {
    x.device() == Device::Cpu && x.kind() == Kind::Float && x.is_contiguous()
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

/// Returns true if [`attention`] supports sequences of up to `longest` tokens, of this type and on
/// this device.
pub fn attends(longest: usize, kind: Kind, device: Device) -> bool {
    device == Device::Cpu && kind == Kind::Float && longest <= LONGEST_FUSED_SEQUENCE
}

/// Numbers of heads, and factor of their products.
#[derive(Clone, Copy, Debug)]
pub struct Heads {
    /// Query heads, a multiple of `keys`.
    pub queries: i64,
    /// Key and value heads.
    pub keys: i64,
    /// 1/√d but in a few families.
    pub scale: f64,
    /// Cap of the scores, if there is one.
    pub cap: Option<f64>,
}

/// Rotary causal attention over packed sequences. Requires [`attends`].
///
/// `qkv` is `[N, (queries + 2·keys)·d]`, one row per token of `packed`. Cosines and sines are
/// `[positions, 1, d]` each, by position, and the second half of each row is read. `window` is the
/// number of visible positions, the query's own included. `sinks` `[queries]` are scores of no key, one a head (Xiao et al.,
/// 2023, as gpt-oss has them). Returns `[N, queries·d]`.
pub fn attention(
    qkv: &Tensor,
    (cos, sin): (&Tensor, &Tensor),
    packed: &Packed,
    heads: Heads,
    window: Option<usize>,
    sinks: Option<&Tensor>,
) -> Tensor {
    let qkv = qkv.contiguous();
    assert!(applies(&qkv) && applies(cos) && applies(sin), "fused attention takes contiguous f32 on the CPU");
    assert!(
        cos.size()[0] >= packed.longest() as i64 && packed.len() as i64 == qkv.size()[0],
        "sequences cover the rows, the rotation every position"
    );
    let (sequences, window) = (sequences(packed), window.unwrap_or(0) as i64);
    call(|out| unsafe {
        let (numbers, count, Heads { queries, keys, scale, cap }) = (sequences.as_ptr().cast(), sequences.len() as i64, heads);
        let (cap, sinks) = (cap.unwrap_or(0.0), sinks.map_or(std::ptr::null_mut(), raw));
        rollflow_attention(out, raw(&qkv), raw(cos), raw(sin), sinks, numbers, count, queries, keys, window, scale, cap)
    })
}

/// Where a cache holds the sequences of its slots.
#[derive(Clone, Copy)]
pub struct Paged<'a> {
    /// Pages of each slot, `[slots, width]`.
    pub table: &'a [i64],
    /// Pages that a slot may have.
    pub width: usize,
    /// Rows of a page.
    pub page: usize,
}

/// Rotary attention of tokens at `positions` of the slots of `cache`, which gets their keys and values: row
/// `i` is a token of slot `of[i]`, or of slot `i` if `of` is `None`, and sees those of its slot up to itself.
/// f32 on the CPU. `qkv` is `[rows, (queries + 2·keys)·d]`, `cache` `[rows of pages, 2, keys, d]`, the rest as for
/// [`attention`]. Without gradients.
pub fn attend(
    qkv: &Tensor,
    (cos, sin): (&Tensor, &Tensor),
    cache: &Tensor,
    (slots, of, positions): (Paged, Option<&[i64]>, &[i64]),
    heads: Heads,
    window: Option<usize>,
    sinks: Option<&Tensor>,
) -> Tensor {
    let qkv = qkv.contiguous();
    assert!(applies(&qkv) && applies(cache) && applies(cos) && applies(sin), "fused attention takes contiguous f32 on the CPU");
    let longest = positions.iter().max().map_or(0, |position| position + 1);
    let (rows, count) = (positions.len(), slots.table.len() / slots.width.max(1));
    let are_slots = of.map_or(rows == count, |of| of.len() == rows && of.iter().all(|slot| (0..count as i64).contains(slot)));
    let has_room = qkv.size()[0] == rows as i64 && cos.size()[0].min((slots.width * slots.page) as i64) >= longest;
    let pages = cache.size()[0] / slots.page as i64;
    assert!(are_slots && has_room && slots.table.iter().all(|page| (0..pages).contains(page)), "a slot and a position per row");
    let (window, Heads { queries, keys, scale, cap }) = (window.unwrap_or(0) as i64, heads);
    call(|out| unsafe {
        let (raws, cap) = ([&qkv, cos, sin, cache].map(raw), cap.unwrap_or(0.0));
        let (of, sinks) = (of.map_or(std::ptr::null(), <[i64]>::as_ptr), sinks.map_or(std::ptr::null_mut(), raw));
        let (table, width, page) = (slots.table.as_ptr(), slots.width as i64, slots.page as i64);
        let positions = positions.as_ptr();
        rollflow_attend(
            out, raws[0], raws[1], raws[2], sinks, raws[3], table, width, page, of, positions, queries, keys, window, scale, cap,
        )
    })
}

/// Queries or keys of sequences laid end to end.
pub struct Runs {
    /// Where each sequence begins, and the end of the last: `[sequences + 1]`, int32.
    pub ends: Tensor,
    /// Length of the longest.
    pub longest: i64,
}

/// Writes numbers that are stored in 4 bits ([`Nf4`](super::nf4::Nf4)) to `out`: codes and scales in bytes,
/// outer scales and tables of levels in f32, on its device. Returns false on a GPU whose kernels do not
/// take them.
pub fn nf4(stored: [&Tensor; 4], outer_block: i64, offset: f64, out: &Tensor) -> bool {
    if out.device() != Device::Cpu {
        return gpu::nf4(stored, outer_block, offset, out);
    }
    let [codes, scales, outer, tables] = stored.map(raw);
    check(unsafe { rollflow_nf4(codes, scales, outer, tables, outer_block, offset, raw(out)) });
    true
}

/// Returns true if [`flash`] takes heads of this width and type: 16 bits, on an NVIDIA GPU from the
/// Ampere generation on.
pub fn flashes(dim: usize, kind: Kind, device: Device) -> bool {
    let Device::Cuda(index) = device else { return false };
    matches!(kind, Kind::BFloat16 | Kind::Half) && dim.is_multiple_of(8) && dim <= 256 && super::cuda::generation(index) >= 8
}

/// Attention over packed rows by libtorch's flash attention (Dao, 2023), with gradients. Requires
/// [`flashes`].
///
/// `q` is `[N, queries, d]`, `k` and `v` `[M, keys, d]`, of which only the last dimension must be
/// contiguous. A sequence's last query sees all its keys, the one before one fewer, and so on.
/// `window` limits them to the last ones. `sinks` as for [`attention`], of any type. Returns `[N, queries, d]`.
pub fn flash(
    [q, k, v]: [&Tensor; 3],
    (queries, keys): (&Runs, &Runs),
    scale: f64,
    window: Option<usize>,
    sinks: Option<&Tensor>,
) -> Tensor {
    let (window, sinks) = (window.unwrap_or(0) as i64, sinks.map_or(std::ptr::null_mut(), raw));
    call(|out| unsafe {
        let (ends, longest) = ([raw(&queries.ends), raw(&keys.ends)], [queries.longest, keys.longest]);
        rollflow_flash(out, raw(q), raw(k), raw(v), sinks, ends[0], ends[1], longest[0], longest[1], scale, window)
    })
}

/// First row and length of each sequence, and of its prefix: `Sequence` in `fused.cpp`.
fn sequences(packed: &Packed) -> Vec<[i64; 4]> {
    let starts: Vec<usize> = packed.starts().collect();
    let sequence = |at: usize| {
        let (prefix_begin, prefix) = packed.prefixes[at].map_or((0, 0), |before| (starts[before], packed.lens[before]));
        [starts[at], packed.lens[at], prefix_begin, prefix].map(|number| number as i64)
    };
    (0..starts.len()).map(sequence).collect()
}

/// Disables two of libtorch's settings for the whole process, and returns the resulting values:
/// attention by cuDNN, which compiles a plan per shape, and sums of bf16 products that are rounded
/// to bf16 on the way (law N5).
pub fn gpu_defaults() -> [bool; 2] {
    let [mut cudnn_attention, mut rounded_sums] = [false; 2];
    check(unsafe { rollflow_gpu_defaults(&mut cudnn_attention, &mut rounded_sums) });
    [cudnn_attention, rounded_sums]
}

/// AdamW's settings.
pub struct AdamWSettings {
    pub lr: f64,
    pub beta1: f64,
    pub beta2: f64,
    pub weight_decay: f64,
    pub epsilon: f64,
}

/// Applies update number `step` (`[1]`, f32) in place to tensors with the same settings, without
/// temporaries. `moments` are the first, the second and, with amsgrad, the largest second moments.
/// Gradients are divided by `divisor` (`[1]`, f32) and used up. Call it without gradient tracking.
pub fn adamw(
    params: &[Tensor],
    grads: &[Tensor],
    moments: &[Vec<Tensor>],
    step: &Tensor,
    divisor: Option<&Tensor>,
    of: AdamWSettings,
) {
    assert!(moments.len() >= 2 && moments.iter().all(|moment| moment.len() == params.len()) && grads.len() == params.len());
    let pointers = |of: &[Tensor]| of.iter().map(raw).collect::<Vec<_>>();
    let (params, grads, moments) = (pointers(params), pointers(grads), moments.iter().map(|of| pointers(of)).collect::<Vec<_>>());
    let maxima = moments.get(2).map_or(std::ptr::null(), |maxima| maxima.as_ptr());
    let AdamWSettings { lr, beta1, beta2, weight_decay, epsilon } = of;
    // SAFETY: as many tensors in each list, all alive until this returns.
    check(unsafe {
        let (count, divisor) = (params.len() as i64, divisor.map_or(std::ptr::null_mut(), raw));
        let (means, squares) = (moments[0].as_ptr(), moments[1].as_ptr());
        let (params, grads, step) = (params.as_ptr(), grads.as_ptr(), raw(step));
        rollflow_adamw(params, grads, means, squares, maxima, count, step, divisor, lr, beta1, beta2, weight_decay, epsilon)
    });
}

/// Copies tensors to others of their shapes, on a GPU all at a time. Call it without gradient tracking.
pub fn copy_all(pairs: &[(Tensor, Tensor)]) {
    if pairs.is_empty() {
        return;
    }
    let (to, from): (Vec<_>, Vec<_>) = pairs.iter().map(|(to, from)| (raw(to), raw(from))).unzip();
    // SAFETY: as many tensors in each list, all alive until this returns.
    check(unsafe { rollflow_copy_all(to.as_ptr(), from.as_ptr(), pairs.len() as i64) });
}

fn raw(tensor: &Tensor) -> *mut C_tensor {
    tensor.as_ptr().cast_mut()
}

/// Runs one entry of `fused.cpp`. Panics with libtorch's message, like tch's operations.
fn call(entry: impl FnOnce(*mut *mut C_tensor) -> *mut c_char) -> Tensor {
    let mut out = std::ptr::null_mut();
    check(entry(&mut out));
    unsafe { Tensor::from_ptr(out) }
}

#[cfg(test)]
mod tests;
