//! Padded golden tensors as the packed columns that our functions read, and back.

use crate::case::Tensor;

/// Rows × columns of the padded golden tensors, seen through the mask: the packed layout our losses read.
pub struct Packing {
    columns: usize,
    pub kept: Vec<usize>,
    pub sequences: Vec<std::ops::Range<usize>>,
}

impl Packing {
    pub fn new(mask: &Tensor) -> Self {
        let columns = mask.shape[1];
        let kept: Vec<usize> = (0..mask.data.len()).filter(|&at| mask.data[at] > 0.0).collect();
        let start = |row: usize| kept.partition_point(|&at| at < row * columns);
        let sequences = (0..mask.shape[0]).map(|row| start(row)..start(row + 1)).collect();
        Packing { columns, kept, sequences }
    }

    /// Values per token; a tensor with one value per row (`[rows]` or `[rows, 1]`) is spread over its row.
    pub fn pack(&self, tensor: &Tensor) -> Vec<f64> {
        let per_token = tensor.data.len() == self.sequences.len() * self.columns;
        self.kept.iter().map(|&at| tensor.data[if per_token { at } else { at / self.columns }]).collect()
    }

    pub fn unpack(&self, values: &[f64]) -> Vec<f64> {
        self.unpack_over(values, 0.0)
    }

    /// With this in the padding.
    pub fn unpack_over(&self, values: &[f64], padding: f64) -> Vec<f64> {
        let mut padded = vec![padding; self.sequences.len() * self.columns];
        self.kept.iter().zip(values).for_each(|(&at, value)| padded[at] = *value);
        padded
    }
}
