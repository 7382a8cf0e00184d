//! Device and number format of a model's computation, as libtorch and safetensors name them.

use safetensors::tensor;
use tch::kind::Element;
use tch::{Cuda, Device, Kind, Tensor};

use super::fused::half;
use super::stream::pinned;
use super::{Dtype, ModelError, cuda};

/// Device, and number format of the layers. Trained parameters, gradient sums and moments are f32
/// in any case. On a CPU, so are activations, keys and values: only weights and products are in 16 bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Compute {
    /// Device.
    pub device: Device,
    /// Number format.
    pub dtype: Dtype,
}

impl Default for Compute {
    fn default() -> Self {
        Compute::cpu(Dtype::F32)
    }
}

impl Compute {
    /// On this machine's processor.
    pub fn cpu(dtype: Dtype) -> Self {
        Compute { device: Device::Cpu, dtype }
    }

    /// An NVIDIA GPU; indices start at 0.
    pub fn cuda(index: usize, dtype: Dtype) -> Self {
        Compute { device: Device::Cuda(index), dtype }
    }

    /// Type and device of new tensors.
    pub fn options(self) -> (Kind, Device) {
        (self.dtype.kind(), self.device)
    }

    /// Type and device of what layers hand on, and of keys and values.
    pub(crate) fn activations(self) -> (Kind, Device) {
        (half::activations(self.dtype.kind(), self.device), self.device)
    }

    /// The device's name in recipes.
    pub fn device_name(self) -> String {
        match self.device {
            Device::Cuda(index) => format!("cuda:{index}"),
            device => format!("{device:?}").to_lowercase(),
        }
    }

    /// Checks that the device exists, and that libtorch has kernels for it. The first check of a GPU loads
    /// libtorch's CUDA library. Call it before the first backward pass, because libtorch looks for devices
    /// once.
    pub fn check(self) -> Result<(), ModelError> {
        let Device::Cuda(index) = self.device else { return Ok(()) };
        let loaded = cuda::load();
        let count = Cuda::device_count().max(0) as usize;
        if index < count {
            return cuda::gpu_problem(index).map_or(Ok(()), |why| Err(ModelError::UnusableDevice(self.device_name(), why)));
        }
        let visible = match std::env::var("CUDA_VISIBLE_DEVICES") {
            Ok(visible) => format!("CUDA_VISIBLE_DEVICES is {visible:?}"),
            Err(_) => "CUDA_VISIBLE_DEVICES is not set".to_owned(),
        };
        let found = match (count, loaded) {
            (0, Err(why)) => format!("{why}, so that only \"cpu\" is ({visible})"),
            (0, Ok(())) => match cuda::driver_problem() {
                Some(why) => format!("{why} ({visible})"),
                None => format!("libtorch finds no CUDA device ({visible})"),
            },
            (count, _) => format!("libtorch finds {count} CUDA devices, the last of which is cuda:{} ({visible})", count - 1),
        };
        Err(ModelError::NoDevice(self.device_name(), found))
    }
}

/// Bytes of ordinary memory of the host that CUDA's driver copies before it returns. For more it waits for
/// what the device still has to do.
const COPIED: usize = 64 << 10;

/// A tensor of these numbers on a device, without waiting for what the device still has to do.
pub(crate) fn upload<T: Element>(numbers: &[T], device: Device) -> Tensor {
    let here = Tensor::from_slice(numbers);
    if device == Device::Cpu {
        return here;
    }
    let here = if size_of_val(numbers) > COPIED { pinned(&here) } else { here };
    here.to_dtype_layout((here.kind(), device), true, false)
}

/// Most logits in memory at a time, in numbers: 128 MiB on a processor, 1 GiB on a GPU, where each chunk
/// costs a pass over the gradient of the head.
pub(crate) fn logits_chunk(device: Device) -> usize {
    if device == Device::Cpu { 1 << 25 } else { 1 << 28 }
}

impl Dtype {
    /// libtorch's name.
    pub fn kind(self) -> Kind {
        match self {
            Dtype::F32 => Kind::Float,
            Dtype::Bf16 => Kind::BFloat16,
            Dtype::F16 => Kind::Half,
        }
    }

    /// Checks that the finite numbers of the tensor `name` are finite in this format, too. f16 ends at 65504,
    /// the others have the range of f32.
    pub(crate) fn check_range(self, name: &str, numbers: &Tensor) -> Result<(), ModelError> {
        if self != Dtype::F16 || numbers.kind() == Kind::Half {
            return Ok(());
        }
        // Infinities and NaN stay what they are.
        self.check_rounded(name, &numbers.nan_to_num(0.0, 0.0, 0.0).to_kind(Kind::Half))
    }

    /// Checks that none of the numbers of the tensor `name` was rounded to infinity in this format.
    pub(crate) fn check_rounded(self, name: &str, rounded: &Tensor) -> Result<(), ModelError> {
        let fits = self != Dtype::F16 || rounded.isfinite().all().int64_value(&[]) != 0;
        if fits { Ok(()) } else { Err(ModelError::BeyondF16(name.to_owned())) }
    }

    /// Name in safetensors files.
    pub(super) fn stored(self) -> tensor::Dtype {
        match self {
            Dtype::F32 => tensor::Dtype::F32,
            Dtype::Bf16 => tensor::Dtype::BF16,
            Dtype::F16 => tensor::Dtype::F16,
        }
    }

    /// Format of a safetensors name.
    pub(super) fn of_stored(stored: tensor::Dtype) -> Option<Dtype> {
        Dtype::ALL.iter().copied().find(|dtype| dtype.stored() == stored)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A device that no other test of the library uses.
    const COUNTED: usize = 5;

    #[test]
    fn the_host_waits_for_no_upload_however_large() {
        type Counts = unsafe extern "C" fn(i64, *mut u64, *mut u64);
        let process = libloading::os::unix::Library::this();
        let Ok(counts) = (unsafe { process.get::<Counts>(b"stand_in_counts\0") }) else {
            return eprintln!("skipped: only the stand-in of a GPU counts waits");
        };
        Compute::cuda(COUNTED, Dtype::F32).check().unwrap();
        let waits = || {
            let (mut kernels, mut waits) = (0, 0);
            // SAFETY: a function of the stand-in, by its signature.
            unsafe { counts(COUNTED as i64, &mut kernels, &mut waits) };
            waits
        };
        let before = waits();
        let numbers: Vec<i64> = (0..COPIED as i64).collect();
        let sent = [&numbers[..3], &numbers[..]].map(|numbers| upload(numbers, Device::Cuda(COUNTED)));
        assert_eq!(waits(), before);
        assert_eq!(sent.map(|sent| sent.sum(Kind::Int64).int64_value(&[])), [3, numbers.iter().sum()]);
    }
}
