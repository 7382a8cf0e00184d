//! Where a model is computed, and in which format.

use tch::{Cuda, Device, Kind};

use super::Dtype;

/// A device and the format of the numbers that layers compute with there. Parameters that are trained, their gradients' sums and their
/// moments are f32 whatever stands here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Compute {
    /// Where.
    pub device: Device,
    /// In which format.
    pub dtype: Dtype,
}

impl Default for Compute {
    fn default() -> Self {
        Compute::cpu(Dtype::F32)
    }
}

/// A device that isn't there.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{wanted} is not there: {found}")]
pub struct NoDevice {
    /// What was asked for.
    pub wanted: String,
    /// What there is.
    pub found: String,
}

impl Compute {
    /// On this machine's processor.
    pub fn cpu(dtype: Dtype) -> Self {
        Compute { device: Device::Cpu, dtype }
    }

    /// On a GPU of NVIDIA's, the first of which is 0.
    pub fn cuda(index: usize, dtype: Dtype) -> Self {
        Compute { device: Device::Cuda(index), dtype }
    }

    /// What tensors are made with.
    pub fn options(self) -> (Kind, Device) {
        (self.dtype.kind(), self.device)
    }

    /// The device's name in recipes.
    pub fn device_name(self) -> String {
        match self.device {
            Device::Cuda(index) => format!("cuda:{index}"),
            device => format!("{device:?}").to_lowercase(),
        }
    }

    /// Whether the device is there.
    pub fn check(self) -> Result<(), NoDevice> {
        let Device::Cuda(index) = self.device else { return Ok(()) };
        let count = Cuda::device_count().max(0) as usize;
        if index < count {
            return Ok(());
        }
        let visible = match std::env::var("CUDA_VISIBLE_DEVICES") {
            Ok(visible) => format!("CUDA_VISIBLE_DEVICES is {visible:?}"),
            Err(_) => "CUDA_VISIBLE_DEVICES is not set".to_owned(),
        };
        let found = match (count, tch::utils::has_cuda()) {
            (0, false) => format!("this program's libtorch is built without CUDA, so that only \"cpu\" is ({visible})"),
            (0, true) => format!("libtorch finds no CUDA device ({visible})"),
            (count, _) => format!("libtorch finds {count} CUDA devices, the last of which is cuda:{} ({visible})", count - 1),
        };
        Err(NoDevice { wanted: self.device_name(), found })
    }
}

/// Bytes of a GPU's memory, asked of the CUDA runtime that came with libtorch; `None` where there is no such device, or no runtime.
pub fn gpu_memory(index: usize) -> Option<u64> {
    use std::ffi::{c_char, c_int, c_void};
    unsafe extern "C" {
        fn dlsym(handle: *mut c_void, symbol: *const c_char) -> *mut c_void;
    }
    type SetDevice = unsafe extern "C" fn(c_int) -> c_int;
    type MemGetInfo = unsafe extern "C" fn(*mut usize, *mut usize) -> c_int;
    if index as i64 >= Cuda::device_count() {
        return None;
    }
    // SAFETY: dlsym looks a name up among the loaded libraries (a null handle), and these two functions have had these signatures in every
    // CUDA runtime.
    unsafe {
        let set = dlsym(std::ptr::null_mut(), c"cudaSetDevice".as_ptr());
        let info = dlsym(std::ptr::null_mut(), c"cudaMemGetInfo".as_ptr());
        if set.is_null() || info.is_null() {
            return None;
        }
        let (set, info) =
            (std::mem::transmute::<*mut c_void, SetDevice>(set), std::mem::transmute::<*mut c_void, MemGetInfo>(info));
        let (mut free, mut total) = (0, 0);
        (set(index as c_int) == 0 && info(&mut free, &mut total) == 0).then_some(total as u64)
    }
}
