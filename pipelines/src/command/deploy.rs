//! `rollflow deploy`: runs elsewhere.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};
use clap::{Args, Subcommand};
use rollflow::recipe::{self, Plan, RecipeErrors};
use rollflow::util::causes::full_message;
use rollflow::util::{atomic_file, reading};

use super::{End, out, refused};
use crate::deploy::job::{Job, command};
use crate::deploy::settings;
use crate::deploy::ssh::{self, Host, Place, State, Task};
use crate::deploy::{compose, kubernetes, skypilot, slurm};
use crate::registry::Registry;
use crate::validate::complaints;

/// Write what starts a run on Slurm, Kubernetes, SkyPilot or Docker compose, or start it on hosts
/// by ssh.
#[derive(Args)]
#[command(after_help = "\
Examples:\n\
\x20 rollflow deploy slurm recipe.toml --set deploy.ranks=4 --set deploy.gpus=1 --start\n\
\x20 rollflow deploy kubernetes recipe.toml --deploy cluster.toml --dry-run\n\
\x20 rollflow deploy ssh gpu1 recipe.toml --set train.steps=2000\n\
\x20 rollflow deploy attach gpu1:grpo-addition\n\
\x20 rollflow deploy fetch gpu1:grpo-addition --out runs/mine")]
pub struct Deploy {
    #[command(subcommand)]
    what: What,
}

#[derive(Subcommand)]
enum What {
    /// Write the batch script of a run on Slurm, which resumes after time limits and preemption.
    Slurm(Files),
    /// Write the manifest of a run on Kubernetes.
    Kubernetes(Files),
    /// Write the task of a run on SkyPilot.
    Skypilot(Files),
    /// Write the compose file of a run in containers on one machine.
    Compose(Files),
    Ssh(Remote),
    /// Say whether a run on a host runs, how it ended, and the last line of its log.
    Status(At),
    Logs(Logs),
    Attach(At),
    /// End a run on a host: it finishes what is in flight and saves a checkpoint. After deploy.grace seconds
    /// it is stopped, after as many again killed.
    Stop(At),
    Fetch(Fetch),
}

#[derive(Args)]
struct Settings {
    /// A file with a section [deploy]: docs/reference/deploy.md lists its keys.
    #[arg(long, value_name = "FILE")]
    deploy: Option<PathBuf>,
    /// Override a key of the recipe, as in train.lr=1e-4, or of the deployment, as in deploy.ranks=4;
    /// may be given several times.
    #[arg(long = "set", value_name = "KEY=VALUE")]
    sets: Vec<String>,
}

#[derive(Args)]
struct Files {
    /// A recipe in this folder or below.
    recipe: PathBuf,
    #[command(flatten)]
    settings: Settings,
    /// The file to write. Left out: the run's name in this folder.
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,
    /// Print the file, write nothing and start nothing.
    #[arg(long)]
    dry_run: bool,
    /// Start the run with the platform's own command.
    #[arg(long, conflicts_with = "dry_run")]
    start: bool,
}

/// Start a run on hosts by ssh. It continues when the connection ends; started again, it resumes.
#[derive(Args)]
struct Remote {
    /// Host as ssh knows it, or several with commas between them, which the ranks are divided among.
    hosts: String,
    /// A recipe in this folder or below.
    recipe: PathBuf,
    #[command(flatten)]
    settings: Settings,
    /// Print what would be started, and connect to no host.
    #[arg(long)]
    dry_run: bool,
}

/// Show the log of a run on a host and forward its metrics, until the run ends. Ctrl-C leaves the run
/// alone. The exit code is the run's.
#[derive(Args)]
struct At {
    /// Host and name of the run, as in gpu1:grpo-addition.
    #[arg(value_name = "HOST:NAME")]
    place: String,
    #[command(flatten)]
    settings: Settings,
}

/// Print the log of a run on a host.
#[derive(Args)]
struct Logs {
    #[command(flatten)]
    at: At,
    /// Print what is added, too, until the run ends.
    #[arg(long, short)]
    follow: bool,
}

