//! Models from and to Hugging Face folders.

use std::collections::{BTreeMap, HashMap};
use std::fs::File;
use std::ops::ControlFlow;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use memmap2::Mmap;
use safetensors::tensor::TensorView;
use safetensors::{SafeTensorError, SafeTensors};
use serde_json::Value;
use tch::{Kind, Tensor};

use super::adapter_folder::{folder_config, holds_adapter, load_with_base, named_base, save_adapter};
use super::error::TensorProblems;
use super::shards::{Format, Slice, save_hf_as};
use super::{Dtype, Entry, Layout, ModelConfig, ModelError, Weights};
use crate::hub::Hub;
use crate::util::reading;

/// Bytes that are read at a time.
const CHUNK_BYTES: usize = 8 << 20;

/// Loads a model from a folder, or from the hub's cache by its id, as f32.
///
/// Reads `config.json` and `model.safetensors`, or the shards of `model.safetensors.index.json`.
/// [`ModelConfig::dtype`] is the folder's format. All problems of the tensors are reported together.
/// For a folder of adapters, loads the base model with the adapters.
///
/// Memory: 4 bytes per parameter and a few megabytes.
pub fn load_hf(dir: &Path) -> Result<(ModelConfig, Weights), ModelError> {
    load_hf_for(dir, Dtype::F32)
}

/// Loads a model for computation in the format `dtype`. A folder in that format is not
/// converted and takes no more memory than on disk; any other becomes f32.
pub fn load_hf_for(dir: &Path, dtype: Dtype) -> Result<(ModelConfig, Weights), ModelError> {
    let dir = &Hub::of_user().open(dir)?;
    if holds_adapter(dir) {
        return load_with_base(dir, dtype);
    }
    let config = ModelConfig::from_dir(dir)?;
    let (weights, dtype) = read_weights(&config, dir, weight_files(dir)?, dtype)?;
    Ok((ModelConfig { dtype, ..config }, weights))
}

/// Loads the weights in `dir` for the configuration `config`, ignoring the folder's own. The error
/// names every tensor of another shape.
pub fn load_like(dir: &Path, config: &ModelConfig) -> Result<Weights, ModelError> {
    Ok(read_weights(config, dir, weight_files(dir)?, Dtype::F32)?.0)
}

/// The weights in one safetensors file, as [`weights_to_bytes`] or [`save_hf`] wrote them.
pub fn load_weights(config: &ModelConfig, file: &Path) -> Result<Weights, ModelError> {
    Ok(read_weights(config, file, vec![file.to_owned()], Dtype::F32)?.0)
}

/// Reads weights from `files`, and their narrowest common format. Weights stay in that format if it
/// is `kept`. Errors name `path`.
fn read_weights(config: &ModelConfig, path: &Path, files: Vec<PathBuf>, kept: Dtype) -> Result<(Weights, Dtype), ModelError> {
    let layout = Layout::new(config);
    let twin = config.shares_embedding().then_some("lm_head.weight");
    let (flat, dtype) = read_tensors(&layout, path, files, twin, kept)?;
    Ok((Weights::new(Arc::new(layout), flat), dtype))
}

/// Reads the tensors of a layout from `files`, and their narrowest common format. The result is in
/// that format if it is `kept`, else in f32. Errors name `path`. A tensor named `twin` is optional
/// and must equal the first tensor.
pub(super) fn read_tensors(
    layout: &Layout,
    path: &Path,
    files: Vec<PathBuf>,
    twin: Option<&str>,
    kept: Dtype,
) -> Result<(Tensor, Dtype), ModelError> {
    let files = files.into_iter().map(WeightFile::open).collect::<Result<Vec<_>, _>>()?;
    let parsed = files.iter().map(|file| Ok((file, file.parse()?))).collect::<Result<Vec<_>, ModelError>>()?;
    let Matched { mut needed, twin, mut problems } = matched(layout, &parsed, twin);
    if !problems.is_empty() {
        return Err(ModelError::Tensors { path: path.into(), problems });
    }

    let mut formats: Vec<Dtype> = needed.iter().map(|(.., dtype)| *dtype).collect();
    formats.dedup();
    let dtype = if let [only] = formats[..] { only } else { Dtype::F32 };
    let held = if dtype == kept { kept } else { Dtype::F32 };
    let flat = Tensor::empty([layout.total() as i64], (held.kind(), tch::Device::Cpu));
    // In disk order.
    needed.sort_by_key(|(_, stored, _)| stored.view.data().as_ptr());
    for (entry, stored, dtype) in &needed {
        stored.each_chunk(*dtype, |at, chunk| {
            flat.narrow(0, (entry.offset + at) as i64, chunk.numel() as i64).copy_(&chunk);
            ControlFlow::Continue(())
        })?;
    }
    if let Some(twin) = twin {
        problems.unusable.extend(twin_problem(layout, &flat, &twin)?);
    }
    if !problems.is_empty() {
        return Err(ModelError::Tensors { path: path.into(), problems });
    }
    Ok((flat, dtype))
}

