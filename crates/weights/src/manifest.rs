//! Description of an artefact: its files, the tensors in them, and where their bytes are.
//!
//! A manifest is two lines of JSON: the checksum of the second, and the second. Its object's name
//! holds writer, version and base, so that a listing alone shows every chain of deltas.

use std::collections::BTreeMap;
use std::fmt;
use std::path::{Component, Path};

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

/// Version of the artefacts' format.
pub const FORMAT: u32 = 1;

/// Most bytes of a manifest: more than those of a model with a million tensors.
pub(crate) const LARGEST: usize = 1 << 30;

/// Most bytes of a chunk or an object, so that a forged manifest allocates little.
const LARGEST_OBJECT: u64 = 256 << 20;

/// Name of an artefact: the process that wrote it, and its version. Later writers are newer than
/// earlier ones whatever their versions, because a run that resumes may publish a version again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Id {
    /// Number of the writing process, from 1.
    pub writer: u64,
    /// Version of the weights, or step of a checkpoint.
    pub version: u64,
}

impl fmt::Display for Id {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "version {} of writer {}", self.version, self.writer)
    }
}

impl Id {
    /// Name of the folder of its objects.
    pub(crate) fn folder(self) -> String {
        format!("w{:010}-v{:010}", self.writer, self.version)
    }

    pub(crate) fn of_folder(name: &str) -> Option<Self> {
        let (writer, version) = name.strip_prefix('w')?.split_once("-v")?;
        Some(Id { writer: writer.parse().ok()?, version: version.parse().ok()? })
    }
}

/// An artefact in a listing: its name, and the version that it is a delta to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Listed {
    pub(crate) id: Id,
    pub(crate) base: Option<u64>,
}

const WHOLE: &str = "whole";
const DELTA: &str = "delta-to-v";

impl Listed {
    /// Name of the manifest's object.
    pub(crate) fn name(self) -> String {
        let base = self.base.map_or(WHOLE.to_owned(), |base| format!("{DELTA}{base:010}"));
        format!("{}-{base}.jsonl", self.id.folder())
    }

    pub(crate) fn of_name(name: &str) -> Option<Self> {
        let (id, base) = name.strip_suffix(".jsonl")?.rsplit_once(&format!("-{WHOLE}")).or_else(|| {
            let (id, base) = name.strip_suffix(".jsonl")?.split_once(&format!("-{DELTA}"))?;
            Some((id, base))
        })?;
        let base = if base.is_empty() { None } else { Some(base.parse().ok()?) };
        Some(Listed { id: Id::of_folder(id)?, base })
    }

    /// The artefact that this one is a delta to.
    pub(crate) fn before(self) -> Option<Id> {
        self.base.map(|version| Id { version, ..self.id })
    }
}

/// An artefact's content.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Manifest {
    pub(crate) format: u32,
    pub(crate) id: Id,
    /// Version that deltas refer to, of the same writer.
    pub(crate) base: Option<u64>,
    /// Bytes of all chunks but a part's last one.
    pub(crate) chunk: u64,
    pub(crate) files: Vec<FileEntry>,
    pub(crate) objects: Vec<ObjectEntry>,
}

/// A file: its parts one after another.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct FileEntry {
    /// Relative path, with `/`.
    pub(crate) name: String,
    pub(crate) parts: Vec<Part>,
}

/// A tensor, or the bytes of a file before its tensors, which are all of them in other files.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Part {
    /// Name of the tensor.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) tensor: Option<String>,
    /// Bytes of a number.
    pub(crate) width: usize,
    pub(crate) bytes: u64,
    pub(crate) chunks: Vec<Chunk>,
}

/// A piece of a part.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Chunk {
    /// Checksum of the restored bytes.
    pub(crate) sha256: String,
    /// Place of its bytes; none if they are those of the base.
    #[serde(flatten)]
    pub(crate) stored: Option<Stored>,
}

