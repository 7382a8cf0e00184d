//! What a run leaves behind, and what shows it while it lives.
//!
//! `recipe.toml` (resolved), `metrics.jsonl`, `rollouts.jsonl`, `dead_letters.jsonl` (if there are any), `checkpoints/step_000123/`,
//! `reference/` (if the policy is held to what its warm-up made), `report.md`, `curve.svg`, `report.html`, `run.json`.

use std::collections::BTreeMap;
use std::fs::{File, TryLockError};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use anyhow::{Context, Result, bail};
use rollflow::data::POISONED;
use rollflow::flow::{Ended, Flow, Report, RunError, StageReport, State};
use rollflow::model::FrozenWeights;
use rollflow::observe::chart::Chart;
use rollflow::observe::logs::{
    ConsoleLogger, DEAD_LETTERS, DeadLetterWriter, JsonlLogger, RolloutWriter, TensorBoardLogger, read_metrics, read_rollouts,
};
use rollflow::observe::progress::{Progress, duration};
use rollflow::observe::report::StageShares;
use rollflow::observe::run_report::RunReport;
use rollflow::observe::stage_sampler::StageSampler;
use rollflow::observe::{Console, Metric, Metrics, MetricsServer, StepMetrics};
use rollflow::recipe::Plan;
use rollflow::stages::evaluate::AnswerLog;
use rollflow::stages::sink::RunLog;
use rollflow::stages::train::{self, Trained};
use rollflow::train::checkpoint::{self, CHECKPOINTS};

use crate::page;
use crate::record::{Drawn, Record};

/// Where the stages of a pipeline write. `W`: what its trainer publishes.
pub struct Outputs<W = FrozenWeights> {
    /// Counters, gauges and histograms.
    pub metrics: Metrics,
    /// The sink at the pipeline's end.
    pub log: RunLog<W>,
    /// Gets the groups whose reward failed, if anything does.
    pub dead_letters: Option<DeadLetterWriter>,
    /// Gets what evaluations find, if anything does.
    pub answers: Option<AnswerLog>,
    /// The folder that gets `checkpoints/`, if any does.
    pub checkpoints: Option<PathBuf>,
}

impl<W> Outputs<W> {
    /// Metrics in memory and no files.
    pub fn in_memory() -> Self {
        let metrics = Metrics::new();
        Outputs { log: RunLog::new(&metrics), metrics, dead_letters: None, answers: None, checkpoints: None }
    }
}

/// A run's folder and its metrics. Dropping it ends the metrics server (law F3).
pub struct RunFolder {
    path: PathBuf,
    name: String,
    metrics: Metrics,
    server: Option<MetricsServer>,
    progress: bool,
    console: Console,
    rows: Arc<Mutex<Vec<(u64, StepMetrics)>>>,
    staleness: Arc<Mutex<BTreeMap<u64, u64>>>,
    /// For the page: the graph, and where the time went.
    drawn: Mutex<Drawn>,
    /// Held for as long as this process works on the run.
    _lock: File,
}

/// The resolved recipe's file.
pub const RECIPE: &str = "recipe.toml";
/// Held by the process that works on the run.
pub const LOCK: &str = ".lock";

impl RunFolder {
    /// Makes the folder, writes the resolved recipe into it and serves metrics if the recipe says so. A folder that already holds a run is
    /// refused: nothing is overwritten.
    pub fn create(path: &Path, plan: &Plan) -> Result<Self> {
        if path.join(RECIPE).exists() {
            bail!("{} already holds a run; choose another folder with --out, or go on with it: rollflow resume", path.display());
        }
        // Before anything is written: a busy port must not leave a folder that looks like a run.
        let (metrics, server) = serve(plan)?;
        std::fs::create_dir_all(path).with_context(|| format!("making the run's folder {}", path.display()))?;
        RunFolder::open(path, plan, metrics, server)
    }

    /// Opens the folder of a run that was interrupted. What is in it stays; the recipe is written anew, with what was overridden.
    pub fn reopen(path: &Path, plan: &Plan) -> Result<Self> {
        let (metrics, server) = serve(plan)?;
        RunFolder::open(path, plan, metrics, server)
    }

    /// The folder `name` in this one, for a part of this run that is a run of its own: made, or opened again. Both show what they do in one place.
    pub fn part(&self, name: &str, plan: &Plan) -> Result<Self> {
        let path = self.path.join(name);
        std::fs::create_dir_all(&path).with_context(|| format!("making the folder {}", path.display()))?;
        Ok(RunFolder { console: self.console.clone(), ..RunFolder::open(&path, plan, self.metrics.clone(), None)? })
    }

