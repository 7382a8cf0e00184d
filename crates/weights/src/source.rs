//! A folder of this machine as the parts of an artefact: tensors of safetensors files, and other
//! files as they are.

use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use safetensors::tensor::Metadata;

use super::WeightsError;

/// A part of a file.
pub(crate) struct SourcePart {
    /// Name of the tensor; none for the bytes before the first, or all of another file.
    pub(crate) tensor: Option<String>,
    /// Bytes of a number.
    pub(crate) width: usize,
    /// First byte in the file.
    pub(crate) at: u64,
    pub(crate) bytes: u64,
}

pub(crate) struct SourceFile {
    /// Relative path, with `/`.
    pub(crate) name: String,
    pub(crate) parts: Vec<SourcePart>,
    path: PathBuf,
    file: File,
}

/// Longest header of a safetensors file.
const HEADER: u64 = 100 << 20;

impl SourceFile {
    /// All files of a folder, by name.
    pub(crate) fn all(folder: &Path) -> Result<Vec<Self>, WeightsError> {
        let mut files = Vec::new();
        walk(folder, "", &mut files)?;
        files.sort_by(|a, b| a.name.cmp(&b.name));
        Ok(files)
    }

    fn open(name: String, path: PathBuf) -> Result<Self, WeightsError> {
        let file = File::open(&path).map_err(WeightsError::io(&path))?;
        let bytes = file.metadata().map_err(WeightsError::io(&path))?.len();
        let parts = match name.ends_with(".safetensors") {
            true => tensors(&file, &path, bytes)?,
            false => vec![SourcePart { tensor: None, width: 1, at: 0, bytes }],
        };
        Ok(SourceFile { name, parts, path, file })
    }

    /// Reads bytes at a place.
    pub(crate) fn read(&self, at: u64, length: u64) -> Result<Vec<u8>, WeightsError> {
        let mut bytes = vec![0; length as usize];
        self.file.read_exact_at(&mut bytes, at).map_err(WeightsError::io(&self.path))?;
        Ok(bytes)
    }
}

fn walk(folder: &Path, prefix: &str, files: &mut Vec<SourceFile>) -> Result<(), WeightsError> {
    for entry in fs::read_dir(folder).map_err(WeightsError::io(folder))? {
        let path = entry.map_err(WeightsError::io(folder))?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        // Half-written files, and those of a puller.
        if name.starts_with('.') {
            continue;
        }
        match fs::metadata(&path).map_err(WeightsError::io(&path))?.is_dir() {
            true => walk(&path, &format!("{prefix}{name}/"), files)?,
            false => files.push(SourceFile::open(format!("{prefix}{name}"), path)?),
        }
    }
    Ok(())
}

/// The header, and the tensors in their order in the file.
fn tensors(file: &File, path: &Path, bytes: u64) -> Result<Vec<SourcePart>, WeightsError> {
    let malformed = |why: String| WeightsError::Malformed { path: path.to_owned(), why };
    let mut length = [0; 8];
    file.read_exact_at(&mut length, 0).map_err(WeightsError::io(path))?;
    let length = u64::from_le_bytes(length);
    if length > HEADER.min(bytes.saturating_sub(8)) {
        return Err(malformed(format!("its header claims {length} bytes")));
    }
    let begin = 8 + length;
    let mut head = vec![0; begin as usize];
    file.read_exact_at(&mut head, 0).map_err(WeightsError::io(path))?;
    let header: Metadata = serde_json::from_slice(&head[8..]).map_err(|error| malformed(error.to_string()))?;
    let mut parts = vec![SourcePart { tensor: None, width: 1, at: 0, bytes: begin }];
    let mut tensors: Vec<_> = header.tensors().into_iter().collect();
    tensors.sort_by_key(|(_, info)| info.data_offsets);
    for (name, info) in tensors {
        let (from, to) = info.data_offsets;
        let width = match info.dtype.bitsize() / 8 {
            width @ (2 | 4 | 8) => width,
            _ => 1,
        };
        parts.push(SourcePart { tensor: Some(name), width, at: begin + from as u64, bytes: (to - from) as u64 });
    }
    // Neither gaps nor bytes at the end: the parts are the file.
    let mut next = 0;
    for part in &parts {
        if part.at != next {
            return Err(malformed(format!("bytes {next} to {} belong to no tensor", part.at)));
        }
        next += part.bytes;
    }
    match next == bytes {
        true => Ok(parts),
        false => Err(malformed(format!("it has {bytes} bytes, and its tensors end at {next}"))),
    }
}
