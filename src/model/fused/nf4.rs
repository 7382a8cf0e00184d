//! Numbers in 4 bits (`nf4.cpp`).

use std::ffi::c_char;

use tch::{Device, Tensor};
use torch_sys::C_tensor;

use super::{gpu, raw};
use crate::model::c_text::check;

unsafe extern "C" {
    fn rollflow_nf4(
        codes: *mut C_tensor,
        scales: *mut C_tensor,
        outer: *mut C_tensor,
        tables: *mut C_tensor,
        outer_block: i64,
        offset: f64,
        out: *mut C_tensor,
    ) -> *mut c_char;
}

/// Writes numbers that are stored in 4 bits ([`Nf4`](crate::model::nf4::Nf4)) to `out`: codes and scales in bytes,
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
