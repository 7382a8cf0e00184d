//! Tensors in 4 bits in folders that bitsandbytes quantised: codes, scales and tables as tensors of their
//! own, and a JSON object with shapes and sizes of blocks.

use std::collections::BTreeMap;

use safetensors::tensor::{Dtype, TensorInfo};
use serde::Deserialize;
use tch::{Kind, Tensor};

use super::folder::WeightFile;
use super::four_bits::{Form, FourBits};
use super::nf4::BLOCK;
use super::{Entry, ModelError};

/// Tensors of a folder by name, in their files.
pub(super) type Found<'a> = BTreeMap<String, (&'a WeightFile, &'a TensorInfo)>;

/// What the JSON object says.
#[derive(Deserialize)]
struct State {
    blocksize: i64,
    shape: Vec<usize>,
    nested_blocksize: Option<i64>,
    nested_offset: Option<f64>,
}

/// A tensor in 4 bits on disk.
pub(super) struct PackedOnDisk<'a> {
    name: String,
    shape: Vec<usize>,
    parts: BTreeMap<&'static str, (&'a WeightFile, &'a TensorInfo)>,
}

const STATES: [&str; 2] = ["quant_state.bitsandbytes__nf4", "quant_state.bitsandbytes__fp4"];
const PARTS: [&str; 4] = ["absmax", "quant_map", "nested_absmax", "nested_quant_map"];

impl<'a> PackedOnDisk<'a> {
    /// Takes all that belongs to this tensor, if it is in 4 bits.
    pub fn take(found: &mut Found<'a>, entry: &Entry) -> Option<Self> {
        let state = STATES.iter().find_map(|state| found.remove(&format!("{}.{state}", entry.name)))?;
        let mut parts = BTreeMap::from([("state", state)]);
        parts.extend(found.remove(&entry.name).map(|codes| ("codes", codes)));
        parts.extend(PARTS.iter().filter_map(|part| Some((*part, found.remove(&format!("{}.{part}", entry.name))?))));
        Some(PackedOnDisk { name: entry.name.clone(), shape: entry.shape.clone(), parts })
    }

    /// Reads the tensor.
    pub fn read(&self) -> Result<FourBits, ModelError> {
        let (file, info) = self.parts["state"];
        let malformed = |problem: String| ModelError::malformed(&file.path, format!("{}: {problem}", self.name));
        let bytes = file.bytes(info)?;
        let state: State = serde_json::from_slice(&bytes).map_err(|error| malformed(format!("its quant_state: {error}")))?;
        let len: usize = self.shape.iter().product();
        let blocks = len.div_ceil(BLOCK as usize);
        if state.shape != self.shape || state.blocksize != BLOCK {
            let (shape, blocks) = (&state.shape, state.blocksize);
            return Err(malformed(format!(
                "shape {shape:?} in blocks of {blocks}, expected {:?} in blocks of {BLOCK}",
                self.shape
            )));
        }
        let tensor = |part: &str, dtype: Dtype, kind: Kind, len: usize| {
            let (file, info) = self.parts.get(part).ok_or_else(|| malformed(format!("its {part} is missing")))?;
            if info.dtype != dtype || info.shape.iter().product::<usize>() != len {
                let (found, shape) = (info.dtype, &info.shape);
                return Err(malformed(format!("its {part} is {found:?} {shape:?}, expected {dtype:?} of {len}")));
            }
            Ok(Tensor::from_data_size(&file.bytes(info)?, &[len as i64], kind))
        };
        let floats = |part, len| tensor(part, Dtype::F32, Kind::Float, len);
        let (codes, levels) = (tensor("codes", Dtype::U8, Kind::Uint8, len.div_ceil(2))?, floats("quant_map", 16)?);
        let (scales, outer, fine, outer_block) = match state.nested_blocksize {
            Some(block @ 1..) => {
                let outer = floats("nested_absmax", blocks.div_ceil(block as usize))?;
                (tensor("absmax", Dtype::U8, Kind::Uint8, blocks)?, outer, floats("nested_quant_map", 256)?, block)
            }
            Some(block) => return Err(malformed(format!("its quant_state: nested_blocksize {block}"))),
            // Each scale is its outer one.
            None => {
                let ones = Tensor::ones([256], (Kind::Float, tch::Device::Cpu));
                (Tensor::zeros([blocks as i64], (Kind::Uint8, tch::Device::Cpu)), floats("absmax", blocks)?, ones, 1)
            }
        };
        let tables = Tensor::cat(&[levels, fine], 0);
        let form = Form { len, block: BLOCK, outer_block, offset: state.nested_offset.unwrap_or(0.0), turned: None };
        Ok(FourBits { codes, scales, outer, tables, form })
    }
}
