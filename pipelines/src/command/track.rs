//! `rollflow track`: logs a run to the trackers of its recipe.

use std::path::PathBuf;

use anyhow::{Context, Result};
use clap::Args;
use rollflow::recipe;

use super::{End, refused, require_run};
use crate::run::RECIPE;
use crate::run::trackers::Trackers;

/// Log a run to the trackers of its recipe: what they miss of it, or all of it with `--set`. A run that is
/// running is followed until it ends.
#[derive(Args)]
#[command(after_help = "Examples:\n  rollflow track runs/mine\n  rollflow track runs/mine --set 'observe.wandb={offline=true}'")]
pub struct Track {
    /// Folder of the run.
    run: PathBuf,
    /// Keys of the recipe to change, as in observe.wandb={project="sums"}.
    #[arg(long = "set", value_name = "KEY=VALUE")]
    set: Vec<String>,
}

impl Track {
    pub fn run(self) -> Result<()> {
        require_run(&self.run)?;
        let path = self.run.join(RECIPE);
        let text = std::fs::read_to_string(&path).with_context(|| path.display().to_string())?;
        let plan = recipe::parse(&path.display().to_string(), &text, &self.set).map_err(End::Recipe)?;
        if plan.trackers().is_empty() {
            return Err(refused("the run's recipe has no tracker: add one, as in --set 'observe.wandb={}'".to_owned()));
        }
        Trackers::check(&plan)?;
        Trackers::catch_up(&plan, &self.run)
    }
}
