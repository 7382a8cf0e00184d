//! What tch lacks of libtorch (`libtorch.cpp`).

use std::ffi::c_char;

use tch::Tensor;
use torch_sys::C_tensor;

use super::raw;
use crate::model::c_text::check;

unsafe extern "C" {
    fn rollflow_gpu_defaults(cudnn_attention: *mut bool, rounded_sums: *mut bool, fixed_pieces: *mut bool) -> *mut c_char;
    fn rollflow_copy_all(to: *const *mut C_tensor, from: *const *mut C_tensor, count: i64) -> *mut c_char;
    #[allow(clippy::too_many_arguments)]
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

/// Disables three of libtorch's settings for the whole process, and returns the resulting values: attention
/// by cuDNN, which compiles a plan per shape; sums of 16-bit products that are rounded to 16 bits on the
/// way (law N5); and memory in pieces of fixed sizes, unless `PYTORCH_ALLOC_CONF` or
/// `PYTORCH_CUDA_ALLOC_CONF` is set.
pub fn gpu_defaults() -> [bool; 3] {
    let [mut cudnn_attention, mut rounded_sums, mut fixed_pieces] = [false; 3];
    check(unsafe { rollflow_gpu_defaults(&mut cudnn_attention, &mut rounded_sums, &mut fixed_pieces) });
    [cudnn_attention, rounded_sums, fixed_pieces]
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
