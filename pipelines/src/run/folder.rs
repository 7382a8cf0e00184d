//! A run's folder, and what shows the run while it lasts.
//!
//! It holds `recipe.toml` (resolved), `metrics.jsonl`, `rollouts.jsonl`, `dead_letters.jsonl`,
//! `checkpoints/step_000123/`, `reference/`, `report.html` and `run.json`.
//! Files that are replaced are written by [`atomic_file`] (law C3). Logs grow by whole lines; a
//! checkpoint is published once the lines of its steps are on disk.

use std::fs::{File, TryLockError};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context, Result, anyhow, bail};
use parking_lot::Mutex;
use rollflow::flow::{Ended, Flow, Report, Until};
use rollflow::model::FrozenWeights;
use rollflow::observe::logs::{
    DEAD_LETTERS, DeadLetter, JsonLines, JsonlLogger, TensorBoardLogger, TimingsLogger, dead_letters, last_step, log_to_console,
};
use rollflow::observe::{Console, Metric, Metrics, MetricsServer, sampled, sampled_with_progress};
use rollflow::ranks::Member;
use rollflow::recipe::Plan;
use rollflow::serve::BearerToken;
use rollflow::stages::sink::RunLog;
use rollflow::stages::train::{self, CheckpointGate, Orders, Trained};
use rollflow::train::checkpoint::CHECKPOINTS;
use rollflow::util::causes::full_message;
use rollflow::util::{atomic_file, lock_file, untrusted};

use crate::assemble::conversations;
use crate::page::{PageServer, Powers};
use crate::profile::Profiler;
use crate::run::changes::Changes;
use crate::run::observed::Observed;
#[cfg(feature = "otlp")]
use crate::run::otlp::Otlp;
use crate::run::page;
use crate::run::record::{Drawn, Record};
use crate::run::traces::Traces;
use crate::run::trackers::Trackers;
use crate::run::upload::Uploads;
use crate::run::{LINEAGE, LOCK, LOGS, PAGE, PAGE_TOKEN, PROFILE, RECIPE, RECORD};

/// Outputs of a pipeline's stages. `W` is the type of the published weights.
pub struct Outputs<W = FrozenWeights> {
    /// Counters, gauges and histograms.
    pub metrics: Metrics,
    /// The sink at the pipeline's end.
    pub log: RunLog<W>,
    /// Gets the groups whose reward failed, if anything does.
    pub dead_letters: Option<JsonLines<DeadLetter>>,
    /// Run folder that evaluations are written to, if there are any.
    pub answers: Option<PathBuf>,
    /// Destination of checkpoints, if they are saved.
    pub checkpoints: Option<Checkpoints>,
    /// Traces of groups.
    pub traces: Traces,
}

/// Destination of a run's checkpoints.
pub struct Checkpoints {
    /// The folder that gets `checkpoints/`.
    pub run: PathBuf,
    /// Holds them back until the log has written their steps.
    pub gate: CheckpointGate,
    /// Orders checkpoints out of turn, and pauses.
    pub orders: Orders,
    /// Orders changes of settings.
    pub changes: Changes,
}

impl<W> Outputs<W> {
    /// Metrics in memory and no files.
    pub fn in_memory() -> Self {
        let metrics = Metrics::new();
        Outputs {
            log: RunLog::new(&metrics),
            metrics,
            dead_letters: None,
            answers: None,
            checkpoints: None,
            traces: Traces::default(),
        }
    }
}

/// A run's folder and its metrics. Dropping it ends the metrics server and the live page (law F3).
pub struct RunFolder {
    path: PathBuf,
    metrics: Metrics,
    server: Option<MetricsServer>,
    progress: bool,
    console: Console,
    /// Gate of the running flow's checkpoints, and true if its trainer works while other stages do.
    gate: Mutex<Option<(CheckpointGate, bool)>>,
    /// For the record and the pages.
    observed: Arc<Observed>,
    /// For forecasts of the run.
    profiler: Profiler,
    /// The live page, if the recipe asks for one.
    page: Option<PageServer>,
    /// The ranks that share the run, if there are several.
    ranks: Option<Arc<Member>>,
    /// Ends before the uploads, which have its state.
    _trackers: Option<Trackers>,
    /// Ends before the lock.
    uploads: Option<Uploads>,
    #[cfg(feature = "otlp")]
    otlp: Option<Otlp>,
    /// Held for as long as this process works on the run.
    _lock: File,
}

