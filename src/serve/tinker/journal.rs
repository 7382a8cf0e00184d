//! A model on disk: what it is, its two newest snapshots, and the operations since the older. A
//! server that was killed makes the same model of them again, to the bit, and the same answers: those
//! since the older snapshot, because a client may not have got the newest.
//!
//! An entry is its length and its checksum, in four bytes each, and the operation.

use std::collections::BTreeMap;
use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use rollflow_tinker::message::LoraConfig;
use serde::{Deserialize, Serialize};

use super::operation::Operation;
use crate::util::{atomic_file, lock_file};

const MODEL: &str = "model.json";

/// The record of a model that was unloaded, whose weights stay.
const UNLOADED: &str = "unloaded.json";

/// What a model is.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct ModelRecord {
    pub id: String,
    pub session: String,
    pub lora: LoraConfig,
    /// Path of the weights that it began with, and true if their optimizer was loaded, too.
    #[serde(default)]
    pub begins: Option<(String, bool)>,
    /// Snapshot that a restart begins with.
    #[serde(default)]
    pub base: Snapshot,
    /// The snapshot after it.
    #[serde(default)]
    pub newest: Option<Snapshot>,
    /// When it was created, in seconds since 1970.
    #[serde(default)]
    pub created: u64,
}

/// A model of the Tinker API on disk: a folder with `metrics.jsonl`, a row per update.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TinkerModel {
    /// Its name.
    pub id: String,
    /// The session that created it.
    pub session: String,
    /// Rank of its adapters; 0 if all weights are trained.
    pub rank: usize,
    /// Seed of its adapters.
    pub seed: u64,
    /// When it was created, in seconds since 1970.
    pub created: u64,
    /// True if it was unloaded. Its saved weights are still there.
    pub unloaded: bool,
}

impl TinkerModel {
    /// Returns true if `folder` is one of a model.
    pub fn is_in(folder: &Path) -> bool {
        [MODEL, UNLOADED].iter().any(|name| folder.join(name).is_file())
    }

    /// Reads the model in `folder`.
    ///
    /// # Errors
    /// There is none, or its record is damaged.
    pub fn read(folder: &Path) -> io::Result<Self> {
        let ModelRecord { id, session, lora, created, .. } = record(folder)?;
        let unloaded = !folder.join(MODEL).exists();
        Ok(TinkerModel { id, session, rank: lora.rank, seed: lora.seed.unwrap_or(0), created, unloaded })
    }
}

/// A state of a model.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(super) struct Snapshot {
    /// Operations that it holds; 0 is the beginning.
    pub done: u64,
    /// Updates that it holds.
    pub step: u64,
    /// Folder in the model's; `None` for the beginning.
    pub folder: Option<PathBuf>,
}

/// The journal of a model, open for more.
pub(super) struct Journal {
    folder: PathBuf,
    pub record: ModelRecord,
    file: File,
    /// Length of the entries in the file, in bytes.
    end: u64,
    /// Held while a server works on the model.
    _lock: File,
}

impl Journal {
    /// Begins the journal of a new model in `folder`.
    pub fn create(folder: &Path, record: ModelRecord) -> io::Result<Self> {
        atomic_file::create_folder(folder)?;
        let lock = lock(folder)?;
        let file = append(&journal(folder, 0))?;
        write_record(folder, &record)?;
        Ok(Journal { folder: folder.to_owned(), record, file, end: 0, _lock: lock })
    }

    /// Opens the journal in `folder`, and reads the operations since the older snapshot. A last one that
    /// was half written is cut off: its client has no answer to its submission, and submits it again.
    ///
    /// # Errors
    /// Another server works on the model, or a file can't be read or is damaged.
    pub fn open(folder: &Path) -> io::Result<(Self, BTreeMap<u64, Operation>)> {
        let lock = lock(folder)?;
        let record: ModelRecord = serde_json::from_slice(&fs::read(folder.join(MODEL))?)?;
        let all = operations(folder, &record)?;
        let file = append(&journal(folder, record.newest.as_ref().unwrap_or(&record.base).done))?;
        let end = file.metadata()?.len();
        Ok((Journal { folder: folder.to_owned(), record, file, end, _lock: lock }, all))
    }

