//! A model on disk: what it is, its newest snapshot, and the operations since. A server that was
//! killed makes the same model of them again, to the bit, and the same answers.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};

use rollflow_tinker::message::LoraConfig;
use serde::{Deserialize, Serialize};

use super::operation::Operation;
use crate::util::atomic_file;

const MODEL: &str = "model.json";

/// The record of a model that was unloaded, whose weights stay.
const UNLOADED: &str = "unloaded.json";

/// Most bytes of one operation.
const LONGEST: u64 = 1 << 30;

/// What a model is.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct ModelRecord {
    pub id: String,
    pub session: String,
    pub lora: LoraConfig,
    /// Path of the weights that it began with, and true if their optimizer was loaded, too.
    #[serde(default)]
    pub begins: Option<(String, bool)>,
    /// Operations that the snapshot holds; 0 without one.
    #[serde(default)]
    pub done: u64,
    /// Updates that the snapshot holds.
    #[serde(default)]
    pub step: u64,
    /// Folder of the snapshot, in the model's.
    #[serde(default)]
    pub snapshot: Option<PathBuf>,
}

/// The journal of a model, open for more.
pub(super) struct Journal {
    folder: PathBuf,
    pub record: ModelRecord,
    file: File,
}

impl Journal {
    /// Begins the journal of a new model in `folder`.
    pub fn create(folder: &Path, record: ModelRecord) -> io::Result<Self> {
        atomic_file::create_folder(folder)?;
        let file = append(&journal(folder, 0))?;
        let journal = Journal { folder: folder.to_owned(), record, file };
        journal.write_record()?;
        Ok(journal)
    }

    /// Opens the journal in `folder`, and reads the operations since the snapshot. One that was half
    /// written is left out: its client has no answer to its submission, and submits it again.
    pub fn open(folder: &Path) -> io::Result<(Self, Vec<(u64, Operation)>)> {
        let record: ModelRecord = serde_json::from_slice(&fs::read(folder.join(MODEL))?)?;
        let path = journal(folder, record.done);
        let mut all = Vec::new();
        if path.exists() {
            let mut file = File::open(&path)?;
            let mut whole = 0;
            while let Some((operation, bytes)) = entry(&mut file)? {
                all.push(operation);
                whole += bytes;
            }
            OpenOptions::new().write(true).open(&path)?.set_len(whole)?;
        }
        let file = append(&path)?;
        Ok((Journal { folder: folder.to_owned(), record, file }, all))
    }

    /// Appends an operation.
    pub fn append(&mut self, number: u64, operation: &Operation) -> io::Result<()> {
        let bytes = postcard::to_stdvec(&(number, operation)).map_err(io::Error::other)?;
        let mut entry = (bytes.len() as u64).to_le_bytes().to_vec();
        entry.extend(bytes);
        self.file.write_all(&entry)
    }

    /// Records a snapshot after operation `done`, and begins a new journal.
    pub fn shorten(&mut self, done: u64, step: u64, snapshot: PathBuf) -> io::Result<()> {
        let (before, old) = (journal(&self.folder, self.record.done), self.record.snapshot.take());
        self.file = append(&journal(&self.folder, done))?;
        (self.record.done, self.record.step, self.record.snapshot) = (done, step, Some(snapshot));
        self.write_record()?;
        atomic_file::remove(&before)?;
        match old {
            Some(old) if Some(&old) != self.record.snapshot.as_ref() => atomic_file::remove(&self.folder.join(old)),
            _ => Ok(()),
        }
    }

    fn write_record(&self) -> io::Result<()> {
        atomic_file::write(&self.folder.join(MODEL), serde_json::to_vec_pretty(&self.record)?)
    }
}

/// The record of a model, loaded or not.
pub(super) fn record(folder: &Path) -> io::Result<ModelRecord> {
    let found = [MODEL, UNLOADED].map(|name| folder.join(name)).into_iter().find(|path| path.exists());
    let path = found.ok_or_else(|| io::Error::from(io::ErrorKind::NotFound))?;
    Ok(serde_json::from_slice(&fs::read(path)?)?)
}

/// Names of the models in `models` that are not unloaded.
pub(super) fn loaded(models: &Path) -> io::Result<Vec<PathBuf>> {
    let entries = fs::read_dir(models)?.map(|entry| entry.map(|entry| entry.path())).collect::<io::Result<Vec<_>>>()?;
    Ok(entries.into_iter().filter(|path| path.join(MODEL).is_file()).collect())
}

/// Removes a model's journal and snapshots. Its saved weights stay.
pub(super) fn unload(folder: &Path) -> io::Result<()> {
    fs::rename(folder.join(MODEL), folder.join(UNLOADED))?;
    for entry in fs::read_dir(folder)? {
        let path = entry?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        if name.starts_with("journal-") || name.starts_with("snapshot-") {
            atomic_file::remove(&path)?;
        }
    }
    Ok(())
}

fn journal(folder: &Path, done: u64) -> PathBuf {
    folder.join(format!("journal-{done:09}"))
}

fn append(path: &Path) -> io::Result<File> {
    OpenOptions::new().create(true).append(true).open(path)
}

/// The next operation and its length with the prefix; `None` at the end, and before an entry that is
/// not whole.
fn entry(file: &mut File) -> io::Result<Option<((u64, Operation), u64)>> {
    let mut length = [0; 8];
    if file.read_exact(&mut length).is_err() {
        return Ok(None);
    }
    let length = u64::from_le_bytes(length);
    let mut bytes = Vec::new();
    file.take(length.min(LONGEST)).read_to_end(&mut bytes)?;
    if (bytes.len() as u64) < length {
        return Ok(None);
    }
    match postcard::from_bytes(&bytes) {
        Ok(operation) => Ok(Some((operation, length + 8))),
        Err(_) => Ok(None),
    }
}

#[cfg(test)]
mod tests {
    use rollflow_tinker::message::AdamParams;

    use super::*;

    #[test]
    fn whole_operations_are_read_again_and_a_torn_one_is_left_out() {
        let folder = tempfile::tempdir().unwrap();
        let folder = folder.path().join("m");
        let lora = LoraConfig { rank: 4, seed: Some(1), train_unembed: true, train_mlp: true, train_attn: true };
        let record = ModelRecord { id: "m".into(), session: "s".into(), lora, begins: None, done: 0, step: 0, snapshot: None };
        let mut journal = Journal::create(&folder, record.clone()).unwrap();
        let operations = [(1, Operation::Pass(vec![1, 2, 3])), (2, Operation::Update(AdamParams::default()))];
        operations.iter().for_each(|(number, operation)| journal.append(*number, operation).unwrap());
        journal.file.write_all(&[9, 0, 0, 0, 0, 0, 0, 0, 1]).unwrap();
        drop(journal);
        let (mut journal, read) = Journal::open(&folder).unwrap();
        assert_eq!((journal.record.clone(), read), (record, operations.to_vec()));
        journal.append(3, &operations[1].1).unwrap();
        journal.shorten(3, 1, "snapshot".into()).unwrap();
        journal.append(4, &operations[0].1).unwrap();
        drop(journal);
        let (journal, read) = Journal::open(&folder).unwrap();
        assert_eq!((journal.record.done, read), (3, vec![(4, operations[0].1.clone())]));
    }
}
