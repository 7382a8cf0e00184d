//! Reinforcement runs in this process, and what each says of itself, step by step.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::{Arc, OnceLock};

use anyhow::{Context, Result, ensure};
use parking_lot::Mutex;
use rollflow::flow::Interrupts;
use rollflow::flow::{Ended, Report, State, Stats};
use rollflow::observe::Metric;
use rollflow::observe::StepMetrics;
use rollflow::prelude::*;
use rollflow::recipe::{self, Plan};
use rollflow_pipelines::Registry;
use rollflow_pipelines::assemble::policy;
use rollflow_pipelines::components::Components;
use rollflow_pipelines::grpo;
use rollflow_pipelines::run::folder::Outputs;
use rollflow_pipelines::sft::{self, WarmUp};

/// Runs recipes, one after the other.
pub struct Learner {
    /// Whether to try rather than to measure.
    pub quick: bool,
    interrupts: Interrupts,
}

/// A run, as long as it was watched.
pub struct Run {
    /// One a step.
    pub rows: Vec<Row>,
    /// Trained samples by their staleness: the upper bound of each bucket, and how many lie in it.
    pub staleness: Vec<(u64, f64)>,
}

/// A run as of the end of a step.
#[derive(Clone)]
pub struct Row {
    /// Since the run began, the warm-up not included.
    pub seconds: f64,
    /// Seconds that the generator was busy until then.
    pub generating: f64,
    /// Seconds that the trainer was busy until then.
    pub training: f64,
    /// The step's numbers, by the catalogue's keys.
    pub metrics: StepMetrics,
    /// The token ledger (law D4), by fate.
    pub tokens: BTreeMap<&'static str, f64>,
}

impl Learner {
    /// Drained by Ctrl-C, whatever runs.
    pub fn new(quick: bool) -> Result<Self> {
        Ok(Learner { quick, interrupts: Interrupts::listen().context("listening for Ctrl-C")? })
    }

    /// Seeds of repeated runs.
    pub fn seeds(&self) -> &'static [u64] {
        if self.quick { &[0] } else { &[0, 1, 2] }
    }

    /// A recipe of this package, with values laid over it.
    pub fn plan(&self, file: &str, sets: &[String]) -> Result<Plan> {
        Ok(recipe::load(&Path::new(env!("CARGO_MANIFEST_DIR")).join(file), sets)?)
    }

    /// What reinforcement begins with: made once, for all runs of a seed.
    pub fn policy(&self, plan: &Plan) -> Result<Policy> {
        let policy = policy::policy(plan)?;
        let Some(warm_up) = &plan.sft else { return Ok(policy) };
        match sft::warm_up(plan, warm_up, &Registry::default(), &policy, &self.interrupts)? {
            WarmUp::Learned(policy) => Ok(policy),
            WarmUp::Interrupted(_) => anyhow::bail!("interrupted"),
        }
    }

    /// Reinforces to the recipe's end, leaving no files.
    pub fn run(&self, plan: &Plan, policy: &Policy) -> Result<Run> {
        let (rows, stats) = (Arc::<Mutex<Vec<Row>>>::default(), Arc::<OnceLock<Stats>>::default());
        let metrics = Metrics::new();
        let (kept, watched, book) = (rows.clone(), stats.clone(), metrics.clone());
        let log = RunLog::new(&metrics).logger(move |_: u64, step: &StepMetrics| {
            let report = watched.get().and_then(Stats::report);
            kept.lock().extend(report.map(|now| row(&now, step, &book)));
        });
        let outputs = Outputs { metrics: metrics.clone(), log, ..Outputs::in_memory() };
        let mut flow = grpo::declare(plan, Components::local(plan, &Registry::default(), policy, policy)?, outputs, None)?;
        flow.interrupted_by(&self.interrupts);
        stats.get_or_init(|| flow.stats());
        let report = flow.run(Until::finished())?;
        ensure!(report.ended == Ended::Finished, "interrupted");
        let rows = std::mem::take(&mut *rows.lock());
        ensure!(!rows.is_empty(), "{} took no step", plan.name);
        Ok(Run { rows, staleness: buckets(&metrics.render(), Metric::SampleStaleness) })
    }
}

impl Run {
    /// The end of the last step.
    pub fn last(&self) -> &Row {
        &self.rows[self.rows.len() - 1]
    }

    /// Over all steps that have it.
    pub fn mean(&self, metric: Metric) -> f64 {
        mean(self.rows.iter().filter_map(|row| row.metrics.get(metric.key()).copied()))
    }

    /// The reward that `train.target_reward` is compared with, after the last step.
    pub fn reward(&self) -> f64 {
        mean(self.rows.iter().rev().take(20).map(Row::reward))
    }

    /// What happened from the end of a step to the end of a later one. Its `metrics` are the later one's.
    pub fn between(&self, from: usize, to: usize) -> Row {
        let (from, mut part) = (&self.rows[from - 1], self.rows[to - 1].clone());
        part.seconds -= from.seconds;
        part.generating -= from.generating;
        part.training -= from.training;
        part.tokens.iter_mut().for_each(|(fate, tokens)| *tokens -= from.tokens[fate]);
        part
    }
}

impl Row {
    /// Mean over the step's samples.
    pub fn reward(&self) -> f64 {
        self.metrics.get(Metric::RewardMean.key()).copied().unwrap_or(f64::NAN)
    }
}

fn row(now: &Report, step: &StepMetrics, book: &Metrics) -> Row {
    let busy = |name: &str| now.stage(name).map_or(0.0, |stage| stage.time().of(State::Busy) as f64 / 1e9);
    let fates = Metric::LedgerTokens.labels()[0].1;
    Row {
        seconds: now.wall as f64 / 1e9,
        generating: busy("generate"),
        training: busy("train"),
        metrics: step.clone(),
        tokens: fates.iter().map(|fate| (*fate, book.newest(Metric::LedgerTokens, &[fate]).unwrap_or(0.0))).collect(),
    }
}

fn mean(values: impl Iterator<Item = f64>) -> f64 {
    let (count, sum) = values.fold((0.0, 0.0), |(count, sum), value| (count + 1.0, sum + value));
    sum / count
}

/// The buckets of a histogram in the Prometheus text, which counts from the smallest value up to each bound.
fn buckets(text: &str, metric: Metric) -> Vec<(u64, f64)> {
    let head = format!("{}_bucket{{le=\"", metric.name());
    let lines = text.lines().filter_map(|line| line.strip_prefix(&head)?.split_once("\"} "));
    let mut below = 0.0;
    let mut own = Vec::new();
    for (bound, count) in lines.filter_map(|(bound, count)| Some((bound.parse().ok()?, count.parse::<f64>().ok()?))) {
        own.push((bound, count - below));
        below = count;
    }
    own
}
