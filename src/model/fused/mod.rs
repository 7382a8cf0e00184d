//! Fused operations of a decoder layer, with gradients, and the choice between them and libtorch's.
//! Each file in C++ has the name of the file in Rust that calls it.
//!
//! On one CPU core a small model spends as long in norms, gates and rotations as in matrix
//! products, because each is a chain of passes over memory. Fusing saves about a third of a
//! training step of the tiny recipe. Models in 16 bits use them, too, for only products are in 16 bits
//! there (`half`). Other devices and long sequences use libtorch's operations, and tests compare both.

use std::ffi::c_char;

use tch::{Device, Kind, Tensor};
use torch_sys::C_tensor;

use super::c_text::{check, taken};

mod attention;
mod delta_chunks;
mod delta_inputs;
mod flash;
mod four_bits;
pub mod gpu;
pub mod half;
mod libtorch;
mod products;
mod rows;

pub use attention::{Heads, LONGEST_FUSED_SEQUENCE, Paged, attend, attends, attention};
pub use delta_chunks::{Steps, delta_chunks};
pub use delta_inputs::delta_inputs;
pub use flash::{Runs, flash, flashes};
pub use four_bits::{codes, four_bits};
pub use libtorch::{AdamWSettings, adamw, copy_all, gpu_defaults};
pub use products::Panels;
pub use rows::{rms_norm, softmax, softmax_gradient, swiglu, takes_logits};

/// Returns true if the fused operations accept this tensor: f32, on the CPU, contiguous.
pub fn applies(x: &Tensor) -> bool {
    x.device() == Device::Cpu && x.kind() == Kind::Float && x.is_contiguous()
}

/// The tensor as an argument of a C function.
pub fn raw(tensor: &Tensor) -> *mut C_tensor {
    tensor.as_ptr().cast_mut()
}

/// Runs one entry in C++. Panics with libtorch's message, like tch's operations.
fn call(entry: impl FnOnce(*mut *mut C_tensor) -> *mut c_char) -> Tensor {
    let mut out = std::ptr::null_mut();
    check(entry(&mut out));
    unsafe { Tensor::from_ptr(out) }
}

#[cfg(test)]
mod tests;
