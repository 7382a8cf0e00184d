//! A model folder written from another one tensor by tensor, so that memory holds one at a time.

use std::borrow::Cow;
use std::cell::RefCell;
use std::path::{Path, PathBuf};

use safetensors::tensor::{self, View};
use serde_json::Map;
use tch::Tensor;

use super::adapter_folder::{load_adapter_over, named_base, save_adapter_of_whole};
use super::folder::{StoredTensors, write_views};
use super::folder_files::holds_adapter;
use super::layout::Role;
use super::shards::{extend, shard_name, shards, write_configs, write_map};
use super::{Adapter, Dtype, Entry, Layout, ModelConfig, ModelError, StoredModel};

/// Writes the model in the folder `from` to `to`, with the files of [`save_hf_as`](super::save_hf_as).
/// Adapters are merged into the model in the folder `base`; `None`: into the one that they name.
///
/// Memory: the largest tensor in f32 and in the format `dtype`, and the adapters. Not atomic: write
/// into a temporary folder and rename it.
///
/// # Errors
/// A number is beyond the range of f16, or a folder can't be read or written.
pub fn export_hf(from: &Path, base: Option<&Path>, to: &Path, dtype: Dtype, max_shard: Option<u64>) -> Result<(), ModelError> {
    let (config, stored, adapter) = open(from, base)?;
    let source = Source { tensors: stored.tensors()?, adapter };
    source.tensors.check_twin()?;
    write_configs(to, &config, dtype)?;
    let layout = Layout::new(&config);
    let shards = shards(layout.entries(), dtype, max_shard.unwrap_or(u64::MAX));
    let mut map = Map::new();
    for (at, entries) in shards.iter().enumerate() {
        let failed = RefCell::new(None);
        let views =
            entries.iter().map(|entry| (entry.name.as_str(), Streamed { entry, dtype, source: &source, failed: &failed }));
        write_views(&to.join(shard_name(at, shards.len())), views)?;
        failed.into_inner().map_or(Ok(()), Err)?;
        extend(&mut map, entries, at, shards.len());
    }
    write_map(to, layout.total(), dtype, shards.len(), map)
}

/// Writes the adapters in the folder `from` to `to`, in PEFT's format, over the model in the folder `base`;
/// `None`: over the one that they name. Not atomic: write into a temporary folder and rename it.
///
/// Over a model that also takes images, tensors have the names of the whole model
/// (`model.language_model.layers…`), as vLLM and `AutoModelForImageTextToText` load it. Returns true if a
/// checkpoint gives them other names, those of `AutoModelForCausalLM`.
pub fn export_adapter(from: &Path, base: Option<&Path>, to: &Path) -> Result<bool, ModelError> {
    let (_, adapter) = load_adapter_over(from, &base_under(from, base)?)?;
    save_adapter_of_whole(to, &adapter)
}

/// The base of the adapters in `dir`: the given one, else the one that they name.
fn base_under(dir: &Path, given: Option<&Path>) -> Result<PathBuf, ModelError> {
    given.map_or_else(|| Ok(named_base(dir)?.0), |base| Ok(base.to_owned()))
}

/// Opens a folder of a model, or of adapters and their base.
fn open(dir: &Path, base: Option<&Path>) -> Result<(ModelConfig, StoredModel, Option<Adapter>), ModelError> {
    if !holds_adapter(dir) {
        let config = ModelConfig::from_dir(dir)?;
        let stored = StoredModel::open(&config, dir)?;
        return Ok((config, stored, None));
    }
    let base = base_under(dir, base)?;
    let stored = StoredModel::open(&ModelConfig::from_dir(&base)?, &base)?;
    let (config, adapter) = load_adapter_over(dir, &base)?;
    Ok((config, stored, Some(adapter)))
}

/// A folder that is read tensor by tensor: a model, or adapters and their base.
struct Source<'a> {
    tensors: StoredTensors<'a>,
    adapter: Option<Adapter>,
}

impl Source<'_> {
    /// The numbers of a tensor, flat and in f32.
    fn tensor(&self, entry: &Entry) -> Result<Tensor, ModelError> {
        let head = self.adapter.as_ref().filter(|_| entry.role() == Role::ScoreHead).and_then(Adapter::score_head);
        if let Some(head) = head {
            return Ok(head);
        }
        let numbers = self.tensors.tensor(&entry.name)?;
        Ok(match self.adapter.as_ref().and_then(|adapter| adapter.delta(&entry.name)) {
            Some(delta) => numbers + delta,
            None => numbers,
        })
    }
}

/// A tensor that is read when it is written.
struct Streamed<'a> {
    entry: &'a Entry,
    dtype: Dtype,
    source: &'a Source<'a>,
    /// First error, for safetensors takes none.
    failed: &'a RefCell<Option<ModelError>>,
}

impl View for Streamed<'_> {
    fn dtype(&self) -> tensor::Dtype {
        self.dtype.stored()
    }

    fn shape(&self) -> &[usize] {
        &self.entry.shape
    }

    fn data(&self) -> Cow<'_, [u8]> {
        let mut bytes = vec![0; self.data_len()];
        if self.failed.borrow().is_some() {
            return bytes.into();
        }
        let numbers = self.source.tensor(self.entry);
        match numbers.and_then(|numbers| self.dtype.check_range(&self.entry.name, &numbers).map(|()| numbers)) {
            // Both libtorch's memory and the file's numbers are little-endian.
            Ok(numbers) => numbers.to_kind(self.dtype.kind()).copy_data_u8(&mut bytes, self.entry.len()),
            Err(error) => *self.failed.borrow_mut() = Some(error),
        }
        bytes.into()
    }

    fn data_len(&self) -> usize {
        self.entry.len() * self.dtype.bytes()
    }
}
