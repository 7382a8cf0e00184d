//! `rollflow simulate`.

use std::path::PathBuf;

use anyhow::{Context, Result, ensure};
use clap::Args;
use rollflow::flow::Interrupts;
use rollflow::recipe::{Computes, RecipeErrors};

use super::plans::{Loaded, RecipeArgs, load_for, show};
use super::{End, out, refused};
use crate::registry::Registry;
use crate::simulate;
use crate::simulate::cluster::{self, Cluster, PREFIX};

/// Simulate a recipe on a machine or a cluster: the same graph in simulated time, thousands of steps in
/// seconds.
#[derive(Args)]
#[command(after_help = "Examples:\n  rollflow simulate mine.toml --profile here.json --vary flow.max_staleness=0,1,2,4\n  \
    rollflow simulate mine.toml --profile here.json --cluster racks.toml --vary cluster.engines=8,64,1000")]
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
    /// Machines, a TOML file with a section [cluster]: ranks, engines, hosts, links, failures. Left
    /// out: one rank and one engine. Its keys can be overridden, as in --set cluster.engines=4.
    #[arg(long, value_name = "FILE")]
    cluster: Option<PathBuf>,
    /// Ask what if: a forecast for each value of a key, as in flow.max_staleness=0,1,2,4 or
    /// cluster.engines=1,2,4. A value may be a list.
    #[arg(long, value_name = "KEY=VALUE,VALUE…", value_parser = simulate::variants)]
    vary: Option<(String, Vec<String>)>,
}

impl Simulate {
    /// Prints a forecast for every variant. The errors of all variants are reported before the first. An
    /// interrupt ends it after the figures of the steps before.
    pub fn run(self, registry: &Registry) -> Result<()> {
        let Simulate { recipe, profile, record, steps, cluster, vary } = self;
        let (of_cluster, sets): (Vec<String>, Vec<String>) = recipe.sets.into_iter().partition(|set| set.starts_with(PREFIX));
        let recipe = RecipeArgs { sets, ..recipe };
        // Without a profile, steps are recorded here.
        let computes = if profile.exists() { Computes::Elsewhere } else { Computes::Here };
        let (plan, _) = load_for(computes, &recipe, registry).map_err(End::Recipe)?;
        if !plan.pipeline.reinforces() {
            let shown = recipe.recipe.display();
            return Err(refused(format!("only pipelines that reinforce can be simulated; {shown} has nothing to overlap")));
        }
        let (key, values) = vary.unwrap_or_default();
        let variants: Vec<String> = match values.is_empty() {
            true => vec![String::new()],
            false => values.iter().map(|value| format!("{key}={value}")).collect(),
        };
        let with = |variant: &String| {
            let of = |sets: &[String], mine: bool| -> Vec<String> {
                let varied = Some(variant).filter(|_| mine && !key.is_empty());
                sets.iter().chain(varied).cloned().collect()
            };
            let varies_cluster = key.starts_with(PREFIX);
            let sets = of(&recipe.sets, !varies_cluster);
            let loaded = load_for(computes, &RecipeArgs { recipe: recipe.recipe.clone(), sets }, registry)?;
            Ok((loaded, cluster::read(cluster.as_deref(), &of(&of_cluster, varies_cluster))?))
        };
        let loaded: Vec<Result<(Loaded, Cluster), RecipeErrors>> = variants.iter().map(with).collect();
        for errors in loaded.iter().filter_map(|loaded| loaded.as_ref().err()) {
            show(errors);
        }
        let loaded = loaded.into_iter().collect::<Result<Vec<_>, _>>().map_err(|_| End::Said(2))?;
        let interrupts = Interrupts::listen().context("listening for Ctrl-C")?;
        let profile = simulate::profile_of(&plan, registry, &profile, record, &interrupts)?;
        let width = variants.iter().map(String::len).max().unwrap_or(0);
        for (variant, ((plan, _), cluster)) in variants.iter().zip(&loaded) {
            let forecast = simulate::simulate(plan, registry, &profile, cluster, steps, &interrupts)?;
            out::line(&format!("{variant:width$}{forecast}"))?;
            out::line(&format!("{:width$}  {}", "", forecast.limits()))?;
            ensure!(!forecast.interrupted, "interrupted: stopped after {} of {steps} steps", forecast.steps);
        }
        Ok(())
    }
}
