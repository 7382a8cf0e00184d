//! `rollflow resume`.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::Result;
use clap::Args;
use rollflow::ranks::{Place, Ranks};
use rollflow::util::secrets::masked;
use rollflow::util::untrusted;

use super::plans::{RecipeArgs, load};
use super::run::{Drained, execute};
use super::{End, out, refused};
use crate::registry::Registry;
use crate::run::folder::{RunFolder, lock};
use crate::run::ranks::among_ranks;
use crate::run::recipe_keys::changed_for_resume;
use crate::run::resume::{TooFewSteps, complete, cut, rewind_to};
use crate::run::{RECIPE, upload};

/// Resume an interrupted run from its newest checkpoint. Some keys may change; changing others,
/// such as seed, is an error.
#[derive(Args)]
#[command(after_help = "\
Examples:\n\
\x20 rollflow resume runs/mine\n\
\x20 rollflow resume runs/mine --set train.steps=900    (more steps than it was to take)\n\
\x20 rollflow resume s3://bucket/run --out runs/mine    (from store.url, on another machine)")]
pub struct Resume {
    /// The run's folder, or the address of its store, as in s3://bucket/run: its newest complete
    /// checkpoint is fetched into --out first.
    pub run: PathBuf,
    /// The new folder of a run that is fetched from a store.
    #[arg(long, value_name = "DIR")]
    pub out: Option<PathBuf>,
    /// PEM file of certificate authorities that are trusted for the store, in addition to the system's.
    #[arg(long, value_name = "FILE")]
    pub ca_file: Option<PathBuf>,
    /// Override a key, as in train.steps=900; may be given several times.
    #[arg(long = "set", value_name = "KEY=VALUE")]
    pub sets: Vec<String>,
    /// Serve Prometheus metrics there, as in 127.0.0.1:9464; port 0 takes a free one and prints it.
    #[arg(long, value_name = "ADDRESS")]
    pub metrics: Option<String>,
    /// Serve the run's live page there, as in 127.0.0.1:7860; port 0 takes a free one and prints it.
    #[arg(long, value_name = "ADDRESS")]
    pub page: Option<String>,
}

/// Interval of the looks for a run that rank 0 fetches.
const LOOK: Duration = Duration::from_secs(1);

/// Waits for a run that rank 0 fetches, for as long as more of it arrives.
fn appears(run: &Path) -> Result<()> {
    let (recipe, limit) = (run.join(RECIPE), Ranks::default().start_timeout);
    if !recipe.exists() {
        out::complain(&format!(
            "waiting for {}: rank 0 fetches it from the store into a folder that all ranks share",
            run.display()
        ));
    }
    let (mut fetched, mut since) = (upload::fetched(run), Instant::now());
    while !recipe.exists() {
        if since.elapsed().as_secs_f64() > limit {
            let why = format!("rank 0 has fetched nothing more for {limit} seconds into {}", run.display());
            return Err(End::ByAnother(why).into());
        }
        std::thread::sleep(LOOK);
        let now = upload::fetched(run);
        if now != fetched {
            (fetched, since) = (now, Instant::now());
        }
    }
    Ok(())
}

impl Resume {
    pub fn run(self, registry: &Registry) -> Result<()> {
        self.until(registry, Drained::Done)
    }

    /// Resumes; `drained` says how a run ends that was interrupted again.
    pub fn until(self, registry: &Registry, drained: Drained) -> Result<()> {
        let Resume { run, out, ca_file, mut sets, metrics, page } = self;
        let run = match (run.to_str().filter(|run| run.contains("://")), out) {
            (Some(address), Some(out)) => {
                match Place::of_environment()?.filter(|place| place.rank > 0) {
                    None => upload::fetch(address, ca_file.as_deref(), &out)?,
                    // Rank 0 fetches it for all. The folder appears whole.
                    Some(_) => appears(&out)?,
                }
                out
            }
            (Some(address), None) => return Err(refused(format!("{}: give --out DIR, the run's new folder", masked(address)))),
            (None, Some(_)) => return Err(refused("--out is for a run that is fetched from a store, as in s3://bucket/run")),
            (None, None) => run,
        };
        sets.extend(metrics.map(|address| format!("observe.metrics={address:?}")));
        sets.extend(page.map(|address| format!("observe.page={address:?}")));
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
            let lock = lock(&run)?;
            // Before anything is written: a run that can't be resumed is not changed.
            let cut = cut(&run, plan.overlaps(), |line| out::complain(&untrusted::line(line)))?;
            let folder = RunFolder::open(&run, &plan, Some(lock))?;
            let from = rewind_to(&run, cut, |line| folder.say(line))?;
            execute(&plan, registry, folder, from.as_ref(), drained)
        })
    }
}
