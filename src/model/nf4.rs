//! NormalFloat4 with double quantisation (Dettmers et al., QLoRA, 2023), as bitsandbytes
//! stores them.
//!
//! A block of 64 numbers has one scale, its largest magnitude, of which each number is the nearest of 16
//! levels. Scales, less their mean, are in 8 bits themselves, in blocks of 256. That is 0.516 bytes a
//! number.

use tch::{Device, Kind, Tensor};

use super::four_bits::{Form, FourBits};
use super::fused;

/// Numbers that share a scale.
pub(super) const BLOCK: i64 = 64;
/// Scales that share an outer scale.
const OUTER_BLOCK: i64 = 256;

/// Shares of a block's largest magnitude: quantiles of the normal distribution.
const LEVELS: [f32; 16] = [
    -1.0,
    -0.696_192_8,
    -0.525_073_05,
    -0.394_917_5,
    -0.284_441_38,
    -0.184_773_43,
    -0.091_050_036,
    0.0,
    0.079_580_3,
    0.160_930_2,
    0.246_112_3,
    0.337_915_24,
    0.440_709_83,
    0.562_617,
    0.722_956_84,
    1.0,
];

/// Quantises a flat tensor on the host, of any format. Memory: the result's twice, and 4 MB.
pub(super) fn quantise(numbers: &Tensor) -> FourBits {
    let _guard = tch::no_grad_guard();
    let len = numbers.numel();
    let levels = Tensor::from_slice(&LEVELS);
    let middles = (levels.narrow(0, 1, 15) + levels.narrow(0, 0, 15)) / 2.0;
    // In pieces, which a folder may have in 16 bits.
    let coded = |piece: &Tensor| fused::codes(&piece.to_kind(Kind::Float), &middles, BLOCK);
    let (codes, scales): (Vec<_>, Vec<_>) = numbers.split(BLOCK * 16384, 0).iter().map(coded).unzip();
    let (codes, scales) = (Tensor::cat(&codes, 0), Tensor::cat(&scales, 0));
    let offset = scales.mean(Kind::Float);
    let (count, fine) = (scales.numel() as i64, fine_levels());
    let inner = blocks_of(&(&scales - &offset), OUTER_BLOCK);
    let outer = inner.abs().amax([1i64].as_slice(), true);
    let middles = (fine.narrow(0, 1, 255) + fine.narrow(0, 0, 255)) / 2.0;
    let bytes = (inner / outer.clamp_min(f64::from(f32::MIN_POSITIVE))).bucketize(&middles, true, false);
    let offset = offset.double_value(&[]);
    FourBits {
        codes,
        scales: bytes.to_kind(Kind::Uint8).view([-1]).narrow(0, 0, count).copy(),
        outer: outer.view([-1]),
        tables: Tensor::cat(&[levels, fine], 0),
        form: Form { len, block: BLOCK, outer_block: OUTER_BLOCK, offset, turned: None },
    }
}

/// Bytes of so many numbers.
pub(super) fn bytes(len: u64) -> u64 {
    FourBits::bytes(len, BLOCK as u64, OUTER_BLOCK as u64)
}

/// A flat tensor in rows of `width`, filled with zeros.
fn blocks_of(numbers: &Tensor, width: i64) -> Tensor {
    let len = numbers.numel() as i64;
    numbers.constant_pad_nd([0, (width - len % width) % width]).view([-1, width])
}

