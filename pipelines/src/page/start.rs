//! Runs that a reader with the token starts from a page: recipes to begin with, what `check` says of them
//! under other values, and the process of the run.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use parking_lot::Mutex;
use rollflow::recipe::{Computes, variables};
use rollflow::util::reading;
use serde::Deserialize;
use serde_json::{Value, json};

use crate::command::check::as_json;
use crate::command::plans::checked;
use crate::registry::Registry;
use crate::run::recipe_keys::flat;
use crate::run::record::run_folders;
use crate::run::{PAGE_TOKEN, RECIPE};
use crate::survey::{self, Surveyed};

/// File in a run's folder with what its process prints.
const CONSOLE: &str = "console.log";

/// Time that a new run has to write its recipe before it counts as begun.
const BEGINS: Duration = Duration::from_secs(60);
const LOOK: Duration = Duration::from_millis(50);

/// Most bytes of what a process printed that its failure shows.
const SHOWN: usize = 4000;

/// Starts runs in a folder.
pub struct Starter {
    /// Folder of recipes, or a recipe.
    recipes: PathBuf,
    registry: Registry,
    /// Folder of the runs.
    runs: PathBuf,
    /// Held while a recipe is checked, which may read its data.
    checking: Mutex<()>,
}

/// A run that is to be.
#[derive(Deserialize)]
pub struct Wanted {
    /// Name of the recipe that it begins with.
    recipe: String,
    /// Keys with other values, as after `--set`.
    #[serde(default)]
    set: Vec<String>,
    /// Name of its folder.
    #[serde(default)]
    name: String,
}

impl Starter {
    /// Starts runs in the folder `runs` from recipes in the folder `recipes`, or from the recipe that it is.
    pub fn new(recipes: &Path, runs: &Path, registry: &Registry) -> Self {
        Starter { recipes: recipes.to_owned(), registry: registry.clone(), runs: runs.to_owned(), checking: Mutex::default() }
    }

    /// Recipes by name: files, and runs, whose recipes are complete.
    fn recipes(&self) -> Result<BTreeMap<String, PathBuf>> {
        let of_file = |path: PathBuf| {
            let toml = path.extension().is_some_and(|extension| extension == "toml");
            toml.then(|| Some((path.file_stem()?.to_string_lossy().into_owned(), path.clone())))?
        };
        let files = match self.recipes.is_dir() {
            true => fs::read_dir(&self.recipes)?.map(|entry| Ok(entry?.path())).collect::<Result<Vec<_>>>()?,
            false => vec![self.recipes.clone()],
        };
        let runs = if self.runs.is_dir() { run_folders(&self.runs)? } else { Vec::new() };
        let of_run = |run: PathBuf| {
            let name = format!("run {}", run.strip_prefix(&self.runs).unwrap_or(&run).display());
            Some((name, run.join(RECIPE))).filter(|(_, path)| path.exists())
        };
        Ok(files.into_iter().filter_map(of_file).chain(runs.into_iter().filter_map(of_run)).collect())
    }

    fn path_of(&self, recipe: &str) -> Result<PathBuf> {
        self.recipes()?.remove(recipe).with_context(|| format!("there is no recipe {recipe:?} here"))
    }

    /// Names of the recipes.
    pub fn list(&self) -> Result<Value> {
        Ok(json!(self.recipes()?.into_keys().collect::<Vec<_>>()))
    }

    /// Errors of the wanted recipe, or its keys and what follows from them.
    pub fn check(&self, Wanted { recipe, set, .. }: &Wanted) -> Result<Value> {
        let path = self.path_of(recipe)?;
        let _one = self.checking.lock();
        let surveyed = Mutex::new(Surveyed::default());
        // The run's process has this one's environment.
        let sets = [variables(std::env::vars_os())?, set.clone()].concat();
        let checked = checked(&path, &sets, Computes::Here, &self.registry, |plan| {
            let found = survey::of(plan);
            let complaints = found.complaints.clone();
            *surveyed.lock() = found;
            complaints
        });
        let mut answer = as_json(&checked, &surveyed.into_inner());
        // With errors, the keys of the recipe as it was.
        let keys = checked.map_or_else(|_| flat(&reading::read_text(&path)?), |(plan, _)| flat(&plan.to_toml()));
        answer["keys"] = json!(keys?);
        Ok(answer)
    }

    /// Starts a run in a process apart, whose page asks for `token`, and waits until it has begun.
    ///
    /// # Errors
    /// No name for a folder, or one that is taken; the last lines of a process that ended immediately.
    pub fn start(&self, wanted: &Wanted, token: Option<&str>) -> Result<()> {
        let name = &wanted.name;
        let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte);
        if name.is_empty() || name.len() > 100 || name.starts_with('.') || !name.bytes().all(plain) {
            bail!("{name:?} is no name for a run's folder; use letters, digits, - and _");
        }
        let (recipe, folder) = (self.path_of(&wanted.recipe)?, self.runs.join(name));
        if folder.exists() {
            bail!("{} exists already; choose another name", folder.display());
        }
        fs::create_dir_all(&folder).with_context(|| format!("making {}", folder.display()))?;
        let console = folder.join(CONSOLE);
        let output = File::create(&console).with_context(|| format!("writing {}", console.display()))?;
        let mut command = Command::new(std::env::current_exe().context("finding this program")?);
        command.arg("run").arg(&recipe).arg("--out").arg(&folder).args(wanted.set.iter().flat_map(|set| ["--set", set.as_str()]));
        if !wanted.set.iter().any(|set| set.trim_start().starts_with("observe.page")) {
            command.args(["--page", "127.0.0.1:0"]).envs(token.map(|token| (PAGE_TOKEN, token)));
        }
        // Ctrl-C in this process's terminal is not for the run.
        command.process_group(0).stdin(Stdio::null()).stdout(output.try_clone()?).stderr(output);
        let child = command.spawn().context("starting the run's process")?;
        begun(child, &folder, &console)
    }
}

/// Waits until the run has begun, and leaves its process to a thread.
fn begun(mut child: Child, folder: &Path, console: &Path) -> Result<()> {
    let until = Instant::now() + BEGINS;
    while Instant::now() < until && !folder.join(RECIPE).exists() {
        if let Some(status) = child.try_wait()?
            && !folder.join(RECIPE).exists()
        {
            let said = fs::read(console).unwrap_or_default();
            let said = String::from_utf8_lossy(&said[said.len().saturating_sub(SHOWN)..]).into_owned();
            // A name that nothing came of is free again.
            fs::remove_dir_all(folder).with_context(|| format!("removing {}", folder.display()))?;
            bail!("the run ended immediately ({status}):\n{said}");
        }
        sleep(LOOK);
    }
    std::thread::Builder::new().name("started-run".to_owned()).spawn(move || drop(child.wait()))?;
    Ok(())
}
