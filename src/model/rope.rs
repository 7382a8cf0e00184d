//! Rotary position embedding: frequencies, and tables of cosines and sines.

use std::cell::RefCell;
use std::sync::Arc;

use tch::{Device, Kind, Tensor};

use super::{ModelConfig, RopeScaling, fused, upload};

/// Cosines and sines by position, `[positions, 1, head_dim]` each. The sine of the first half is
/// negated: a rotation is `x · cos + swap_halves(x) · sin`.
pub(super) struct Tables {
    pub cos: Tensor,
    pub sin: Tensor,
}

impl Tables {
    fn new(Angles { frequencies, amplitude, turning }: &Angles, positions: usize, device: Device) -> Self {
        let amplitude = |pair: usize| if pair < *turning { *amplitude } else { 1.0 };
        let (mut cos, mut sin) = (Vec::new(), Vec::new());
        for position in 0..positions {
            let angles = || frequencies.iter().map(move |frequency| position as f64 * frequency).enumerate();
            cos.extend(angles().chain(angles()).map(|(pair, angle)| (amplitude(pair) * angle.cos()) as f32));
            sin.extend(angles().map(|(pair, angle)| (-amplitude(pair) * angle.sin()) as f32));
            sin.extend(angles().map(|(pair, angle)| (amplitude(pair) * angle.sin()) as f32));
        }
        let table = |values: &[f32]| upload(values, device).view([positions as i64, 1, -1]);
        Tables { cos: table(&cos), sin: table(&sin) }
    }

    /// All positions.
    pub fn all(&self) -> Tables {
        Tables { cos: self.cos.shallow_clone(), sin: self.sin.shallow_clone() }
    }

    /// The first `len` positions.
    pub fn first(&self, len: i64) -> Tables {
        Tables { cos: self.cos.narrow(0, 0, len), sin: self.sin.narrow(0, 0, len) }
    }

    /// One row for each of `positions`.
    pub fn at(&self, positions: &Tensor) -> Tables {
        Tables { cos: self.cos.index_select(0, positions), sin: self.sin.index_select(0, positions) }
    }

    /// Rotates `[…, positions, heads, head_dim]` in f32; the result has the type of `x`.
    pub fn rotate(&self, x: &Tensor) -> Tensor {
        if let Some(rotated) = fused::gpu::rotate(x, &self.cos, &self.sin) {
            return rotated;
        }
        let wide = x.to_kind(Kind::Float);
        let swapped = wide.roll([wide.size()[wide.dim() - 1] / 2], [-1]);
        (&wide * &self.cos).addcmul(&swapped, &self.sin).to_kind(x.kind())
    }
}

/// One way to turn positions into angles.
struct Angles {
    /// Angle per position of each pair of a head's columns.
    frequencies: Vec<f64>,
    /// Multiplies cosines and sines of the pairs that turn.
    amplitude: f64,
    /// Pairs that turn; the rest keep their place.
    turning: usize,
}