    fn open(path: &Path, plan: &Plan, metrics: Metrics, server: Option<MetricsServer>) -> Result<Self> {
        let lock = lock_run(path)?;
        let (recipe, written) = (path.join(RECIPE), path.join(".recipe.writing"));
        std::fs::write(&written, plan.to_toml())
            .and_then(|()| std::fs::rename(&written, &recipe))
            .with_context(|| format!("writing {}", recipe.display()))?;
        let recorded = Record::begin(path, plan);
        let (path, name, progress) = (path.to_owned(), plan.name.clone(), plan.observe.progress);
        let run = RunFolder {
            path,
            name,
            metrics,
            server,
            progress,
            console: Console::default(),
            rows: Arc::default(),
            staleness: Arc::default(),
            drawn: Mutex::default(),
            _lock: lock,
        };
        // A run that can't be remembered can still be made.
        if let Err(error) = recorded {
            run.say(&format!("warning: {error:#}"));
        }
        if let Some(server) = &run.server {
            run.say(&format!("metrics: http://{}/metrics", server.address()));
        }
        Ok(run)
    }

    /// Takes the steps that the run has logged before into the report to come.
    pub fn remember(&self) -> Result<()> {
        let path = self.path.join("metrics.jsonl");
        if path.exists() {
            *lock(&self.rows) = read_metrics(path)?;
        }
        Ok(())
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// One line for whoever watches.
    pub fn say(&self, line: &str) {
        self.console.warn(line);
    }

    /// Where lines and progress are shown. What pipelines say are events, shown once it is installed.
    pub fn console(&self) -> &Console {
        &self.console
    }

    /// Where the pipeline's stages write.
    pub fn outputs(&self, plan: &Plan) -> Result<Outputs> {
        Ok(Outputs {
            metrics: self.metrics.clone(),
            log: self.log(plan)?,
            dead_letters: Some(DeadLetterWriter::new(&self.path)),
            answers: plan.eval.as_ref().filter(|eval| eval.every > 0).map(|_| AnswerLog::new(&self.path)).transpose()?,
            checkpoints: Some(self.path.clone()),
        })
    }

    fn log(&self, plan: &Plan) -> Result<RunLog<FrozenWeights>> {
        let rows = self.rows.clone();
        let remember = move |step: u64, row: &StepMetrics| lock(&rows).push((step, row.clone()));
        let console = ConsoleLogger::events(plan.observe.log_every);
        let staleness = self.staleness.clone();
        let lags = move |trained: &Trained<FrozenWeights>| {
            let mut seen = lock(&staleness);
            for lag in trained.batch.samples().filter_map(|sample| train::staleness(sample, trained.version)) {
                *seen.entry(lag).or_default() += 1;
            }
        };
        let mut log =
            RunLog::new(&self.metrics).each(lags).logger(JsonlLogger::new(&self.path)?).logger(remember).logger(console);
        if plan.observe.tensorboard {
            log = log.logger(TensorBoardLogger::new(&self.path)?);
        }
        if plan.observe.rollouts_every > 0 {
            log = log.rollouts(RolloutWriter::new(&self.path, true)?, plan.observe.rollouts_every);
        }
        Ok(log)
    }

    /// Runs a flow of `steps` steps with its progress on show, and writes the report, also of a run that failed.
    pub fn watch(&self, flow: &mut Flow, steps: u64, run: impl FnOnce(&mut Flow) -> Result<Report, RunError>) -> Result<Report> {
        lock(&self.drawn).graph = serde_json::from_str(&flow.graph().to_json()).context("the graph as JSON")?;
        let progress = self.progress.then(|| Progress::new(&self.console, Some(steps)));
        let sampler = StageSampler::start(flow.stats(), self.metrics.clone(), progress)?;
        let result = run(flow);
        drop(sampler);
        match &result {
            Ok(report) => self.report(report)?,
            // A full disk may have ended the run and take no report either: the error is what the run died of.
            Err(RunError::Failed { report, .. }) => self.report(report).unwrap_or_else(|error| self.say(&format!("{error:#}"))),
            Err(_) => {}
        }
        Ok(result?)
    }

    /// Writes down how the run ended, and its page. What can't be written is said: the run is what it is.
    pub fn end(&self, result: &Result<Report>) {
        let drawn = Drawn { staleness: lock(&self.staleness).clone().into_iter().collect(), ..lock(&self.drawn).clone() };
        let written = Record::end(&self.path, result, drawn).and_then(|()| page::write(&self.path));
        if let Err(error) = written {
            self.say(&format!("warning: {error:#}"));
        }
    }

    fn report(&self, report: &Report) -> Result<()> {
        self.draw(report);
        let outcome = match report.ended {
            Ended::Finished => "finished",
            Ended::Drained => "was interrupted",
            Ended::Stopped => "was stopped",
            Ended::Failed => "failed",
        };
        let rows = lock(&self.rows);
        let Some((last_step, last)) = rows.last() else { return Ok(()) };
        let time = std::time::Duration::from_nanos(report.wall);
        let curve_of = if last.contains_key(Metric::RewardMean.key()) { Metric::RewardMean } else { Metric::Loss };
        let points: Vec<(f64, f64)> =
            rows.iter().filter_map(|(step, row)| Some((*step as f64, *row.get(curve_of.key())?))).collect();
        let title = if curve_of == Metric::RewardMean { "mean reward" } else { "loss" };
        let total = |metric, labels: &[&str]| self.metrics.newest(metric, labels).unwrap_or(0.0);
        let rate = |tokens: f64| format!("{tokens:.0} ({:.0} a second)", tokens / time.as_secs_f64());
        let mut summary = vec![
            ("steps".into(), format!("{last_step} ({:.1} a second)", *last_step as f64 / time.as_secs_f64())),
            ("tokens generated".into(), rate(total(Metric::GeneratedTokens, &[]))),
            ("tokens trained".into(), rate(total(Metric::Tokens, &["trained"]))),
            ("token ledger".into(), self.ledger(Metric::LedgerTokens, "generated")),
            ("prompt ledger".into(), self.ledger(Metric::LedgerPrompts, "entered")),
            ("checkpoint".into(), self.newest_checkpoint()?),
        ];
        let (poisoned, dead) = (total(Metric::GroupsDropped, &[POISONED]), total(Metric::DeadLetters, &["reward"]));
        if poisoned > 0.0 {
            summary.push(("groups dropped as poisoned".into(), format!("{poisoned}")));
        }
        if dead > 0.0 {
            summary.push(("dead letters".into(), format!("{dead} in `{DEAD_LETTERS}`; `rollflow replay` tries them again")));
        }
        let page = RunReport {
            name: self.name.clone(),
            outcome: format!("The run {outcome} after {last_step} steps in {}.", duration(time)),
            summary,
            curve: Chart::curve(title, "step", points),
            bottleneck: report.bottleneck.clone(),
            flow_table: report.to_string(),
            final_metrics: last.clone(),
            samples: self.last_rollouts(8),
        };
        page.write(&self.path)?;
        Ok(())
    }

    fn draw(&self, report: &Report) {
        let shares = |stage: &StageReport| StageShares {
            name: stage.name.clone(),
            workers: stage.workers.len(),
            shares: State::ALL.iter().map(|&state| (state.name().to_owned(), stage.share(state))).collect(),
        };
        let mut drawn = lock(&self.drawn);
        (drawn.stages, drawn.bottleneck) = (report.stages.iter().map(shares).collect(), report.bottleneck.clone());
    }

    /// The sum, and what it is made of (law D4).
    fn ledger(&self, metric: Metric, sum: &str) -> String {
        let of = |part: &str| self.metrics.newest(metric, &[part]).unwrap_or(0.0);
        let parts = metric.spec().labels[0].values.iter().filter(|part| **part != sum && of(part) > 0.0);
        let parts: Vec<String> = parts.map(|part| format!("{} {part}", of(part))).collect();
        if parts.is_empty() { "none kept".to_owned() } else { format!("{} {sum} = {}", of(sum), parts.join(" + ")) }
    }

    fn newest_checkpoint(&self) -> Result<String> {
        let newest = checkpoint::latest(&self.path.join(CHECKPOINTS))?;
        let shown = newest.as_ref().map(|path| path.strip_prefix(&self.path).unwrap_or(path));
        Ok(shown.map_or("none".to_owned(), |path| format!("`{}`", path.display())))
    }

    fn last_rollouts(&self, n: usize) -> Vec<rollflow::observe::logs::Rollout> {
        let Ok(rollouts) = read_rollouts(self.path.join("rollouts.jsonl")) else { return Vec::new() };
        let mut last = std::collections::VecDeque::new();
        for rollout in rollouts.flatten() {
            last.push_back(rollout);
            if last.len() > n {
                last.pop_front();
            }
        }
        last.into()
    }
}

fn serve(plan: &Plan) -> Result<(Metrics, Option<MetricsServer>)> {
    let metrics = Metrics::new();
    let server = plan.observe.metrics.map(|address| MetricsServer::start(address, metrics.clone())).transpose()?;
    Ok((metrics, server))
}

/// Two processes on one run would tear its files. The lock goes with the process, also when it is killed.
fn lock_run(path: &Path) -> Result<File> {
    let file = path.join(LOCK);
    let lock = File::create(&file).with_context(|| format!("locking {}", file.display()))?;
    match lock.try_lock() {
        Ok(()) => Ok(lock),
        Err(TryLockError::WouldBlock) => bail!("another process works on the run in {}; wait for it or stop it", path.display()),
        Err(TryLockError::Error(error)) => Err(error).with_context(|| format!("locking {}", file.display())),
    }
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
