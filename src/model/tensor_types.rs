//! Number formats as libtorch and safetensors name them.

use safetensors::tensor;
use tch::Kind;

use super::Dtype;

impl Dtype {
    /// libtorch's name.
    pub fn kind(self) -> Kind {
        match self {
            Dtype::F32 => Kind::Float,
            Dtype::Bf16 => Kind::BFloat16,
            Dtype::F16 => Kind::Half,
        }
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
