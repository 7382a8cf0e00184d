//! Arguments that benches on devices share.

use std::num::ParseIntError;
use std::str::FromStr;

use anyhow::{Context, Result, bail};
use rollflow::model::{Compute, Dtype};
use rollflow::recipe::DeviceName;

/// Arguments by their position.
pub struct Arguments(Vec<String>);

impl Arguments {
    /// Those of this program, but for what cargo adds.
    pub fn read() -> Self {
        Arguments(std::env::args().skip(1).filter(|arg| arg != "--bench").collect())
    }

    pub fn get(&self, at: usize, default: &'static str) -> &str {
        self.0.get(at).map_or(default, String::as_str)
    }

    pub fn number<T: FromStr<Err = ParseIntError>>(&self, at: usize, default: T) -> Result<T> {
        let given = self.0.get(at).map(|given| given.parse().with_context(|| format!("{given}: give a number")));
        given.unwrap_or(Ok(default))
    }

    /// A device and its format, the first two.
    pub fn compute(&self) -> Result<Compute> {
        let dtype = match self.get(1, "f32") {
            "f32" => Dtype::F32,
            "bf16" => Dtype::Bf16,
            "f16" => Dtype::F16,
            other => bail!("{other}: give f32, bf16 or f16"),
        };
        let compute = match self.get(0, "cpu").parse().map_err(anyhow::Error::msg)? {
            DeviceName::Cpu => Compute::cpu(dtype),
            DeviceName::Cuda(index) => Compute::cuda(index, dtype),
        };
        compute.check()?;
        Ok(compute)
    }
}
