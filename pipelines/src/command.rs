//! The command `rollflow`, for the binary of that name and for those who have parts of their own to put into it.
//!
//! Exit codes: 0 the run finished or was drained by Ctrl-C, or all that was replayed earns now; 1 it failed or was stopped, or something
//! that was replayed still fails; 2 the recipe or the arguments are wrong.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{SystemTime, UNIX_EPOCH};

use anyhow::Result;
use clap::{Args, Parser, Subcommand, ValueEnum};
use rollflow::flow::Ended;
use rollflow::observe::logs::DEAD_LETTERS;
use rollflow::recipe::{self, Pipeline, Plan};

use crate::grpo::{self, Actors};
use crate::registry::Registry;
use crate::resume::{ResumePoint, rewind_to_checkpoint};
use crate::run_folder::{Outputs, RECIPE, RunFolder};
use crate::simulate::profile::Profile;
use crate::{models, parts, replay, reward_model, sft, simulate};

/// RL post-training of language models as a pipelined dataflow.
#[derive(Parser)]
#[command(
    version,
    after_help = "Exit codes: 0 finished, or drained by Ctrl-C, or all that was replayed earns now; 1 failed or stopped, or something that \
                  was replayed still fails; 2 the recipe or the arguments are wrong."
)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Run a recipe. Ctrl-C once finishes what is in flight, twice stops.
    Run {
        #[command(flatten)]
        recipe: RecipeArgs,
        /// The run's folder; a new one below `runs/` unless given.
        #[arg(long, value_name = "DIR")]
        out: Option<PathBuf>,
        /// Serve Prometheus metrics there, as in 127.0.0.1:9464; port 0 takes a free one and prints it.
        #[arg(long, value_name = "ADDRESS")]
        metrics: Option<String>,
    },
    /// Go on with a run that was interrupted, from its newest checkpoint.
    Resume {
        /// The run's folder.
        run: PathBuf,
        /// Override a key, as in train.steps=900; may be given several times.
        #[arg(long = "set", value_name = "KEY=VALUE")]
        sets: Vec<String>,
        /// Serve Prometheus metrics there, as in 127.0.0.1:9464; port 0 takes a free one and prints it.
        #[arg(long, value_name = "ADDRESS")]
        metrics: Option<String>,
    },
    /// Find everything that is wrong with a recipe, and print what follows from it.
    Check {
        #[command(flatten)]
        recipe: RecipeArgs,
    },
    /// List the popular models that recipes may name by `model.preset`, and what is in the hub's local cache.
    Models {
        /// As JSON, for scripts.
        #[arg(long)]
        json: bool,
    },
    /// Draw a recipe's pipeline.
    Graph {
        #[command(flatten)]
        recipe: RecipeArgs,
        /// The drawing's language.
        #[arg(long, value_enum, default_value = "mermaid")]
        format: Format,
    },
    /// Forecast what a recipe would do on a machine: the same graph in simulated time, thousands of steps in seconds.
    Simulate {
        #[command(flatten)]
        recipe: RecipeArgs,
        /// How long things take, and what answers are like. Recorded there from a short real run of the recipe if it is missing.
        #[arg(long, value_name = "FILE")]
        profile: PathBuf,
        /// Steps to record.
        #[arg(long, default_value_t = 60, value_parser = clap::value_parser!(u64).range(1..))]
        record: u64,
        /// Steps to simulate.
        #[arg(long, default_value_t = 10_000, value_parser = clap::value_parser!(u64).range(1..))]
        steps: u64,
        /// Ask what if: a forecast for each value, as in flow.max_staleness=0,1,2,4.
        #[arg(long, value_name = "KEY=VALUE,VALUE…", value_parser = simulate::variants)]
        vary: Option<(String, Vec<String>)>,
    },
    /// Score the groups again that a run gave up because their reward failed (its dead letters), and write those that earn now to
    /// `replayed.jsonl` in the run's folder. Nothing else is changed.
    Replay {
        /// The run's folder.
        run: PathBuf,
        /// Override a key of the run's reward, as in reward.kind=numeric; may be given several times.
        #[arg(long = "set", value_name = "reward.KEY=VALUE", value_parser = reward_key)]
        sets: Vec<String>,
    },
}