/// Copy the run folder of a run on a host to this machine.
#[derive(Args)]
struct Fetch {
    #[command(flatten)]
    at: At,
    /// The folder to write. Left out: the run's name below `runs`.
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
}

impl Deploy {
    pub fn run(self, registry: &Registry) -> Result<()> {
        match self.what {
            What::Slurm(of) => {
                let own = std::env::current_exe().context("finding this program's file")?;
                let program = own.to_str().context("the path of this program is not UTF-8")?;
                of.write(
                    registry,
                    "sbatch",
                    |job, folder| slurm::script(job, folder, program),
                    |_, file| words(&["sbatch", file]),
                )
            }
            What::Kubernetes(of) => {
                of.write(registry, "yaml", |job, _| kubernetes::manifest(job), |_, file| words(&["kubectl", "apply", "-f", file]))
            }
            What::Skypilot(of) => of.write(
                registry,
                "sky.yaml",
                |job, _| skypilot::task(job),
                |job, file| {
                    let secrets = job.secrets.iter().flat_map(|name| ["--secret", name.as_str()]);
                    words(&["sky", "jobs", "launch", "--yes"].into_iter().chain(secrets).chain([file]).collect::<Vec<_>>())
                },
            ),
            What::Compose(of) => {
                of.write(registry, "compose.yaml", compose::file, |_, file| words(&["docker", "compose", "-f", file, "up", "-d"]))
            }
            What::Ssh(of) => of.run(registry),
            What::Status(of) => of.with(|place, _| {
                let (state, last) = place.status()?;
                let state = match state {
                    State::Running(id) => format!("running (process {id})"),
                    State::Ended(Some(code)) => format!("ended with code {code}"),
                    State::Ended(None) => {
                        "ended without a code: the host stopped, or the process was killed with its session".to_owned()
                    }
                };
                out::line(&format!("{}:{}: {state}\n  {last}", place.host.name, place.name))
            }),
            What::Logs(of) => of.at.with(|place, _| coded(place.logs(of.follow)?)),
            What::Attach(of) => of.with(|place, _| coded(place.attach(out::complain)?)),
            What::Stop(of) => of.with(|place, settings| place.stop(settings.grace)),
            What::Fetch(of) => of.at.with(|place, _| {
                let to = of.out.clone().unwrap_or_else(|| Path::new("runs").join(place.name));
                place.fetch(&to)?;
                out::line(&to.display().to_string())
            }),
        }
    }
}

fn words(all: &[&str]) -> Vec<String> {
    all.iter().map(|word| (*word).to_owned()).collect()
}

fn coded(code: u8) -> Result<()> {
    if code == 0 { Ok(()) } else { Err(End::Said(code).into()) }
}

impl Settings {
    /// The deployment's settings, and the overrides of the recipe.
    fn read(&self) -> Result<(settings::Deploy, Vec<String>)> {
        let (ours, recipe): (Vec<String>, Vec<String>) = self.sets.iter().cloned().partition(|set| set.starts_with("deploy."));
        Ok((settings::read(self.deploy.as_deref(), &ours).map_err(End::Recipe)?, recipe))
    }

    /// The job of a recipe. Models and data that it names may lie elsewhere, and are not looked for.
    fn job(&self, recipe: &Path, registry: &Registry) -> Result<Job> {
        let (settings, mut sets) = self.read()?;
        let serves = settings.engines.count > 0;
        if serves {
            leave_addresses(&mut sets)?;
        }
        let text = reading::read_text(recipe).map_err(|error| refused(format!("{}: {error}", recipe.display())))?;
        let name = recipe.display().to_string();
        let parse = |sets: &[String]| recipe::parse_with(&name, &text, sets, |plan| complaints(registry, plan));
        let plan: Plan = match parse(&sets) {
            Err(errors) if serves => {
                let fewer = |others: RecipeErrors| if others.iter().count() < errors.iter().count() { others } else { errors };
                parse(&[&sets[..], &[PLACEHOLDER.to_owned()]].concat()).map_err(fewer)
            }
            parsed => parsed,
        }
        .map_err(End::Recipe)?;
        Job::of(&plan, recipe, sets, settings).map_err(|error| refused(full_message(error.as_ref())))
    }
}

