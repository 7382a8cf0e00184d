//! Forecast of a recipe without the machine: the graph of [`grpo`] in simulated time.
//!
//! Engine and trainer only take the time that real ones were recorded to take. It answers what-ifs in
//! seconds: staleness, over-sampling, capacities, slots, generators, completion lengths. It ignores
//! that stages share cores, and that another recipe changes what the policy samples.

pub mod profile;
pub mod record;

use std::collections::BTreeMap;
use std::fmt;
use std::path::Path;
use std::sync::Arc;

use anyhow::{Context, Result, bail};
use parking_lot::Mutex;
use rollflow::algo::rewards::IntoReward;
use rollflow::engine::SimulatedEngine;
use rollflow::flow::{BoxedStage, Simulation, Until, weights};
use rollflow::prelude::*;
use rollflow::recipe::{Plan, Timeline};
use rollflow::stages::generate::EngineSettings;
use rollflow::stages::train::{Trained, staleness};
use rollflow::train::SimulatedBackend;
use rollflow::util::untrusted;

use crate::assemble::rewards::Scoring;
use crate::assemble::{data, policy, rollout};
use crate::command::out;
use crate::components::Components;
use crate::grpo;
use crate::registry::Registry;
use crate::run::folder::Outputs;
use profile::Profile;

/// The stage whose times are the backend's: of an update, and of each token that a pass goes over.
const TRAINER: &str = "train";

/// Outcome of a simulated run.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Forecast {
    /// Number of steps.
    pub steps: u64,
    /// Simulated seconds.
    pub seconds: f64,
    /// Shares of the time in which generator and trainer worked.
    pub busy: [f64; 2],
    /// Tokens that were sampled.
    pub generated: u64,
    /// Tokens that were learned from.
    pub trained: u64,
    /// Trained samples by how many versions their oldest token lagged.
    pub staleness: BTreeMap<u64, u64>,
    /// The bottleneck, and the setting that moves it.
    pub bottleneck: String,
}

impl fmt::Display for Forecast {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [generator, trainer] = self.busy.map(|share| 100.0 * share);
        let samples: u64 = self.staleness.values().sum();
        // Sampled tokens that nothing was learned from.
        let waste = 1.0 - self.trained as f64 / self.generated.max(1) as f64;
        let share = |count: &u64| 100.0 * *count as f64 / samples.max(1) as f64;
        let lags: Vec<String> = self.staleness.iter().map(|(lag, count)| format!("{lag}: {:.0}%", share(count))).collect();
        write!(
            f,
            "{:>9.0} steps/h  {:>9.0} tokens/s trained  {:>5.1}% wasted  idle: generator {:>5.1}%, trainer {:>5.1}%  staleness {}",
            self.steps as f64 / self.seconds * 3600.0,
            self.trained as f64 / self.seconds,
            100.0 * waste,
            100.0 - generator,
            100.0 - trainer,
            lags.join(", "),
        )
    }
}

/// Runs the recipe's graph for `steps` steps of simulated time. The same seed gives the same forecast.
pub fn simulate(plan: &Plan, registry: &Registry, profile: &Profile, steps: u64) -> Result<Forecast> {
    if plan.environment.is_some() {
        bail!("[environment] answers in real time, and its turns depend on what is said: such a run can't be simulated");
    }
    let mut plan = plan.clone();
    (plan.train.steps, plan.train.target_reward) = (steps, None);
    let simulation = Simulation::new(plan.seed);
    // The trainer says itself what it takes: its passes are not one a message.
    for (stage, times) in profile.stages.clone().into_iter().filter(|(stage, _)| stage != TRAINER) {
        simulation.takes(&stage, move |tokens| times.of(tokens));
    }
    let seen: Arc<Mutex<Forecast>> = Arc::default();
    let looked = seen.clone();
    let mut outputs = Outputs::in_memory();
    outputs.log = outputs.log.each(move |step: &Trained<()>| {
        let mut forecast = looked.lock();
        for lag in step.batch.samples().filter_map(|sample| staleness(sample, step.version)) {
            *forecast.staleness.entry(lag).or_default() += 1;
        }
        if let Some(totals) = &step.totals {
            forecast.generated = totals.generated;
            forecast.trained = totals.tokens.get(&rollflow::rollout::Fate::Trained).copied().unwrap_or(0);
        }
    });
    let mut flow = grpo::declare(&plan, components(&plan, registry, profile, &simulation)?, outputs, None)?;
    let graph = flow.graph();
    if let Some(stage) = profile.stages.keys().find(|stage| graph.stages().all(|name| name != *stage)) {
        let known: Vec<&str> = graph.stages().collect();
        bail!("the profile gives times for a stage {stage:?}, which the pipeline lacks; its stages are {}", known.join(", "));
    }
    let report = flow.simulate(&simulation, Until::finished())?;
    let busy = |name| report.stage(name).map_or(0.0, |stage| stage.share(rollflow::flow::State::Busy));
    let mut forecast = seen.lock().clone();
    forecast.steps = steps;
    forecast.seconds = report.wall as f64 / 1e9;
    forecast.busy = [busy("generate"), busy("train")];
    forecast.bottleneck = report.bottleneck();
    Ok(forecast)
}

