//! Flash attention of 16-bit types on GPUs (`flash.cpp`).

use std::ffi::c_char;

use tch::{Device, Kind, Tensor};
use torch_sys::C_tensor;

use super::{call, raw};
use crate::model::{cuda, upload};

unsafe extern "C" {
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
}

/// Queries or keys of sequences laid end to end.
pub struct Runs {
    /// Where each sequence begins, and the end of the last: `[sequences + 1]`, int32.
    pub ends: Tensor,
    /// Length of the longest.
    pub longest: i64,
}

impl Runs {
    /// Sequences of these lengths.
    pub fn of(lens: impl Iterator<Item = usize>, device: Device) -> Self {
        let (mut ends, mut longest) = (vec![0i32], 0);
        for len in lens {
            ends.push(ends[ends.len() - 1] + len as i32);
            longest = longest.max(len as i64);
        }
        Runs { ends: upload(&ends, device), longest }
    }
}

/// Returns true if [`flash`] takes heads of this width and type: 16 bits, on an NVIDIA GPU from the
/// Ampere generation on.
pub fn flashes(dim: usize, kind: Kind, device: Device) -> bool {
    let Device::Cuda(index) = device else { return false };
    matches!(kind, Kind::BFloat16 | Kind::Half) && dim.is_multiple_of(8) && dim <= 256 && cuda::generation(index) >= 8
}

/// Attention over packed rows by libtorch's flash attention (Dao, 2023), with gradients. Requires
/// [`flashes`].
///
/// `q` is `[N, queries, d]`, `k` and `v` `[M, keys, d]`, of which only the last dimension must be
/// contiguous. A sequence's last query sees all its keys, the one before one fewer, and so on. `window`
/// limits them to the last ones. `sinks` as for [`attention`](super::attention), of any type. Returns `[N,
/// queries, d]`.
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