/// Address of a server whose host is known when the run starts.
const PLACEHOLDER: &str = "engine.urls=[\"http://engine:8400\"]";

/// Removes overrides of `engine.urls`, which take precedence over the addresses that the platform gives.
fn leave_addresses(sets: &mut Vec<String>) -> Result<()> {
    let is = |set: &String, key: &str| set.split_once('=').is_some_and(|(given, _)| given.trim() == key);
    if sets.iter().any(|set| is(set, "engine")) {
        let why = "`engine` replaces the whole section, and the addresses of deploy.engines with it; set its keys, such as engine.kind=vllm";
        return Err(refused(why));
    }
    let given = sets.len();
    sets.retain(|set| !is(set, "engine.urls"));
    if sets.len() < given {
        out::complain("engine.urls is left out: the run gets the addresses of deploy.engines");
    }
    Ok(())
}

impl Files {
    fn write(
        self,
        registry: &Registry,
        ending: &str,
        render: impl Fn(&Job, &Path) -> Result<String>,
        starter: impl Fn(&Job, &str) -> Vec<String>,
    ) -> Result<()> {
        let job = self.settings.job(&self.recipe, registry)?;
        let here = std::env::current_dir().context("finding the current folder")?;
        let text = render(&job, &here).map_err(|error| refused(full_message(error.as_ref())))?;
        let path = self.out.unwrap_or_else(|| PathBuf::from(format!("{}.{ending}", job.name)));
        let start = starter(&job, &path.display().to_string());
        if self.dry_run {
            out::text(&text)?;
            out::complain(&format!("to start it: {}", command(&start)?));
            return Ok(());
        }
        match std::fs::read(&path) {
            Ok(found) if found == text.as_bytes() => {}
            Ok(_) => {
                return Err(refused(format!(
                    "{} exists and differs; remove it, or name another file with --out",
                    path.display()
                )));
            }
            Err(_) => atomic_file::write(&path, &text).with_context(|| format!("writing {}", path.display()))?,
        }
        if !self.start {
            return out::text(&format!("{}\nto start it: {}\n", path.display(), command(&start)?));
        }
        let status = Command::new(&start[0]).args(&start[1..]).status();
        let status = status.with_context(|| format!("starting {}; is it installed?", start[0]))?;
        ensure!(status.success(), "{} failed ({status}); {} is written", start[0], path.display());
        Ok(())
    }
}

impl Remote {
    fn run(self, registry: &Registry) -> Result<()> {
        let job = self.settings.job(&self.recipe, registry)?;
        let hosts: Vec<&str> = self.hosts.split(',').collect();
        let address = |name: &str| Host::of(name, &job.settings.ssh)?.address();
        let tasks = ssh::tasks(&job, &hosts, address).map_err(|error| refused(full_message(error.as_ref())))?;
        if self.dry_run {
            let shown = |Task { name, host, script, .. }: &Task| format!("# {host}:{name}\n{script}\n");
            return out::text(&tasks.iter().map(shown).collect::<String>());
        }
        ssh::start(&job, &tasks, out::complain)?;
        let places = tasks.iter().map(|task| format!("{}:{}\n", task.host, task.name)).collect::<String>();
        out::text(&places)
    }
}

impl At {
    fn with(&self, what: impl Fn(&Place<'_>, &settings::Deploy) -> Result<()>) -> Result<()> {
        let (settings, _) = self.settings.read()?;
        let parts = self.place.rsplit_once(':').ok_or_else(|| refused(format!("{:?} is not HOST:NAME", self.place)))?;
        let host = Host::of(parts.0, &settings.ssh).map_err(|error| refused(error.to_string()))?;
        let place = Place::of(host, parts.1).map_err(|error| refused(error.to_string()))?;
        what(&place, &settings)
    }
}
