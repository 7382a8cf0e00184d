//! Gains of a run from other settings: simulations on the times that it recorded itself.

use std::path::Path;

use anyhow::{Context, Result, ensure};
use rollflow::flow::Interrupts;
use rollflow::recipe::Plan;
use serde::Serialize;

use crate::command::plans::load_of_run;
use crate::profile::Profile;
use crate::registry::Registry;
use crate::run::PROFILE;
use crate::simulate::cluster::{self, Cluster, PREFIX};
use crate::simulate::{Forecast, simulate};

/// Steps that are simulated: long enough that the fill of the pipeline at its start does not count.
const STEPS: u64 = 60;

/// A forecast of the run, and of what five settings would make of it.
#[derive(Clone, Debug, Serialize)]
pub struct Forecasts {
    /// Steps an hour that the run made.
    pub made: f64,
    /// Steps an hour of the simulated run, as it was.
    pub simulated: f64,
    /// The same with one setting changed.
    pub changed: Vec<Changed>,
}

/// A forecast with one other setting.
#[derive(Clone, Debug, Serialize)]
pub struct Changed {
    /// The setting, as after `--set`.
    pub set: String,
    /// Steps an hour over those of the run as it was, less 1.
    pub gain: f64,
    /// Largest staleness of any sample, in versions.
    pub staleness: u64,
    /// Share of generated tokens that is not trained.
    pub wasted: f64,
}

/// The settings that move a bottleneck, each with a value a step further.
fn further(plan: &Plan) -> Vec<String> {
    let (staleness, oversampling) = (plan.flow.max_staleness, plan.batch.oversampling_factor);
    let mut sets = vec![format!("flow.max_staleness={}", (2 * staleness).max(1))];
    sets.push(format!("batch.oversampling_factor={}", 1.25 * oversampling));
    // With 0 the run finds the number by itself.
    sets.extend((plan.generate.max_num_seqs > 0).then(|| format!("generate.max_num_seqs={}", 2 * plan.generate.max_num_seqs)));
    sets.push(format!("sync.every={}", 2 * plan.sync.every));
    sets.push("cluster.engines=2".to_owned());
    sets
}

/// Forecasts of the run in `folder`; `None` if it recorded no times, or can't be simulated. A setting that
/// the recipe can't have is left out.
pub fn of(folder: &Path, registry: &Registry) -> Result<Option<Forecasts>> {
    let path = folder.join(PROFILE);
    if !path.exists() {
        return Ok(None);
    }
    let (profile, plan) = (Profile::load(&path)?, load_of_run(folder, &[], registry)?);
    if !plan.pipeline.reinforces() || plan.environment.is_some() {
        return Ok(None);
    }
    let hourly = |forecast: &Forecast| forecast.steps as f64 / forecast.seconds * 3600.0;
    let interrupts = Interrupts::listen().context("listening for Ctrl-C")?;
    let forecast = |plan: &Plan, cluster: &Cluster| -> Result<Forecast> {
        let forecast = simulate(plan, registry, &profile, cluster, STEPS, &interrupts)?;
        ensure!(!forecast.interrupted, "interrupted");
        Ok(forecast)
    };
    let before = hourly(&forecast(&plan, &Cluster::default())?);
    let changed = |set: String| {
        let sets = [set.clone()];
        let (of_cluster, of_plan) = if set.starts_with(PREFIX) { (&sets[..], &[][..]) } else { (&[][..], &sets[..]) };
        let (plan, cluster) = (load_of_run(folder, of_plan, registry).ok()?, cluster::read(None, of_cluster).ok()?);
        let forecast = forecast(&plan, &cluster).ok()?;
        Some(Changed {
            set,
            gain: hourly(&forecast) / before - 1.0,
            staleness: forecast.staleness.keys().next_back().copied().unwrap_or(0),
            wasted: 1.0 - forecast.trained as f64 / forecast.generated.max(1) as f64,
        })
    };
    let made = profile.recorded.map_or(0.0, |recorded| recorded.steps as f64 / recorded.seconds * 3600.0);
    let changed = further(&plan).into_iter().filter_map(changed).collect();
    ensure!(!interrupts.pressed(), "interrupted");
    Ok(Some(Forecasts { made, simulated: before, changed }))
}