/// Other files of a run that a second run must not mix with its own.
const OTHERS: [&str; 7] = [RECORD, LINEAGE, DEAD_LETTERS, CHECKPOINTS, "evaluations", PAGE, PROFILE];

/// Rejects a folder that holds a run, or files of a run whose recipe is missing.
pub fn refuse_another_run(path: &Path) -> Result<()> {
    if path.join(RECIPE).exists() {
        bail!("{0} already holds a run; choose another folder with --out, or resume it: rollflow resume {0}", path.display());
    }
    let found: Vec<&str> = LOGS.into_iter().chain(OTHERS).filter(|name| path.join(name).symlink_metadata().is_ok()).collect();
    if !found.is_empty() {
        bail!(
            "{} holds files of another run, but no {RECIPE}: {}; choose another folder with --out, or move them away",
            path.display(),
            found.join(", ")
        );
    }
    Ok(())
}

/// Takes the lock of the run in `path`, and makes the folder if it is not there.
pub fn lock(path: &Path) -> Result<File> {
    atomic_file::create_folder(path).with_context(|| format!("making the run's folder {}", path.display()))?;
    let file = path.join(LOCK);
    // Two processes on one run would tear its files. The lock goes with the process, also when it is killed.
    match lock_file::take(&file) {
        Ok(lock) => Ok(lock),
        Err(TryLockError::WouldBlock) => bail!("another process works on the run in {}; wait for it or stop it", path.display()),
        Err(TryLockError::Error(error)) => Err(error).with_context(|| format!("locking {}", file.display())),
    }
}

/// Gives the metrics what is known of a flow from the recipe of its part of the run.
fn describe(metrics: &Metrics, plan: &Plan) {
    metrics.set(Metric::PlannedSteps, &[], plan.steps() as f64);
    metrics.set(Metric::CheckpointInterval, &[], plan.checkpoint.every as f64);
    if plan.pipeline.reinforces() {
        metrics.set(Metric::StalenessBound, &[], plan.flow.max_staleness as f64);
        metrics.set(Metric::GapWarning, &[], plan.train.gap_limits(plan.model.precision())[0]);
    }
}

/// Logs `text` if the run finished.
pub fn announce_end(report: &Report, text: &str) {
    if report.ended == Ended::Finished {
        tracing::info!("{text}");
    }
}

impl RunFolder {
    /// Opens or creates the folder, writes the resolved recipe into it and serves metrics and the live
    /// page if the recipe says so. Other files stay. `locked`: the run's [`lock`], if the caller has it.
    pub fn open(path: &Path, plan: &Plan, locked: Option<File>) -> Result<Self> {
        let (metrics, address) = (Metrics::new(), plan.observe.metrics);
        // Before anything is written: a busy port or a wrong store must not leave a folder that looks like a run.
        let serve = |address| MetricsServer::start(address, metrics.clone(), &plan.net.allowed_hosts);
        let server = address.map(serve).transpose()?;
        let page = |address| {
            let given = || std::env::var_os(PAGE_TOKEN).map(|_| PAGE_TOKEN);
            let token = plan.observe.page_token_env.as_deref().or_else(given).map(BearerToken::from_env).transpose()?;
            anyhow::Ok(PageServer::start(address, path, token, Powers::default(), &plan.net.allowed_hosts)?)
        };
        let page = plan.observe.page.map(page).transpose()?;
        Trackers::check(plan)?;
        drop(plan.store.checkpoints(plan.net.ca_file.as_deref())?);
        #[cfg(feature = "otlp")]
        let otlp = plan.observe.otlp.as_ref().map(|url| Otlp::start(url, plan, &metrics)).transpose()?;
        metrics.set(Metric::BuildInfo, &[env!("CARGO_PKG_VERSION")], 1.0);
        metrics.set(Metric::RunInfo, &[&plan.name, plan.pipeline.word()], 1.0);
        let lock = locked.map_or_else(|| lock(path), Ok)?;
        let mut run = RunFolder::serving(path, plan, metrics, server, page, lock)?;
        #[cfg(feature = "otlp")]
        {
            run.otlp = otlp;
        }
        run._trackers = Some(Trackers::start(plan, path, &run.console)?);
        Ok(run)
    }

    /// Uploads the run's checkpoints from now on, if the recipe has a store. The run must have been rewound.
    pub fn uploading(mut self, plan: &Plan) -> Result<Self> {
        if let Some(publisher) = plan.store.checkpoints(plan.net.ca_file.as_deref())? {
            self.uploads = Some(Uploads::start(&self.path, publisher, self.console.clone())?);
        }
        Ok(self)
    }

