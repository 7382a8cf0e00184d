//! Rotary position embedding: frequencies, and tables of cosines and sines.

use std::cell::RefCell;

use tch::{Device, Tensor};

use super::{ModelConfig, RopeScaling};

/// Angle per position of each pair of a head's columns. Pure.
pub(super) fn frequencies(config: &ModelConfig) -> Vec<f64> {
    let dim = config.head_dim as f64;
    let plain = (0..config.head_dim / 2).map(|pair| config.rope_theta.powf(-2.0 * pair as f64 / dim));
    match config.rope_scaling {
        RopeScaling::Default => plain.collect(),
        RopeScaling::Linear { factor } => plain.map(|frequency| frequency / factor).collect(),
        RopeScaling::Llama3 { factor, low, high, original } => {
            let stretch = |frequency: f64| {
                let wavelength = std::f64::consts::TAU / frequency;
                if wavelength < original / high {
                    frequency
                } else if wavelength > original / low {
                    frequency / factor
                } else {
                    let kept = (original / wavelength - low) / (high - low);
                    (1.0 - kept) * frequency / factor + kept * frequency
                }
            };
            plain.map(stretch).collect()
        }
    }
}

/// Cosines and sines by position, `[positions, 1, head_dim]` each. The sine of the first half is negated, so that a rotation is
/// `x · cos + swap_halves(x) · sin`.
pub(super) struct Tables {
    pub cos: Tensor,
    pub sin: Tensor,
}

impl Tables {
    fn new(frequencies: &[f64], positions: usize, device: Device) -> Self {
        let (mut cos, mut sin) = (Vec::new(), Vec::new());
        for position in 0..positions {
            let angles = || frequencies.iter().map(move |frequency| position as f64 * frequency);
            cos.extend(angles().chain(angles()).map(|angle| angle.cos() as f32));
            sin.extend(angles().map(|angle| -angle.sin() as f32));
            sin.extend(angles().map(|angle| angle.sin() as f32));
        }
        let table = |values: &[f32]| Tensor::from_slice(values).view([positions as i64, 1, -1]).to_device(device);
        Tables { cos: table(&cos), sin: table(&sin) }
    }

    /// The first `len` positions.
    pub fn first(&self, len: i64) -> Tables {
        Tables { cos: self.cos.narrow(0, 0, len), sin: self.sin.narrow(0, 0, len) }
    }

    /// One row for each of `positions`.
    pub fn at(&self, positions: &Tensor) -> Tables {
        Tables { cos: self.cos.index_select(0, positions), sin: self.sin.index_select(0, positions) }
    }

    /// Plain cosines and sines of each pair of columns, `[positions, head_dim / 2]` each.
    pub fn pairs(&self) -> (Tensor, Tensor) {
        let half = self.cos.size()[2] / 2;
        let part = |table: &Tensor, first| table.squeeze_dim(1).narrow(1, first, half).contiguous();
        (part(&self.cos, 0), part(&self.sin, half))
    }

    /// Rotates `[…, positions, heads, head_dim]`.
    pub fn rotate(&self, x: &Tensor) -> Tensor {
        let swapped = x.roll([x.size()[x.dim() - 1] / 2], [-1]);
        (x * &self.cos).addcmul(&swapped, &self.sin)
    }
}

/// Tables that grow with the longest sequence seen, for a model's full context may be far longer than what is trained.
pub(super) struct Rope {
    frequencies: Vec<f64>,
    tables: RefCell<Tables>,
}

impl Rope {
    pub fn new(config: &ModelConfig) -> Self {
        let frequencies = frequencies(config);
        let tables = RefCell::new(Tables::new(&frequencies, 64, Device::Cpu));
        Rope { frequencies, tables }
    }

    /// Runs `f` with tables that cover `positions`.
    pub fn with<T>(&self, positions: usize, device: Device, f: impl FnOnce(&Tables) -> T) -> T {
        let held = self.tables.borrow().cos.size()[0] as usize;
        if held < positions || self.tables.borrow().cos.device() != device {
            *self.tables.borrow_mut() = Tables::new(&self.frequencies, positions.max(held).next_power_of_two(), device);
        }
        f(&self.tables.borrow())
    }
}