#[derive(Args)]
struct RecipeArgs {
    /// A recipe, as in pipelines/recipes/grpo.toml.
    recipe: PathBuf,
    /// Override a key, as in train.lr=1e-4; may be given several times.
    #[arg(long = "set", value_name = "KEY=VALUE")]
    sets: Vec<String>,
}

#[derive(Clone, Copy, ValueEnum)]
enum Format {
    Mermaid,
    Dot,
    Json,
}

/// The whole command on the arguments of this program, with `registry`'s parts beside the library's: `run`, `check`, `resume` and all others.
///
/// ```no_run
/// use rollflow::prelude::*;
/// use rollflow_pipelines::{Registry, command};
///
/// fn main() -> std::process::ExitCode {
///     // [reward] kind = "custom", name = "polite"
///     command(Registry::default().reward("polite", |sample: &Sample| f64::from(sample.response.contains("please"))))
/// }
/// ```
pub fn command(registry: Registry) -> ExitCode {
    command_with(registry, std::env::args_os())
}

/// [`command`] on other arguments, of which the first is the program's name.
pub fn command_with<A: Into<OsString> + Clone>(registry: Registry, args: impl IntoIterator<Item = A>) -> ExitCode {
    rollflow::model::keep_freed_memory();
    match dispatch(Cli::parse_from(args).command, &registry) {
        Ok(code) => code,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn dispatch(command: Command, registry: &Registry) -> Result<ExitCode> {
    match command {
        Command::Run { mut recipe, out, metrics } => {
            recipe.sets.extend(metrics.map(|address| format!("observe.metrics={address:?}")));
            let Some(plan) = load(&recipe, registry) else { return Ok(ExitCode::from(2)) };
            execute(&plan, registry, &RunFolder::create(&out.unwrap_or_else(|| new_folder(&plan)), &plan)?, None)
        }
        Command::Resume { run, mut sets, metrics } => {
            sets.extend(metrics.map(|address| format!("observe.metrics={address:?}")));
            let Some(plan) = load(&RecipeArgs { recipe: run.join(RECIPE), sets }, registry) else { return Ok(ExitCode::from(2)) };
            let folder = RunFolder::reopen(&run, &plan)?;
            let from = rewind_to_checkpoint(&run, |line| folder.say(line))?;
            execute(&plan, registry, &folder, from.as_ref())
        }
        Command::Check { recipe } => {
            let Some(plan) = load(&recipe, registry) else { return Ok(ExitCode::from(2)) };
            print!("{}", recipe::check_text(&plan));
            Ok(ExitCode::SUCCESS)
        }
        Command::Models { json } => {
            print!("{}", models::list(json));
            Ok(ExitCode::SUCCESS)
        }
        Command::Graph { recipe, format } => {
            let Some(plan) = load(&recipe, registry) else { return Ok(ExitCode::from(2)) };
            draw(&plan, registry, format)?;
            Ok(ExitCode::SUCCESS)
        }
        Command::Simulate { recipe, profile, record, steps, vary } => {
            let Some(plan) = load(&recipe, registry) else { return Ok(ExitCode::from(2)) };
            if plan.pipeline != Pipeline::Grpo {
                eprintln!("error: only the pipeline grpo can be simulated; {} has nothing to overlap", recipe.recipe.display());
                return Ok(ExitCode::from(2));
            }
            let profile = simulate::profile_of(&plan, registry, &profile, record)?;
            forecast(&recipe, registry, &profile, steps, vary)
        }
        Command::Replay { run, sets } => {
            let Some(plan) = load_of_run(&run, &sets, registry) else { return Ok(ExitCode::from(2)) };
            let replayed = replay::replay(&plan, registry, &run, &mut std::io::stdout())?;
            Ok(if replayed.failed == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE })
        }
    }
}

/// Of a replayed run nothing but the reward is used: another key would change nothing, without a word.
fn reward_key(set: &str) -> Result<String, String> {
    let rewards = ["reward.", "reward="].iter().any(|key| set.starts_with(key));
    if rewards {
        Ok(set.to_owned())
    } else {
        Err("only keys of [reward] have a meaning here, as in reward.kind=numeric".to_owned())
    }
}

/// The plan, or all of the recipe's errors on standard error.
fn load(args: &RecipeArgs, registry: &Registry) -> Option<Plan> {
    recipe::load_with(&args.recipe, &args.sets, |plan| registry.complaints(plan)).map_err(|errors| eprintln!("{errors}")).ok()
}

/// The plan of a run. The files that it names may be gone or lie elsewhere by now, and are not looked for.
fn load_of_run(run: &Path, sets: &[String], registry: &Registry) -> Option<Plan> {
    let path = run.join(RECIPE);
    let text = std::fs::read_to_string(&path)
        .map_err(|error| eprintln!("{}: {error}; give the folder of a run, as in runs/mine", path.display()))
        .ok()?;
    recipe::parse_with(&path.display().to_string(), &text, sets, |plan| registry.complaints(plan))
        .map_err(|errors| eprintln!("{errors}"))
        .ok()
}

fn execute(plan: &Plan, registry: &Registry, run: &RunFolder, from: Option<&ResumePoint>) -> Result<ExitCode> {
    run.remember()?;
    run.console().install()?;
    let report = crate::run(plan, registry, run, from)?;
    println!("{report}");
    let page = run.path().join("report.md");
    if page.exists() {
        println!("report: {}", page.display());
    }
    if run.path().join(DEAD_LETTERS).exists() {
        println!("some rewards failed; to try them again: rollflow replay {}", run.path().display());
    }
    Ok(match report.ended {
        Ended::Finished | Ended::Drained => ExitCode::SUCCESS,
        Ended::Stopped | Ended::Failed => ExitCode::FAILURE,
    })
}

/// `runs/NAME-1790000000`, by the seconds of the clock.
fn new_folder(plan: &Plan) -> PathBuf {
    let seconds = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs());
    PathBuf::from("runs").join(format!("{}-{seconds}", plan.name))
}