    /// Uploads the checkpoints of the supervised part, too. The part must have been rewound.
    pub fn uploading_part(&self) {
        self.uploads.iter().for_each(Uploads::include_part);
    }

    /// Creates or opens the folder `name` in this one, for a part that is a separate run, with its own trackers.
    pub fn part(&self, name: &str, plan: &Plan) -> Result<Self> {
        let path = self.path.join(name);
        let part = RunFolder::serving(&path, plan, self.metrics.clone(), None, None, lock(&path)?)?;
        self.page.iter().for_each(|page| page.show(&part.observed));
        let trackers = Trackers::start(plan, part.path(), &self.console)?;
        Ok(RunFolder { console: self.console.clone(), ranks: self.ranks.clone(), _trackers: Some(trackers), ..part })
    }

    /// Ends the run's flows when one of these ranks is lost.
    pub fn among(self, ranks: Option<&Arc<Member>>) -> Self {
        RunFolder { ranks: ranks.cloned(), ..self }
    }

    fn serving(
        path: &Path,
        plan: &Plan,
        metrics: Metrics,
        server: Option<MetricsServer>,
        page: Option<PageServer>,
        lock: File,
    ) -> Result<Self> {
        atomic_file::remove_leftovers(path).with_context(|| format!("removing what is half written in {}", path.display()))?;
        let recipe = path.join(RECIPE);
        let mut plan = plan.clone();
        conversations::decide(&mut plan.chat, &plan.model.source);
        let plan = &plan;
        atomic_file::write(&recipe, plan.to_toml()).with_context(|| format!("writing {}", recipe.display()))?;
        let warnings = Record::begin(path, plan, page.as_ref().map(PageServer::address))?;
        let run = RunFolder {
            path: path.to_owned(),
            observed: Arc::new(Observed::new(path, &metrics)),
            metrics,
            profiler: Profiler::default(),
            server,
            page,
            progress: plan.observe.progress,
            console: Console::default(),
            gate: Mutex::default(),
            ranks: None,
            uploads: None,
            _trackers: None,
            #[cfg(feature = "otlp")]
            otlp: None,
            _lock: lock,
        };
        warnings.iter().for_each(|warning| run.say(warning));
        if let Some(server) = &run.server {
            run.say(&format!("metrics: http://{}/metrics", server.address()));
        }
        if let Some(page) = &run.page {
            page.show(&run.observed);
            run.say(&format!("page: http://{}/", page.address()));
        }
        Ok(run)
    }

    /// Path of the folder.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Prints one line to standard error, above the progress line.
    pub fn say(&self, line: &str) {
        self.console.warn(&untrusted::line(line));
    }

    /// Gathers the run's times.
    pub fn profiler(&self) -> &Profiler {
        &self.profiler
    }

    /// Console for lines and progress.
    pub fn console(&self) -> &Console {
        &self.console
    }

