//! Models from and to Hugging Face folders.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fs::{self, File, Permissions};
use std::ops::Range;
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use memmap2::Mmap;
use safetensors::SafeTensors;
use safetensors::tensor::{Metadata, TensorInfo, View};
use serde_json::Value;
use tch::{Kind, Tensor};

use super::adapter_folder::{folder_config, load_with_base, named_base, save_adapter};
use super::folder_files::{INDEX, WHOLE, holds_adapter};
use super::keys::read_object;
use super::layout::{HEAD, part};
use super::matched::{Matched, is_foreign, matched};
use super::quantised::{Place, Quantised, is_packed};
use super::shards::{TensorSlice, save_hf_as};
use super::{Dtype, Entry, Layout, ModelConfig, ModelError, Weights, nf4};
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
    load_hf_as(dir, Kept { dtype, in_4_bits: false })
}

/// [`load_hf_for`] with the matrices of the layers in 4 bits, as [`Weights::quantised`] stores them. Each is
/// converted alone. Experts in MXFP4 stay so, and adapters whole.
///
/// Memory: 0.52 bytes per parameter of the layers, 5 per number of one matrix, and the rest.
pub fn load_hf_in_4_bits(dir: &Path, dtype: Dtype) -> Result<(ModelConfig, Weights), ModelError> {
    load_hf_as(dir, Kept { dtype, in_4_bits: true })
}

/// The form in which a reader keeps numbers.
#[derive(Clone, Copy)]
pub(super) struct Kept {
    /// The format of folders that are not converted to f32.
    pub dtype: Dtype,
    /// True if the matrices of the layers become 4 bits.
    pub in_4_bits: bool,
}

pub(super) fn load_hf_as(dir: &Path, kept: Kept) -> Result<(ModelConfig, Weights), ModelError> {
    let dir = &Hub::of_user().open(dir)?;
    if holds_adapter(dir) {
        return load_with_base(dir, kept);
    }
    let config = ModelConfig::from_dir(dir)?;
    let (weights, dtype) = read_weights(&config, dir, weight_files(dir)?, kept)?;
    Ok((ModelConfig { dtype, ..config }, weights))
}

/// Loads the weights in a folder for the configuration `config`, ignoring the folder's own, or those
/// in one safetensors file. The error names every tensor of another shape.
pub fn load_weights(config: &ModelConfig, path: &Path) -> Result<Weights, ModelError> {
    load_weights_for(config, path, Dtype::F32)
}

/// [`load_weights`] in the format `dtype` if the folder has it, else in f32.
pub(crate) fn load_weights_for(config: &ModelConfig, path: &Path, dtype: Dtype) -> Result<Weights, ModelError> {
    let files = if path.is_dir() { weight_files(path)? } else { vec![path.to_owned()] };
    Ok(read_weights(config, path, files, Kept { dtype, in_4_bits: false })?.0)
}

/// Reads weights from `files`, and the format that most numbers have. Errors name `path`.
fn read_weights(config: &ModelConfig, path: &Path, files: Vec<PathBuf>, kept: Kept) -> Result<(Weights, Dtype), ModelError> {
    let layout = Layout::new(config);
    let twin = config.shares_embedding().then_some(HEAD);
    let (flat, quantised, dtype) = read_tensors(&layout, path, files, twin, kept)?;
    Ok((Weights { quantised: quantised.map(Arc::new), ..Weights::new(Arc::new(layout), flat) }, dtype))
}

