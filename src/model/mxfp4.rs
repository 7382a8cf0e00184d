//! Experts in MXFP4 (Open Compute Project, 2023), as gpt-oss is published: blocks of 32 numbers in 4 bits,
//! each with a power of two. Where a folder is read they are widened, exactly, or kept.

use std::ops::Range;

use safetensors::tensor::{Dtype, TensorInfo};
use tch::Tensor;

use super::bitsandbytes::Found;
use super::folder::WeightFile;
use super::four_bits::{Form, FourBits};
use super::layout::part;
use super::{Entry, ModelError};

/// Numbers of a block.
const BLOCK: usize = 32;

/// Added to a block's exponent.
const BIAS: i32 = 127;

/// The eight levels; with the highest bit, they are negative.
const LEVELS: [f32; 8] = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];

fn scale_of(exponent: u8) -> f32 {
    f32::powi(2.0, i32::from(exponent) - BIAS)
}

fn level(code: u8) -> f32 {
    let level = LEVELS[usize::from(code & 7)];
    if code & 8 == 0 { level } else { -level }
}

/// Matrices `[experts, input, output]` of a layout, which on disk are `[experts, output, input]` in blocks.
pub(super) struct ExpertsOnDisk<'a> {
    /// `[experts, input, output]`.
    shape: [usize; 3],
    /// Place in the flat buffer.
    pub range: Range<usize>,
    codes: (&'a WeightFile, &'a TensorInfo),
    scales: (&'a WeightFile, &'a TensorInfo),
}

impl<'a> ExpertsOnDisk<'a> {
    /// Takes what belongs to this tensor, if it is in MXFP4; or says why it does not fit.
    pub fn take(found: &mut Found<'a>, entry: &Entry) -> Option<Result<Self, String>> {
        let shape @ [experts, input, output] = entry.shape.as_slice().try_into().ok()?;
        let [codes_name, scales_name] = ["blocks", "scales"].map(|part| format!("{}_{part}", entry.name));
        let codes = found.remove(&codes_name)?;
        let Some(scales) = found.remove(&scales_name) else { return Some(Err(format!("{scales_name} is missing"))) };
        let blocks = input / BLOCK;
        let expected = [
            (&codes_name, codes.1, vec![experts, output, blocks, BLOCK / 2]),
            (&scales_name, scales.1, vec![experts, output, blocks]),
        ];
        for (name, info, expected) in expected {
            if info.dtype != Dtype::U8 || info.shape != expected || input % BLOCK != 0 {
                return Some(Err(format!("{name}: {:?} {:?}, expected U8 {expected:?}", info.dtype, info.shape)));
            }
        }
        Some(Ok(ExpertsOnDisk { shape, range: entry.range(), codes, scales }))
    }

    /// Copies the numbers at `range` of the flat buffer, which are this tensor's, to `to`, in its format. An
    /// expert at a time.
    pub fn copy(&self, range: Range<usize>, to: &Tensor) -> Result<(), ModelError> {
        let size = self.shape[1] * self.shape[2];
        let experts = (range.start - self.range.start) / size..(range.end - self.range.start).div_ceil(size);
        for expert in experts {
            let begin = self.range.start + expert * size;
            let common = range.start.max(begin)..range.end.min(begin + size);
            let own = part(&self.expert(expert)?, common.start - begin..common.end - begin);
            part(to, common.start - range.start..common.end - range.start).copy_(&own);
        }
        Ok(())
    }

    /// Reads all experts as they are stored.
    pub fn keep(&self) -> Result<FourBits, ModelError> {
        let ([experts, input, output], bytes) = (self.shape, |(file, info): (&WeightFile, &TensorInfo)| file.bytes(info));
        // The first number of a byte is in its lower bits here.
        let codes: Vec<u8> = bytes(self.codes)?.into_iter().map(|pair| pair.rotate_left(4)).collect();
        let scales = bytes(self.scales)?;
        let powers = (0..=u8::MAX).map(scale_of);
        let form = Form {
            len: self.range.len(),
            block: BLOCK as i64,
            outer_block: scales.len() as i64,
            offset: 0.0,
            turned: Some([experts, output, input]),
        };
        Ok(FourBits {
            codes: Tensor::from_slice(&codes),
            scales: Tensor::from_slice(&scales),
            outer: Tensor::from_slice(&[1f32]),
            tables: Tensor::from_slice(&(0..16).map(level).chain(powers).collect::<Vec<f32>>()),
            form,
        })
    }

    /// An expert's numbers, in the layout's order.
    fn expert(&self, expert: usize) -> Result<Tensor, ModelError> {
        let [_, input, output] = self.shape;
        let of = |(file, info): (&WeightFile, &TensorInfo), len: usize| file.bytes_of(info, expert * len..(expert + 1) * len);
        let (codes, scales) = (of(self.codes, input * output / 2)?, of(self.scales, input * output / BLOCK)?);
        let mut numbers = vec![0.0f32; input * output];
        let blocks = numbers.chunks_exact_mut(BLOCK).zip(codes.chunks_exact(BLOCK / 2));
        for ((numbers, codes), scale) in blocks.zip(&scales) {
            let scale = scale_of(*scale);
            for (pair, code) in numbers.chunks_exact_mut(2).zip(codes) {
                pair.copy_from_slice(&[code & 15, code >> 4].map(|code| level(code) * scale));
            }
        }
        Ok(Tensor::from_slice(&numbers).view([output as i64, input as i64]).tr().reshape([-1]))
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use tch::{Device, Kind};

    use super::*;
    use crate::model::{StoredModel, load_hf};

    #[test]
    fn parts_of_a_folder_in_mxfp4_are_read_as_the_whole_wherever_it_is_cut() {
        let folder = Path::new("tests/golden/mxfp4");
        let (config, whole) = load_hf(folder).unwrap();
        let (stored, len) = (StoredModel::open(&config, folder).unwrap(), whole.flat.numel());
        let to = Tensor::zeros([len as i64], (Kind::Float, Device::Cpu));
        // Pieces end within experts, and within their blocks.
        for begin in (0..len).step_by(997) {
            let end = (begin + 997).min(len);
            stored.read(&[(begin..end, 0)], &part(&to, begin..end)).unwrap();
        }
        assert!(to == whole.flat);
    }
}
