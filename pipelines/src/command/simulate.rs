//! `rollflow simulate`.

use std::path::PathBuf;

use anyhow::Result;
use clap::Args;
use rollflow::recipe::RecipeErrors;

use super::plans::{Loaded, RecipeArgs, load, load_and, show};
use super::{End, out, refused};
use crate::registry::Registry;
use crate::simulate;

/// Simulate a recipe on a machine: the same graph in simulated time, thousands of steps in seconds.
#[derive(Args)]
#[command(after_help = "Example:\n  rollflow simulate mine.toml --profile here.json --vary flow.max_staleness=0,1,2,4")]
pub struct Simulate {
    #[command(flatten)]
    recipe: RecipeArgs,
    /// Durations and lengths of completions. If the file is missing, it is recorded from a short
    /// real run of the recipe.
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
}

impl Simulate {
    /// Prints a forecast for every variant. The errors of all variants are reported before the first.
    pub fn run(self, registry: &Registry) -> Result<()> {
        let Simulate { recipe, profile, record, steps, vary } = self;
        let plan = load(&recipe, registry)?;
        if !plan.pipeline.reinforces() {
            let shown = recipe.recipe.display();
            return Err(refused(format!("only pipelines that reinforce can be simulated; {shown} has nothing to overlap")));
        }
        let profile = simulate::profile_of(&plan, registry, &profile, record)?;
        let variants: Vec<String> = match vary {
            None => vec![String::new()],
            Some((key, values)) => values.iter().map(|value| format!("{key}={value}")).collect(),
        };
        let with = |variant: &String| {
            let sets = recipe.sets.iter().chain(Some(variant).filter(|variant| !variant.is_empty())).cloned().collect();
            load_and(&RecipeArgs { recipe: recipe.recipe.clone(), sets }, registry, |_| Vec::new())
        };
        let loaded: Vec<Result<Loaded, RecipeErrors>> = variants.iter().map(with).collect();
        for errors in loaded.iter().filter_map(|loaded| loaded.as_ref().err()) {
            show(errors);
        }
        let loaded = loaded.into_iter().collect::<Result<Vec<Loaded>, _>>().map_err(|_| End::Said(2))?;
        let width = variants.iter().map(String::len).max().unwrap_or(0);
        for (variant, (plan, _)) in variants.iter().zip(&loaded) {
            let forecast = simulate::simulate(plan, registry, &profile, steps)?;
            out::line(&format!("{variant:width$}{forecast}"))?;
            out::line(&format!("{:width$}  {}", "", forecast.bottleneck))?;
        }
        Ok(())
    }
}