    /// Appends an operation, durably (law C3). It replaces an earlier one of the same number.
    pub fn append(&mut self, number: u64, operation: &Operation) -> io::Result<()> {
        self.append_all([(&number, operation)])
    }

    /// Appends several as [`Journal::append`] does one.
    pub fn append_all<'a>(&mut self, operations: impl IntoIterator<Item = (&'a u64, &'a Operation)>) -> io::Result<()> {
        let entries = entries(operations)?;
        // Cuts off a part that a failed append left.
        self.file.set_len(self.end)?;
        self.file.write_all(&entries)?;
        self.file.sync_data()?;
        self.end += entries.len() as u64;
        Ok(())
    }

    /// Refuses the operations up to `done` that saved these weights ([`Operation::saves`]), so that a
    /// restart does not save them again. Returns the refusals.
    pub fn forget(&mut self, saved: &str, done: u64) -> io::Result<BTreeMap<u64, Operation>> {
        let mut all = operations(&self.folder, &self.record)?;
        all.retain(|number, operation| *number <= done && operation.saves(&self.record.id).as_deref() == Some(saved));
        let why = format!("the weights {saved} of this model were deleted");
        let refused: BTreeMap<u64, Operation> = all.into_keys().map(|number| (number, Operation::Refused(why.clone()))).collect();
        self.append_all(&refused)?;
        Ok(refused)
    }

    /// Records a snapshot, and begins a new journal with the operations that `wait`. What only the
    /// snapshot before the last needs is removed. After an error the old journal continues.
    pub fn snapshot(&mut self, newest: Snapshot, wait: &BTreeMap<u64, Operation>) -> io::Result<()> {
        let path = journal(&self.folder, newest.done);
        atomic_file::write(&path, entries(wait)?)?;
        let file = append(&path)?;
        let end = file.metadata()?.len();
        let mut record = self.record.clone();
        let old = record.newest.replace(newest).map(|before| std::mem::replace(&mut record.base, before));
        write_record(&self.folder, &record)?;
        (self.record, self.file, self.end) = (record, file, end);
        let Some(old) = old else { return Ok(()) };
        atomic_file::remove(&journal(&self.folder, old.done))?;
        old.folder.map_or(Ok(()), |folder| atomic_file::remove(&self.folder.join(folder)))
    }
}

/// Takes the lock of a folder that one server at a time works on.
pub(super) fn lock(folder: &Path) -> io::Result<File> {
    lock_file::take(&folder.join(".lock")).map_err(|error| match error {
        TryLockError::WouldBlock => io::Error::new(
            io::ErrorKind::WouldBlock,
            format!("another server works on {}; stop it, or choose another folder", folder.display()),
        ),
        TryLockError::Error(error) => error,
    })
}

fn write_record(folder: &Path, record: &ModelRecord) -> io::Result<()> {
    atomic_file::write(&folder.join(MODEL), serde_json::to_vec_pretty(record)?)
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

/// The operations of a model since the older snapshot.
fn operations(folder: &Path, record: &ModelRecord) -> io::Result<BTreeMap<u64, Operation>> {
    let mut all = BTreeMap::new();
    for snapshot in [Some(&record.base), record.newest.as_ref()].into_iter().flatten() {
        read(&journal(folder, snapshot.done), &mut all)?;
    }
    // A later journal may refuse an operation of an earlier one.
    Ok(all.split_off(&(record.base.done + 1)))
}

fn journal(folder: &Path, done: u64) -> PathBuf {
    folder.join(format!("journal-{done:09}"))
}

fn append(path: &Path) -> io::Result<File> {
    OpenOptions::new().create(true).append(true).open(path)
}

fn entry(number: u64, operation: &Operation) -> io::Result<Vec<u8>> {
    let bytes = postcard::to_stdvec(&(number, operation)).map_err(io::Error::other)?;
    let length = u32::try_from(bytes.len()).map_err(io::Error::other)?;
    Ok([&length.to_le_bytes()[..], &crc32fast::hash(&bytes).to_le_bytes(), &bytes].concat())
}

fn entries<'a>(operations: impl IntoIterator<Item = (&'a u64, &'a Operation)>) -> io::Result<Vec<u8>> {
    let each = operations.into_iter().map(|(number, operation)| entry(*number, operation));
    Ok(each.collect::<io::Result<Vec<_>>>()?.concat())
}

