//! The optimizer's files in a checkpoint: `optimizer.safetensors`, or one for each rank that holds a
//! part of the moments.
//!
//! A file has the moments as flat tensors, and the f32 parameters as `master` if the model's files
//! have them rounded. A tensor of all trained numbers has the name of its quantity, as `exp_avg`. A
//! tensor of some has their places, too, as `exp_avg.0-4096`. A reader takes any division of the
//! numbers and reads only what it needs.

use std::collections::HashMap;
use std::fmt::Display;
use std::ops::Range;
use std::path::{Path, PathBuf};

use safetensors::tensor::TensorInfo;
use serde::{Deserialize, Serialize};
use tch::{Device, Kind, Tensor};

use super::TrainError;
use super::groups::ParamGroups;
use crate::model::{Dtype, Entry, Held, ModelError, TensorSlice, WeightFile, part};

/// The f32 parameters, if the model's files have them rounded.
pub(super) const MASTERS: &str = "master";

/// Key of [`OptimizerState`] in a file's header. Several keys would be written in random order.
const STATE: &str = "optimizer";

/// The part of the optimizer that is not tensors.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct OptimizerState {
    /// Updates made.
    pub step: u64,
    pub groups: ParamGroups,
}

/// Name of a writer's file.
pub(super) fn file_name(writer: usize, writers: usize) -> String {
    match writers {
        1 => "optimizer.safetensors".to_owned(),
        _ => format!("optimizer-{:05}-of-{writers:05}.safetensors", writer + 1),
    }
}