impl Angles {
    fn of(config: &ModelConfig, rope: Option<(f64, RopeScaling)>) -> Self {
        let Some((theta, scaling)) = rope else {
            // A turn by nothing, exactly.
            return Angles { frequencies: vec![0.0; config.head_dim / 2], amplitude: 1.0, turning: 0 };
        };
        let (rotated, turning) = (config.rotated_columns(), config.rotated_columns() / 2);
        let dim = rotated as f64;
        let plain = (0..turning).map(|pair| theta.powf(-2.0 * pair as f64 / dim));
        let mut frequencies: Vec<f64> = match scaling {
            RopeScaling::Default | RopeScaling::Dynamic { .. } => plain.collect(),
            RopeScaling::Linear { factor } => plain.map(|frequency| frequency / factor).collect(),
            RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_max_position_embeddings: original } => {
                let stretch = |frequency: f64| {
                    let wavelength = std::f64::consts::TAU / frequency;
                    if wavelength < original / high_freq_factor {
                        frequency
                    } else if wavelength > original / low_freq_factor {
                        frequency / factor
                    } else {
                        let kept = (original / wavelength - low_freq_factor) / (high_freq_factor - low_freq_factor);
                        (1.0 - kept) * frequency / factor + kept * frequency
                    }
                };
                plain.map(stretch).collect()
            }
            RopeScaling::LongRope { ref short_factor, ref long_factor, .. } => {
                let factors = if config.rotates_long() { long_factor } else { short_factor };
                plain.zip(factors).map(|(frequency, factor)| frequency / factor).collect()
            }
            RopeScaling::Yarn { factor, original_max_position_embeddings: original, beta_fast, beta_slow, truncate, .. } => {
                // The column pair that turns so often within the original context.
                let column = |turns: f64| dim * (original / (turns * std::f64::consts::TAU)).ln() / (2.0 * theta.ln());
                let (low, high) = match truncate {
                    true => (column(beta_fast).floor(), column(beta_slow).ceil()),
                    false => (column(beta_fast), column(beta_slow)),
                };
                let (low, high) = (low.max(0.0), high.min(dim - 1.0));
                let high = if low == high { high + 0.001 } else { high };
                let divided = |pair: usize| ((pair as f64 - low) / (high - low)).clamp(0.0, 1.0);
                let stretch = |(pair, frequency)| frequency / factor * divided(pair) + frequency * (1.0 - divided(pair));
                plain.enumerate().map(stretch).collect()
            }
        };
        let amplitude = match scaling {
            RopeScaling::Yarn { attention_factor, .. } | RopeScaling::LongRope { attention_factor, .. } => attention_factor,
            _ => 1.0,
        };
        frequencies.resize(config.head_dim / 2, 0.0);
        Angles { frequencies, amplitude, turning }
    }
}

/// Something of each layer, held once for all layers that have it in common.
pub(super) struct ByLayer<T> {
    distinct: Vec<T>,
    of_layer: Arc<[usize]>,
}

impl<T> ByLayer<T> {
    /// Makes one value for all layers of the same `kind`.
    pub fn new<K: PartialEq>(kinds: impl Iterator<Item = K>, make: impl FnMut(K) -> T) -> Self {
        let mut distinct: Vec<K> = Vec::new();
        let place = |kind: K| {
            distinct.iter().position(|known| *known == kind).unwrap_or_else(|| {
                distinct.push(kind);
                distinct.len() - 1
            })
        };
        let of_layer = kinds.map(place).collect();
        ByLayer { distinct: distinct.into_iter().map(make).collect(), of_layer }
    }

    pub fn get(&self, layer: usize) -> &T {
        &self.distinct[self.of_layer[layer]]
    }
}

/// Tables that grow with the longest sequence so far: a model's full context may be far longer.
pub(super) struct Rope(ByLayer<(Angles, RefCell<Tables>)>);

impl Rope {
    pub fn new(config: &ModelConfig) -> Self {
        let kinds = (0..config.layers()).map(|layer| config.rope_of(layer));
        Rope(ByLayer::new(kinds, |scaling| {
            let angles = Angles::of(config, scaling);
            let tables = RefCell::new(Tables::new(&angles, 64, Device::Cpu));
            (angles, tables)
        }))
    }

    /// Applies `make` to each layer's tables, which cover at least `positions`.
    pub fn by_layer<T>(&self, positions: usize, device: Device, make: impl Fn(&Tables) -> T) -> ByLayer<T> {
        let of_kind = |(angles, tables): &(Angles, RefCell<Tables>)| {
            let held = tables.borrow().cos.size()[0] as usize;
            if held < positions || tables.borrow().cos.device() != device {
                *tables.borrow_mut() = Tables::new(angles, positions.max(held).next_power_of_two(), device);
            }
            make(&tables.borrow())
        };
        ByLayer { distinct: self.0.distinct.iter().map(of_kind).collect(), of_layer: self.0.of_layer.clone() }
    }
}