/// Reads the operations of a journal, and cuts off a last one that is not whole. A loss of power may leave
/// one of full length with other bytes, or zeros.
///
/// # Errors
/// The file can't be read, or an entry before its end is damaged.
fn read(path: &Path, all: &mut BTreeMap<u64, Operation>) -> io::Result<()> {
    let bytes = match fs::read(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        bytes => bytes?,
    };
    let mut rest = &bytes[..];
    while let Some((length, after)) = rest.split_first_chunk::<4>()
        && let Some((sum, after)) = after.split_first_chunk::<4>()
    {
        let (length, sum) = (u32::from_le_bytes(*length), u32::from_le_bytes(*sum));
        // Journals before the checksum have 0 there.
        let own = after.get(..length as usize).filter(|own| sum == 0 || sum == crc32fast::hash(own));
        let decoded = own.and_then(|own| postcard::from_bytes::<(u64, Operation)>(own).ok()).filter(|(number, _)| *number > 0);
        let Some((number, operation)) = decoded else {
            let is_last = after.len() <= length as usize || rest.iter().all(|byte| *byte == 0);
            // One bit of the length is wrong if the checksum is right with another.
            let fits = |bit: u32| after.get(..(length ^ 1 << bit) as usize).is_some_and(|own| sum == crc32fast::hash(own));
            if is_last && !(sum != 0 && (0..u32::BITS).any(fits)) {
                break;
            }
            let why = format!(
                "{}: the operation at byte {} is damaged; restore the file, or move the model's folder away to start without it",
                path.display(),
                bytes.len() - rest.len()
            );
            return Err(io::Error::new(io::ErrorKind::InvalidData, why));
        };
        all.insert(number, operation);
        rest = &after[length as usize..];
    }
    if rest.is_empty() {
        return Ok(());
    }
    tracing::warn!("{}: the last {} bytes are a part of an operation, and are cut off", path.display(), rest.len());
    let file = OpenOptions::new().write(true).open(path)?;
    file.set_len((bytes.len() - rest.len()) as u64)?;
    file.sync_data()
}

#[cfg(test)]
pub(super) mod tests {
    use rollflow_tinker::message::AdamParams;

    use super::*;

    /// A part of an operation of nine bytes.
    const TORN: [u8; 9] = [9, 0, 0, 0, 1, 1, 1, 1, 1];

    pub(in super::super) fn new_record() -> ModelRecord {
        let lora = LoraConfig { rank: 4, seed: Some(1), train_unembed: true, train_mlp: true, train_attn: true };
        let (base, newest) = (Snapshot::default(), None);
        ModelRecord { id: "m".into(), session: "s".into(), lora, begins: None, base, newest, created: 1 }
    }

    #[test]
    fn whole_operations_are_read_again_and_a_torn_one_is_left_out() {
        let folder = tempfile::tempdir().unwrap();
        let folder = folder.path().join("m");
        let record = new_record();
        let mut journal = Journal::create(&folder, record.clone()).unwrap();
        let (pass, update) = (Operation::Pass(vec![1, 2, 3]), Operation::Update(AdamParams::default()));
        journal.append(1, &pass).unwrap();
        // A failed append leaves a part, which the next one cuts off.
        journal.file.write_all(&TORN).unwrap();
        journal.append(2, &update).unwrap();
        journal.file.write_all(&TORN).unwrap();
        assert!(Journal::open(&folder).err().unwrap().to_string().contains("another server works on"));
        drop(journal);
        assert_eq!(TinkerModel::read(&folder).unwrap().rank, 4);
        let (mut journal, read) = Journal::open(&folder).unwrap();
        assert_eq!((journal.record.clone(), read), (record, BTreeMap::from([(1, pass.clone()), (2, update.clone())])));
        let snapshot = |done| Snapshot { done, step: done / 2, folder: None };
        // Operation 3 waits when the first snapshot is taken.
        journal.append(3, &pass).unwrap();
        journal.snapshot(snapshot(2), &BTreeMap::from([(3, pass.clone())])).unwrap();
        journal.append(4, &update).unwrap();
        drop(journal);
        let (mut journal, read) = Journal::open(&folder).unwrap();
        assert_eq!(read.into_keys().collect::<Vec<_>>(), [1, 2, 3, 4], "since the older snapshot, the beginning");
        journal.snapshot(snapshot(4), &BTreeMap::new()).unwrap();
        journal.append(5, &pass).unwrap();
        drop(journal);
        let (journal, read) = Journal::open(&folder).unwrap();
        assert_eq!((journal.record.base, journal.record.newest), (snapshot(2), Some(snapshot(4))));
        assert_eq!(read.into_keys().collect::<Vec<_>>(), [3, 4, 5]);
        assert!(!folder.join("journal-000000000").exists());
    }

