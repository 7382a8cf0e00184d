//! Remaining steps of a run that is to be resumed. Only reads: a run without remaining steps, or whose
//! recipe asks for fewer than were taken, stays unchanged.

use std::path::{Path, PathBuf};

use anyhow::Result;
use rollflow::recipe::{Pipeline, Plan, parse};
use rollflow::train::checkpoint::{self, CHECKPOINTS};

use crate::run::files::RECIPE;
use crate::run::files::SFT;
use crate::run::record::{Record, State};

/// A resumed run whose recipe asks for fewer steps than its checkpoint has taken.
#[derive(Debug, thiserror::Error)]
#[error(
    "{}: `{key}` = {steps}, and the newest checkpoint has taken {taken} steps already; raise `{key}` above {taken}, or begin a new run",
    folder.display()
)]
pub struct TooFewSteps {
    /// The folder of the run, or of its supervised part.
    pub folder: PathBuf,
    /// The key to raise.
    pub key: &'static str,
    /// Steps that the checkpoint has taken.
    pub taken: u64,
    /// Steps that the run is to take.
    pub steps: u64,
}

/// Remaining work of a resumed run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Remaining {
    /// Steps, or the end of the last one: a report, a record.
    Work,
    /// Nothing: it took all of its steps and ended, and its recipe is what it was.
    Nothing {
        /// The key that would have it train on.
        key: &'static str,
        /// The steps that it took.
        steps: u64,
    },
}

/// Returns the remaining work of the run in `folder`.
///
/// # Errors
/// [`TooFewSteps`] if the run has taken more steps than the plan asks for.
pub fn remaining(folder: &Path, plan: &Plan) -> Result<Remaining> {
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
    Ok(if done { Remaining::Nothing { key, steps } } else { Remaining::Work })
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
