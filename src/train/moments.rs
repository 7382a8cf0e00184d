//! Moments of an optimizer: in f32 next to the parameters, in host memory, or in 8 bits.
//!
//! In 8 bits, blocks of 256 numbers have a scale, their largest magnitude, and a code each for a value of
//! bitsandbytes's dynamic table (Dettmers et al., 2021, "8-bit optimizers via block-wise quantization"),
//! which is dense near 0. The lowest value is −1 here, so that numbers that were read have the same codes
//! again: a checkpoint holds them in f32, and a resume is exact. A mean square above 0 never becomes 0,
//! which a mean gradient would be divided by.
//!
//! A moment that is not next to the parameters is read, changed and written in pieces.

use std::ops::Range;

use tch::{Device, Kind, Tensor};

use super::MomentFormat;
use crate::model::part;

/// Numbers that are read at a time, which take some 20 bytes each on the way; a multiple of [`BLOCK`].
pub(super) const PIECE: usize = 1 << 20;

/// Numbers with a common scale.
const BLOCK: usize = 256;

/// Powers of ten in a table, from 1 down.
const DECADES: i32 = 7;

/// A moment of all parameters, or of a rank's part of them.
pub(super) struct Moment {
    /// Its name in PyTorch.
    pub name: &'static str,
    len: usize,
    numbers: Numbers,
}

enum Numbers {
    /// Zeros, which take no memory.
    None,
    Near(Tensor),
    /// Pieces in pinned memory, if the parameters are on a GPU.
    Host(Vec<Tensor>),
    EightBit(Codes),
}

struct Codes {
    /// Whole blocks.
    codes: Tensor,
    scales: Tensor,
    table: Table,
}

impl Moment {
    pub fn new(name: &'static str, len: usize) -> Self {
        Moment { name, len, numbers: Numbers::None }
    }

    /// Allocates zeros, unless there are numbers, for parameters on `device`.
    pub fn settle(&mut self, format: MomentFormat, device: Device) {
        if matches!(self.numbers, Numbers::None) {
            self.restore(&self.all(device), format, device);
        }
    }

    /// All numbers, in f32. Before the first update one zero, expanded.
    pub fn all(&self, device: Device) -> Tensor {
        match &self.numbers {
            Numbers::None => Tensor::zeros([1], (Kind::Float, device)).expand([self.len as i64], false),
            Numbers::Near(numbers) => numbers.shallow_clone(),
            Numbers::Host(pieces) => Tensor::cat(pieces, 0),
            Numbers::EightBit(of) => of.read(0..self.len),
        }
    }

    /// A copy of all numbers in host memory, in f32; before the first update one zero, expanded. Takes memory
    /// of a piece on a device.
    pub fn copied(&self) -> Tensor {
        match &self.numbers {
            Numbers::None | Numbers::Host(_) => self.all(Device::Cpu),
            Numbers::Near(numbers) => numbers.to_device_(Device::Cpu, Kind::Float, false, true),
            Numbers::EightBit(of) => {
                let all = Tensor::empty([self.len as i64], (Kind::Float, Device::Cpu));
                pieces(self.len).for_each(|range| part(&all, range.clone()).copy_(&of.read(range)));
                all
            }
        }
    }

    /// Replaces all numbers.
    pub fn restore(&mut self, numbers: &Tensor, format: MomentFormat, device: Device) {
        self.numbers = match format {
            MomentFormat::F32 => Numbers::Near(numbers.to_device(device).contiguous()),
            MomentFormat::Host => Numbers::Host(pieces(self.len).map(|range| to_host(&part(numbers, range), device)).collect()),
            MomentFormat::EightBit => {
                let mut of = Codes::zeros(self.len, self.name != "exp_avg", device);
                pieces(self.len).for_each(|range| of.write(range.clone(), &part(numbers, range).to_device(device)));
                Numbers::EightBit(of)
            }
        };
    }

    /// The numbers of a range that [`pieces`] or the whole is, in f32 on `device`.
    pub fn read(&self, range: Range<usize>, device: Device) -> Tensor {
        match &self.numbers {
            Numbers::None => part(&self.all(device), range),
            Numbers::Near(numbers) => part(numbers, range),
            Numbers::Host(pieces) => pieces[range.start / PIECE].to_device_(device, Kind::Float, true, device == Device::Cpu),
            Numbers::EightBit(of) => of.read(range),
        }
    }

    /// Writes what [`read`](Self::read) gave, after it changed.
    pub fn write(&mut self, range: Range<usize>, numbers: Tensor) {
        match &mut self.numbers {
            // Changed in place.
            Numbers::None | Numbers::Near(_) => {}
            Numbers::Host(pieces) => pieces[range.start / PIECE] = to_host(&numbers, numbers.device()),
            Numbers::EightBit(of) => of.write(range, &numbers),
        }
    }
}

/// Ranges of at most [`PIECE`] numbers.
pub(super) fn pieces(len: usize) -> impl Iterator<Item = Range<usize>> {
    (0..len).step_by(PIECE).map(move |first| first..(first + PIECE).min(len))
}

/// A copy in host memory; pinned, and made in order with other work, if the parameters are on a GPU.
fn to_host(numbers: &Tensor, device: Device) -> Tensor {
    let near = numbers.to_device(device);
    near.to_device_(Device::Cpu, Kind::Float, device != Device::Cpu, true)
}

