//! `rollflow run`, and what running and resuming share.

use std::ffi::OsString;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use anyhow::Result;
use clap::Args;
use rollflow::flow::Ended;
use rollflow::hub::Cache;
use rollflow::observe::logs::DEAD_LETTERS;
use rollflow::recipe::{self, Machine, Plan};

use super::plans::{RecipeArgs, load_and};
use super::resume::Resume;
use super::{End, out, refused};
use crate::registry::Registry;
use crate::run::folder::{RunFolder, refuse_another_run};
use crate::run::ranks::among_ranks;
use crate::run::resume::ResumePoint;
use crate::run::{PAGE, RECIPE};

/// Run a recipe. Ctrl-C once finishes what is in flight, twice stops.
#[derive(Args)]
#[command(after_help = "\
Examples:\n\
\x20 rollflow run pipelines/recipes/grpo.toml\n\
\x20 rollflow run mine.toml --set train.lr=1e-4 --set seed=1 --out runs/mine --metrics 127.0.0.1:9464")]
pub struct Run {
    #[command(flatten)]
    recipe: RecipeArgs,
    /// The run's folder; a new one below `runs/` unless given.
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
    /// Resume the run that --out holds, under its own recipe; start it if there is none. A run that
    /// SIGTERM drained ends with exit code 75, so that a scheduler starts the same command again.
    #[arg(long, requires = "out")]
    resume: bool,
    /// Serve Prometheus metrics there, as in 127.0.0.1:9464; port 0 takes a free one and prints it.
    #[arg(long, value_name = "ADDRESS")]
    metrics: Option<String>,
    /// Serve the run's live page there, as in 127.0.0.1:7860; port 0 takes a free one and prints it.
    #[arg(long, value_name = "ADDRESS")]
    page: Option<String>,
}

impl Run {
    /// The run that is resumed, if --out holds one.
    fn resumed(&self) -> Option<&Path> {
        self.out.as_deref().filter(|out| self.resume && out.join(RECIPE).exists())
    }

    /// The recipe that takes effect, with its overrides: that of the run that is resumed, if there is one.
    pub fn recipe(&self) -> RecipeArgs {
        let recipe = self.resumed().map_or_else(|| self.recipe.recipe.clone(), |run| run.join(RECIPE));
        RecipeArgs { recipe, sets: self.recipe.sets.clone() }
    }

    /// These arguments, for another process.
    pub fn arguments(&self) -> Vec<OsString> {
        let Run { recipe, out, resume, metrics, page } = self;
        let mut words = vec![recipe.recipe.clone().into_os_string()];
        let mut option = |name: &str, value: OsString| words.extend([name.into(), value]);
        recipe.sets.iter().for_each(|set| option("--set", set.into()));
        out.iter().for_each(|folder| option("--out", folder.into()));
        metrics.iter().for_each(|address| option("--metrics", address.into()));
        page.iter().for_each(|address| option("--page", address.into()));
        words.extend(resume.then(|| "--resume".into()));
        words
    }

    pub fn run(self, registry: &Registry) -> Result<()> {
        let resumed = self.resumed().map(Path::to_owned);
        let Run { mut recipe, out, resume, metrics, page } = self;
        if let Some(run) = resumed {
            out::complain(&format!("resuming {} under its own {RECIPE}; {} is not read", run.display(), recipe.recipe.display()));
            return Resume { run, out: None, ca_file: None, sets: recipe.sets, metrics, page }.until(registry, Drained::Again);
        }
        recipe.sets.extend(metrics.map(|address| format!("observe.metrics={address:?}")));
        recipe.sets.extend(page.map(|address| format!("observe.page={address:?}")));
        let (plan, _) = load_and(&recipe, registry, recipe::beyond_one_process).map_err(End::Recipe)?;
        among_ranks(&plan, registry, |registry| {
            let folder = out.unwrap_or_else(|| new_folder(&plan));
            refuse_another_run(&folder).map_err(|error| refused(error.to_string()))?;
            // Ids are pinned, since their contents may change.
            let plan = plan.pinned(&Cache::of_user());
            let drained = if resume { Drained::Again } else { Drained::Done };
            execute(&plan, registry, RunFolder::open(&folder, &plan, None)?, None, drained)
        })
    }
}

/// Meaning of a drained run for the program that started it.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Drained {
    /// Success: a user interrupted the run.
    Done,
    /// The run has more to do: [`End::AGAIN`].
    Again,
}

/// Runs a plan in its folder and says what came of it.
pub fn execute(plan: &Plan, registry: &Registry, run: RunFolder, from: Option<&ResumePoint>, drained: Drained) -> Result<()> {
    let run = run.among(registry.ranks()).uploading(plan)?;
    run.console().install()?;
    plan.warnings(Machine::here()).iter().for_each(|warning| run.say(&format!("warning: {warning}")));
    let report = crate::run_plan(plan, registry, &run, from)?;
    let mut told = format!("{report}\n");
    told += &format!("report: {}\n", run.path().join(PAGE).display());
    if run.path().join(DEAD_LETTERS).exists() {
        told += &format!("some rewards failed; to try them again: rollflow replay {}\n", run.path().display());
    }
    // A closed output must not end the run.
    out::text(&told).ok();
    match report.ended {
        Ended::Drained if drained == Drained::Again => Err(End::Said(End::AGAIN).into()),
        Ended::Finished | Ended::Drained => Ok(()),
        Ended::Running | Ended::Stopped | Ended::Failed => Err(End::Said(1).into()),
    }
}

/// Makes `runs/NAME-1790000000`, by the seconds of the clock, or with `-2` and so on where another run began
/// in the same second.
fn new_folder(plan: &Plan) -> PathBuf {
    let seconds = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs());
    let first = PathBuf::from("runs").join(format!("{}-{seconds}", plan.name));
    let next = |number: u32| first.with_file_name(format!("{}-{seconds}-{number}", plan.name));
    // Other errors than that it exists are those of the run, which opens it.
    let is_free = |folder: &PathBuf| {
        let made = std::fs::create_dir_all("runs").and_then(|()| std::fs::create_dir(folder));
        !made.is_err_and(|error| error.kind() == ErrorKind::AlreadyExists)
    };
    std::iter::once(first.clone()).chain((2..).map(next)).find(is_free).unwrap_or(first)
}