/// Shares of an outer block's largest magnitude, ascending: bitsandbytes' dynamic map (Dettmers et al.,
/// 8-bit optimizers, 2022), which is finer near zero.
fn fine_levels() -> Tensor {
    let mut all = vec![Tensor::from_slice(&[0f32, 1.0])];
    for power in 0..7 {
        let edges = Tensor::linspace(0.1, 1.0, (1 << power) + 1, (Kind::Float, Device::Cpu));
        let count = 1 << power;
        let middles = (edges.narrow(0, 0, count) + edges.narrow(0, 1, count)) / 2.0 * 10f64.powi(power - 6);
        all.extend([-&middles, middles]);
    }
    Tensor::cat(&all, 0).sort(0, false).0
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::{Compute, Dtype};

    fn numbers(len: i64) -> Tensor {
        tch::manual_seed(7);
        Tensor::randn([len], (Kind::Float, Device::Cpu)) * 0.02
    }

    /// Half the widest gap between levels, and what a scale in 8 bits is off.
    #[test]
    fn a_number_comes_back_within_half_a_gap_of_its_block() {
        for len in [64, 640, 64 * 300, 64 * 513 + 10] {
            let numbers = numbers(len);
            let stored = quantise(&numbers);
            let back = numbers.empty_like();
            stored.write_to(&back);
            let most = blocks_of(&numbers, BLOCK).abs().amax([1i64].as_slice(), true) * 0.16;
            assert!(bool::try_from((blocks_of(&(&back - &numbers), BLOCK).abs() - most).le(0.0).all()).unwrap(), "{len}");
            assert!(bytes(len as u64) < len as u64 * 6 / 10 + 1200);
            let zero = quantise(&numbers.zeros_like());
            zero.write_to(&back);
            assert_eq!(back.abs().max().double_value(&[]), 0.0);
        }
    }

    /// By bitsandbytes 0.50.2 (scripts/golden_bitsandbytes.py).
    #[test]
    fn codes_scales_and_numbers_are_those_of_bitsandbytes() {
        let golden = Tensor::read_safetensors("tests/golden/bitsandbytes/tensors.safetensors").unwrap();
        let golden = |case: &str, what: &str| {
            let name = format!("{case}.{what}");
            golden.iter().find(|(known, _)| *known == name).map(|(_, of)| of.shallow_clone()).unwrap()
        };
        for case in ["f32", "bf16", "many", "few"] {
            let kind = if case == "bf16" { Kind::BFloat16 } else { Kind::Float };
            let stored = quantise(&golden(case, "numbers").view([-1]).to_kind(kind));
            let far = |a: &Tensor, b: &Tensor| (a.to_kind(Kind::Float) - b.to_kind(Kind::Float)).abs().max().double_value(&[]);
            assert_eq!(far(&stored.tables, &Tensor::cat(&[golden(case, "levels"), golden(case, "fine_levels")], 0)), 0.0);
            assert!(stored.codes.equal(&golden(case, "codes")), "{case}: codes");
            assert!(far(&stored.outer, &golden(case, "outer")) < 1e-8, "{case}: outer scales");
            assert!((stored.form.offset - golden(case, "offset").double_value(&[0])).abs() < 1e-8, "{case}: offset");
            // A scale halfway between two levels may round either way; one alone is the mean.
            assert!(case == "few" || far(&stored.scales, &golden(case, "scales")) <= 1.0, "{case}: scales");
            let theirs = FourBits { scales: golden(case, "scales"), outer: golden(case, "outer"), ..stored };
            let back = Tensor::zeros([theirs.form.len as i64], (kind, Device::Cpu));
            theirs.write_to(&back);
            assert!(far(&back, &golden(case, "dequantised")) < 1e-8, "{case}: numbers");
        }
    }

    #[test]
    fn every_way_to_read_gives_the_same_in_every_format() {
        let mut devices = vec![Device::Cpu];
        devices.extend(Compute::cuda(0, Dtype::F32).check().ok().map(|()| Device::Cuda(0)));
        for len in [64 * 9, 64 * 1000] {
            let stored = quantise(&numbers(len));
            let expected = stored.by_operations();
            for device in &devices {
                let stored = stored.on(*device);
                for kind in [Kind::Float, Kind::BFloat16, Kind::Half] {
                    // Within a layer, where tensors follow each other.
                    let room = Tensor::zeros([len + 24], (kind, *device));
                    for first in [0, 8, 3] {
                        let out = room.narrow(0, first, len);
                        stored.write_to(&out);
                        let gap = out.to_device(Device::Cpu).to_kind(Kind::Float) - expected.to_kind(kind).to_kind(Kind::Float);
                        // A GPU may multiply and add with one rounding.
                        let most = if *device == Device::Cpu { 0.0 } else { 2e-4 };
                        assert!(gap.abs().max().double_value(&[]) <= most, "{len}, {device:?}, {kind:?}, {first}");
                    }
                }
            }
        }
    }
}
