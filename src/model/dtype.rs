//! The number formats that models are stored and computed in.

use safetensors::tensor;
use tch::Kind;

/// A number format.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Dtype {
    /// 32 bits.
    #[default]
    F32,
    /// 16 bits with the range of 32: 8 bits of precision.
    Bf16,
    /// 16 bits: 11 bits of precision, nothing above 65504.
    F16,
}

impl Dtype {
    /// Every format.
    pub const ALL: [Dtype; 3] = [Dtype::F32, Dtype::Bf16, Dtype::F16];

    /// Its name in `config.json`.
    pub fn name(self) -> &'static str {
        match self {
            Dtype::F32 => "float32",
            Dtype::Bf16 => "bfloat16",
            Dtype::F16 => "float16",
        }
    }

    /// The format of that name, `torch.` before it or not.
    pub fn named(name: &str) -> Option<Dtype> {
        let name = name.strip_prefix("torch.").unwrap_or(name);
        Dtype::ALL.into_iter().find(|dtype| dtype.name() == name)
    }

    /// Bytes of a number.
    pub fn bytes(self) -> usize {
        match self {
            Dtype::F32 => 4,
            Dtype::Bf16 | Dtype::F16 => 2,
        }
    }

    /// What libtorch calls it.
    pub fn kind(self) -> Kind {
        match self {
            Dtype::F32 => Kind::Float,
            Dtype::Bf16 => Kind::BFloat16,
            Dtype::F16 => Kind::Half,
        }
    }

    /// What safetensors files call it.
    pub(super) fn stored(self) -> tensor::Dtype {
        match self {
            Dtype::F32 => tensor::Dtype::F32,
            Dtype::Bf16 => tensor::Dtype::BF16,
            Dtype::F16 => tensor::Dtype::F16,
        }
    }

    /// The format that a safetensors file calls so.
    pub(super) fn of_stored(stored: tensor::Dtype) -> Option<Dtype> {
        Dtype::ALL.into_iter().find(|dtype| dtype.stored() == stored)
    }
}