/// Bytes in an object, counted after decompression.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Stored {
    pub(crate) object: usize,
    pub(crate) at: u64,
    pub(crate) length: u64,
    /// If true, a delta to the base's chunk; else the chunk in planes.
    pub(crate) delta: bool,
}

/// An object of compressed chunks.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct ObjectEntry {
    /// Compressed size.
    pub(crate) bytes: u64,
    /// Size after decompression.
    pub(crate) raw: u64,
    /// Checksum of the compressed bytes.
    pub(crate) sha256: String,
}

#[derive(Serialize, Deserialize)]
struct Seal {
    sha256: String,
}

pub(crate) fn sha256(bytes: &[u8]) -> String {
    format!("{:x}", Sha256::digest(bytes))
}

impl Part {
    /// Name that finds the part in other versions. Other files of a version may have tensors of the same names:
    /// a critic's, a reference's and the optimizer's.
    pub(crate) fn key(&self, file: &str) -> String {
        self.tensor.as_ref().map_or_else(|| format!("file {file}"), |tensor| format!("tensor {tensor} of {file}"))
    }

    /// Bytes of a chunk, of which all but the last have `chunk`.
    pub(crate) fn len(&self, chunk: u64, at: usize) -> u64 {
        chunk.min(self.bytes - at as u64 * chunk)
    }
}

impl Manifest {
    pub(crate) fn listed(&self) -> Listed {
        Listed { id: self.id, base: self.base }
    }

    pub(crate) fn to_bytes(&self) -> serde_json::Result<Vec<u8>> {
        let json = serde_json::to_vec(self)?;
        let mut bytes = serde_json::to_vec(&Seal { sha256: sha256(&json) })?;
        bytes.push(b'\n');
        bytes.extend(json);
        Ok(bytes)
    }

    /// Reads a manifest and checks it. The error says what is wrong.
    pub(crate) fn read(bytes: &[u8]) -> Result<Self, String> {
        let at = bytes.iter().position(|byte| *byte == b'\n').ok_or("it breaks off before its first line ends")?;
        let (seal, json) = (&bytes[..at], &bytes[at + 1..]);
        let seal: Seal = serde_json::from_slice(seal).map_err(|error| format!("its first line has no checksum ({error})"))?;
        if seal.sha256 != sha256(json) {
            return Err("its checksum differs from its content".to_owned());
        }
        let manifest: Manifest = serde_json::from_slice(json).map_err(|error| error.to_string())?;
        manifest.check()?;
        Ok(manifest)
    }

    /// Checks what readers rely on: a checksum shows damage, and not what a writer may put there.
    fn check(&self) -> Result<(), String> {
        if self.format != FORMAT {
            return Err(format!("its format is {}, and this program reads {FORMAT}: use the program that wrote it", self.format));
        }
        if self.chunk == 0
            || self.chunk > LARGEST_OBJECT
            || self.objects.iter().any(|of| of.raw > LARGEST_OBJECT || of.bytes > LARGEST_OBJECT)
        {
            return Err(format!("it has chunks or objects of more than {} MiB", LARGEST_OBJECT >> 20));
        }
        if self.base.is_some_and(|base| base >= self.id.version) {
            return Err("its base is not older than itself".to_owned());
        }
        for file in &self.files {
            let inside = Path::new(&file.name).components().all(|part| matches!(part, Component::Normal(_)));
            if file.name.is_empty() || !inside || file.name.contains(['\\', '\0']) {
                return Err(format!("the file name {:?} leads out of the folder", file.name));
            }
            for part in &file.parts {
                let key = part.key(&file.name);
                if !matches!(part.width, 1 | 2 | 4 | 8) || part.chunks.len() as u64 != part.bytes.div_ceil(self.chunk) {
                    return Err(format!("{key} has another number of chunks than bytes"));
                }
                for (at, chunk) in part.chunks.iter().enumerate() {
                    match chunk.stored {
                        None if self.base.is_none() => return Err(format!("{key} has no bytes, and there is no base")),
                        Some(stored) if stored.delta && self.base.is_none() => {
                            return Err(format!("{key} is a delta without a base"));
                        }
                        Some(stored) if !stored.delta && stored.length != part.len(self.chunk, at) => {
                            return Err(format!("{key} has a chunk of another length"));
                        }
                        Some(stored) => {
                            let end = stored.at.checked_add(stored.length);
                            let object = self.objects.get(stored.object);
                            if object.is_none_or(|object| end.is_none_or(|end| end > object.raw)) {
                                return Err(format!("{key} points outside of its object"));
                            }
                        }
                        None => {}
                    }
                }
            }
        }
        Ok(())
    }

