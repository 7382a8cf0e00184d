//! Observations that only the process of a run can make, for the run's record and its pages: the flow,
//! its times, the ledgers and the staleness of trained samples.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use parking_lot::Mutex;
use rollflow::data::POISONED;
use rollflow::flow::{Control, Flow, Report, Stats};
use rollflow::observe::logs::{DEAD_LETTERS, last_step};
use rollflow::observe::{Baseline, Metric, Metrics, StageShares};
use rollflow::rollout::LOST;
use rollflow::stages::train::Orders;
use rollflow::train::checkpoint::{self, CHECKPOINTS};
use serde_json::Value;

use crate::run::changes::Changes;
use crate::run::record::Drawn;

/// Observations of a run by its process.
pub(crate) struct Observed {
    /// The run's folder.
    pub folder: PathBuf,
    pub metrics: Metrics,
    /// Number of trained samples by staleness.
    staleness: Mutex<BTreeMap<u64, u64>>,
    flow: Mutex<Option<ObservedFlow>>,
    /// Orders to the run's trainer.
    pub orders: Orders,
    /// Changes of the run's settings.
    pub changes: Changes,
}

struct ObservedFlow {
    graph: Value,
    stats: Stats,
    control: Control,
    /// Steps that earlier processes of the run took. Rates count this process.
    taken: u64,
    /// Totals when the flow began: of an earlier part of the run, if it has one.
    before: Baseline,
    /// Final report.
    ended: Option<Report>,
}

impl Observed {
    /// No observations yet of the run in `folder`.
    pub fn new(folder: &Path, metrics: &Metrics) -> Self {
        Observed {
            folder: folder.to_owned(),
            metrics: metrics.clone(),
            staleness: Mutex::default(),
            flow: Mutex::default(),
            orders: Orders::default(),
            changes: Changes::default(),
        }
    }

    /// Ends the running flow: it finishes what is in flight, or stops. A pause ends with it.
    pub fn end_run(&self, drain: bool) {
        if let Some(flow) = &*self.flow.lock() {
            if drain { flow.control.drain() } else { flow.control.stop() }
        }
    }

    /// Observes `flow` from now on.
    pub fn begin(&self, flow: &Flow) -> Result<()> {
        let graph = serde_json::from_str(&flow.graph().to_json()).context("the graph as JSON")?;
        let taken = last_step(&self.folder.join("metrics.jsonl"))?;
        let (stats, control, before) = (flow.stats(), flow.handle(), self.metrics.baseline());
        *self.flow.lock() = Some(ObservedFlow { graph, stats, control, taken, before, ended: None });
        Ok(())
    }

    /// Keeps the final report of the flow.
    pub fn end(&self, report: Option<&Report>) {
        self.flow.lock().iter_mut().for_each(|flow| flow.ended = report.cloned());
    }

    /// Steps that earlier processes of the run took.
    pub fn taken(&self) -> u64 {
        self.flow.lock().as_ref().map_or(0, |flow| flow.taken)
    }

    /// Total of a counter since the flow began.
    pub fn total(&self, metric: Metric, labels: &[&str]) -> f64 {
        let before = self.flow.lock().as_ref().map_or(0.0, |flow| flow.before.total(metric, labels));
        self.metrics.newest(metric, labels).unwrap_or(0.0) - before
    }

    /// Counts trained samples of these stalenesses.
    pub fn count(&self, lags: impl Iterator<Item = u64>) {
        let mut seen = self.staleness.lock();
        lags.for_each(|lag| *seen.entry(lag).or_default() += 1);
    }

    /// Trained samples by how many versions their oldest token lagged.
    pub fn staleness(&self) -> Vec<(u64, u64)> {
        self.staleness.lock().clone().into_iter().collect()
    }

    /// Report of the flow, final or of now; `None` before it runs.
    pub fn report(&self) -> Option<Report> {
        let flow = self.flow.lock();
        flow.as_ref().and_then(|flow| flow.ended.clone().or_else(|| flow.stats.report()))
    }

