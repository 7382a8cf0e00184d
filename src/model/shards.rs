//! Model folders in other formats and in several files.

use std::borrow::Cow;
use std::path::Path;

use safetensors::tensor::{self, View};
use serde_json::{Map, Value, json};
use tch::Tensor;

use super::folder::write_tensors;
use super::folder_files::{INDEX, WHOLE};
use super::layout::part;
use super::{Dtype, Entry, Layout, ModelConfig, ModelError, Weights};
use crate::util::atomic_file;

/// Writes a complete model folder without tokenizer: `config.json`, `generation_config.json` and
/// weights.
///
/// Adapters are merged. Weights are `model.safetensors`, or shards with
/// `model.safetensors.index.json`, rounded to nearest in the format `dtype`. No file exceeds
/// `max_shard` bytes, unless a single tensor does; `None` writes one file. Not atomic: write into a
/// temporary folder and rename it.
pub fn save_hf_as(
    dir: &Path,
    config: &ModelConfig,
    weights: &Weights,
    dtype: Dtype,
    max_shard: Option<u64>,
) -> Result<(), ModelError> {
    write_configs(dir, config, dtype)?;
    let weights = weights.merged();
    let shards = shards(weights.layout.entries(), dtype, max_shard.unwrap_or(u64::MAX));
    write_shards(dir, &weights, dtype, &shards, 0, Map::new())
}

/// File name of a shard.
pub(super) fn shard_name(at: usize, of: usize) -> String {
    if of == 1 { WHOLE.to_owned() } else { format!("model-{:05}-of-{of:05}.safetensors", at + 1) }
}

/// Writes each shard's tensors after the first `done` shards, whose tensors `map` has, and the
/// index, which maps tensors to shards, if there are several.
pub(super) fn write_shards(
    dir: &Path,
    weights: &Weights,
    dtype: Dtype,
    shards: &[&[Entry]],
    done: usize,
    mut map: Map<String, Value>,
) -> Result<(), ModelError> {
    let all = done + shards.len();
    for (at, entries) in (done..).zip(shards) {
        write_tensors(&dir.join(shard_name(at, all)), entries, &weights.flat, dtype)?;
        extend(&mut map, entries, at, all);
    }
    write_map(dir, weights.layout.total(), dtype, all, map)
}

/// Names the shard of each tensor.
pub(super) fn extend(map: &mut Map<String, Value>, entries: &[Entry], at: usize, all: usize) {
    map.extend(entries.iter().map(|entry| (entry.name.clone(), shard_name(at, all).into())));
}

/// Writes the index of `all` shards, if there are several.
pub(super) fn write_map(
    dir: &Path,
    parameters: usize,
    dtype: Dtype,
    all: usize,
    map: Map<String, Value>,
) -> Result<(), ModelError> {
    if all == 1 {
        return Ok(());
    }
    let metadata = json!({ "total_parameters": parameters, "total_size": parameters * dtype.bytes() });
    write_json(dir, INDEX, &json!({ "metadata": metadata, "weight_map": map }))
}

/// A model's tensors divided among several writers, each with a shard of a folder.
pub(crate) struct FolderShards<'a> {
    /// Writer and tensors of each shard.
    shards: Vec<(usize, &'a [Entry])>,
    layout: &'a Layout,
}

impl<'a> FolderShards<'a> {
    /// Neighbouring tensors of about equal size for each of `writers`. A writer that would have less
    /// than half a tensor has none.
    pub fn new(layout: &'a Layout, writers: usize) -> Self {
        let writer = |entry: &Entry| (entry.offset + entry.len() / 2) * writers / layout.total().max(1);
        let shards = layout.entries().chunk_by(|a, b| writer(a) == writer(b));
        FolderShards { shards: shards.map(|entries| (writer(&entries[0]), entries)).collect(), layout }
    }

    /// File name and tensors of a writer's shard, if it has one.
    pub fn of(&self, writer: usize) -> Option<(String, &'a [Entry])> {
        let at = self.shards.iter().position(|(of, _)| *of == writer)?;
        Some((shard_name(at, self.shards.len()), self.shards[at].1))
    }

    /// Writes all of the folder but its shards: configurations, and the index if there are several.
    pub fn write_rest(&self, dir: &Path, config: &ModelConfig, dtype: Dtype) -> Result<(), ModelError> {
        write_configs(dir, config, dtype)?;
        let (mut map, all) = (Map::new(), self.shards.len());
        for (at, (_, entries)) in self.shards.iter().enumerate() {
            extend(&mut map, entries, at, all);
        }
        write_map(dir, self.layout.total(), dtype, all, map)
    }
}

fn write_json(dir: &Path, name: &str, object: &Value) -> Result<(), ModelError> {
    let path = dir.join(name);
    atomic_file::write_unsynced(&path, format!("{object:#}\n")).map_err(ModelError::io(&path))
}

/// All of a model's folder but its weights.
pub(super) fn write_configs(dir: &Path, config: &ModelConfig, dtype: Dtype) -> Result<(), ModelError> {
    atomic_file::create_folder(dir).map_err(ModelError::io(dir))?;
    let json = ModelConfig { dtype, ..config.clone() }.to_json();
    write_json(dir, "config.json", &Value::Object(json))?;
    write_json(dir, "generation_config.json", &Value::Object(config.to_generation_json()))
}

/// Neighbouring tensors that share a file.
pub(super) fn shards(entries: &[Entry], dtype: Dtype, most: u64) -> Vec<&[Entry]> {
    let (mut shards, mut begin, mut bytes) = (Vec::new(), 0, 0);
    for (at, entry) in entries.iter().enumerate() {
        let size = (entry.len() * dtype.bytes()) as u64;
        if at > begin && bytes + size > most {
            shards.push(&entries[begin..at]);
            (begin, bytes) = (at, 0);
        }
        bytes += size;
    }
    shards.push(&entries[begin..]);
    shards
}

/// One tensor of the flat buffer, in the form that safetensors writes.
pub(crate) struct TensorSlice<'a> {
    entry: &'a Entry,
    flat: &'a Tensor,
    dtype: Dtype,
}

impl<'a> TensorSlice<'a> {
    pub fn new(entry: &'a Entry, flat: &'a Tensor, dtype: Dtype) -> Self {
        TensorSlice { entry, flat, dtype }
    }

    /// Tensors and their names.
    pub fn all(entries: &'a [Entry], flat: &'a Tensor, dtype: Dtype) -> impl Iterator<Item = (&'a str, TensorSlice<'a>)> {
        entries.iter().map(move |entry| (entry.name.as_str(), TensorSlice::new(entry, flat, dtype)))
    }
}

impl View for TensorSlice<'_> {
    fn dtype(&self) -> tensor::Dtype {
        self.dtype.stored()
    }

    fn shape(&self) -> &[usize] {
        &self.entry.shape
    }

    fn data(&self) -> Cow<'_, [u8]> {
        let numbers =
            part(&self.flat.detach(), self.entry.range()).to_device(tch::Device::Cpu).to_kind(self.dtype.kind()).contiguous();
        let mut bytes = vec![0; self.data_len()];
        // Both libtorch's memory and the file's numbers are little-endian.
        numbers.copy_data_u8(&mut bytes, self.entry.len());
        bytes.into()
    }

    fn data_len(&self) -> usize {
        self.entry.len() * self.dtype.bytes()
    }
}
