//! Where an interrupted run goes on (laws C1, C2).
//!
//! The newest intact checkpoint whose step stands in `metrics.jsonl` is the cut: everything after it is undone, in the logs and among the
//! checkpoints, and made again. Nothing is lost but the work since then. Dead letters stay: a group that fails again is there twice.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use rollflow::observe::logs::{last_step, rewind};
use rollflow::stages::train::Resumed;
use rollflow::train::checkpoint::{self, CHECKPOINTS};

/// A checkpoint to go on from.
pub struct ResumePoint {
    /// The checkpoint's folder.
    pub checkpoint: PathBuf,
    /// What the trainer and the admission knew.
    pub trainer: Resumed,
}

/// Finds the cut of the run in `run` and undoes what came after it. `None` when the run is to begin anew: it never came to a checkpoint.
pub fn rewind_to_checkpoint(run: &Path, say: impl Fn(&str)) -> Result<Option<ResumePoint>> {
    let checkpoints = run.join(CHECKPOINTS);
    let logged = last_step(&run.join("metrics.jsonl"))?;
    let (mut chosen, mut later) = (None, Vec::new());
    for found in checkpoint::intact(&checkpoints)? {
        match found {
            Ok((step, path)) if step <= logged => {
                chosen = Some((step, path));
                break;
            }
            Ok((step, path)) => later.push((step, path)),
            Err(error) => say(&format!("checkpoint left out: {error}")),
        }
    }
    if chosen.is_none()
        && let Some((step, path)) = later.pop()
    {
        say(&format!(
            "metrics.jsonl ends at step {logged}; the oldest checkpoint is of step {step}: the rows between them are missing"
        ));
        chosen = Some((step, path));
    }
    let step = chosen.as_ref().map_or(0, |(step, _)| *step);
    // What lies beyond the cut, and what is damaged, must not be taken for a checkpoint of the run that goes on.
    for (_, path) in checkpoint::named(&checkpoints)?.into_iter().filter(|(other, _)| *other > step) {
        let aside = checkpoint::set_aside(&path, "undone")?;
        say(&format!("set aside: {}", aside.display()));
    }
    for file in ["metrics.jsonl", "rollouts.jsonl", "evaluations.jsonl"] {
        rewind(&run.join(file), step)?;
    }
    let Some((step, checkpoint)) = chosen else {
        say("no checkpoint yet: the run begins anew");
        return Ok(None);
    };
    say(&format!("going on after step {step}, from {}", checkpoint.display()));
    let trainer = Resumed::read(&checkpoint).context("reading where the run stood")?;
    Ok(Some(ResumePoint { checkpoint, trainer }))
}
