//! The arguments that name a recipe, the plan that they come to, and what is wrong with it.

use std::io::{self, Write};
use std::path::{Path, PathBuf};

use anyhow::Result;
use clap::Args;
use rollflow::observe::Console;
use rollflow::recipe::{self, Computes, Derived, Place, Plan, Problem, RecipeErrors, TaskData};
use rollflow::util::{reading, untrusted};

use super::{End, out, refused};
use crate::assemble::conversations;
use crate::epochs;
use crate::registry::Registry;
use crate::run::RECIPE;
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

/// The plan, or all that is wrong with the recipe.
pub fn load(args: &RecipeArgs, registry: &Registry) -> Result<Plan> {
    Ok(load_and(args, registry, |_| Vec::new()).map_err(End::Recipe)?.0)
}

/// [`load_and`] for a command that may compute nothing with the model.
pub fn load_for(computes: Computes, args: &RecipeArgs, registry: &Registry) -> Result<Loaded, RecipeErrors> {
    checked(&args.recipe, &overrides(args)?, computes, registry, |_| Vec::new())
}

/// A plan, and the values that its recipe left out, each with the reason.
pub type Loaded = (Plan, Vec<Derived>);

/// The plan of a recipe under the environment's variables and `--set`, or all that is wrong with it.
/// `further` looks for more problems in a plan that is sound otherwise.
pub fn load_and(args: &RecipeArgs, registry: &Registry, further: impl Fn(&Plan) -> Vec<Problem>) -> Result<Loaded, RecipeErrors> {
    checked(&args.recipe, &overrides(args)?, Computes::Here, registry, further)
}

fn overrides(args: &RecipeArgs) -> Result<Vec<String>, RecipeErrors> {
    Ok([recipe::variables(std::env::vars_os())?, args.sets.clone()].concat())
}

/// [`load_and`] of a file under these overrides alone.
pub fn checked(
    path: &Path,
    sets: &[String],
    computes: Computes,
    registry: &Registry,
    further: impl Fn(&Plan) -> Vec<Problem>,
) -> Result<Loaded, RecipeErrors> {
    let complaints = |plan: &Plan| match complaints(registry, plan) {
        none if none.is_empty() && plan.validate().is_ok() => {
            let mut plan = plan.clone();
            conversations::decide(&mut plan.chat, &plan.model.source);
            further(&plan)
        }
        complaints => complaints,
    };
    // Warnings go to standard error, since no run has a console yet.
    tracing::subscriber::with_default(Console::quiet(), || {
        let (mut plan, mut derived) = recipe::load_with(path, sets, computes, complaints)?;
        let ask = conversations::decide(&mut plan.chat, &plan.model.source);
        match epochs::settle(&mut plan, registry) {
            Ok(steps) => derived.extend(steps),
            // Loaded again, so that the error stands where the key was written.
            Err(error) => return recipe::load_with(path, sets, computes, |plan| vec![epochs::complaint(plan, &error)]),
        }
        let imitates = plan.sft.as_ref().is_some_and(|sft| !sft.sources().is_empty());
        derived.extend(ask.filter(|_| imitates || matches!(plan.task.data, TaskData::Data(_))));
        plan.validate().map(|()| (plan, derived))
    })
}

/// The plan of a run. The files that it names may be gone or lie elsewhere by now, and are not looked for.
pub fn load_of_run(run: &Path, sets: &[String], registry: &Registry) -> Result<Plan> {
    let path = run.join(RECIPE);
    let unread = |error| refused(format!("{}: {error}; give the folder of a run, as in runs/mine", path.display()));
    let text = reading::read_text(&path).map_err(unread)?;
    let parse = || recipe::parse_with(&path.display().to_string(), &text, sets, |plan| complaints(registry, plan));
    let mut plan = tracing::subscriber::with_default(Console::quiet(), parse).map_err(End::Recipe)?;
    conversations::decide(&mut plan.chat, &plan.model.source);
    Ok(plan)
}

/// Prints every error to standard error, with the line that it is about and a mark below its place; in
/// colours on a terminal.
pub fn show(errors: &RecipeErrors) {
    let colours = out::is_coloured(&io::stderr());
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
    // A closed stream loses it.
    writeln!(io::stderr(), "{text}{count} problem{} in the recipe", if count == 1 { "" } else { "s" }).ok();
}