/// Reads the tensors of a layout from `files`: numbers, those in 4 bits apart, and the format that most of
/// them have on disk. Numbers stay in that format if all have it and it is `kept`, else they become f32.
/// Errors name `path`. A tensor named `twin` is optional and must equal the first tensor.
pub(super) fn read_tensors(
    layout: &Layout,
    path: &Path,
    files: Vec<PathBuf>,
    twin: Option<&str>,
    kept: Kept,
) -> Result<(Tensor, Option<Quantised>, Dtype), ModelError> {
    let files = WeightFile::open_all(files)?;
    let mut matched = matched(layout, path, &files, twin)?;
    // A few small tensors may be in a wider format than the rest.
    let of = |dtype: Dtype| matched.needed.iter().filter(move |stored| stored.dtype == dtype);
    let share = |dtype: Dtype| of(dtype).map(|stored| stored.range().len()).sum::<usize>();
    let dtype = [Dtype::F32, Dtype::F16, Dtype::Bf16].into_iter().max_by_key(|dtype| share(*dtype)).unwrap_or_default();
    let is_whole = matched.needed.iter().all(|stored| stored.dtype == dtype);
    let left_out: usize = files.iter().map(|file| file.header.tensors().keys().filter(|name| is_foreign(name)).count()).sum();
    if left_out > 0 {
        tracing::info!("{}: {left_out} tensors for images or for predictions further ahead are left out", path.display());
    }
    let in_4_bits = kept.in_4_bits || !matched.packed.is_empty();
    let quantised = in_4_bits.then(|| read_4_bits(layout, &mut matched, kept.in_4_bits)).transpose()?;
    let Matched { mut needed, twin, experts, .. } = matched;
    let held = if is_whole && dtype == kept.dtype { dtype } else { Dtype::F32 };
    let len: usize = needed.iter().map(Stored::range).chain(experts.iter().map(|of| of.range.clone())).map(|of| of.len()).sum();
    let flat = Tensor::empty([len as i64], (held.kind(), tch::Device::Cpu));
    // In disk order.
    needed.sort_by(|a, b| (&a.file.path, a.info.data_offsets).cmp(&(&b.file.path, b.info.data_offsets)));
    for stored in &needed {
        stored.each_chunk(&flat, |mut ours, chunk| {
            ours.copy_(&chunk);
            true
        })?;
    }
    experts.iter().try_for_each(|experts| experts.copy(experts.range.clone(), &part(&flat, experts.range.clone())))?;
    if let Some(twin) = twin {
        check_twin(path, twin.each_chunk(&flat, |ours, chunk| chunk.to_kind(Kind::Float) == ours.to_kind(Kind::Float))?)?;
    }
    Ok((flat, quantised, dtype))
}

/// Reads the tensors that are in 4 bits on disk, and with `all` those that become so. The others of `matched`
/// remain, moved together.
fn read_4_bits(layout: &Layout, matched: &mut Matched, all: bool) -> Result<Quantised, ModelError> {
    let Matched { needed, packed, experts, .. } = matched;
    let (mut packed, mut len, mut moved) = (std::mem::take(packed).into_iter().peekable(), 0, BTreeMap::new());
    let mut places = Vec::new();
    for (at, entry) in layout.entries().iter().enumerate() {
        places.push(if let Some((_, on_disk)) = packed.next_if(|(packed, _)| *packed == at) {
            Place::Packed(on_disk.read()?)
        } else if all && is_packed(entry) {
            Place::Packed(match experts.iter().find(|experts| experts.range == entry.range()) {
                Some(experts) => experts.keep()?,
                None => {
                    let numbers = Tensor::empty([entry.len() as i64], (Kind::Float, tch::Device::Cpu));
                    holding(needed, entry).copy(entry.range(), &numbers)?;
                    nf4::quantise(&numbers)
                }
            })
        } else {
            moved.insert(entry.offset, len);
            len += entry.len();
            Place::Kept(len - entry.len())
        });
    }
    needed.retain_mut(|of| moved.get(&of.offset).inspect(|to| of.offset = **to).is_some());
    experts.retain_mut(|of| moved.get(&of.range.start).inspect(|to| of.range = **to..**to + of.range.len()).is_some());
    Ok(Quantised::new(places))
}

/// Rejects a folder whose head is not the embedding that it should be.
fn check_twin(path: &Path, is_same: bool) -> Result<(), ModelError> {
    let problem = "lm_head.weight: differs from the embedding although tie_word_embeddings is true".to_owned();
    let problems = if is_same { Vec::new() } else { vec![problem] };
    ModelError::check_tensors(path, [Vec::new(), Vec::new(), problems])
}

/// Numbers of a flat buffer that a reader needs: ranges of the buffer, and the place where each
/// begins in the reader's own.
pub(crate) type Held = [(Range<usize>, usize)];

/// A model folder on disk, read in parts.
pub(crate) struct StoredModel {
    layout: Layout,
    dir: PathBuf,
    files: Vec<WeightFile>,
    twin: Option<&'static str>,
}

impl StoredModel {
    /// Opens the weights in `dir`, of a model of this shape without adapters.
    pub fn open(config: &ModelConfig, dir: &Path) -> Result<Self, ModelError> {
        let files = WeightFile::open_all(weight_files(dir)?)?;
        let twin = config.shares_embedding().then_some(HEAD);
        Ok(StoredModel { layout: Layout::new(config), dir: dir.to_owned(), files, twin })
    }

