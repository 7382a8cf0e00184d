//! Checkpoints in an object store: uploaded in the background when they are complete, and fetched to
//! resume on another machine.
//!
//! An upload holds what a resume needs: the checkpoint, the recipe, the logs up to then, the reference
//! policy that the run keeps, and the checkpoint of a supervised part that the run began from. While that
//! part trains, an upload holds the part's newest checkpoint, recipe and logs. An upload is one artefact,
//! whose manifest comes last, so that an upload that was interrupted is never resumed from.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::{Acquire, Release};
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use rollflow::observe::Console;
use rollflow::observe::logs::DEAD_LETTERS;
use rollflow::train::checkpoint;
use rollflow::util::causes::full_message;
use rollflow::util::{atomic_file, untrusted};
use rollflow::weights::{CHECKPOINTS, Publisher, Puller, Store};
use serde::{Deserialize, Serialize};

use crate::assemble::models::Lineage;
use crate::run::{LINEAGE, LOGS, RECIPE, RECORD, SFT};

/// Interval of the looks for a new checkpoint.
const LOOK: Duration = Duration::from_secs(1);

/// Hard links to what is being uploaded. A kill leaves it for the next start to delete.
const STAGING: &str = ".upload.writing";

/// What was uploaded last, so that a resumed run does not upload it again.
const UPLOADED: &str = ".uploaded";

/// Files that a resume needs, in addition to the logs.
const FILES: [&str; 4] = [RECIPE, RECORD, LINEAGE, DEAD_LETTERS];
/// So are these: what each tracker has of the run.
const TRACKERS: [&str; 3] = ["trackers/wandb.json", "trackers/trackio.json", "trackers/mlflow.json"];
/// Folders that a resume needs, in addition to a checkpoint.
const FOLDERS: [&str; 1] = ["reference"];

/// Uploads of a run's checkpoints. Dropping it uploads the newest one first.
pub(crate) struct Uploads {
    stop: Option<Sender<()>>,
    /// If true, checkpoints of the supervised part are uploaded, too.
    of_part: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Uploads {
    /// Starts to upload the checkpoints of the run in `run`, of which there may be some already.
    pub(crate) fn start(run: &Path, mut publisher: Publisher, console: Console) -> Result<Self> {
        let (stop, stopped) = channel();
        let (run, mut told, of_part) = (run.to_owned(), None, Arc::new(AtomicBool::new(false)));
        let with_part = of_part.clone();
        let mut done = fs::read(run.join(UPLOADED)).ok().and_then(|text| serde_json::from_slice(&text).ok());
        let thread = std::thread::Builder::new().name("upload".into()).spawn(move || {
            loop {
                let ends = stopped.recv_timeout(LOOK) != Err(RecvTimeoutError::Timeout);
                match upload_newest(&run, with_part.load(Acquire), &mut publisher, &mut done) {
                    Ok(()) => {}
                    Err(error) => {
                        let error = full_message(error.as_ref());
                        if told.as_ref() != Some(&error) {
                            console.warn(&untrusted::line(&format!("warning: a checkpoint was not uploaded: {error}")));
                            told = Some(error);
                        }
                    }
                }
                if ends {
                    return;
                }
            }
        });
        let thread = thread.context("starting the thread that uploads checkpoints")?;
        Ok(Uploads { stop: Some(stop), of_part, thread: Some(thread) })
    }

    /// Uploads the checkpoints of the supervised part from now on, too.
    pub(crate) fn include_part(&self) {
        self.of_part.store(true, Release);
    }
}

impl Drop for Uploads {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take() {
            thread.join().ok();
        }
    }
}

/// A checkpoint in a store.
#[derive(PartialEq, Serialize, Deserialize)]
struct Uploaded {
    store: String,
    /// Folder of the checkpoint, in the run's.
    checkpoint: PathBuf,
    /// Its list of files with their checksums.
    metadata: String,
    /// Trackers that had begun the run.
    #[serde(default)]
    trackers: Vec<String>,
}

/// Uploads the newest complete checkpoint, unless it is `done`. `with_part`: also one of the supervised part.
fn upload_newest(run: &Path, with_part: bool, publisher: &mut Publisher, done: &mut Option<Uploaded>) -> Result<()> {
    let newest = |folder: &Path| Ok::<_, anyhow::Error>(checkpoint::list(&folder.join(checkpoint::CHECKPOINTS))?.pop());
    let of_part = || if with_part && Lineage::read(run)?.is_none() { newest(&run.join(SFT)) } else { Ok(None) };
    let Some((step, path)) = newest(run)?.map_or_else(of_part, |of_run| Ok(Some(of_run)))? else { return Ok(()) };
    let found = Uploaded {
        store: publisher.store().name().to_owned(),
        checkpoint: path.strip_prefix(run).unwrap_or(&path).to_owned(),
        metadata: fs::read_to_string(path.join(checkpoint::METADATA)).with_context(|| path.display().to_string())?,
        trackers: TRACKERS.into_iter().filter(|file| run.join(file).exists()).map(str::to_owned).collect(),
    };
    if done.as_ref() == Some(&found) {
        return Ok(());
    }
    let staging = run.join(STAGING);
    atomic_file::remove(&staging)?;
    let uploaded = stage(run, &found.checkpoint, &staging).and_then(|()| {
        let folder: Arc<Path> = staging.clone().into();
        publisher.publish(step, &folder).context("uploading it")
    });
    atomic_file::remove(&staging)?;
    let uploaded = uploaded.with_context(|| path.display().to_string())?;
    tracing::info!("Uploaded checkpoint of step {step} to {} ({} bytes)", publisher.store().name(), uploaded.stored);
    atomic_file::write(&run.join(UPLOADED), serde_json::to_string(&found)?)?;
    *done = Some(found);
    Ok(())
}

