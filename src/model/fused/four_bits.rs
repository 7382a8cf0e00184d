//! Numbers in 4 bits (`four_bits.cpp`).

use std::ffi::c_char;

use tch::{Device, Kind, Tensor};
use torch_sys::C_tensor;

use super::{gpu, raw};
use crate::model::c_text::check;

unsafe extern "C" {
    fn rollflow_codes(
        numbers: *mut C_tensor,
        middles: *mut C_tensor,
        block: i64,
        codes: *mut C_tensor,
        scales: *mut C_tensor,
    ) -> *mut c_char;
    #[allow(clippy::too_many_arguments)]
    fn rollflow_four_bits(
        codes: *mut C_tensor,
        scales: *mut C_tensor,
        outer: *mut C_tensor,
        tables: *mut C_tensor,
        block: i64,
        outer_block: i64,
        offset: f64,
        out: *mut C_tensor,
    ) -> *mut c_char;
}

/// Writes numbers in 4 bits ([`FourBits`](crate::model::four_bits::FourBits)) to `out`. Codes and scales
/// are in bytes, outer scales and tables of levels in f32, on its device. Returns false on a GPU whose
/// kernels do not take them.
pub fn four_bits(stored: [&Tensor; 4], [block, outer_block]: [i64; 2], offset: f64, out: &Tensor) -> bool {
    if out.device() != Device::Cpu {
        return gpu::four_bits(stored, [block, outer_block], offset, out);
    }
    let [codes, scales, outer, tables] = stored.map(raw);
    check(unsafe { rollflow_four_bits(codes, scales, outer, tables, block, outer_block, offset, raw(out)) });
    true
}

/// Codes and scales of a flat tensor in f32, on the host, in blocks of an even number of at most 64. A
/// scale is a block's largest magnitude. A code says how many of `middles`, 15 in f32, are less than a
/// number's share of it; two are a byte, the first in the higher bits.
pub fn codes(numbers: &Tensor, middles: &Tensor, block: i64) -> (Tensor, Tensor) {
    let len = numbers.numel() as i64;
    let codes = Tensor::empty([(len + 1) / 2], (Kind::Uint8, Device::Cpu));
    let scales = Tensor::empty([(len + block - 1) / block], (Kind::Float, Device::Cpu));
    check(unsafe { rollflow_codes(raw(numbers), raw(middles), block, raw(&codes), raw(&scales)) });
    (codes, scales)
}