    /// The graph of the flow, or null before there is one.
    pub fn graph(&self) -> Value {
        self.flow.lock().as_ref().map_or(Value::Null, |flow| flow.graph.clone())
    }

    /// The run's observations until now.
    pub fn drawn(&self) -> Result<Drawn> {
        let staleness = self.staleness();
        let (report, taken) = (self.report(), self.taken());
        let graph = self.graph();
        let Some(report) = report else { return Ok(Drawn { graph, staleness, ..Drawn::default() }) };
        let summary = self.summary(&report, taken)?;
        let stages = report.stages.iter().map(StageShares::of).collect();
        let tokens = self.ledger_parts(Metric::LedgerTokens, "generated");
        Ok(Drawn { graph, stages, bottleneck: report.bottleneck(), summary, tokens, staleness })
    }

    /// Totals, rates and ledgers.
    fn summary(&self, report: &Report, taken: u64) -> Result<Vec<(String, String)>> {
        let seconds = report.wall as f64 / 1e9;
        let steps = last_step(&self.folder.join("metrics.jsonl"))?.saturating_sub(taken) as f64;
        let newest = checkpoint::latest(&self.folder.join(CHECKPOINTS))?;
        let newest = newest.as_ref().map(|path| path.strip_prefix(&self.folder).unwrap_or(path).display().to_string());
        let rate = |tokens: f64| format!("{tokens:.0} ({:.0} a second)", tokens / seconds);
        let since = if taken > 0 { format!(" after step {taken}") } else { String::new() };
        let mut summary = vec![
            (format!("steps{since}"), format!("{steps} ({:.1} a second)", steps / seconds)),
            (format!("tokens generated{since}"), rate(self.total(Metric::GeneratedTokens, &[]))),
            (format!("tokens trained{since}"), rate(self.total(Metric::Tokens, &["trained"]))),
            ("token ledger".to_owned(), self.ledger(Metric::LedgerTokens, "generated")),
            ("prompt ledger".to_owned(), self.ledger(Metric::LedgerPrompts, "entered")),
            ("checkpoint".to_owned(), newest.unwrap_or_else(|| "none".to_owned())),
        ];
        let dropped = [
            ("groups dropped as poisoned", self.total(Metric::GroupsDropped, &[POISONED]), String::new()),
            ("groups dropped as lost", self.total(Metric::GroupsDropped, &[LOST]), String::new()),
            ("samples lost", self.total(Metric::SamplesDropped, &[LOST]), String::new()),
            (
                "dead letters",
                self.total(Metric::DeadLetters, &["reward"]),
                format!(" in {DEAD_LETTERS}; rollflow replay tries them again"),
            ),
        ];
        let counted = dropped.into_iter().filter(|(_, count, _)| *count > 0.0);
        summary.extend(counted.map(|(what, count, note)| (what.to_owned(), format!("{count}{note}"))));
        Ok(summary)
    }

    /// The sum, and what it is made of (law D4).
    fn ledger(&self, metric: Metric, sum: &str) -> String {
        let parts = self.ledger_parts(metric, sum);
        let parts: Vec<String> = parts.into_iter().map(|(part, count)| format!("{count} {part}")).collect();
        let sum_of = self.metrics.newest(metric, &[sum]).unwrap_or(0.0);
        if parts.is_empty() { "none kept".to_owned() } else { format!("{sum_of} {sum} = {}", parts.join(" + ")) }
    }

    /// Parts of a ledger that are not 0.
    fn ledger_parts(&self, metric: Metric, sum: &str) -> Vec<(String, f64)> {
        let parts = metric.labels()[0].1.iter().filter(|part| **part != sum);
        let counts = parts.map(|part| ((*part).to_owned(), self.metrics.newest(metric, &[part]).unwrap_or(0.0)));
        counts.filter(|(_, count)| *count > 0.0).collect()
    }
}
