//! One description of a run, from which the files of every platform follow.

use std::path::{Component, Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};
use rollflow::recipe::Plan;
use rollflow::util::reading;

use super::settings::{Deploy, Engines, is_label};
use crate::command::End;

/// Processes of a run: ranks of a trainer, and servers that generate for it.
pub struct Job {
    /// Name: a label of DNS.
    pub name: String,
    /// The recipe, relative to the folder that the run works in.
    pub recipe: PathBuf,
    /// The recipe and the files that it includes, relative to that folder, and their texts.
    pub files: Vec<(PathBuf, String)>,
    /// Settings.
    pub settings: Deploy,
    /// Overrides of the recipe.
    sets: Vec<String>,
    /// Names of variables with secrets.
    pub secrets: Vec<String>,
}

/// What a process needs of its host.
#[derive(Clone, Copy)]
pub struct Needs {
    /// Cores.
    pub cpus: usize,
    /// Memory in GiB.
    pub memory: usize,
    /// GPUs.
    pub gpus: usize,
}

/// Exit codes of a trainer that is to be started again: drained, and ended by SIGTERM before the run
/// had begun.
pub const AGAIN: [u8; 2] = [End::AGAIN, 143];

/// Variable that gives the recipe's `engine.urls`.
pub const URLS: &str = "ROLLFLOW__ENGINE__URLS";

impl Job {
    /// Describes the run of `plan`, which `recipe` says under the overrides `sets`.
    ///
    /// # Errors
    /// Settings that contradict each other or the recipe, and files that cannot be read.
    pub fn of(plan: &Plan, recipe: &Path, sets: Vec<String>, settings: Deploy) -> Result<Self> {
        let name = settings.name.clone().unwrap_or_else(|| label(&plan.name));
        let Deploy { ranks, hosts, engines, .. } = &settings;
        ensure!(
            ranks % hosts == 0,
            "deploy.ranks is {ranks} and deploy.hosts is {hosts}: each host has as many ranks; choose a multiple"
        );
        if *ranks > 1 {
            plan.ranks.mesh(*ranks)?;
        }
        ensure!(
            engines.count == 0 || plan.engine.is_remote(),
            "deploy.engines.count is {}, and the recipe generates in the trainer's process; set engine.kind to the kind of the servers",
            engines.count
        );
        ensure!(
            engines.count == 0 || !engines.command.is_empty(),
            "deploy.engines.count is {}, and deploy.engines.command is empty; give the command that starts a server",
            engines.count
        );
        let texts = engines.command.iter().chain(&sets).chain(&settings.slurm.setup);
        for text in texts.chain(recipe.to_str().map(str::to_owned).as_ref()) {
            ensure!(!text.contains('\0'), "an argument holds a NUL character");
        }
        let mut files = Vec::new();
        collect(recipe, &mut files)?;
        let secrets = settings.secrets.iter().chain(&plan.engine.token_env).cloned().collect::<std::collections::BTreeSet<_>>();
        let secrets = secrets.into_iter().collect();
        Ok(Job { name, recipe: recipe.to_owned(), files, settings, sets, secrets })
    }

    /// Run folder, relative to the folder that the run works in unless it is absolute.
    pub fn run(&self) -> PathBuf {
        self.settings.runs.join(&self.name)
    }

    /// Command of a rank, which starts or resumes the run: `program` on `recipe`, with metrics at
    /// `metrics`.
    pub fn trainer(&self, program: &str, recipe: &str, run: &Path, metrics: &str) -> Vec<String> {
        let run = run.display().to_string();
        let program = self.settings.program.as_deref().unwrap_or(program);
        let words = [program, "run", recipe, "--out", &run, "--resume", "--metrics", metrics];
        let sets = self.sets.iter().flat_map(|set| ["--set".to_owned(), set.clone()]);
        words.into_iter().map(str::to_owned).chain(sets).collect()
    }

    /// Address of the metrics where the trainer has its own network.
    pub fn metrics(&self) -> String {
        format!("0.0.0.0:{}", self.settings.metrics)
    }

    /// Needs of a rank.
    pub fn rank_needs(&self) -> Needs {
        let Deploy { cpus, memory, gpus, .. } = self.settings;
        Needs { cpus, memory, gpus }
    }