/// Writes a file. Each of `tensors` has the numbers in `held` of `len` trained ones.
pub(super) fn write(
    path: &Path,
    state: &OptimizerState,
    tensors: &[(&'static str, Tensor)],
    held: &Held,
    len: usize,
) -> Result<(), TrainError> {
    let state = serde_json::to_string(state).map_err(|error| TrainError::malformed(path, error))?;
    let metadata = HashMap::from([(STATE.to_owned(), state)]);
    let entry = |name: &str, (range, offset): &(Range<usize>, usize)| Entry {
        name: if *range == (0..len) { name.to_owned() } else { format!("{name}.{}-{}", range.start, range.end) },
        shape: vec![range.len()],
        offset: *offset,
    };
    let all = tensors.iter().flat_map(|(name, tensor)| held.iter().map(move |of| (entry(name, of), tensor)));
    let all: Vec<(Entry, &Tensor)> = all.collect();
    let slices = all.iter().map(|(entry, tensor)| (&entry.name, TensorSlice::new(entry, tensor, Dtype::F32)));
    let written = safetensors::serialize_to_file(slices, Some(metadata), path);
    written.map_err(ModelError::safetensors(path)).map_err(TrainError::of_model(path))
}

/// The files of a checkpoint, open.
pub(super) struct OptimizerFiles {
    folder: PathBuf,
    files: Vec<WeightFile>,
    pub state: OptimizerState,
}

impl OptimizerFiles {
    /// Opens the optimizer's files in `folder`, which must be of one step and of the parameter groups
    /// `ours`.
    pub fn open(folder: &Path, ours: &ParamGroups) -> Result<Self, TrainError> {
        let mut paths = Vec::new();
        for entry in std::fs::read_dir(folder).map_err(TrainError::io(folder))? {
            let path = entry.map_err(TrainError::io(folder))?.path();
            let name = path.file_name().unwrap_or_default().to_string_lossy();
            if name.starts_with("optimizer") && name.ends_with(".safetensors") {
                paths.push(path);
            }
        }
        paths.sort();
        if paths.is_empty() {
            // The error names the file.
            paths.push(folder.join(file_name(0, 1)));
        }
        let mut state: Option<OptimizerState> = None;
        let files = WeightFile::open_all(paths).map_err(TrainError::of_model(folder))?;
        for file in &files {
            let (path, found) = (&file.path, state_of(file)?);
            let first = state.get_or_insert_with(|| found.clone());
            if first.step != found.step || first.groups != found.groups {
                let reason = format!("it is of step {}, and {} of step {}", found.step, files[0].path.display(), first.step);
                return Err(TrainError::malformed(path, format!("{reason}: the files are not of one checkpoint")));
            }
            // Other groups would continue another optimizer.
            if found.groups != *ours {
                let [theirs, ours] = [&found.groups, ours].map(|of| serde_json::to_string(of).unwrap_or_default());
                let reason = format!("it was trained with the parameter groups {theirs}, and these are {ours}");
                return Err(TrainError::malformed(path, format!("{reason}; give `decay` and `lr_scale` their former values")));
            }
        }
        let state = state.expect("there is a file at least, and each has a state");
        Ok(OptimizerFiles { folder: folder.to_owned(), files, state })
    }

    /// Returns true if the files hold the quantity `name`.
    pub fn has(&self, name: &str) -> bool {
        self.files.iter().flat_map(|file| file.header.tensors().into_keys()).any(|key| range_of(&key, name, 0).is_some())
    }

    /// Reads the numbers in `held`, of the quantity `name` of `len` trained numbers, into a tensor of
    /// `room` numbers.
    pub fn read(&self, name: &str, len: usize, held: &Held, room: usize) -> Result<Tensor, TrainError> {
        let mut pieces = Vec::new();
        for file in &self.files {
            for (key, info) in file.header.tensors() {
                let Some(range) = range_of(&key, name, len) else { continue };
                if info.dtype != safetensors::Dtype::F32 || info.shape != [range.len()] || range.is_empty() {
                    let reason = format!("{key} is {:?} {:?}; expected F32 [{}]", info.dtype, info.shape, range.len());
                    return Err(TrainError::malformed(&file.path, reason));
                }
                pieces.push((range, file, info));
            }
        }
        pieces.sort_by_key(|(range, ..)| range.start);
        let mut end = 0;
        for (range, file, _) in &pieces {
            if range.start != end {
                return Err(self.incomplete(&file.path, name, end, range));
            }
            end = range.end;
        }
        if end != len {
            return Err(self.incomplete(&self.folder, name, end, &(len..len)));
        }
        let to = Tensor::zeros([room as i64], (Kind::Float, Device::Cpu));
        for (range, file, info) in &pieces {
            for (wanted, at) in held {
                let common = wanted.start.max(range.start)..wanted.end.min(range.end);
                if !common.is_empty() {
                    let to = part(&to, at + common.start - wanted.start..at + common.end - wanted.start);
                    copy(file, info, common.start - range.start..common.end - range.start, &to)?;
                }
            }
        }
        Ok(to)
    }

    fn incomplete(&self, path: &Path, name: &str, end: usize, next: &Range<usize>) -> TrainError {
        let reason = format!("{name} ends at number {end}, and continues at {}", next.start);
        TrainError::malformed(path, format!("{reason}: the optimizer's files do not belong together, or are another model's"))
    }
}

/// The range in a tensor's key, as in `exp_avg.0-4096`, if it is of the quantity `name`.
fn range_of(key: &str, name: &str, len: usize) -> Option<Range<usize>> {
    match key.strip_prefix(name)? {
        "" => Some(0..len),
        places => {
            let (start, end) = places.strip_prefix('.')?.split_once('-')?;
            Some(start.parse().ok()?..end.parse().ok()?)
        }
    }
}

/// Copies some of a tensor's numbers.
fn copy(file: &WeightFile, info: &TensorInfo, numbers: Range<usize>, to: &Tensor) -> Result<(), TrainError> {
    const SIZE: usize = size_of::<f32>();
    let begin = numbers.start * SIZE;
    let copied = file.each_chunk_of(info, begin..numbers.end * SIZE, |at, bytes| {
        let (first, len) = ((at - begin) / SIZE, bytes.len() / SIZE);
        part(to, first..first + len).copy_(&Tensor::from_data_size(bytes, &[len as i64], Kind::Float));
        true
    });
    copied.map(drop).map_err(TrainError::of_model(&file.path))
}

fn state_of(file: &WeightFile) -> Result<OptimizerState, TrainError> {
    let malformed = |reason: &dyn Display| TrainError::malformed(&file.path, reason);
    let state = file.header.metadata().as_ref().and_then(|metadata| metadata.get(STATE));
    let state = state.ok_or_else(|| malformed(&format!("its header has no `{STATE}`")))?;
    serde_json::from_str(state).map_err(|error| malformed(&format!("`{STATE}`: {error}")))
}
