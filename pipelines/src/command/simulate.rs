//! `rollflow simulate`.

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Result;
use clap::Args;
use rollflow::recipe::Plan;

use super::plans::{RecipeArgs, load};
use super::{REFUSED, out};
use crate::registry::Registry;
use crate::simulate;
use crate::simulate::profile::Profile;

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
    pub fn run(self, registry: &Registry) -> Result<ExitCode> {
        let Simulate { recipe, profile, record, steps, vary } = self;
        let Some(plan) = load(&recipe, registry) else { return Ok(ExitCode::from(REFUSED)) };
        if !plan.pipeline.reinforces() {
            eprintln!(
                "error: only pipelines that reinforce can be simulated; {} has nothing to overlap",
                recipe.recipe.display()
            );
            return Ok(ExitCode::from(REFUSED));
        }
        let profile = simulate::profile_of(&plan, registry, &profile, record)?;
        forecast(&recipe, registry, &profile, steps, vary)
    }
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
        return Ok(ExitCode::from(REFUSED));
    }
    let width = variants.iter().map(String::len).max().unwrap_or(0);
    for (variant, plan) in variants.iter().zip(plans.iter().flatten()) {
        let forecast = simulate::simulate(plan, registry, profile, steps)?;
        out::line(&format!("{variant:width$}{forecast}"))?;
        out::line(&format!("{:width$}  {}", "", forecast.bottleneck))?;
    }
    Ok(ExitCode::SUCCESS)
}
