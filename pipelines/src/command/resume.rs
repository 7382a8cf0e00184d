//! `rollflow resume`.

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Result;
use clap::Args;

use super::REFUSED;
use super::plans::{RecipeArgs, load};
use super::run::execute;
use crate::registry::Registry;
use crate::resume::rewind_to_checkpoint;
use crate::run_folder::{RECIPE, RunFolder};

/// Go on with a run that was interrupted, from its newest checkpoint.
#[derive(Args)]
#[command(after_help = "\
Examples:\n\
\x20 rollflow resume runs/mine\n\
\x20 rollflow resume runs/mine --set train.steps=900    (more steps than it was to take)")]
pub struct Resume {
    /// The run's folder.
    run: PathBuf,
    /// Override a key, as in train.steps=900; may be given several times.
    #[arg(long = "set", value_name = "KEY=VALUE")]
    sets: Vec<String>,
    /// Serve Prometheus metrics there, as in 127.0.0.1:9464; port 0 takes a free one and prints it.
    #[arg(long, value_name = "ADDRESS")]
    metrics: Option<String>,
}

impl Resume {
    pub fn run(self, registry: &Registry) -> Result<ExitCode> {
        let Resume { run, mut sets, metrics } = self;
        sets.extend(metrics.map(|address| format!("observe.metrics={address:?}")));
        let Some(plan) = load(&RecipeArgs { recipe: run.join(RECIPE), sets }, registry) else {
            return Ok(ExitCode::from(REFUSED));
        };
        let folder = RunFolder::reopen(&run, &plan)?;
        let from = rewind_to_checkpoint(&run, |line| folder.say(line))?;
        execute(&plan, registry, &folder, from.as_ref())
    }
}
