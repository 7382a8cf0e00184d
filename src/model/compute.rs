//! Where a model is computed, and in which format.

use tch::{Cuda, Device, Kind};

use super::{Dtype, cuda};

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

    /// Whether the device is there. The first question after a GPU loads libtorch's CUDA half: to be asked before anything is differentiated, for libtorch
    /// looks for devices once.
    pub fn check(self) -> Result<(), NoDevice> {
        let Device::Cuda(index) = self.device else { return Ok(()) };
        let loaded = cuda::load();
        let count = Cuda::device_count().max(0) as usize;
        if index < count {
            return Ok(());
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
        Err(NoDevice { wanted: self.device_name(), found })
    }
}