    /// Opens the outputs of the pipeline's stages.
    pub fn outputs<W: Send + Sync + 'static>(&self, plan: &Plan) -> Result<Outputs<W>> {
        describe(&self.metrics, plan);
        let gate = CheckpointGate::new(LOGS.map(|name| self.path.join(name)));
        *self.gate.lock() = Some((gate.clone(), plan.overlaps()));
        #[cfg(feature = "otlp")]
        let traces = self.otlp.as_ref().map(|otlp| otlp.traces.clone()).unwrap_or_default();
        #[cfg(not(feature = "otlp"))]
        let traces = Traces::default();
        // Ranks build their losses from the recipe, and a part is not begun again from its own.
        let followed = self.page.as_ref().filter(|_| self.ranks.is_none());
        let changes = followed.map_or_else(Changes::default, |_| self.observed.changes.clone());
        Ok(Outputs {
            traces,
            metrics: self.metrics.clone(),
            log: self.log(plan, &changes)?.gate(&gate),
            dead_letters: Some(dead_letters(&self.path)),
            answers: plan.eval.as_ref().filter(|eval| eval.every > 0).map(|_| self.path.clone()),
            checkpoints: Some(Checkpoints { run: self.path.clone(), gate, orders: self.observed.orders.clone(), changes }),
        })
    }

    fn log<W: Send + Sync + 'static>(&self, plan: &Plan, changes: &Changes) -> Result<RunLog<W>> {
        let console = log_to_console(changes.every(plan, |plan| plan.observe.log_every), |line| tracing::info!("{line}"));
        let observed = self.observed.clone();
        let lags = move |trained: &Trained<W>| {
            observed.count(trained.batch.samples().filter_map(|sample| train::staleness(sample, trained.version)));
        };
        let profiler = self.profiler.clone();
        let mut log = RunLog::new(&self.metrics)
            .each(lags)
            .each(move |step| profiler.look(step))
            .logger(TimingsLogger::new(&self.path, &self.metrics)?)
            .logger(JsonlLogger::new(&self.path)?)
            .logger(console);
        if plan.observe.tensorboard {
            log = log.logger(TensorBoardLogger::after(&self.path, last_step(&self.path.join("metrics.jsonl"))?)?);
        }
        let (rollouts, every) = (self.path.join("rollouts.jsonl"), |plan: &Plan| plan.observe.rollouts_every);
        let rollouts = if every(plan) > 0 { JsonLines::append(rollouts)? } else { JsonLines::later(rollouts) };
        Ok(log.rollouts(rollouts, changes.every(plan, every)))
    }

    /// Runs a flow of `steps` steps, shows its progress and keeps its figures for the page, also if the
    /// run fails.
    pub fn watch(&self, flow: &mut Flow, steps: u64) -> Result<Report> {
        self.observed.begin(flow)?;
        // For pages that other processes show.
        Record::keep_graph(&self.path, self.observed.graph())?;
        let (stats, metrics, taken) = (flow.stats(), &self.metrics, self.observed.taken());
        // Not that of the part before.
        metrics.set(Metric::Step, &[], taken as f64);
        if let Some(ranks) = &self.ranks {
            let (stopped, drained) = (flow.handle(), flow.handle());
            ranks.on_loss(move || stopped.stop());
            ranks.on_drain(move || drained.drain());
        }
        let run = || flow.run(Until::finished());
        let result = match self.progress {
            true => sampled_with_progress(stats, metrics, &self.path, &self.console, steps, taken, run)?,
            false => sampled(stats, metrics, &self.path, run)?,
        };
        // A run that was stopped dropped the rows of its last steps, and so did one whose trainer worked on while
        // another stage failed. The resume of a synchronous run makes them again (law C2).
        let gate = self.gate.lock().take().filter(|(_, overlaps)| result.is_ok() || *overlaps);
        let opened = gate.map_or(Ok(()), |(gate, _)| gate.open());
        let result = match (result, opened) {
            (Ok(_), Err(error)) => return Err(error.into()),
            (Err(failure), Err(error)) => {
                tracing::error!("{error}");
                Err(failure)
            }
            (result, Ok(())) => result,
        };
        if let Some(profile) = result.as_ref().ok().and_then(|report| self.profiler.profile(report)) {
            profile.save(&self.path.join(PROFILE))?;
        }
        self.observed.end(result.as_ref().map_or_else(|error| error.report(), Some));
        // A flow that was stopped for a lost rank says nothing of it.
        match self.ranks.as_ref().and_then(|ranks| ranks.lost()) {
            Some(reason) => Err(anyhow!(reason)),
            None => result.map_err(Into::into),
        }
    }

    /// Writes the run's page, then its record. The record comes last: a resume leaves a finished run
    /// unchanged, so a run killed before its record gets its page from the resume. A failed write fails
    /// the run, or warns if the run failed already.
    pub fn end(&self, result: Result<Report>) -> Result<Report> {
        let (drawn, failed) = self.observed.drawn().map_or_else(|error| (Drawn::default(), Err(error)), |drawn| (drawn, Ok(())));
        let result = self.unless_failed(result, failed);
        let ended = |result: &Result<Report>| Record::ended(&self.path, result, drawn.clone());
        let paged = ended(&result).and_then(|record| page::write(&self.path, &record).map(|_| record));
        // Page and record have the same times.
        let (paged, written) = match paged {
            Ok(record) => (Some(record), Ok(())),
            Err(error) => (None, Err(error)),
        };
        let result = self.unless_failed(result, written);
        let record = paged.map_or_else(|| ended(&result), Ok).and_then(|record| record.write(&self.path));
        self.unless_failed(result, record)
    }

    fn unless_failed(&self, result: Result<Report>, written: Result<()>) -> Result<Report> {
        match (written, result) {
            (Err(error), Ok(_)) => Err(error),
            (Err(error), failed) => {
                self.say(&format!("warning: {}", full_message(error.as_ref())));
                failed
            }
            (Ok(()), result) => result,
        }
    }
}
