//! Forecast of a recipe without the machine: the graph of [`grpo`] in simulated time.
//!
//! Engine and trainer only take the time that real ones were recorded to take, divided among the
//! engines and ranks of a [`Cluster`]. It answers what-ifs in seconds: staleness, over-sampling,
//! capacities, slots, generators, completion lengths, ranks, links, engines and their failures. It
//! ignores that stages share cores, and that another recipe changes what the policy samples.

pub mod cluster;
mod engines;
mod ranks;
pub mod record;

use std::collections::BTreeMap;
use std::fmt;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use parking_lot::Mutex;
use rollflow::algo::rewards::IntoReward;
use rollflow::engine::SimulatedEngine;
use rollflow::flow::{BoxedStage, Ended, Interrupts, Simulation, Until, weights};
use rollflow::prelude::*;
use rollflow::recipe::{Plan, Timeline};
use rollflow::stages::generate::EngineSettings;
use rollflow::stages::train::{Trained, staleness};
use rollflow::train::SimulatedBackend;
use rollflow::util::untrusted;

use crate::assemble::references::Scorers;
use crate::assemble::rewards::Scoring;
use crate::assemble::{data, policy, rollout};
use crate::command::out;
use crate::components::Components;
use crate::grpo;
use crate::profile::Profile;
use crate::registry::Registry;
use crate::run::folder::Outputs;
use cluster::Cluster;
use engines::Engines;
use ranks::{Seconds, Trainer};

/// The stage whose times are the backend's: of an update, and of each token that a pass goes over.
const TRAINER: &str = "train";

/// Outcome of a simulated run.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Forecast {
    /// Number of steps that were simulated.
    pub steps: u64,
    /// If true, Ctrl-C or SIGTERM ended the simulation before its last step.
    pub interrupted: bool,
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
    /// Share of the time in which ranks only waited for their exchanges.
    pub exchange: f64,
    /// Seconds until a version has reached all engines.
    pub carry: f64,
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

impl Forecast {
    /// The bottleneck, what several ranks and engines wait for, and an early end, in one line.
    pub fn limits(&self) -> String {
        let exchange = (self.exchange > 0.0).then(|| format!("; exchanges of ranks take {:.1}%", 100.0 * self.exchange));
        let carry = (self.carry > 0.0).then(|| format!("; a version takes {:.2} s to the engines", self.carry));
        let stopped = self.interrupted.then(|| format!("; stopped after {} steps", self.steps));
        [Some(self.bottleneck.clone()), exchange, carry, stopped].into_iter().flatten().collect()
    }
}

/// Runs the recipe's graph for `steps` steps of simulated time on `cluster`. The same seed gives the
/// same forecast. If interrupted, the forecast is that of the steps before.
///
/// # Errors
///
/// If the plan can't be simulated, or no step was.
pub fn simulate(
    plan: &Plan,
    registry: &Registry,
    profile: &Profile,
    cluster: &Cluster,
    steps: u64,
    interrupts: &Interrupts,
) -> Result<Forecast> {
    if plan.environment.is_some() {
        bail!("[environment] answers in real time, and its turns depend on what is said: such a run can't be simulated");
    }
    if cluster.engines > 1 && plan.generate.workers > 1 {
        bail!("cluster.engines counts all engines, so generate.workers has to be 1; it is {}", plan.generate.workers);
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
        forecast.steps = step.step;
        for lag in step.batch.samples().filter_map(|sample| staleness(sample, step.version)) {
            *forecast.staleness.entry(lag).or_default() += 1;
        }
        if let Some(totals) = &step.totals {
            forecast.generated = totals.generated;
            forecast.trained = totals.tokens.get(&rollflow::rollout::Fate::Trained).copied().unwrap_or(0);
        }
    });
    let exchanged: Arc<AtomicU64> = Arc::default();
    let components = components(&plan, registry, profile, cluster, &simulation, &exchanged)?;
    let mut flow = grpo::declare(&plan, components, outputs, None)?;
    let graph = flow.graph();
    if let Some(stage) = profile.stages.keys().find(|stage| graph.stages().all(|name| name != *stage)) {
        let known: Vec<&str> = graph.stages().collect();
        bail!("the profile gives times for a stage {stage:?}, which the pipeline lacks; its stages are {}", known.join(", "));
    }
    flow.interrupted_by(interrupts);
    let report = flow.simulate(&simulation, Until::finished())?;
    let busy = |name| report.stage(name).map_or(0.0, |stage| stage.share(rollflow::flow::State::Busy));
    let mut forecast = seen.lock().clone();
    ensure!(forecast.steps > 0, "the simulation was interrupted, or its data ended, before the first step");
    forecast.interrupted = report.ended != Ended::Finished;
    forecast.seconds = report.wall as f64 / 1e9;
    forecast.busy = [busy("generate"), busy("train")];
    forecast.exchange = exchanged.load(Relaxed) as f64 / report.wall.max(1) as f64;
    forecast.carry = cluster.carry(&plan);
    forecast.bottleneck = report.bottleneck();
    Ok(forecast)
}

