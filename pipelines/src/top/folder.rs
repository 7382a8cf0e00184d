//! A run's folder as a source of the view. Each look reads what the files have grown by.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::{Instant, SystemTime};

use anyhow::Result;
use rollflow::observe::StageShares;
use rollflow::observe::logs::{Rollout, TIMINGS};
use rollflow::recipe::parse;
use rollflow::util::lock_file;
use serde_json::Value;

use super::answers::Wanted;
use super::totals::Totals;
use super::view::{Connection, RATES, RunView, ShownSample, line};
use crate::run::growing::GrowingLines;
use crate::run::record::{Record, State};
use crate::run::{LOCK, RECIPE, RECORD};

/// Bytes at the end of `rollouts.jsonl` in which the first look searches for samples.
const NEWEST: u64 = 16 << 20;

/// A run's folder.
pub struct Folder {
    path: PathBuf,
    record: Record,
    /// State of the record's file and of the run's lock when the record was read.
    stamp: (Option<SystemTime>, bool),
    read: Instant,
    metrics: GrowingLines,
    evaluations: GrowingLines,
    timings: GrowingLines,
    rollouts: GrowingLines,
    totals: Totals,
}

/// Facts about a run from its recipe.
pub struct Planned {
    /// Steps.
    pub steps: u64,
    /// Environment variable with the page's token.
    pub token_env: Option<String>,
}

impl Folder {
    /// The run in this folder.
    pub fn open(path: &Path) -> Result<Self> {
        Ok(Folder {
            record: Record::read(path)?,
            stamp: stamp(path),
            read: Instant::now(),
            metrics: GrowingLines::of(path.join("metrics.jsonl")),
            evaluations: GrowingLines::of(path.join("evaluations.jsonl")),
            timings: GrowingLines::of(path.join(TIMINGS)),
            rollouts: GrowingLines::of_end(path.join("rollouts.jsonl"), NEWEST),
            totals: Totals::default(),
            path: path.to_owned(),
        })
    }

    /// Returns true if a process works on the run.
    pub fn is_running(&self) -> bool {
        self.record.state == State::Running
    }

    /// The run, as its page lists it.
    pub fn wanted(&self) -> Wanted {
        Wanted::Begun { name: self.name(), started: self.record.started().to_owned() }
    }

    /// Name of the folder, which pages use too.
    fn name(&self) -> String {
        let path = std::path::absolute(&self.path).unwrap_or_else(|_| self.path.clone());
        path.file_name().map_or_else(String::new, |name| name.to_string_lossy().into_owned())
    }

    /// The run's recipe, if it can be read.
    pub fn planned(&self) -> Option<Planned> {
        let text = std::fs::read_to_string(self.path.join(RECIPE)).ok()?;
        let plan = parse(RECIPE, &text, &[]).ok()?;
        Some(Planned { steps: plan.steps() as u64, token_env: plan.observe.page_token_env })
    }

    /// Address of the page of the process that works on the run, for this machine.
    pub fn page(&self) -> Option<SocketAddr> {
        self.record.page()
    }

    /// Brings the view up to date. Damaged lines are skipped.
    pub fn read(&mut self, view: &mut RunView) -> Result<()> {
        // The lock before the lines: a run's last lines are there before it frees its lock.
        let stamp = stamp(&self.path);
        if stamp != self.stamp {
            // Deriving a running run's record reads all its metrics.
            (self.record, self.read) = (Record::read(&self.path)?, Instant::now());
            self.stamp = stamp;
        }
        self.metrics.each_new(|line| {
            if let Some((step, row)) = numbers(line.bytes) {
                view.step = step;
                view.add_metrics(step, row);
            }
            Ok(())
        })?;
        self.evaluations.each_new(|line| {
            if let Some((step, row)) = numbers(line.bytes) {
                view.add_metrics(step, row);
            }
            Ok(())
        })?;
        self.rollouts.each_new(|line| {
            if let Ok(rollout) = Rollout::without_columns(line.bytes) {
                view.add_sample(ShownSample::of(rollout));
            }
            Ok(())
        })?;
        let totals = &mut self.totals;
        self.timings.each_new(|line| {
            let Some((step, row)) = numbers(line.bytes) else { return Ok(()) };
            totals.push(row.get("elapsed_seconds").copied().unwrap_or_default(), row);
            for (curve, name) in view.rates.iter_mut().zip(RATES) {
                if let Some(rate) = totals.rate(name) {
                    curve.push(step as f64, rate);
                }
            }
            Ok(())
        })?;
        view.has_timings = self.timings.read() > 0;
        self.show_record(view);
        Ok(())
    }

    fn show_record(&self, view: &mut RunView) {
        let record = &self.record;
        let running = record.state == State::Running;
        (view.name, view.pipeline, view.state) = (line(&self.name()), line(&record.pipeline), record.state.word());
        view.seconds = record.seconds() + if running { self.read.elapsed().as_secs_f64() } else { 0.0 };
        if running && view.connection == Connection::Connected {
            return;
        }
        view.end_live();
        view.set_facts(record.drawn.summary.clone());
        if running {
            view.set_stages(StageShares::of_totals(self.totals.growth()));
            return;
        }
        view.bottleneck = match record.sessions.last().and_then(|session| session.error.as_deref()) {
            Some(error) => line(&format!("error: {error}")),
            None => line(&record.drawn.bottleneck),
        };
        view.set_stages(record.drawn.stages.clone());
        view.tokens = record.drawn.tokens.iter().map(|(fate, count)| (line(fate), *count)).collect();
        view.staleness.clone_from(&record.drawn.staleness);
    }
}

/// State of the record's file, and whether a process works on the run.
fn stamp(folder: &Path) -> (Option<SystemTime>, bool) {
    let changed = folder.join(RECORD).metadata().and_then(|metadata| metadata.modified()).ok();
    (changed, lock_file::is_taken(&folder.join(LOCK)))
}

/// Step and numbers of a row.
fn numbers(row: &[u8]) -> Option<(u64, BTreeMap<String, f64>)> {
    let row: BTreeMap<String, Value> = serde_json::from_slice(row).ok()?;
    let step = row.get("step")?.as_u64()?;
    let number = |(name, value): (String, Value)| Some((line(&name), value.as_f64()?));
    Some((step, row.into_iter().filter(|(name, _)| name != "step").filter_map(number).collect()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_row_is_its_step_and_its_numbers() {
        let (step, row) = numbers(b"{\"step\":3,\"loss\":0.5,\"kl\":\"NaN\",\"a\\u001b[2J\":1}").unwrap();
        assert_eq!((step, row), (3, BTreeMap::from([("loss".to_owned(), 0.5), ("a\\u{1b}[2J".to_owned(), 1.0)])));
        assert!(numbers(b"{\"loss\":0.5}").is_none() && numbers(b"{torn").is_none());
    }
}