    /// Finds its tensors on disk, to read one after another.
    pub(super) fn tensors(&self) -> Result<StoredTensors<'_>, ModelError> {
        let matched = matched(&self.layout, &self.dir, &self.files, self.twin)?;
        let names = self.layout.entries().iter().enumerate().map(|(at, entry)| (entry.name.as_str(), at)).collect();
        Ok(StoredTensors { stored: self, matched, names })
    }

    /// Reads the numbers in `held` into `to`, in its format.
    pub fn read(&self, held: &Held, to: &Tensor) -> Result<(), ModelError> {
        let Matched { mut needed, packed, experts, .. } = matched(&self.layout, &self.dir, &self.files, self.twin)?;
        if !packed.is_empty() {
            let problem = "its layers are in 4 bits, which ranks that divide the parameters do not read";
            return Err(ModelError::malformed(&self.dir, problem));
        }
        // In disk order.
        needed.sort_by(|a, b| (&a.file.path, a.info.data_offsets).cmp(&(&b.file.path, b.info.data_offsets)));
        // Ranges that are a tensor's, and where each begins in `to`.
        let common = |tensor: Range<usize>| {
            let of = move |(range, at): &(Range<usize>, usize)| {
                let common = range.start.max(tensor.start)..range.end.min(tensor.end);
                (!common.is_empty()).then(|| (common.clone(), at + common.start - range.start))
            };
            held.iter().filter_map(of)
        };
        for stored in &needed {
            for (range, first) in common(stored.range()) {
                stored.copy(range.clone(), &part(to, first..first + range.len()))?;
            }
        }
        for experts in &experts {
            for (range, first) in common(experts.range.clone()) {
                experts.copy(range.clone(), &part(to, first..first + range.len()))?;
            }
        }
        Ok(())
    }
}

/// The tensors of a [`StoredModel`], found on disk.
pub(super) struct StoredTensors<'a> {
    stored: &'a StoredModel,
    /// In the layout's order.
    matched: Matched<'a>,
    /// Places in the layout.
    names: HashMap<&'a str, usize>,
}

impl StoredTensors<'_> {
    /// Rejects a stored head that differs from the embedding, if the model ties them.
    pub fn check_twin(&self) -> Result<(), ModelError> {
        let Some(twin) = &self.matched.twin else { return Ok(()) };
        let embedding = self.at(0)?;
        check_twin(&self.stored.dir, twin.each_chunk(&embedding, |ours, chunk| chunk.to_kind(Kind::Float) == ours)?)
    }

    /// The tensor of that name, flat and in f32.
    pub fn tensor(&self, name: &str) -> Result<Tensor, ModelError> {
        self.at(*self.names.get(name).expect("callers name a tensor of the layout"))
    }

    fn at(&self, place: usize) -> Result<Tensor, ModelError> {
        let entry = &self.stored.layout.entries()[place];
        let numbers = Tensor::empty([entry.len() as i64], (Kind::Float, tch::Device::Cpu));
        let Matched { needed, packed, experts, .. } = &self.matched;
        if let Ok(found) = packed.binary_search_by_key(&place, |(place, _)| *place) {
            packed[found].1.read()?.write_to(&numbers);
        } else if let Ok(found) = experts.binary_search_by_key(&entry.offset, |experts| experts.range.start) {
            experts[found].copy(entry.range(), &numbers)?;
        } else {
            holding(needed, entry).copy(entry.range(), &numbers)?;
        }
        Ok(numbers)
    }
}

/// The tensor on disk that has this one: itself, or one of all experts. `needed` is in the layout's order.
fn holding<'a, 'f>(needed: &'a [Stored<'f>], entry: &Entry) -> &'a Stored<'f> {
    &needed[needed.partition_point(|of| of.range().end <= entry.offset)]
}

/// Checks a folder without reading its weights: `config.json`, and the headers of its safetensors
/// files. For a folder of adapters, checks their configuration and the base model. Allocates
/// little, whatever the headers claim.
pub fn check_folder(dir: &Path) -> Result<ModelConfig, ModelError> {
    if holds_adapter(dir) {
        check_folder(&named_base(dir)?.0)?;
        return folder_config(dir);
    }
    let config = ModelConfig::from_dir(dir)?;
    let files = WeightFile::open_all(weight_files(dir)?)?;
    matched(&Layout::new(&config), dir, &files, config.shares_embedding().then_some(HEAD))?;
    Ok(config)
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
        None => save_hf_as(dir, config, weights, config.dtype, None),
    }
}

