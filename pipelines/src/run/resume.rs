//! The point where an interrupted run resumes (laws C1, C2).
//!
//! The newest intact checkpoint is the cut: it was published after the rows of its steps were on disk. A
//! run that was stopped or failed may have saved a later one, whose rows it lost: an asynchronous run
//! continues from it, and others make the rows again. Everything after the cut is removed from logs and
//! checkpoints, and made again. Without a checkpoint the run starts again with empty logs.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use rollflow::observe::logs::{DEAD_LETTERS, last_step, rewind, rewind_events, rewind_to_lines};
use rollflow::recipe::{Pipeline, Plan, parse};
use rollflow::stages::train::Resumed;
use rollflow::train::checkpoint::{self, CHECKPOINTS};
use rollflow::util::atomic_file;

use crate::run::record::{Record, State};
use crate::run::{LOGS, RECIPE, SFT};

/// A checkpoint to resume from.
pub struct ResumePoint {
    /// The checkpoint's folder.
    pub checkpoint: PathBuf,
    /// State of trainer and admission.
    pub trainer: Resumed,
}

/// Where a run is cut: step and folder of its newest intact checkpoint.
pub type Cut = Option<(u64, PathBuf)>;

/// Finds the cut of the run in `run`: `None` if it has no checkpoint and starts again. Changes nothing.
/// `overlaps`: a checkpoint is taken although rows before it are missing.
///
/// # Errors
/// None of the checkpoints is intact, or one can't be read.
pub fn cut(run: &Path, overlaps: bool, say: impl Fn(&str)) -> Result<Cut> {
    let checkpoints = run.join(CHECKPOINTS);
    let logged = last_step(&run.join("metrics.jsonl"))?;
    let (mut chosen, mut later) = (None, None);
    for found in checkpoint::intact(&checkpoints)? {
        match found {
            Ok((step, path)) if overlaps || step <= logged => {
                chosen = Some((step, path));
                break;
            }
            Ok(beyond) => later = Some(beyond),
            Err(error) if checkpoint::may_be_intact(&error) => {
                bail!(
                    "{error}; the checkpoint may be intact: make it readable, or move its folder away to resume from an older one"
                )
            }
            Err(error) => say(&format!("checkpoint left out: {error}")),
        }
    }
    let chosen = chosen.or(later);
    if chosen.is_none() && !checkpoint::named(&checkpoints)?.is_empty() {
        let shown = checkpoints.display();
        bail!("{shown} has no intact checkpoint; restore the files above, or move the folder away to begin again at step 1");
    }
    Ok(chosen)
}

/// Undoes everything after the cut.
pub fn rewind_to(run: &Path, chosen: Cut, say: impl Fn(&str)) -> Result<Option<ResumePoint>> {
    let checkpoints = run.join(CHECKPOINTS);
    checkpoint::remove_leftovers(&checkpoints)?;
    let logged = last_step(&run.join("metrics.jsonl"))?;
    // A run that was stopped or failed dropped the rows of its last steps, or the log was edited.
    if let Some((step, _)) = chosen.as_ref().filter(|(step, _)| *step > logged) {
        say(&format!(
            "metrics.jsonl ends at step {logged}, and the checkpoint is of step {step}: the rows between them are missing"
        ));
    }
    let step = chosen.as_ref().map(|(step, _)| *step);
    // What lies beyond the cut, and what is damaged, must not be taken for a checkpoint of the resumed run.
    for (_, path) in checkpoint::named(&checkpoints)?.into_iter().filter(|(other, _)| Some(*other) > step) {
        let aside = checkpoint::set_aside(&path)?;
        say(&format!("set aside: {}", aside.display()));
    }
    for file in LOGS {
        rewind(&run.join(file), step)?;
    }
    rewind_events(run, step)?;
    remove_answers(&run.join("evaluations"), step)?;
    let letters = run.join(DEAD_LETTERS);
    let Some((step, checkpoint)) = chosen else {
        rewind_to_lines(&letters, 0)?;
        say("no checkpoint yet: the run begins again");
        return Ok(None);
    };
    say(&format!("going on after step {step}, from {}", checkpoint.display()));
    // The process may have been killed after it published the checkpoint and before it said so.
    checkpoint::point_to(&checkpoint)?;
    let trainer = Resumed::read(&checkpoint).context("reading where the run stood")?;
    trainer.dead_letters.map_or(Ok(()), |lines| rewind_to_lines(&letters, lines))?;
    Ok(Some(ResumePoint { checkpoint, trainer }))
}

/// Removes the answers of evaluations after `step`.
fn remove_answers(folder: &Path, step: Option<u64>) -> Result<()> {
    let Ok(entries) = std::fs::read_dir(folder) else { return Ok(()) };
    for entry in entries {
        let path = entry?.path();
        let of = path.file_stem().and_then(|name| checkpoint::parse_step(name.to_str()?));
        if of.is_some() && of > step {
            atomic_file::remove(&path).with_context(|| format!("removing {}", path.display()))?;
        }
    }
    Ok(())
}

/// A resumed run whose recipe asks for fewer steps than its checkpoint has taken.
#[derive(Debug, thiserror::Error)]
#[error(
    "{}: `{key}` = {steps}, and the newest checkpoint has taken {taken} steps already; raise `{key}` above {taken}, or begin a new run",
    folder.display()
)]
pub(crate) struct TooFewSteps {
    /// The folder of the run, or of its supervised part.
    folder: PathBuf,
    key: &'static str,
    taken: u64,
    steps: u64,
}

/// Returns the key and the number of the steps of the run in `folder` if nothing is left to do: it took
/// all of them and ended, and its recipe is what it was. Only reads.
///
/// # Errors
/// [`TooFewSteps`] if the run has taken more steps than the plan asks for.
pub(crate) fn complete(folder: &Path, plan: &Plan) -> Result<Option<(&'static str, u64)>> {
    if let (Pipeline::SftThenGrpo, Some(sft)) = (plan.pipeline, &plan.sft) {
        taken(&folder.join(SFT), "sft.steps", sft.steps)?;
    }
    let key = match plan.pipeline {
        Pipeline::Sft => "sft.steps",
        Pipeline::RewardModel => "reward_model.steps",
        Pipeline::Grpo | Pipeline::Distill | Pipeline::GrpoOffline | Pipeline::Dpo | Pipeline::SftThenGrpo => "train.steps",
    };
    let steps = plan.steps();
    // A changed recipe may fail for a reason that only the run finds. An earlier version spelled out other keys.
    let before = || std::fs::read_to_string(folder.join(RECIPE)).ok().and_then(|text| parse(RECIPE, &text, &[]).ok());
    let unchanged = || before().is_some_and(|before| before == *plan);
    let done = taken(folder, key, steps)? == Some(steps) && Record::read(folder)?.state == State::Finished && unchanged();
    Ok(done.then_some((key, steps)))
}

/// Steps of the newest checkpoint, if there is one. Where the result decides, all its files are
/// verified.
fn taken(folder: &Path, key: &'static str, steps: u64) -> Result<Option<u64>> {
    let checkpoints = folder.join(CHECKPOINTS);
    let newest = match checkpoint::list(&checkpoints)?.last() {
        Some((step, _)) if *step >= steps => checkpoint::intact(&checkpoints)?.find_map(Result::ok).map(|(step, _)| step),
        newest => newest.map(|(step, _)| *step),
    };
    match newest {
        Some(taken) if taken > steps => Err(TooFewSteps { folder: folder.to_owned(), key, taken, steps }.into()),
        newest => Ok(newest),
    }
}