/// Splits `KEY=VALUE,VALUE…`, at commas outside brackets and quotes.
pub fn variants(text: &str) -> std::result::Result<(String, Vec<String>), String> {
    let Some((key, values)) = text.split_once('=').filter(|(key, values)| !key.is_empty() && !values.is_empty()) else {
        return Err("write a key and its values, as in flow.max_staleness=0,1,2,4".to_owned());
    };
    let (mut depth, mut quoted) = (0_usize, false);
    let separates = |letter: char| {
        match letter {
            '"' => quoted = !quoted,
            '[' | '{' if !quoted => depth += 1,
            ']' | '}' if !quoted => depth = depth.saturating_sub(1),
            _ => {}
        }
        letter == ',' && depth == 0 && !quoted
    };
    Ok((key.to_owned(), values.split(separates).map(str::to_owned).collect()))
}

/// The profile in that file, or a new one that is kept there.
pub fn profile_of(plan: &Plan, registry: &Registry, path: &Path, steps: u64, interrupts: &Interrupts) -> Result<Profile> {
    if path.exists() {
        return Profile::load(path);
    }
    out::line(&format!("recording {steps} steps of {} to {}", untrusted::line(&plan.name), untrusted::path(path)))?;
    let profile = record::record(plan, registry, steps, interrupts)?;
    profile.save(path)?;
    if let Some(recorded) = profile.recorded {
        let predicted = simulate(plan, registry, &profile, &Cluster::default(), recorded.steps, interrupts)?;
        ensure!(!predicted.interrupted, "interrupted after the profile was saved to {}", untrusted::path(path));
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

/// Components that only take time. Nanoseconds of exchanges between ranks are added to `exchanged`.
fn components(
    plan: &Plan,
    registry: &Registry,
    profile: &Profile,
    cluster: &Cluster,
    simulation: &Simulation,
    exchanged: &Arc<AtomicU64>,
) -> Result<Components<SimulatedBackend>> {
    let tokenizer =
        Arc::new(policy::tokenizer(&plan.model, &plan.chat).context("the tokenizer, which tells how long prompts are")?);
    let (publisher, published) = weights();
    let (machine, decode, answers, seed) = (simulation.clone(), profile.decode, profile.answers.clone(), plan.seed);
    let (lengths, machines) = (answers.clone(), cluster.clone());
    // A completion in flight has half of its tokens on average.
    let context = answers.mean().min(plan.generate.max_new_tokens as f64) / 2.0;
    let make = move |settings: &EngineSettings| {
        let (lengths, clock) = (lengths.clone(), machine.clone());
        let length = move |ordinal, index| lengths.of(seed, ordinal, index).0;
        let mut engines = Engines::new(&machines, decode, context, seed);
        let time = move |load| engines.step(clock.now(), load);
        SimulatedEngine::new(&machine, settings.slots, time, length)
            .on_new_weights(settings.on_new_weights)
            .pause(duration(machines.pause))
    };
    let generator = Generator::by(make, &tokenizer).weights(published);
    let (timeline, every) = (Timeline::of(plan)?, plan.sync.every);
    let generator = rollout::configured(generator, &plan.generate, seed, plan.most_slots(), timeline.clone(), every);
    let trainer = Trainer::new(profile.stages.get(TRAINER).copied().unwrap_or_default(), cluster, plan);
    let (machine, carry) = (simulation.clone(), duration(cluster.carry(plan)));
    let sync = WeightSync::to(publisher).log_every(plan.observe.log_every).before_publish(move || machine.pass(carry));
    let exchanged = exchanged.clone();
    let takes = move |Seconds { all, exchange }| {
        exchanged.fetch_add(duration(exchange).as_nanos() as u64, Relaxed);
        duration(all)
    };
    let (of_update, update) = (takes.clone(), trainer.update());
    let backend = SimulatedBackend::on(simulation, move || of_update(update), move |tokens| takes(trainer.pass(tokens)));
    let reward = move |sample: &Sample| answers.of(seed, sample.group_index, sample.index).1;
    Ok(Components {
        prompts: data::prompts(&plan.task, plan.environment.as_ref(), &plan.chat, seed, plan.reward.rule.compares(), |_| Ok(()))?,
        generator: BoxedStage::new(generator),
        sleep: None,
        sync: BoxedStage::new(sync),
        reward: Scoring::Local {
            reward: Box::new(move |sample: &Sample| reward(sample).into_reward()),
            models: Vec::new(),
            threads: 0,
        },
        scorers: Scorers {
            reference: plan.reference.as_ref().map(|_| Reference::frozen(unscored, Arc::new(()))),
            teacher: plan.teacher.as_ref().map(|_| Reference::frozen(unscored, Arc::new(())).teaching()),
        },
        // Its time is within that of the stage.
        critic: plan.critic.as_ref().map(|_| SimulatedBackend::default()),
        backend,
        mixture: None,
        evaluator: None,
        registry: registry.clone(),
        timeline,
    })
}

/// A duration from a number that may be beyond all durations.
fn duration(seconds: f64) -> Duration {
    Duration::try_from_secs_f64(seconds).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_end_at_commas_outside_brackets_and_quotes() {
        let values = |text: &str| variants(text).map(|(_, values)| values);
        assert_eq!(values("flow.max_staleness=0,1").unwrap(), ["0", "1"]);
        assert_eq!(values("cluster.outages=[],[{at=1,engines=2}]").unwrap(), ["[]", "[{at=1,engines=2}]"]);
        assert_eq!(values("a=\"x,[\",y").unwrap(), ["\"x,[\"", "y"]);
        assert!(values("a").is_err() && values("=1").is_err() && values("a=").is_err());
    }
}