/// Tensors that a layout needs, and problems that the files' headers show.
struct Matched<'a> {
    needed: Vec<(&'a Entry, Stored<'a>, Dtype)>,
    twin: Option<Stored<'a>>,
    problems: TensorProblems,
}

/// Matches a layout with the files' headers. Allocates for names only: sizes are unverified until
/// this returns.
fn matched<'a>(layout: &'a Layout, parsed: &'a [(&'a WeightFile, SafeTensors<'a>)], twin: Option<&str>) -> Matched<'a> {
    let mut found: BTreeMap<&str, Stored> = BTreeMap::new();
    for (file, tensors) in parsed {
        found.extend(tensors.iter().map(|(name, view)| (name, Stored { file, view })));
    }
    let mut problems = TensorProblems::default();
    let mut needed: Vec<(&Entry, Stored, Dtype)> = Vec::new();
    for entry in layout.entries() {
        match found.remove(entry.name.as_str()).map(|stored| (stored.dtype_for(entry), stored)) {
            None => problems.missing.push(entry.name.clone()),
            Some((Ok(dtype), stored)) => needed.push((entry, stored, dtype)),
            Some((Err(problem), _)) => problems.unusable.push(problem),
        }
    }
    let twin = twin.and_then(|name| found.remove(name));
    // Buffers of old checkpoints that are recomputed.
    found.retain(|name, _| !name.ends_with(".rotary_emb.inv_freq"));
    problems.unexpected.extend(found.keys().map(|name| name.to_string()));
    Matched { needed, twin, problems }
}

/// Checks a folder without reading its weights: `config.json`, and the headers of its safetensors
/// files. For a folder of adapters, checks their configuration and the base model. Allocates
/// little, whatever the headers claim.
pub fn check_folder(dir: &Path) -> Result<ModelConfig, ModelError> {
    if holds_adapter(dir) {
        check_folder(&named_base(dir)?.base)?;
        return folder_config(dir);
    }
    let config = ModelConfig::from_dir(dir)?;
    let files = weight_files(dir)?.into_iter().map(WeightFile::open).collect::<Result<Vec<_>, _>>()?;
    let parsed = files.iter().map(|file| Ok((file, file.parse()?))).collect::<Result<Vec<_>, ModelError>>()?;
    let layout = Layout::new(&config);
    let problems = matched(&layout, &parsed, config.shares_embedding().then_some("lm_head.weight")).problems;
    if problems.is_empty() { Ok(config) } else { Err(ModelError::Tensors { path: dir.into(), problems }) }
}

/// Writes `config.json`, `generation_config.json` and `model.safetensors` into `dir`, and creates
/// the folder if it is missing.
///
/// Weights are rounded to [`ModelConfig::dtype`]. With adapters, writes the adapters alone, in
/// PEFT's format. The tokenizer's files are not written. Not atomic: write into a temporary folder
/// and rename it.
pub fn save_hf(dir: &Path, config: &ModelConfig, weights: &Weights) -> Result<(), ModelError> {
    match &weights.adapter {
        Some(adapter) => save_adapter(dir, adapter),
        None => save_hf_as(dir, config, weights, &Format { dtype: config.dtype, max_shard: None }),
    }
}

/// Weights without adapters as [`save_hf`] writes them to `model.safetensors` in f32, in memory.
pub fn weights_to_bytes(weights: &Weights) -> Result<Vec<u8>, ModelError> {
    let failed = |error: SafeTensorError| ModelError::Safetensors { path: "weights".into(), reason: error.to_string() };
    let tensors = Slice::all(weights.layout.entries(), &weights.flat, Dtype::F32);
    safetensors::serialize(tensors, Some(metadata())).map_err(failed)
}

/// Writes tensors of a flat buffer into a file.
pub(super) fn write_tensors(path: &Path, entries: &[Entry], flat: &Tensor, dtype: Dtype) -> Result<(), ModelError> {
    let io = |source| ModelError::Io { path: path.into(), source };
    let failed = |error| match error {
        SafeTensorError::IoError(source) => io(source),
        other => ModelError::Safetensors { path: path.into(), reason: other.to_string() },
    };
    safetensors::serialize_to_file(Slice::all(entries, flat, dtype), Some(metadata()), path).map_err(failed)?;
    readable_by_all(path).map_err(io)
}

fn metadata() -> HashMap<String, String> {
    HashMap::from([("format".to_owned(), "pt".to_owned())])
}

/// File of weights. The header is memory-mapped, and tensors are read by offset: touched pages of a
/// mapping count as the process's memory, which would double a model's size.
pub(super) struct WeightFile {
    pub(super) path: PathBuf,
    file: File,
    map: Mmap,
}

impl WeightFile {
    pub(super) fn open(path: PathBuf) -> Result<Self, ModelError> {
        let failed = |source| ModelError::Io { path: path.clone(), source };
        let file = reading::open(&path).map_err(failed)?;
        // SAFETY: the file is only read, and its header is parsed before this function's caller
        // returns. Another process could truncate the file meanwhile, as with any mapped file.
        let map = unsafe { Mmap::map(&file) }.map_err(failed)?;
        Ok(WeightFile { path, file, map })
    }

