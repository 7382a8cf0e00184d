//! The arguments that name a recipe, the plan that they come to, and what is wrong with it.

use std::io::IsTerminal;
use std::path::{Path, PathBuf};

use clap::Args;
use rollflow::observe::Console;
use rollflow::recipe::{self, Loaded, Place, Plan, Problem, RecipeErrors};
use rollflow::util::{reading, untrusted};

use super::out;
use crate::assemble::conversations;
use crate::epochs;
use crate::registry::Registry;
use crate::run::files::RECIPE;
use crate::validate::complaints;

// A doc comment here would replace the help of each subcommand.
#[derive(Args)]
pub struct RecipeArgs {
    /// A recipe, as in pipelines/recipes/grpo.toml.
    pub recipe: PathBuf,
    /// Override a key, as in train.lr=1e-4; may be given several times. Takes precedence over
    /// ROLLFLOW__TRAIN__LR=1e-4 in the environment.
    #[arg(long = "set", value_name = "KEY=VALUE")]
    pub sets: Vec<String>,
}

/// The plan, or all of the recipe's errors on standard error.
pub fn load(args: &RecipeArgs, registry: &Registry) -> Option<Plan> {
    try_load(args, registry).map_err(|errors| show(&errors)).ok()
}

/// The plan, or all that is wrong with it.
pub fn try_load(args: &RecipeArgs, registry: &Registry) -> Result<Plan, RecipeErrors> {
    try_load_and(args, registry, |_| Vec::new()).map(|loaded| loaded.plan)
}

/// The plan with the reasons for values that the recipe left out, or all that is wrong with it.
/// `further` looks for more problems in a plan that is sound otherwise.
pub fn try_load_and(
    args: &RecipeArgs,
    registry: &Registry,
    further: impl Fn(&Plan) -> Vec<Problem>,
) -> Result<Loaded, RecipeErrors> {
    let sets = [recipe::variables(std::env::vars_os())?, args.sets.clone()].concat();
    explained(&args.recipe, &sets, registry, further)
}

/// [`try_load_and`] for a file with overrides. Warnings go to standard error, since no run has a
/// console yet.
pub fn explained(
    path: &Path,
    sets: &[String],
    registry: &Registry,
    further: impl Fn(&Plan) -> Vec<Problem>,
) -> Result<Loaded, RecipeErrors> {
    tracing::subscriber::with_default(Console::quiet(), || settled(path, sets, registry, further))
}

fn settled(
    path: &Path,
    sets: &[String],
    registry: &Registry,
    further: impl Fn(&Plan) -> Vec<Problem>,
) -> Result<Loaded, RecipeErrors> {
    let complaints = |plan: &Plan| {
        let complaints = complaints(registry, plan);
        if complaints.is_empty() && plan.validate().is_ok() { further(plan) } else { complaints }
    };
    let Loaded { mut plan, mut derived } = recipe::load_with(path, sets, complaints)?;
    match epochs::settle(&mut plan, registry) {
        Ok(steps) => derived.extend(steps),
        // Loaded again, so that the error stands where the key was written.
        Err(error) => {
            let complaint = |plan: &Plan| vec![epochs::complaint(plan, &error)];
            return recipe::load_with(path, sets, complaint);
        }
    }
    derived.extend(conversations::derived(&plan));
    plan.validate().map(|()| Loaded { plan, derived })
}

/// The plan of a run. The files that it names may be gone or lie elsewhere by now, and are not looked for.
pub fn load_of_run(run: &Path, sets: &[String], registry: &Registry) -> Option<Plan> {
    let path = run.join(RECIPE);
    let text = reading::read_text(&path)
        .map_err(|error| out::complain(&format!("{}: {error}; give the folder of a run, as in runs/mine", path.display())))
        .ok()?;
    let parse = || recipe::parse_with(&path.display().to_string(), &text, sets, |plan| complaints(registry, plan));
    tracing::subscriber::with_default(Console::quiet(), parse).map_err(|errors| show(&errors)).ok()
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
        let place = untrusted::line(&format!("{}:", error.place));
        text += &format!("{} {}\n", painted(&place, "1"), painted(&untrusted::block(&error.message), "31"));
        if let Place::File { file, line, column } = &error.place
            && let Some(source) = reading::read_text(file.as_ref()).ok().as_ref().and_then(|text| text.lines().nth(line - 1))
            && !source.trim().is_empty()
        {
            let (number, source) = (line.to_string(), untrusted::block(&recipe::masked(source)));
            // Tabs stay tabs, so that the mark stands below its place however wide they are.
            let before: String = source.chars().take(column - 1).map(|c| if c == '\t' { c } else { ' ' }).collect();
            let (margin, mark) = (" ".repeat(number.len()), painted("^", "31"));
            text += &format!("  {number} | {source}\n  {margin} | {before}{mark}\n");
        }
        if !error.help.is_empty() {
            text += &format!("    {} {}\n", painted("help:", "36"), untrusted::block(&error.help));
        }
    }
    let count = errors.iter().count();
    text + &format!("{count} problem{} in the recipe", if count == 1 { "" } else { "s" })
}
