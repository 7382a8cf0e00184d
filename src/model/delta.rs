//! Model folders that share unchanged tensors with an earlier folder of the same model.
//!
//! A file whose tensors are all unchanged is hard-linked. Changed tensors are written to a separate
//! file, so that the next folder can share the others. With adapters on a few projections, or
//! weights rounded to 16 bits, most of a model is shared. If everything changes, the folder has one
//! file.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use safetensors::tensor::{TensorInfo, View};
use serde_json::Map;

use super::folder::{WeightFile, weight_files};
use super::shards::{TensorSlice, shard_name, write_configs, write_shards};
use super::{Dtype, Entry, ModelConfig, ModelError, Weights};
use crate::util::atomic_file;

/// Tensors of a written folder, counted by how they were stored.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Delta {
    /// Tensors that differ from the earlier folder, or have no earlier version.
    pub changed: usize,
    /// Unchanged tensors that are written again, because their file also holds a changed one.
    pub moved: usize,
    /// Tensors in a file that both folders share.
    pub shared: usize,
}

/// Writes a complete model folder without tokenizer, like [`save_hf_as`](super::save_hf_as), and
/// shares unchanged files with the folder `before`. Nothing is shared with a folder that is
/// unreadable, of another model or on another disk. The files of both folders must not be modified
/// afterwards. Cost: reads the earlier folder, each tensor up to its first difference.
pub(crate) fn save_hf_after(
    dir: &Path,
    config: &ModelConfig,
    weights: &Weights,
    dtype: Dtype,
    before: Option<&Path>,
) -> Result<Delta, ModelError> {
    write_configs(dir, config, dtype)?;
    let weights = weights.merged();
    let earlier = before.and_then(|before| compare(before, &weights, dtype).ok()).unwrap_or_default();
    let all = earlier.iter().flat_map(|file| &file.tensors);
    let unchanged: BTreeSet<&str> = all.filter(|(_, same)| **same).map(|(name, _)| name.as_str()).collect();

    // Links come first, because linking may fail.
    let mut shared: Vec<&Earlier> = Vec::new();
    let link = |at: usize| dir.join(format!(".shared-{at}.writing"));
    let is_unchanged = |file: &&Earlier| !file.tensors.is_empty() && file.tensors.values().all(|same| *same);
    for file in earlier.iter().filter(is_unchanged) {
        let link = link(shared.len());
        let made = atomic_file::remove(&link).and_then(|()| std::fs::hard_link(&file.path, &link));
        if made.is_ok() {
            shared.push(file);
        }
    }
    let in_shared = |entry: &&Entry| shared.iter().any(|file| file.tensors.contains_key(&entry.name));
    let rest: Vec<&Entry> = weights.layout.entries().iter().filter(|entry| !in_shared(entry)).collect();
    let (moved, changed): (Vec<Entry>, Vec<Entry>) =
        rest.into_iter().cloned().partition(|entry| unchanged.contains(entry.name.as_str()));
    let delta = Delta {
        changed: changed.len(),
        moved: moved.len(),
        shared: weights.layout.entries().len() - changed.len() - moved.len(),
    };

    let written: Vec<&[Entry]> = [&changed[..], &moved].into_iter().filter(|entries| !entries.is_empty()).collect();
    let mut map = Map::new();
    for (at, file) in shared.iter().enumerate() {
        let name = shard_name(at, shared.len() + written.len());
        let to = dir.join(&name);
        atomic_file::replace(&link(at), &to).map_err(ModelError::io(&to))?;
        map.extend(file.tensors.keys().map(|tensor| (tensor.clone(), name.clone().into())));
    }
    write_shards(dir, &weights, dtype, &written, shared.len(), map)?;
    Ok(delta)
}

/// A file of the earlier folder.
struct Earlier {
    path: PathBuf,
    /// Tensors by name; true: unchanged.
    tensors: BTreeMap<String, bool>,
}

fn compare(dir: &Path, weights: &Weights, dtype: Dtype) -> Result<Vec<Earlier>, ModelError> {
    let is_same = |file: &WeightFile, name: &str, tensor: &TensorInfo| match weights.layout.find(name) {
        Some(entry) if tensor.dtype == dtype.stored() && tensor.shape == entry.shape => {
            let bytes = TensorSlice::new(entry, &weights.flat, dtype).data().into_owned();
            file.each_chunk(tensor, |at, read| *read == bytes[at..at + read.len()])
        }
        _ => Ok(false),
    };
    let earlier = |file: WeightFile| {
        let tensors = file.header.tensors().into_iter();
        let tensors = tensors.map(|(name, tensor)| is_same(&file, &name, tensor).map(|same| (name, same)));
        Ok(Earlier { tensors: tensors.collect::<Result<_, ModelError>>()?, path: file.path })
    };
    WeightFile::open_all(weight_files(dir)?)?.into_iter().map(earlier).collect()
}
