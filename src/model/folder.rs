//! Models from and to Hugging Face folders.

use std::collections::{BTreeMap, HashMap};
use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use memmap2::Mmap;
use safetensors::tensor::{Dtype, TensorView};
use safetensors::{SafeTensorError, SafeTensors};
use serde_json::Value;
use tch::{Kind, Tensor};

use super::adapter_folder::{holds_adapter, load_with_base, save_adapter};
use super::shards::{Format, Precision, Slice, save_hf_as};
use super::{Entry, Layout, ModelConfig, ModelError, TensorProblems, Weights};

/// Loads `config.json` and the weights beside it, `model.safetensors` or the shards of `model.safetensors.index.json`, as f32.
/// Everything that is wrong with the tensors is reported at once. A folder of adapters gives the model that they name, under them.
pub fn load_hf(dir: &Path) -> Result<(ModelConfig, Weights), ModelError> {
    if holds_adapter(dir) {
        return load_with_base(dir);
    }
    let config = ModelConfig::from_dir(dir)?;
    let weights = read_weights(&config, dir, weight_files(dir)?)?;
    Ok((config, weights))
}

/// The weights in `dir` for a model of this shape, whatever the configuration there says: tensors of another shape are all named.
pub fn load_like(dir: &Path, config: &ModelConfig) -> Result<Weights, ModelError> {
    read_weights(config, dir, weight_files(dir)?)
}

/// The weights in one safetensors file, as [`weights_to_bytes`] or [`save_hf`] wrote them.
pub fn load_weights(config: &ModelConfig, file: &Path) -> Result<Weights, ModelError> {
    read_weights(config, file, vec![file.to_owned()])
}

/// From `files`; `path` names them in errors.
fn read_weights(config: &ModelConfig, path: &Path, files: Vec<PathBuf>) -> Result<Weights, ModelError> {
    let layout = Layout::new(config);
    let flat = read_tensors(&layout, path, files, |flat, found| {
        let head = if config.shares_embedding() { found.remove("lm_head.weight") } else { None };
        // Buffers that old checkpoints carry and everyone recomputes.
        found.retain(|name, _| !name.ends_with(".rotary_emb.inv_freq"));
        head.and_then(|view| tied_head_problem(&layout, flat, &view)).into_iter().collect()
    })?;
    Ok(Weights::new(Arc::new(layout), flat))
}

/// The tensors of a layout, from `files`; `path` names them in errors. `rest` takes further ones out that are known, and says what is wrong with
/// them.
pub(super) fn read_tensors(
    layout: &Layout,
    path: &Path,
    files: Vec<PathBuf>,
    rest: impl FnOnce(&Tensor, &mut BTreeMap<&str, TensorView>) -> Vec<String>,
) -> Result<Tensor, ModelError> {
    let files = files.into_iter().map(MappedFile::open).collect::<Result<Vec<_>, _>>()?;
    let parsed = files.iter().map(|file| Ok((file, file.parse()?))).collect::<Result<Vec<_>, ModelError>>()?;
    let mut found: BTreeMap<&str, TensorView> = BTreeMap::new();
    for (_, tensors) in &parsed {
        found.extend(tensors.iter());
    }

    let mut problems = TensorProblems::default();
    let flat = Tensor::zeros([layout.total() as i64], (Kind::Float, tch::Device::Cpu));
    for entry in layout.entries() {
        match found.remove(entry.name.as_str()) {
            None => problems.missing.push(entry.name.clone()),
            Some(view) => match read_tensor(entry, &view) {
                Ok(tensor) => flat.narrow(0, entry.offset as i64, entry.len() as i64).copy_(&tensor.view([-1])),
                Err(problem) => problems.unusable.push(problem),
            },
        }
    }
    problems.unusable.extend(rest(&flat, &mut found));
    problems.unexpected.extend(found.keys().map(|name| name.to_string()));
    if !problems.is_empty() {
        return Err(ModelError::Tensors { path: path.into(), problems });
    }
    Ok(flat)
}

/// Writes `config.json`, `generation_config.json` and `model.safetensors` (f32) into `dir`, which is made if need be; weights under adapters
/// leave the adapters alone there, as PEFT writes them. A tokenizer's files are written by the tokenizer. Not atomic: write into a temporary
/// folder and rename it.
pub fn save_hf(dir: &Path, config: &ModelConfig, weights: &Weights) -> Result<(), ModelError> {
    match &weights.adapter {
        Some(adapter) => save_adapter(dir, adapter),
        None => save_hf_as(dir, config, weights, &Format::default()),
    }
}