    pub(super) fn parse(&self) -> Result<SafeTensors<'_>, ModelError> {
        let failed = |error: SafeTensorError| ModelError::Safetensors { path: self.path.clone(), reason: error.to_string() };
        SafeTensors::deserialize(&self.map).map_err(failed)
    }

    /// Returns true if a tensor has exactly these bytes.
    pub(super) fn holds(&self, tensor: &TensorView, bytes: &[u8]) -> Result<bool, ModelError> {
        let begin = tensor.data().as_ptr() as usize - self.map.as_ptr() as usize;
        if tensor.data().len() != bytes.len() {
            return Ok(false);
        }
        let mut read = vec![0; CHUNK_BYTES.min(bytes.len())];
        for (at, chunk) in bytes.chunks(CHUNK_BYTES).enumerate() {
            let failed = |source| ModelError::Io { path: self.path.clone(), source };
            let read = &mut read[..chunk.len()];
            self.file.read_exact_at(read, (begin + at * CHUNK_BYTES) as u64).map_err(failed)?;
            if read != chunk {
                return Ok(false);
            }
        }
        Ok(true)
    }
}

/// A tensor on disk.
struct Stored<'a> {
    file: &'a WeightFile,
    /// Position of its bytes; they are read from the file instead.
    view: TensorView<'a>,
}

impl Stored<'_> {
    /// Format of the tensor, or the reason why it does not fit `entry`.
    fn dtype_for(&self, entry: &Entry) -> Result<Dtype, String> {
        let (name, shape, stored) = (&entry.name, self.view.shape(), self.view.dtype());
        if shape != entry.shape {
            return Err(format!("{name}: shape {shape:?}, expected {:?}", entry.shape));
        }
        Dtype::of_stored(stored).ok_or_else(|| format!("{name}: dtype {stored:?}, expected F32, F16 or BF16"))
    }

    /// Passes the tensor's numbers to `take` in chunks, each with the index of its first.
    fn each_chunk(&self, dtype: Dtype, mut take: impl FnMut(usize, Tensor) -> ControlFlow<()>) -> Result<(), ModelError> {
        let data = self.view.data();
        let begin = data.as_ptr() as usize - self.file.map.as_ptr() as usize;
        let mut bytes = vec![0; CHUNK_BYTES.min(data.len())];
        for at in (0..data.len()).step_by(CHUNK_BYTES) {
            let bytes = &mut bytes[..CHUNK_BYTES.min(data.len() - at)];
            let failed = |source| ModelError::Io { path: self.file.path.clone(), source };
            self.file.file.read_exact_at(bytes, (begin + at) as u64).map_err(failed)?;
            let chunk = Tensor::from_data_size(bytes, &[(bytes.len() / dtype.bytes()) as i64], dtype.kind());
            if take(at / dtype.bytes(), chunk).is_break() {
                break;
            }
        }
        Ok(())
    }
}

/// The one file, or every shard that the index names.
pub(super) fn weight_files(dir: &Path) -> Result<Vec<PathBuf>, ModelError> {
    let index = dir.join("model.safetensors.index.json");
    if !index.exists() || dir.join("model.safetensors").exists() {
        return Ok(vec![dir.join("model.safetensors")]);
    }
    let text = reading::read_text(&index).map_err(|source| ModelError::Io { path: index.clone(), source })?;
    let json = |reason: String| ModelError::Json { path: index.clone(), reason };
    let value: Value = serde_json::from_str(&text).map_err(|error| json(error.to_string()))?;
    let map = value["weight_map"].as_object().ok_or_else(|| json("it has no object `weight_map`".into()))?;
    let mut names = map
        .values()
        .map(|name| name.as_str())
        .collect::<Option<Vec<_>>>()
        .ok_or_else(|| json("`weight_map` names no file".into()))?;
    names.sort_unstable();
    names.dedup();
    Ok(names.into_iter().map(|name| dir.join(name)).collect())
}

/// Reports an `lm_head.weight` that differs from a tied embedding.
fn twin_problem(layout: &Layout, flat: &Tensor, stored: &Stored) -> Result<Option<String>, ModelError> {
    let Some(embedding) = layout.entries().first() else { return Ok(None) };
    let dtype = match stored.dtype_for(&Entry { name: "lm_head.weight".into(), ..embedding.clone() }) {
        Ok(dtype) => dtype,
        Err(problem) => return Ok(Some(problem)),
    };
    let mut same = true;
    stored.each_chunk(dtype, |at, chunk| {
        let ours = flat.narrow(0, (embedding.offset + at) as i64, chunk.numel() as i64);
        same = chunk.to_kind(Kind::Float) == ours.to_kind(Kind::Float);
        if same { ControlFlow::Continue(()) } else { ControlFlow::Break(()) }
    })?;
    Ok((!same).then(|| "lm_head.weight: differs from the embedding although tie_word_embeddings is true".into()))
}

/// safetensors writes files readable by their owner only; other users and servers need checkpoints,
/// too.
fn readable_by_all(path: &Path) -> std::io::Result<()> {
    #[cfg(unix)]
    {
        use std::os::unix::fs::PermissionsExt;
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o644))?;
    }
    Ok(())
}
