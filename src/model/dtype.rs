//! Number formats that models are stored and computed in. Builds without libtorch, for recipes.

use crate::settings::declare::choices;

choices! {
    /// Number format.
    pub enum Dtype {
        /// 32 bits.
        "f32" => F32,
        /// 16 bits with the range of 32.
        "bf16" => Bf16,
        /// 16 bits with more precision and a small range.
        "f16" => F16,
    }
}

impl Dtype {
    /// Name in `config.json`.
    pub fn name(self) -> &'static str {
        match self {
            Dtype::F32 => "float32",
            Dtype::Bf16 => "bfloat16",
            Dtype::F16 => "float16",
        }
    }

    /// Returns the format of a name in `config.json`, with or without the prefix `torch.`.
    pub fn named(name: &str) -> Option<Dtype> {
        let name = name.strip_prefix("torch.").unwrap_or(name);
        Dtype::ALL.iter().copied().find(|dtype| dtype.name() == name)
    }

    /// Bytes per number.
    pub fn bytes(self) -> usize {
        match self {
            Dtype::F32 => 4,
            Dtype::Bf16 | Dtype::F16 => 2,
        }
    }

    /// Largest mean difference of log-probabilities, in nats, between two correct implementations of
    /// one model. Published differences of bf16 engines are 0.03 to 0.05.
    pub fn agreement(self) -> f64 {
        match self {
            Dtype::F32 | Dtype::F16 => 0.02,
            Dtype::Bf16 => 0.08,
        }
    }

    /// [`Dtype::agreement`] for a server that has loaded our weights, where f32 differs less.
    pub fn server_agreement(self) -> f64 {
        match self {
            Dtype::F32 => 1e-3,
            half => half.agreement(),
        }
    }

    /// Mean gaps between generator and trainer, in nats, above which a step warns and the run ends.
    ///
    /// In f32 the whole gap is what the policy learned while samples were in flight, which may be
    /// large. Recipes in 16 bits train pretrained models in small steps, so that such a gap is a
    /// mismatch.
    pub fn gap_limits(self) -> [f64; 2] {
        match self {
            Dtype::F32 => [1.0, 3.0],
            Dtype::Bf16 | Dtype::F16 => [0.15, 1.0],
        }
    }
}