fn draw(plan: &Plan, registry: &Registry, format: Format) -> Result<()> {
    let outputs = Outputs::in_memory();
    let flow = match plan.pipeline {
        Pipeline::Grpo => grpo::declare(plan, Actors::local(plan, registry, &parts::policy(plan)?)?, outputs, None)?,
        Pipeline::Sft => sft::declare(plan, &parts::policy(plan)?, outputs, None)?,
        Pipeline::RewardModel => reward_model::declare(plan, outputs, None)?.0,
    };
    let graph = flow.graph();
    println!(
        "{}",
        match format {
            Format::Mermaid => graph.to_mermaid(),
            Format::Dot => graph.to_dot(),
            Format::Json => graph.to_json(),
        }
    );
    Ok(())
}

/// Prints a forecast for every variant. Says all that is wrong with the variants before the first.
fn forecast(
    recipe: &RecipeArgs,
    registry: &Registry,
    profile: &Profile,
    steps: u64,
    vary: Option<(String, Vec<String>)>,
) -> Result<ExitCode> {
    let variants: Vec<String> = match vary {
        None => vec![String::new()],
        Some((key, values)) => values.iter().map(|value| format!("{key}={value}")).collect(),
    };
    let with = |variant: &String| {
        let sets = recipe.sets.iter().chain(Some(variant).filter(|variant| !variant.is_empty())).cloned().collect();
        load(&RecipeArgs { recipe: recipe.recipe.clone(), sets }, registry)
    };
    let plans: Vec<Option<Plan>> = variants.iter().map(with).collect();
    if plans.iter().any(Option::is_none) {
        return Ok(ExitCode::from(2));
    }
    let width = variants.iter().map(String::len).max().unwrap_or(0);
    for (variant, plan) in variants.iter().zip(plans.iter().flatten()) {
        let forecast = simulate::simulate(plan, registry, profile, steps)?;
        println!("{variant:width$}{forecast}");
        println!("{:width$}  {}", "", forecast.bottleneck);
    }
    Ok(ExitCode::SUCCESS)
}