/// Weights without adapters as [`save_hf`] writes them to `model.safetensors`, in memory.
pub fn weights_to_bytes(weights: &Weights) -> Result<Vec<u8>, ModelError> {
    let failed = |error: SafeTensorError| ModelError::Safetensors { path: "weights".into(), reason: error.to_string() };
    let tensors = Slice::all(weights.layout.entries(), &weights.flat, Precision::F32);
    safetensors::serialize(tensors, Some(metadata())).map_err(failed)
}

/// Writes tensors of a flat buffer into a file.
pub(super) fn write_tensors(path: &Path, entries: &[Entry], flat: &Tensor, precision: Precision) -> Result<(), ModelError> {
    let io = |source| ModelError::Io { path: path.into(), source };
    let failed = |error| match error {
        SafeTensorError::IoError(source) => io(source),
        other => ModelError::Safetensors { path: path.into(), reason: other.to_string() },
    };
    safetensors::serialize_to_file(Slice::all(entries, flat, precision), Some(metadata()), path).map_err(failed)?;
    readable_by_all(path).map_err(io)
}

fn metadata() -> HashMap<String, String> {
    HashMap::from([("format".to_owned(), "pt".to_owned())])
}

/// The weights of one file, not read until they are looked at.
struct MappedFile {
    path: PathBuf,
    map: Mmap,
}

impl MappedFile {
    fn open(path: PathBuf) -> Result<Self, ModelError> {
        let failed = |source| ModelError::Io { path: path.clone(), source };
        let file = File::open(&path).map_err(failed)?;
        // SAFETY: the file is only read, and copied out of before this function's caller returns. A file that another process cuts
        // short meanwhile is the risk everyone who maps files takes.
        let map = unsafe { Mmap::map(&file) }.map_err(failed)?;
        Ok(MappedFile { path, map })
    }

    fn parse(&self) -> Result<SafeTensors<'_>, ModelError> {
        let failed = |error: SafeTensorError| ModelError::Safetensors { path: self.path.clone(), reason: error.to_string() };
        SafeTensors::deserialize(&self.map).map_err(failed)
    }
}

/// The one file, or every shard that the index names.
fn weight_files(dir: &Path) -> Result<Vec<PathBuf>, ModelError> {
    let index = dir.join("model.safetensors.index.json");
    if !index.exists() || dir.join("model.safetensors").exists() {
        return Ok(vec![dir.join("model.safetensors")]);
    }
    let text = std::fs::read_to_string(&index).map_err(|source| ModelError::Io { path: index.clone(), source })?;
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

/// The tensor in its own precision, or what is wrong with it.
fn read_tensor(entry: &Entry, view: &TensorView) -> Result<Tensor, String> {
    let (name, shape) = (&entry.name, view.shape());
    if shape != entry.shape {
        return Err(format!("{name}: shape {shape:?}, expected {:?}", entry.shape));
    }
    let kind = match view.dtype() {
        Dtype::F32 => Kind::Float,
        Dtype::F16 => Kind::Half,
        Dtype::BF16 => Kind::BFloat16,
        other => return Err(format!("{name}: dtype {other:?}, expected F32, F16 or BF16")),
    };
    let size: Vec<i64> = shape.iter().map(|&size| size as i64).collect();
    Tensor::f_from_data_size(view.data(), &size, kind).map_err(|error| format!("{name}: {error}"))
}

/// A head beside a tied embedding must be that embedding; anything else would be dropped silently.
fn tied_head_problem(layout: &Layout, flat: &Tensor, view: &TensorView) -> Option<String> {
    let embedding = layout.entries().first()?;
    let head = Entry { name: "lm_head.weight".into(), ..embedding.clone() };
    let tensor = match read_tensor(&head, view) {
        Ok(tensor) => tensor.to_kind(Kind::Float).view([-1]),
        Err(problem) => return Some(problem),
    };
    let same = tensor == flat.narrow(0, embedding.offset as i64, embedding.len() as i64);
    (!same).then(|| "lm_head.weight: differs from the embedding although tie_word_embeddings is true".into())
}

/// The writer makes a private temporary file and renames it; a checkpoint is for other users and servers, too.
fn readable_by_all(path: &Path) -> std::io::Result<()> {
    #[cfg(unix)]
    {
        use std::os::unix::fs::PermissionsExt;
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o644))?;
    }
    Ok(())
}