    /// Parts by their keys, each with its file and its place there.
    pub(crate) fn parts(&self) -> BTreeMap<String, Place<'_>> {
        let mut parts = BTreeMap::new();
        for file in &self.files {
            let mut at = 0;
            for part in &file.parts {
                parts.insert(part.key(&file.name), Place { file: &file.name, at, part });
                at += part.bytes;
            }
        }
        parts
    }

    /// Bytes of all files.
    pub(crate) fn raw(&self) -> u64 {
        self.files.iter().flat_map(|file| &file.parts).map(|part| part.bytes).sum()
    }
}

/// A part of a manifest.
#[derive(Clone, Copy)]
pub(crate) struct Place<'a> {
    pub(crate) file: &'a str,
    /// First byte in the file.
    pub(crate) at: u64,
    pub(crate) part: &'a Part,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_listing_shows_writer_version_and_base() {
        let id = Id { writer: 3, version: 42 };
        for listed in [Listed { id, base: None }, Listed { id, base: Some(41) }] {
            assert_eq!(Listed::of_name(&listed.name()), Some(listed), "{}", listed.name());
        }
        assert_eq!(Listed { id, base: Some(41) }.name(), "w0000000003-v0000000042-delta-to-v0000000041.jsonl");
        for other in ["", "w1-v2.jsonl", "w1-v2-whole", "x1-v2-whole.jsonl", "w1-v2-delta-to-v.json", "w1-vx-whole.jsonl"] {
            assert_eq!(Listed::of_name(other), None, "{other}");
        }
    }

    #[test]
    fn a_manifest_that_was_changed_or_leads_out_of_its_folder_is_refused() {
        let part = Part { tensor: None, width: 1, bytes: 3, chunks: vec![Chunk { sha256: sha256(b"abc"), stored: None }] };
        let file = FileEntry { name: "config.json".to_owned(), parts: vec![part] };
        let id = Id { writer: 1, version: 2 };
        let manifest = Manifest { format: FORMAT, id, base: Some(1), chunk: 8, files: vec![file], objects: Vec::new() };
        let bytes = manifest.to_bytes().unwrap();
        assert_eq!(Manifest::read(&bytes).unwrap(), manifest);
        for end in 0..bytes.len() {
            assert!(Manifest::read(&bytes[..end]).is_err(), "cut at {end}");
            let mut flipped = bytes.clone();
            flipped[end] ^= 1;
            assert!(Manifest::read(&flipped).is_err(), "a bit of byte {end}");
        }
        for name in ["../up", "/etc/passwd", "a/../../b", "", "."] {
            let mut forged = manifest.clone();
            forged.files[0].name = name.to_owned();
            assert!(Manifest::read(&forged.to_bytes().unwrap()).unwrap_err().contains("leads out"), "{name}");
        }
        let forged = Manifest { base: None, ..manifest.clone() };
        assert!(Manifest::read(&forged.to_bytes().unwrap()).unwrap_err().contains("file config.json has no bytes"));
        let forged = Manifest { chunk: 1 << 40, ..manifest };
        assert!(Manifest::read(&forged.to_bytes().unwrap()).unwrap_err().contains("more than 256 MiB"));
    }
}
