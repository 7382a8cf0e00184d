//! Stochastic rounding to bf16: up or down with a probability that makes the mean exact (Zamirai et al.,
//! 2020, "Revisiting BFloat16 Training").
//!
//! Rounded to the nearest, an update below half the distance of two bf16 numbers, 1/256 of a weight, is lost
//! every time. The noise depends only on the step and a number's place, so that a resumed run rounds the same
//! way.

use std::ops::Range;

use tch::{Device, Kind, Tensor};

use super::MasterFormat;

impl MasterFormat {
    /// libtorch's name.
    pub(super) fn kind(self) -> Kind {
        match self {
            MasterFormat::F32 => Kind::Float,
            MasterFormat::Bf16 => Kind::BFloat16,
        }
    }
}

/// Bits that bf16 lacks of f32.
const LOW: i64 = 0xffff;

/// Writes the f32 `numbers` of the places in `range` to bf16 `params`, in update number `step`. Costs some 20
/// passes over them.
pub(super) fn write(params: &mut Tensor, numbers: &Tensor, step: u64, range: &Range<usize>) {
    let _guard = tch::no_grad_guard();
    // The magnitude grows by a random part of the distance of two bf16 numbers, and the rest is cut off.
    let mut grown = noise(step, range, numbers.device());
    let mut grown = grown.g_add_(&numbers.view_dtype(Kind::Int));
    params.copy_(&grown.bitwise_and_(!LOW).view_dtype(Kind::Float));
}

/// Uniform numbers of 16 bits: MurmurHash3's last steps over the place and a key of the step. Products wrap.
fn noise(step: u64, range: &Range<usize>, device: Device) -> Tensor {
    const FACTORS: [u32; 3] = [0x9e37_79b1, 0x85eb_ca6b, 0xc2b2_ae35];
    let [spread, first, second] = FACTORS.map(|factor| i64::from(factor as i32));
    let [place, key] = [range.start as u64, key(step, range.start as u64 >> 32)].map(|number| i64::from(number as u32 as i32));
    let mut bits = Tensor::arange(range.len() as i64, (Kind::Int, device));
    let mut bits = bits.g_add_scalar_(place).g_mul_scalar_(spread).g_add_scalar_(key);
    for (shift, factor) in [(16, first), (13, second), (16, 1)] {
        let mut high = bits.bitwise_right_shift_tensor_scalar(shift);
        let high = high.bitwise_and_((1 << (32 - shift)) - 1);
        bits = bits.bitwise_xor_tensor_(&high).g_mul_scalar_(factor);
    }
    bits.bitwise_and_(LOW)
}

/// SplitMix64 of a step, and of the upper half of a place.
fn key(step: u64, place: u64) -> u64 {
    let mixed = (step.wrapping_add(place << 40)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb) >> 16
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn written(numbers: &[f32], step: u64, first: usize) -> Vec<f32> {
        let mut params = Tensor::zeros([numbers.len() as i64], (Kind::BFloat16, Device::Cpu));
        write(&mut params, &Tensor::from_slice(numbers), step, &(first..first + numbers.len()));
        params.to_kind(Kind::Float).try_into().unwrap()
    }

    proptest! {
        #[test]
        fn a_number_becomes_one_of_its_two_neighbours_wherever_a_range_is_cut(
            numbers in prop::collection::vec(prop_oneof![-1e3f32..1e3, -1e-30f32..1e-30, Just(0.0f32)], 2..100),
            step in any::<u64>(), first in 0..1usize << 36, cut in any::<prop::sample::Index>(),
        ) {
            let found = written(&numbers, step, first);
            for (number, found) in numbers.iter().zip(&found) {
                let below = f32::from_bits(number.to_bits() & 0xffff_0000);
                let above = f32::from_bits((number.to_bits() & 0xffff_0000) + 0x1_0000);
                prop_assert!(*found == below || *found == above && below != *number, "{number} {found}");
            }
            let cut = cut.index(numbers.len() - 1) + 1;
            let (left, right) = numbers.split_at(cut);
            prop_assert_eq!([written(left, step, first), written(right, step, first + cut)].concat(), found);
        }
    }

    /// The noise is Murmur's, whatever libtorch does with products that overflow.
    #[test]
    fn the_noise_is_that_of_its_definition() {
        for (step, first) in [(0, 0), (1, 7), (12_345, (1 << 31) - 3), (9, (3 << 32) + (1 << 31) - 2)] {
            let found: Vec<i32> = noise(step, &(first..first + 6), Device::Cpu).try_into().unwrap();
            let expected = (first..first + 6).map(|place| {
                let key = key(step, place as u64 >> 32) as u32;
                let bits = (place as u32).wrapping_mul(0x9e37_79b1).wrapping_add(key);
                let bits = (bits ^ (bits >> 16)).wrapping_mul(0x85eb_ca6b);
                let bits = (bits ^ (bits >> 13)).wrapping_mul(0xc2b2_ae35);
                ((bits ^ (bits >> 16)) & 0xffff) as i32
            });
            assert_eq!(found, expected.collect::<Vec<_>>(), "step {step} from {first}");
        }
    }

    /// Steps of a hundredth of the distance of two numbers add up; to the nearest, none would move.
    #[test]
    fn the_mean_of_small_steps_is_exact() {
        const NUMBERS: usize = 4096;
        let (mut numbers, small, steps) = (vec![1f32; NUMBERS], 1.0 / 12_800.0, 640);
        for step in 0..steps {
            let moved: Vec<f32> = numbers.iter().map(|number| number + small).collect();
            numbers = written(&moved, step, 0);
        }
        let mean = numbers.iter().map(|number| f64::from(*number)).sum::<f64>() / NUMBERS as f64;
        // Each number's deviation is below the root of 640 · 1/100 distances.
        let (expected, deviation) = (1.0 + steps as f64 * f64::from(small), 6.4f64.sqrt() / 128.0 / (NUMBERS as f64).sqrt());
        assert!((mean - expected).abs() < 5.0 * deviation, "{mean} for {expected}, deviation {deviation}");
    }
}