/// Links everything that a resume needs into `staging`, so that nothing is pruned during the upload.
fn stage(run: &Path, checkpoint: &Path, staging: &Path) -> Result<()> {
    link_all(&run.join(checkpoint), &staging.join(checkpoint))?;
    let parts: &[&str] = if checkpoint.starts_with(SFT) { &["", SFT] } else { &[""] };
    for (part, file) in parts.iter().flat_map(|part| FILES.into_iter().chain(TRACKERS).chain(LOGS).map(move |file| (part, file)))
    {
        let (from, to) = (run.join(part).join(file), staging.join(part).join(file));
        // Logs grow, so they are copied.
        if from.is_file() {
            to.parent().map_or(Ok(()), fs::create_dir_all).with_context(|| to.display().to_string())?;
            fs::copy(&from, &to).with_context(|| format!("copying {}", from.display()))?;
        }
    }
    for folder in FOLDERS.into_iter().filter(|folder| run.join(folder).is_dir()) {
        link_all(&run.join(folder), &staging.join(folder))?;
    }
    if let Some(Lineage { checkpoint, .. }) = Lineage::read(run)?.filter(|lineage| lineage.checkpoint.is_relative()) {
        // Whole, as its list of files says.
        link_all(&run.join(&checkpoint), &staging.join(&checkpoint))?;
    }
    Ok(())
}

fn link_all(from: &Path, to: &Path) -> Result<()> {
    fs::create_dir_all(to).with_context(|| to.display().to_string())?;
    for entry in fs::read_dir(from).with_context(|| from.display().to_string())? {
        let entry = entry?;
        let (path, to) = (entry.path(), to.join(entry.file_name()));
        match path.is_dir() {
            true => link_all(&path, &to)?,
            // A disk without hard links.
            false => fs::hard_link(&path, &to)
                .or_else(|_| fs::copy(&path, &to).map(drop))
                .with_context(|| path.display().to_string())?,
        }
    }
    Ok(())
}

/// Fetches the newest complete checkpoint of a run's store, with its recipe and logs, into the folder
/// `run`, which must not exist. Interrupted and begun again, it fetches what is missing.
pub(crate) fn fetch(address: &str, ca_file: Option<&Path>, run: &Path) -> Result<()> {
    ensure!(
        run.symlink_metadata().is_err(),
        "{} exists already; give --out another folder, or resume the run that is there",
        run.display()
    );
    let store = Store::open(address, ca_file)?.below(CHECKPOINTS);
    let pulls = hidden(run);
    let pulled = Puller::open(store, &pulls, 1)?.pull(None)?;
    atomic_file::publish(&pulled.folder, run).with_context(|| format!("writing {}", run.display()))?;
    atomic_file::remove(&pulls).with_context(|| format!("removing {}", pulls.display()))
}

/// Number and bytes of the files that a fetch into the folder `run` has so far.
pub(crate) fn fetched(run: &Path) -> (u64, u64) {
    fn below(folder: &Path) -> (u64, u64) {
        let entries = fs::read_dir(folder).into_iter().flatten().flatten();
        // A file that was moved meanwhile is counted the next time.
        let size = |entry: fs::DirEntry| match entry.metadata() {
            Ok(of) if of.is_dir() => below(&entry.path()),
            of => (1, of.map_or(0, |of| of.len())),
        };
        entries.map(size).fold((0, 0), |sum, size| (sum.0 + size.0, sum.1 + size.1))
    }
    below(&hidden(run))
}

/// Folder of a fetch that has not ended.
fn hidden(run: &Path) -> PathBuf {
    run.with_file_name(format!(".{}.fetching", run.file_name().unwrap_or_default().to_string_lossy()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn checkpoints_of_a_supervised_part_are_uploaded_only_once_it_was_rewound() {
        let folder = tempfile::tempdir().unwrap();
        let [run, store] = ["run", "store"].map(|name| folder.path().join(name));
        checkpoint::write(&run.join(SFT).join(checkpoint::CHECKPOINTS), 1, Default::default(), |_| Ok(())).unwrap();
        let mut publisher = Publisher::new(Store::open(store.to_str().unwrap(), None).unwrap(), 1, 1);
        let mut uploaded = |with_part| {
            let mut done = None;
            upload_newest(&run, with_part, &mut publisher, &mut done).unwrap();
            done.map(|done| done.checkpoint)
        };
        assert_eq!([false, true].map(&mut uploaded), [None, Some("sft/checkpoints/step_000001".into())]);
    }
}