    /// Needs of a server.
    pub fn engine_needs(&self) -> Needs {
        let Engines { cpus, memory, gpus, .. } = self.settings.engines;
        Needs { cpus, memory, gpus }
    }

    /// Ranks of a host.
    pub fn ranks_per_host(&self) -> usize {
        self.settings.ranks / self.settings.hosts
    }

    /// `engine.urls` of servers on these hosts, in TOML.
    pub fn urls(&self, hosts: impl IntoIterator<Item = String>) -> String {
        let port = self.settings.engines.port;
        let urls: Vec<String> = hosts.into_iter().map(|host| format!("\"http://{host}:{port}\"")).collect();
        format!("[{}]", urls.join(", "))
    }

    /// Variables of `deploy.env`, as names and values.
    pub fn env(&self) -> impl Iterator<Item = (&str, &str)> {
        self.settings.env.iter().filter_map(|pair| pair.split_once('='))
    }
}

/// `words` as one command of a POSIX shell.
pub fn shell<'a>(words: impl IntoIterator<Item = &'a str>) -> Result<String> {
    shlex::try_join(words).context("a word of a command holds a NUL character")
}

/// [`shell`] of a command.
pub fn command(words: &[String]) -> Result<String> {
    shell(words.iter().map(String::as_str))
}

/// The recipe's name as a label of DNS.
fn label(name: &str) -> String {
    let letters =
        name.to_lowercase().chars().map(|letter| if letter.is_ascii_alphanumeric() { letter } else { '-' }).collect::<String>();
    let parts: Vec<&str> = letters.split('-').filter(|part| !part.is_empty()).collect();
    let joined: String = parts.join("-").chars().take(40).collect();
    let label = joined.trim_matches('-').to_owned();
    if is_label(&label) { label } else { format!("run-{label}").trim_end_matches('-').chars().take(40).collect() }
}

/// Adds a recipe and what it includes. Paths are relative and inside the folder that the command runs
/// in, so that they mean the same elsewhere.
fn collect(path: &Path, files: &mut Vec<(PathBuf, String)>) -> Result<()> {
    let path = inside(path)?;
    if files.iter().any(|(known, _)| *known == path) {
        return Ok(());
    }
    let text = reading::read_text(&path).with_context(|| format!("reading {}", path.display()))?;
    let table: toml::Table = text.parse().with_context(|| format!("{} is not valid TOML", path.display()))?;
    files.push((path.clone(), text));
    let included = match table.get("include") {
        Some(toml::Value::Array(list)) => list.clone(),
        one => one.cloned().into_iter().collect(),
    };
    let folder = path.parent().unwrap_or(Path::new(""));
    included.iter().filter_map(toml::Value::as_str).try_for_each(|name| collect(&folder.join(name), files))
}

/// `path` without `.` and `..`, if it stays in the folder that the command runs in.
///
/// # Errors
/// If it leaves that folder, is absolute, or is not UTF-8 on one line.
pub fn inside(path: &Path) -> Result<PathBuf> {
    let mut found = PathBuf::new();
    let mut depth = 0_usize;
    for part in path.components() {
        match part {
            Component::Normal(name) => {
                found.push(name);
                depth += 1;
            }
            Component::CurDir => {}
            Component::ParentDir if depth > 0 => {
                found.pop();
                depth -= 1;
            }
            Component::ParentDir | Component::RootDir | Component::Prefix(_) => {
                bail!("{} is not in this folder; deploy from a folder that holds the recipe and what it includes", path.display())
            }
        }
    }
    let text = found.to_str().with_context(|| format!("{} is not UTF-8", path.display()))?;
    ensure!(!text.is_empty() && !text.chars().any(char::is_control), "{text:?} is not the path of a file");
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_becomes_a_label_and_a_path_stays_inside() {
        for (name, expected) in [("grpo-addition", "grpo-addition"), ("My Run! №7", "my-run-7"), ("7b", "run-7b"), ("—", "run")]
        {
            assert_eq!(label(name), expected);
            assert!(is_label(&label(name)));
        }
        assert!(is_label(&label(&"x-".repeat(99))));
        assert_eq!(inside(Path::new("./a/../b/c.toml")).unwrap(), Path::new("b/c.toml"));
        for path in ["../x", "a/../../x", "/etc/passwd", "", "a\nb"] {
            assert!(inside(Path::new(path)).is_err(), "{path:?}");
        }
    }
}
