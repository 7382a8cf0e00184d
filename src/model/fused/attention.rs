//! Attention in f32 on a CPU: over packed sequences (`attention.cpp`), with gradients, and of tokens of
//! sequences in a cache (`slots.cpp`).

use std::ffi::c_char;

use tch::{Device, Kind, Tensor};
use torch_sys::C_tensor;

use super::{applies, call, raw};
use crate::model::Packed;

unsafe extern "C" {
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
}

/// Longest sequence, in tokens, of the fused attention, whose backward pass keeps two squares of that size.
/// Bounded by memory (half a megabyte), not by measurement.
pub const LONGEST_FUSED_SEQUENCE: usize = 256;

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
/// `qkv` is `[N, (queries + 2·keys)·d]`, one row per token of `packed`. Cosines and sines are `[positions,
/// 1, d]` each, by position, and the second half of each row is read. `window` is the number of visible
/// positions, the query's own included. `sinks` `[queries]` are scores of no key, one a head (Xiao et al.,
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
/// `i` is a token of slot `of[i]`, or of slot `i` if `of` is `None`, and sees those of its slot up to
/// itself. f32 on the CPU. `qkv` is `[rows, (queries + 2·keys)·d]`, `cache` `[rows of pages, 2, keys, d]`,
/// the rest as for [`attention`]. Without gradients.
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

/// First row and length of each sequence, and of its prefix: `Sequence` in `attention.cpp`.
fn sequences(packed: &Packed) -> Vec<[i64; 4]> {
    let starts: Vec<usize> = packed.starts().collect();
    let sequence = |at: usize| {
        let (prefix_begin, prefix) = packed.prefixes[at].map_or((0, 0), |before| (starts[before], packed.lens[before]));
        [starts[at], packed.lens[at], prefix_begin, prefix].map(|number| number as i64)
    };
    (0..starts.len()).map(sequence).collect()
}