impl Codes {
    fn zeros(len: usize, is_square: bool, device: Device) -> Self {
        let blocks = len.div_ceil(BLOCK) as i64;
        Codes {
            codes: Tensor::zeros([blocks * BLOCK as i64], (Kind::Uint8, device)),
            scales: Tensor::zeros([blocks], (Kind::Float, device)),
            table: Table::new(is_square, device),
        }
    }

    /// Codes and scales of the blocks of a range.
    fn of(&self, range: &Range<usize>) -> (Tensor, Tensor) {
        let blocks = range.start / BLOCK..range.end.div_ceil(BLOCK);
        let codes = part(&self.codes, blocks.start * BLOCK..blocks.end * BLOCK).view([-1, BLOCK as i64]);
        (codes, part(&self.scales, blocks).unsqueeze(1))
    }

    fn read(&self, range: Range<usize>) -> Tensor {
        let (codes, scales) = self.of(&range);
        let values = self.table.values.index_select(0, &codes.reshape([-1]).to_kind(Kind::Int));
        (values.view_as(&codes) * scales).view([-1]).narrow(0, 0, range.len() as i64)
    }

    fn write(&mut self, range: Range<usize>, numbers: &Tensor) {
        let (mut codes, mut scales) = self.of(&range);
        let padding = codes.numel() - range.len();
        let padded = if padding > 0 { numbers.constant_pad_nd([0, padding as i64]) } else { numbers.shallow_clone() };
        let blocks = padded.view_as(&codes);
        scales.copy_(&blocks.abs().amax([1], true));
        let shares = &blocks / scales.clamp_min(f64::from(f32::MIN_POSITIVE));
        codes.copy_(&shares.bucketize(&self.table.bounds, true, false));
    }
}

/// Values from −1 or 0 to 1, in order.
struct Table {
    values: Tensor,
    /// Code `i` is for numbers above bound `i − 1`, up to bound `i`.
    bounds: Tensor,
}

impl Table {
    fn new(is_square: bool, device: Device) -> Self {
        let values = values(is_square);
        let mut bounds: Vec<f64> = values.windows(2).map(|pair| (pair[0] + pair[1]) / 2.0).collect();
        if is_square {
            bounds[0] = 0.0;
        }
        let of = |numbers: &[f64]| Tensor::from_slice(numbers).to_kind(Kind::Float).to_device(device);
        Table { values: of(&values), bounds: of(&bounds) }
    }
}

/// In each decade as many values as in all below it: the middles of equal parts of 0.1 to 1, times its power
/// of ten; and 0 and 1.
fn values(is_square: bool) -> Vec<f64> {
    let mut values = vec![0.0, 1.0];
    for decade in 0..DECADES {
        let count = if is_square { 2 << decade } else { 1 << decade };
        for at in 0..count {
            let middle = 0.1 + 0.9 * (f64::from(at) + 0.5) / f64::from(count);
            let value = middle * 10f64.powi(decade + 1 - DECADES);
            values.push(value);
            if !is_square {
                values.push(-value);
            }
        }
    }
    values.sort_by(f64::total_cmp);
    if !is_square {
        values[0] = -1.0;
    }
    values
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_table_has_a_value_for_each_code() {
        for is_square in [false, true] {
            let values = values(is_square);
            assert!(values.len() == 256 && values.is_sorted() && values[255] == 1.0);
            assert!(values.contains(&0.0) && values[0] == if is_square { 0.0 } else { -1.0 });
        }
    }

    proptest! {
        /// Law C1: a checkpoint of what was read is what was held.
        #[test]
        fn c1_numbers_in_8_bits_are_the_nearest_of_their_block_and_stay_so(
            numbers in prop::collection::vec(prop_oneof![Just(0.0f32), -1f32..1.0, -1e-4f32..1e-4], 1..700), is_square in any::<bool>(),
        ) {
            let numbers: Vec<f32> = numbers.into_iter().map(|number| if is_square { number * number } else { number }).collect();
            let mut moment = Moment::new(if is_square { "exp_avg_sq" } else { "exp_avg" }, numbers.len());
            moment.restore(&Tensor::from_slice(&numbers), MomentFormat::EightBit, Device::Cpu);
            let read: Vec<f32> = moment.all(Device::Cpu).try_into().unwrap();
            for (block, read) in numbers.chunks(BLOCK).zip(read.chunks(BLOCK)) {
                let scale = block.iter().fold(0f32, |most, number| most.max(number.abs()));
                for (number, read) in block.iter().zip(read) {
                    let distance = |value: f64| (value * f64::from(scale) - f64::from(*number)).abs();
                    let nearest = values(is_square).into_iter().map(distance).fold(f64::INFINITY, f64::min);
                    let kept = is_square && *number > 0.0 && *read > 0.0;
                    prop_assert!(kept || (f64::from(*read) - f64::from(*number)).abs() <= nearest + 1e-6 * f64::from(scale), "{number} {read}");
                    prop_assert!(!is_square || *number == 0.0 || *read > 0.0, "{number} became 0");
                }
            }
            moment.restore(&Tensor::from_slice(&read), MomentFormat::EightBit, Device::Cpu);
            prop_assert_eq!(Vec::<f32>::try_from(moment.all(Device::Cpu)).unwrap(), read);
        }
    }
}
