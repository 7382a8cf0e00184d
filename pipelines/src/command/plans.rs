//! The arguments that name a recipe, the plan that they come to, and what is wrong with it.

use std::io::IsTerminal;
use std::path::{Path, PathBuf};

use clap::Args;
use rollflow::recipe::{self, Place, Plan, RecipeErrors};

use crate::registry::Registry;
use crate::run_folder::RECIPE;

// A doc comment here would be shown in the place of each subcommand's own.
#[derive(Args)]
pub struct RecipeArgs {
    /// A recipe, as in pipelines/recipes/grpo.toml.
    pub recipe: PathBuf,
    /// Override a key, as in train.lr=1e-4; may be given several times. ROLLFLOW__TRAIN__LR=1e-4 in the environment does the same, before it.
    #[arg(long = "set", value_name = "KEY=VALUE")]
    pub sets: Vec<String>,
}

/// The plan, or all of the recipe's errors on standard error.
pub fn load(args: &RecipeArgs, registry: &Registry) -> Option<Plan> {
    try_load(args, registry).map_err(|errors| show(&errors)).ok()
}

/// The plan, or all that is wrong with it.
pub fn try_load(args: &RecipeArgs, registry: &Registry) -> Result<Plan, RecipeErrors> {
    let sets = [recipe::variables(variables()), args.sets.clone()].concat();
    recipe::load_with(&args.recipe, &sets, |plan| registry.complaints(plan))
}

/// The plan of a run. The files that it names may be gone or lie elsewhere by now, and are not looked for.
pub fn load_of_run(run: &Path, sets: &[String], registry: &Registry) -> Option<Plan> {
    let path = run.join(RECIPE);
    let text = std::fs::read_to_string(&path)
        .map_err(|error| eprintln!("{}: {error}; give the folder of a run, as in runs/mine", path.display()))
        .ok()?;
    recipe::parse_with(&path.display().to_string(), &text, sets, |plan| registry.complaints(plan))
        .map_err(|errors| show(&errors))
        .ok()
}

/// Those that are text.
fn variables() -> impl Iterator<Item = (String, String)> {
    std::env::vars_os().filter_map(|(name, value)| Some((name.into_string().ok()?, value.into_string().ok()?)))
}

/// Every error with the line that it is about and a mark below its place; in colours on a terminal.
pub fn show(errors: &RecipeErrors) {
    let colours = std::io::stderr().is_terminal() && std::env::var_os("NO_COLOR").is_none();
    eprintln!("{}", shown(errors, colours));
}

fn shown(errors: &RecipeErrors, colours: bool) -> String {
    let painted = |text: &str, colour: &str| if colours { format!("\x1b[{colour}m{text}\x1b[0m") } else { text.to_owned() };
    let mut text = String::new();
    for error in errors.iter() {
        text += &format!("{} {}\n", painted(&format!("{}:", error.place), "1"), painted(&error.message, "31"));
        if let Place::File { file, line, column } = &error.place
            && let Some(source) = std::fs::read_to_string(file).ok().as_ref().and_then(|text| text.lines().nth(line - 1))
            && !source.trim().is_empty()
        {
            let (number, source) = (line.to_string(), recipe::masked(source));
            // Tabs stay tabs, so that the mark stands below its place however wide they are.
            let before: String = source.chars().take(column - 1).map(|c| if c == '\t' { c } else { ' ' }).collect();
            let (margin, mark) = (" ".repeat(number.len()), painted("^", "31"));
            text += &format!("  {number} | {source}\n  {margin} | {before}{mark}\n");
        }
        if !error.help.is_empty() {
            text += &format!("    {} {}\n", painted("help:", "36"), error.help);
        }
    }
    let count = errors.iter().count();
    text + &format!("{count} problem{} in the recipe", if count == 1 { "" } else { "s" })
}