    #[test]
    fn an_operation_whose_weights_were_deleted_is_refused_after_a_restart() {
        let folder = tempfile::tempdir().unwrap();
        let folder = folder.path().join("m");
        let mut journal = Journal::create(&folder, new_record()).unwrap();
        let save = |name: &str| Operation::Save(name.to_owned());
        let sampler = Operation::Sampler { session: "m.a".to_owned(), name: Some("a".to_owned()) };
        let mut all = BTreeMap::from([(1, save("a")), (2, sampler), (3, save("b")), (4, save("a"))]);
        journal.append_all(&all).unwrap();
        let snapshot = |done| Snapshot { done, step: 0, folder: None };
        journal.snapshot(snapshot(2), &all.split_off(&3)).unwrap();
        // The last is not done yet.
        for (saved, number) in [("weights/a", 1), ("sampler_weights/a", 2)] {
            assert!(journal.forget(saved, 3).unwrap().keys().eq(&[number]), "{saved}");
        }
        drop(journal);
        let (mut journal, read) = Journal::open(&folder).unwrap();
        let refused = |number: u64| matches!(&read[&number], Operation::Refused(why) if why.contains("were deleted"));
        assert_eq!([1, 2, 3, 4].map(refused), [true, true, false, false]);
        journal.snapshot(snapshot(3), &BTreeMap::from([(4, save("a"))])).unwrap();
        drop(journal);
        let (_, read) = Journal::open(&folder).unwrap();
        assert!(read.keys().eq(&[3, 4]), "a refusal of an operation before the older snapshot is no operation");
    }

    #[test]
    fn a_last_operation_that_a_loss_of_power_left_with_other_bytes_is_cut_off() {
        let folder = tempfile::tempdir().unwrap();
        let file = journal(folder.path(), 0);
        let [first, last] = [1, 2].map(|number| entry(number, &Operation::Pass(vec![7; 20])).unwrap());
        let mut other = last.clone();
        other[20] ^= 1;
        let zeros_after = |bytes: usize| [&last[..bytes], &vec![0; last.len() - bytes]].concat();
        for torn in [other, zeros_after(0), zeros_after(4), zeros_after(8), last[..20].to_vec()] {
            fs::write(&file, [&first[..], &torn].concat()).unwrap();
            let mut all = BTreeMap::new();
            read(&file, &mut all).unwrap();
            assert!(all.keys().eq(&[1]) && fs::read(&file).unwrap() == first, "{torn:?}: {all:?}");
        }
    }

    #[test]
    fn a_damaged_operation_before_others_is_an_error_that_names_the_file_and_cuts_nothing_law_c3() {
        let folder = tempfile::tempdir().unwrap();
        let file = journal(folder.path(), 0);
        let pass = |number| entry(number, &Operation::Pass(vec![number as u8; 20])).unwrap();
        let torn = [pass(1), TORN.to_vec(), pass(2), pass(3)].concat();
        let mut flipped = [pass(1), pass(2), pass(3)].concat();
        flipped[40] ^= 1;
        // The length of the second reaches beyond the file.
        let mut long = [pass(1), pass(2), pass(3)].concat();
        long[pass(1).len() + 3] ^= 0x80;
        for bytes in [torn, flipped, long] {
            fs::write(&file, &bytes).unwrap();
            let error = read(&file, &mut BTreeMap::new()).unwrap_err().to_string();
            assert!(error.contains("journal-000000000") && error.contains("is damaged"), "{error}");
            assert_eq!(fs::read(&file).unwrap(), bytes);
        }
        // A journal before the checksum.
        let mut old = pass(4);
        old[4..8].fill(0);
        fs::write(&file, old).unwrap();
        let mut all = BTreeMap::new();
        read(&file, &mut all).unwrap();
        assert!(all.contains_key(&4));
    }
}
