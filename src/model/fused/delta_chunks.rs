//! The recurrence of gated delta nets over chunks of tokens (`delta_chunks.cpp`).

use std::ffi::c_char;

use tch::Tensor;
use torch_sys::C_tensor;

use super::gpu::{maybe, runs_kernels, several};
use super::raw;

unsafe extern "C" {
    #[allow(clippy::too_many_arguments)]
    fn rollflow_delta_chunks(
        results: *mut *mut C_tensor,
        of: *const *mut C_tensor,
        before: *mut C_tensor,
        prefixes: *mut C_tensor,
        steps: *const i64,
        count: i64,
        second: i64,
        states: i64,
        sequences: i64,
        kernels: bool,
    ) -> *mut c_char;
}

/// Order in which chunks are computed.
#[derive(Default)]
pub struct Steps {
    /// Chunks that are computed at a time: the first, how many, and the state of the first of them; those of the
    /// others follow.
    pub steps: Vec<[i64; 3]>,
    /// From this step on, sequences continue others; -1 if none do.
    pub second: i64,
    /// Number of sequences before these.
    pub begun: i64,
    /// All sequences, each with a state.
    pub sequences: i64,
    /// For each sequence that continues another, the state of that one.
    pub prefixes: Option<Tensor>,
}

/// Outputs `[chunks, heads, chunk, value dim]` and the states `[sequences, heads, key dim, value dim]`
/// after all chunks, with gradients.
///
/// `of`: queries and keys `[chunks, heads, chunk, key dim]`, values, logarithms of decays and shares of
/// corrections that are written `[chunks, heads, chunk]`. `before`: states of the sequences that continue
/// no other, else 0.
pub fn delta_chunks(of: [&Tensor; 5], before: Option<&Tensor>, steps: &Steps) -> [Tensor; 2] {
    let Steps { steps: order, second, begun, sequences, prefixes } = steps;
    let (pointers, kernels) = (of.map(raw), runs_kernels(of[0].device()));
    let (before, prefixes) = (maybe(before), maybe(prefixes.as_ref()));
    // SAFETY: the tensors live until this returns, and the list has three numbers a step.
    several(|results| unsafe {
        let (numbers, count) = (order.as_ptr().cast(), order.len() as i64);
        rollflow_delta_chunks(results, pointers.as_ptr(), before, prefixes, numbers, count, *second, *begun, *sequences, kernels)
    })
}
