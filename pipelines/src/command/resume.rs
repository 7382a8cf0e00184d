//! `rollflow resume`.

use std::path::PathBuf;

use anyhow::Result;
use clap::Args;

use super::plans::{RecipeArgs, load};
use super::run::{Drained, execute};
use super::{out, refused};
use crate::registry::Registry;
use crate::run::RECIPE;
use crate::run::folder::RunFolder;
use crate::run::ranks::among_ranks;
use crate::run::recipe_keys::changed_for_resume;
use crate::run::resume::{TooFewSteps, complete, rewind_to_checkpoint};

/// Resume an interrupted run from its newest checkpoint. Some keys may change; changing others,
/// such as seed, is an error.
#[derive(Args)]
#[command(after_help = "\
Examples:\n\
\x20 rollflow resume runs/mine\n\
\x20 rollflow resume runs/mine --set train.steps=900    (more steps than it was to take)")]
pub struct Resume {
    /// The run's folder.
    pub run: PathBuf,
    /// Override a key, as in train.steps=900; may be given several times.
    #[arg(long = "set", value_name = "KEY=VALUE")]
    pub sets: Vec<String>,
    /// Serve Prometheus metrics there, as in 127.0.0.1:9464; port 0 takes a free one and prints it.
    #[arg(long, value_name = "ADDRESS")]
    pub metrics: Option<String>,
}

impl Resume {
    pub fn run(self, registry: &Registry) -> Result<()> {
        self.until(registry, Drained::Done)
    }

    /// Resumes; `drained` says how a run ends that was interrupted again.
    pub fn until(self, registry: &Registry, drained: Drained) -> Result<()> {
        let Resume { run, mut sets, metrics } = self;
        sets.extend(metrics.map(|address| format!("observe.metrics={address:?}")));
        let plan = load(&RecipeArgs { recipe: run.join(RECIPE), sets }, registry)?;
        among_ranks(&plan, registry, |registry| {
            let changed = changed_for_resume(&run, &plan)?;
            if !changed.is_empty() {
                let why = "can't change when a run is resumed; resume with the run's own values, or begin another run";
                return Err(refused(format!("{}: {why}", changed.join("; "))));
            }
            let complete = complete(&run, &plan);
            let complete =
                complete.map_err(|error| if error.is::<TooFewSteps>() { refused(error.to_string()) } else { error })?;
            if let Some((key, steps)) = complete {
                let shown = run.display();
                return out::text(&format!(
                    "{shown} is complete: it has taken all of its {steps} steps. To train on: rollflow resume {shown} --set {key}=N\n"
                ));
            }
            let folder = RunFolder::open(&run, &plan)?;
            let from = rewind_to_checkpoint(&run, |line| folder.say(line))?;
            execute(&plan, registry, folder, from.as_ref(), drained)
        })
    }
}
