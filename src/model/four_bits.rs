//! Numbers in 4 bits: two a byte, each one of 16 levels, and a scale for each block of them.
//!
//! [`nf4`](super::nf4) quantises numbers so, bitsandbytes' folders have them so, and so do the experts of
//! folders in MXFP4.

use serde::{Deserialize, Serialize};
use tch::{Device, Kind, Tensor};

use super::fused;
use super::layout::part;

/// Levels of numbers.
const LEVELS: usize = 16;
/// Levels of scales.
const SCALES: usize = 256;

/// Sizes and order of stored numbers.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(crate) struct Form {
    /// Number of elements.
    pub len: usize,
    /// Numbers that share a scale: 64, or 32.
    pub block: i64,
    /// Scales that share an outer scale.
    pub outer_block: i64,
    /// Added to a scale.
    pub offset: f64,
    /// Number, rows and columns of matrices that are stored row by row and computed with column by column.
    pub turned: Option<[usize; 3]>,
}

impl Form {
    fn scales(&self) -> i64 {
        (self.len as i64 + self.block - 1) / self.block
    }
}

/// A flat tensor in 4 bits.
#[derive(Debug)]
pub(crate) struct FourBits {
    /// Two numbers a byte, the first in the higher bits.
    pub codes: Tensor,
    /// One byte a block: its place among the levels of scales.
    pub scales: Tensor,
    /// One f32 for `outer_block` scales.
    pub outer: Tensor,
    /// The 16 levels of numbers, and the 256 of scales, in f32.
    pub tables: Tensor,
    /// Their sizes and order.
    pub form: Form,
}

impl FourBits {
    /// Room for numbers of this form, not filled.
    pub fn room(form: Form, device: Device) -> Self {
        let bytes = |len| Tensor::empty([len], (Kind::Uint8, device));
        let floats = |len| Tensor::empty([len], (Kind::Float, device));
        let (codes, scales) = ((form.len as i64 + 1) / 2, form.scales());
        let outer = (scales + form.outer_block - 1) / form.outer_block;
        let tables = (LEVELS + SCALES) as i64;
        FourBits { codes: bytes(codes), scales: bytes(scales), outer: floats(outer), tables: floats(tables), form }
    }

    /// Bytes of so many numbers in blocks of this size.
    pub fn bytes(len: u64, block: u64, outer_block: u64) -> u64 {
        let blocks = len.div_ceil(block);
        len.div_ceil(2) + blocks + 4 * blocks.div_ceil(outer_block) + 4 * (LEVELS + SCALES) as u64
    }

    /// The tensors that hold the numbers.
    pub fn tensors(&self) -> [&Tensor; 4] {
        [&self.codes, &self.scales, &self.outer, &self.tables]
    }

    /// Writes the numbers to `out`, flat, on the same device, in its format.
    pub fn write_to(&self, out: &Tensor) {
        let _guard = tch::no_grad_guard();
        let Some([count, rows, columns]) = self.form.turned else { return self.write_stored(out) };
        let len = rows * columns;
        let stored = Tensor::empty([rows as i64, columns as i64], (out.kind(), out.device()));
        for at in 0..count {
            self.matrix(at * len, len).write_stored(&stored.view([-1]));
            part(out, at * len..(at + 1) * len).view([columns as i64, rows as i64]).copy_(&stored.tr());
        }
    }

    /// A matrix of those that are turned, whose scales have one outer scale together.
    fn matrix(&self, first: usize, len: usize) -> FourBits {
        let block = self.form.block as usize;
        let (codes, scales) = (first / 2..(first + len) / 2, first / block..(first + len) / block);
        FourBits {
            codes: part(&self.codes, codes),
            scales: part(&self.scales, scales),
            outer: self.outer.shallow_clone(),
            tables: self.tables.shallow_clone(),
            form: Form { len, turned: None, ..self.form },
        }
    }

    /// Writes the numbers in the order in which they are stored.
    fn write_stored(&self, out: &Tensor) {
        let Form { block, outer_block, offset, .. } = self.form;
        if !fused::four_bits(self.tensors(), [block, outer_block], offset, out) {
            out.shallow_clone().copy_(&self.by_operations());
        }
    }

    /// The numbers in f32, in the order in which they are stored, by libtorch's operations.
    pub fn by_operations(&self) -> Tensor {
        let look_up = |first: usize, count: usize, of: &Tensor| {
            part(&self.tables, first..first + count).index_select(0, &of.to_kind(Kind::Int))
        };
        let Form { len, block, outer_block, offset, .. } = self.form;
        let halves = [self.codes.bitwise_right_shift_tensor_scalar(4), self.codes.bitwise_and(15)];
        let numbers = look_up(0, LEVELS, &Tensor::stack(&halves, 1).view([-1]));
        let outer = self.outer.repeat_interleave_self_int(outer_block, 0, None).narrow(0, 0, self.scales.numel() as i64);
        let scales = look_up(LEVELS, SCALES, &self.scales) * outer + offset;
        let scales = scales.repeat_interleave_self_int(block, 0, None);
        part(&numbers, 0..len) * part(&scales, 0..len)
    }

    /// On a device; shared if it is there.
    pub fn on(&self, device: Device) -> Self {
        let [codes, scales, outer, tables] = self.tensors().map(|of| of.to_device(device));
        FourBits { codes, scales, outer, tables, form: self.form }
    }
}
