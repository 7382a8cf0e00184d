//! Checkpoints in an object store: uploaded in the background when they are complete, and fetched to
//! resume on another machine.
//!
//! An upload holds what a resume needs: the checkpoint, the recipe, the logs up to then, the reference
//! policy that the run keeps, and the checkpoint of a supervised part that the run began from. It is one
//! artefact, whose manifest comes last, so that an upload that was interrupted is never resumed from.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use rollflow::observe::Console;
use rollflow::observe::logs::DEAD_LETTERS;
use rollflow::train::checkpoint;
use rollflow::util::{atomic_file, untrusted};
use rollflow::weights::{CHECKPOINTS, Publisher, Puller, Store};

use crate::assemble::models::Lineage;
use crate::run::{LINEAGE, LOGS, RECIPE, RECORD};

/// Interval of the looks for a new checkpoint.
const LOOK: Duration = Duration::from_secs(1);

/// Hard links to what is being uploaded. A kill leaves it for the next start to delete.
const STAGING: &str = ".upload.writing";

/// Folders that a resume needs, in addition to a checkpoint.
const FOLDERS: [&str; 1] = ["reference"];

/// Uploads of a run's checkpoints. Dropping it uploads the newest one first.
pub(crate) struct Uploads {
    stop: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Uploads {
    /// Starts to upload the checkpoints of the run in `run`, of which there may be some already.
    pub(crate) fn start(run: &Path, mut publisher: Publisher, console: Console) -> Result<Self> {
        let (stop, stopped) = channel();
        let (run, mut done, mut told) = (run.to_owned(), None, None);
        let thread = std::thread::Builder::new().name("upload".into()).spawn(move || {
            loop {
                let ends = stopped.recv_timeout(LOOK) != Err(RecvTimeoutError::Timeout);
                match upload_newest(&run, &mut publisher, done) {
                    Ok(newest) => done = newest,
                    Err(error) => {
                        let error = format!("{error:#}");
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
        Ok(Uploads { stop: Some(stop), thread: Some(thread.context("starting the thread that uploads checkpoints")?) })
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

/// Uploads the newest complete checkpoint, unless it is of step `done`. Returns its step.
fn upload_newest(run: &Path, publisher: &mut Publisher, done: Option<u64>) -> Result<Option<u64>> {
    let Some((step, path)) = checkpoint::list(&run.join(checkpoint::CHECKPOINTS))?.pop() else { return Ok(done) };
    if done == Some(step) {
        return Ok(done);
    }
    let staging = run.join(STAGING);
    atomic_file::remove(&staging)?;
    let uploaded = stage(run, &path, &staging).and_then(|()| {
        let folder: Arc<Path> = staging.clone().into();
        publisher.publish(step, &folder).context("uploading it")
    });
    atomic_file::remove(&staging)?;
    let uploaded = uploaded.with_context(|| path.display().to_string())?;
    tracing::info!("Uploaded checkpoint of step {step} to {} ({} bytes)", publisher.store().name(), uploaded.stored);
    Ok(Some(step))
}

/// Links everything that a resume needs into `staging`, so that nothing is pruned during the upload.
fn stage(run: &Path, path: &Path, staging: &Path) -> Result<()> {
    let name = path.file_name().unwrap_or_default();
    link_all(path, &staging.join(checkpoint::CHECKPOINTS).join(name))?;
    for file in [RECIPE, RECORD, LINEAGE, DEAD_LETTERS].into_iter().chain(LOGS) {
        // Logs grow, so they are copied.
        if run.join(file).is_file() {
            fs::copy(run.join(file), staging.join(file)).with_context(|| format!("copying {file}"))?;
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

/// Folder of a fetch that has not ended.
fn hidden(run: &Path) -> PathBuf {
    run.with_file_name(format!(".{}.fetching", run.file_name().unwrap_or_default().to_string_lossy()))
}
