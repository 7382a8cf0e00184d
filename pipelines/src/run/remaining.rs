//! Remaining steps of a run that is to be resumed. Only reads: a run without remaining steps, or whose
//! recipe asks for fewer than were taken, stays unchanged.

use std::path::{Path, PathBuf};

use anyhow::Result;
use rollflow::recipe::{Pipeline, Plan, parse};
use rollflow::train::checkpoint::{self, CHECKPOINTS};

use crate::run::record::{Record, State};
use crate::run::{RECIPE, SFT};

/// A resumed run whose recipe asks for fewer steps than its checkpoint has taken.
#[derive(Debug, thiserror::Error)]
#[error(
    "{}: `{key}` = {steps}, and the newest checkpoint has taken {taken} steps already; raise `{key}` above {taken}, or begin a new run",
    folder.display()
)]
pub struct TooFewSteps {
    /// The folder of the run, or of its supervised part.
    folder: PathBuf,
    key: &'static str,
    taken: u64,
    steps: u64,
}

/// Returns the key and the number of the steps of the run in `folder` if nothing is left to do: it took
/// all of them and ended, and its recipe is what it was.
///
/// # Errors
/// [`TooFewSteps`] if the run has taken more steps than the plan asks for.
pub fn complete(folder: &Path, plan: &Plan) -> Result<Option<(&'static str, u64)>> {
    if let (Pipeline::SftThenGrpo, Some(sft)) = (plan.pipeline, &plan.sft) {
        taken(&folder.join(SFT), "sft.steps", sft.steps)?;
    }
    let key = match plan.pipeline {
        Pipeline::Sft => "sft.steps",
        Pipeline::RewardModel => "reward_model.steps",
        Pipeline::Grpo | Pipeline::GrpoOffline | Pipeline::Dpo | Pipeline::SftThenGrpo => "train.steps",
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