/// Weights without adapters as [`save_hf`] writes them to `model.safetensors` in f32, in memory.
pub fn weights_to_bytes(weights: &Weights) -> Result<Vec<u8>, ModelError> {
    let tensors = TensorSlice::all(weights.layout.entries(), &weights.flat, Dtype::F32);
    safetensors::serialize(tensors, Some(metadata())).map_err(ModelError::safetensors("weights".as_ref()))
}

/// Writes tensors of a flat buffer into a file.
pub(crate) fn write_tensors(path: &Path, entries: &[Entry], flat: &Tensor, dtype: Dtype) -> Result<(), ModelError> {
    let flat = &flat.detach();
    entries.iter().try_for_each(|entry| dtype.check_range(&entry.name, &part(flat, entry.range())))?;
    write_views(path, TensorSlice::all(entries, flat, dtype))
}

/// Writes tensors into a file, one after another.
pub(super) fn write_views<'a>(path: &Path, tensors: impl Iterator<Item = (&'a str, impl View)>) -> Result<(), ModelError> {
    safetensors::serialize_to_file(tensors, Some(metadata()), path).map_err(ModelError::safetensors(path))?;
    // safetensors makes it readable by its owner only; other users and servers need checkpoints, too.
    fs::set_permissions(path, Permissions::from_mode(0o644)).map_err(ModelError::io(path))
}

fn metadata() -> HashMap<String, String> {
    HashMap::from([("format".to_owned(), "pt".to_owned())])
}

/// File of weights. Tensors are read by offset: touched pages of a mapping count as the process's
/// memory, which would double a model's size.
pub(crate) struct WeightFile {
    pub path: PathBuf,
    pub header: Metadata,
    file: File,
    /// Place of the first tensor.
    begin: usize,
}

impl WeightFile {
    pub fn open_all(paths: Vec<PathBuf>) -> Result<Vec<Self>, ModelError> {
        paths.into_iter().map(Self::open).collect()
    }

    /// Names of its tensors.
    pub fn names(&self) -> Vec<String> {
        self.header.tensors().into_keys().collect()
    }

    pub fn open(path: PathBuf) -> Result<Self, ModelError> {
        let file = reading::open(&path).map_err(ModelError::io(&path))?;
        // SAFETY: the file is only read, and the mapping ends with this function. Another process could
        // truncate the file meanwhile, as with any mapped file.
        let map = unsafe { Mmap::map(&file) }.map_err(ModelError::io(&path))?;
        let (header_len, header) = SafeTensors::read_metadata(&map).map_err(ModelError::safetensors(&path))?;
        Ok(WeightFile { path, header, file, begin: size_of::<u64>() + header_len })
    }

    /// A tensor's bytes.
    pub fn bytes(&self, tensor: &TensorInfo) -> Result<Vec<u8>, ModelError> {
        let (begin, end) = tensor.data_offsets;
        self.bytes_of(tensor, 0..end - begin)
    }

    /// The tensor's bytes in `within`.
    pub fn bytes_of(&self, tensor: &TensorInfo, within: Range<usize>) -> Result<Vec<u8>, ModelError> {
        let begin = self.begin + tensor.data_offsets.0 + within.start;
        let mut bytes = vec![0; within.len()];
        self.file.read_exact_at(&mut bytes, begin as u64).map_err(ModelError::io(&self.path))?;
        Ok(bytes)
    }

    /// Passes a tensor's bytes to `take` in chunks, each with the place of its first, until it
    /// returns false. Returns true if it never did.
    pub fn each_chunk(&self, tensor: &TensorInfo, take: impl FnMut(usize, &[u8]) -> bool) -> Result<bool, ModelError> {
        let (begin, end) = tensor.data_offsets;
        self.each_chunk_of(tensor, 0..end - begin, take)
    }

    /// [`WeightFile::each_chunk`] of the tensor's bytes in `within`.
    pub fn each_chunk_of(
        &self,
        tensor: &TensorInfo,
        within: Range<usize>,
        mut take: impl FnMut(usize, &[u8]) -> bool,
    ) -> Result<bool, ModelError> {
        let begin = self.begin + tensor.data_offsets.0;
        let mut bytes = vec![0; CHUNK_BYTES.min(within.len())];
        for at in within.clone().step_by(CHUNK_BYTES) {
            let bytes = &mut bytes[..CHUNK_BYTES.min(within.end - at)];
            self.file.read_exact_at(bytes, (begin + at) as u64).map_err(ModelError::io(&self.path))?;
            if !take(at, bytes) {
                return Ok(false);
            }
        }
        Ok(true)
    }
}