/// `KEY=VALUE,VALUE…` in parts.
pub fn variants(text: &str) -> std::result::Result<(String, Vec<String>), String> {
    match text.split_once('=') {
        Some((key, values)) if !key.is_empty() && !values.is_empty() => {
            Ok((key.to_owned(), values.split(',').map(str::to_owned).collect()))
        }
        _ => Err("write a key and its values, as in flow.max_staleness=0,1,2,4".to_owned()),
    }
}

/// The profile in that file, or a new one that is kept there.
pub fn profile_of(plan: &Plan, registry: &Registry, path: &Path, steps: u64) -> Result<Profile> {
    if path.exists() {
        return Profile::load(path);
    }
    out::line(&format!("recording {steps} steps of {} to {}", untrusted::line(&plan.name), untrusted::path(path)))?;
    let profile = record::record(plan, registry, steps)?;
    profile.save(path)?;
    if let Some(recorded) = profile.recorded {
        let predicted = simulate(plan, registry, &profile, recorded.steps)?;
        out::line(&format!(
            "{steps} steps took {:.2} s; simulated they take {:.2} s ({:+.1}%)",
            recorded.seconds,
            predicted.seconds,
            100.0 * (predicted.seconds / recorded.seconds - 1.0)
        ))?;
    }
    Ok(profile)
}

/// Gives every token the log-probability 0.
fn unscored(_: &Arc<()>, samples: &mut [Sample]) -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
    samples.iter_mut().for_each(|sample| sample.ref_log_probs = vec![0.0; sample.tokens.len()]);
    Ok(())
}

/// Components that only take time.
fn components(
    plan: &Plan,
    registry: &Registry,
    profile: &Profile,
    simulation: &Simulation,
) -> Result<Components<SimulatedBackend>> {
    let tokenizer =
        Arc::new(policy::tokenizer(&plan.model, &plan.chat).context("the tokenizer, which tells how long prompts are")?);
    let (publisher, published) = weights();
    let (machine, times, answers, seed) = (simulation.clone(), profile.decode, profile.answers.clone(), plan.seed);
    let lengths = answers.clone();
    let make = move |settings: &EngineSettings| {
        let lengths = lengths.clone();
        let length = move |ordinal, index| lengths.of(seed, ordinal, index).0;
        SimulatedEngine::new(&machine, settings.slots, move |load| times.step(load), length)
            .on_new_weights(settings.on_new_weights)
    };
    let generator = Generator::by(make, &tokenizer).weights(published);
    let (timeline, every) = (Timeline::of(plan)?, plan.sync.every);
    let generator = rollout::configured(generator, &plan.generate, seed, plan.most_slots(), timeline, every);
    let trainer = profile.stages.get(TRAINER).copied().unwrap_or_default();
    let reward = move |sample: &Sample| answers.of(seed, sample.group_index, sample.index).1;
    Ok(Components {
        prompts: data::prompts(&plan.task, &plan.chat, seed, plan.reward.rule.compares(), |_| Ok(()))?,
        generator: BoxedStage::new(generator),
        sync: BoxedStage::new(WeightSync::to(publisher).log_every(plan.observe.log_every)),
        reward: Scoring::Local {
            reward: Box::new(move |sample: &Sample| reward(sample).into_reward()),
            models: Vec::new(),
            threads: 0,
        },
        reference: plan.reference.as_ref().map(|_| Reference::frozen(unscored, Arc::new(()))),
        // Its time is within that of the stage.
        critic: plan.critic.as_ref().map(|_| SimulatedBackend::default()),
        backend: SimulatedBackend::on(simulation, trainer.of(0), trainer.of(1).saturating_sub(trainer.of(0))),
        mixture: None,
        evaluator: None,
        registry: registry.clone(),
    })
}