/// A tensor of a layout, on disk.
pub(super) struct Stored<'a> {
    file: &'a WeightFile,
    info: &'a TensorInfo,
    dtype: Dtype,
    /// Place in the flat buffer.
    offset: usize,
}

impl<'a> Stored<'a> {
    /// The tensor `name` as `entry`, or the reason why it does not fit.
    pub(super) fn new(name: &str, entry: &Entry, file: &'a WeightFile, info: &'a TensorInfo) -> Result<Self, String> {
        if info.shape != entry.shape {
            return Err(format!("{name}: shape {:?}, expected {:?}", info.shape, entry.shape));
        }
        let dtype = Dtype::of_stored(info.dtype);
        let dtype = dtype.ok_or_else(|| format!("{name}: dtype {:?}, expected F32, F16 or BF16", info.dtype))?;
        Ok(Stored { file, info, dtype, offset: entry.offset })
    }

    /// Passes the tensor's part of `flat` and its numbers on disk to `take` in chunks, until it
    /// returns false. Returns true if it never did.
    fn each_chunk(&self, flat: &Tensor, mut take: impl FnMut(Tensor, Tensor) -> bool) -> Result<bool, ModelError> {
        self.file.each_chunk(self.info, |at, bytes| {
            let (first, chunk) = (self.offset + at / self.dtype.bytes(), self.numbers(bytes));
            take(part(flat, first..first + chunk.numel()), chunk)
        })
    }

    fn numbers(&self, bytes: &[u8]) -> Tensor {
        Tensor::from_data_size(bytes, &[(bytes.len() / self.dtype.bytes()) as i64], self.dtype.kind())
    }

    /// Place in the flat buffer.
    fn range(&self) -> Range<usize> {
        let (begin, end) = self.info.data_offsets;
        self.offset..self.offset + (end - begin) / self.dtype.bytes()
    }

    /// Copies the numbers at `range` of the flat buffer, which are this tensor's, to `to`.
    fn copy(&self, range: Range<usize>, to: &Tensor) -> Result<(), ModelError> {
        let size = self.dtype.bytes();
        let within = (range.start - self.offset) * size..(range.end - self.offset) * size;
        let begin = within.start;
        let copied = self.file.each_chunk_of(self.info, within, |at, bytes| {
            let (first, chunk) = ((at - begin) / size, self.numbers(bytes));
            part(to, first..first + chunk.numel()).copy_(&chunk);
            true
        });
        copied.map(drop)
    }
}

/// The one file, or every shard that the index names.
pub(super) fn weight_files(dir: &Path) -> Result<Vec<PathBuf>, ModelError> {
    let (whole, index) = (dir.join(WHOLE), dir.join(INDEX));
    if whole.exists() {
        return Ok(vec![whole]);
    }
    if !index.exists() {
        return Err(no_weights(dir, "model.safetensors and no index"));
    }
    let (object, bad) = (read_object(&index)?, |problem| ModelError::malformed(&index, problem));
    let map = object.get("weight_map").and_then(Value::as_object).ok_or_else(|| bad("it has no object `weight_map`"))?;
    let names = map.values().map(Value::as_str).collect::<Option<BTreeSet<_>>>();
    Ok(names.ok_or_else(|| bad("`weight_map` names no file"))?.into_iter().map(|name| dir.join(name)).collect())
}

/// Names of files of pickled weights.
const PICKLED: [&str; 4] = ["pytorch_model", "model", "adapter_model", "consolidated"];

/// For a folder without its files of weights. If they are pickled, the error has the remedy.
pub(super) fn no_weights(dir: &Path, lacks: &str) -> ModelError {
    let is_pickled = |name: &str| {
        [".bin", ".pth"].iter().any(|end| name.ends_with(end)) && PICKLED.iter().any(|begin| name.starts_with(begin))
    };
    let mut files = fs::read_dir(dir).into_iter().flatten().flatten();
    let remedy = match files.any(|file| is_pickled(&file.file_name().to_string_lossy())) {
        true => "; its weights are pickled: save it again with save_pretrained(…, safe_serialization=True)",
        false => "",
    };
    ModelError::malformed(dir, format!("it has no {lacks}{remedy}"))
}
