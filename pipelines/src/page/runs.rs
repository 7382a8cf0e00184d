//! The runs that a live page shows, by name: a run's path below the page's folder.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::SystemTime;

use anyhow::{Error, Result};
use parking_lot::Mutex;
use rollflow::observe::logs::{metrics_row, smoothed_at};
use rollflow::recipe::parse;
use rollflow::util::causes::full_message;
use rollflow::util::lock_file;
use serde_json::{Value, json};

use super::Powers;
use super::cache::{Caches, RunCache};
use super::relay::Relay;
use crate::run::growing::GrowingLines;
use crate::run::observed::Observed;
use crate::run::page;
use crate::run::record::{Record, State, run_folders};
use crate::run::{LOCK, RECIPE, RECORD, SFT};

/// Points of a run's small curve in the list.
const POINTS: usize = 60;

/// Runs of a folder, or one run.
pub(super) struct Runs {
    root: PathBuf,
    /// True if readers may give orders to runs of this process.
    pub steerable: bool,
    /// Powers of readers with the token.
    pub powers: Powers,
    /// Runs of this process.
    live: Mutex<Vec<Arc<Observed>>>,
    /// Rows of the list, with the state of the files that they were made from.
    rows: Mutex<HashMap<PathBuf, (RunState, Value)>>,
    /// Small curves of the list.
    small: Mutex<HashMap<PathBuf, SmallLines>>,
    /// Lines that were read of runs.
    caches: Caches,
}

/// A run that was found.
pub(super) struct Found {
    pub name: String,
    pub path: PathBuf,
}

/// State of the files that a run's page is made from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct RunState {
    files: [Option<(u64, SystemTime)>; 4],
    pub working: bool,
}

impl RunState {
    /// Files that are looked at; the second to fourth grow.
    const FILES: [&'static str; 4] = [RECORD, "metrics.jsonl", "rollouts.jsonl", "evaluations.jsonl"];

    /// The state of the run in `folder` now.
    pub fn of(folder: &Path) -> Self {
        let stamp = |name: &str| {
            let metadata = folder.join(name).metadata().ok()?;
            Some((metadata.len(), metadata.modified().ok()?))
        };
        RunState { files: Self::FILES.map(stamp), working: lock_file::is_taken(&folder.join(LOCK)) }
    }

    /// Names of the files that differ from `before`.
    pub fn changed(&self, before: &RunState) -> Vec<&'static str> {
        let pairs = Self::FILES.into_iter().zip(self.files.iter().zip(&before.files));
        let mut changed: Vec<&str> = pairs.filter(|(_, (now, before))| now != before).map(|(name, _)| name).collect();
        if self.working != before.working && !changed.contains(&RECORD) {
            changed.push(RECORD);
        }
        changed
    }
}

impl Runs {
    /// The runs in `root`, or the run that `root` is.
    pub fn of(root: &Path, steerable: bool, powers: Powers) -> Self {
        let root = std::path::absolute(root).unwrap_or_else(|_| root.to_owned());
        Runs {
            root,
            steerable,
            powers,
            live: Mutex::default(),
            rows: Mutex::default(),
            small: Mutex::default(),
            caches: Caches::default(),
        }
    }

    /// Adds a run of this process.
    pub fn show(&self, run: &Arc<Observed>) {
        self.live.lock().push(run.clone());
    }

    /// All runs, and the supervised parts of runs, in no order.
    fn all(&self) -> Result<Vec<Found>> {
        if !self.root.exists() {
            return Ok(Vec::new());
        }
        let mut paths = run_folders(&self.root)?;
        let parts: Vec<PathBuf> = paths.iter().map(|path| path.join(SFT)).filter(|part| part.join(RECIPE).exists()).collect();
        paths.extend(parts);
        // A page of one run names it by its folder.
        let base = if self.root.join(RECIPE).exists() { self.root.parent() } else { Some(self.root.as_path()) };
        let named = |path: PathBuf| {
            let below = base.and_then(|base| path.strip_prefix(base).ok()).unwrap_or(&path);
            Found { name: below.to_string_lossy().into_owned(), path }
        };
        Ok(paths.into_iter().map(named).collect())
    }

    /// The run with this name. Only names of listed runs are found.
    pub fn find(&self, name: &str) -> Result<Option<Found>> {
        Ok(self.all()?.into_iter().find(|run| run.name == name))
    }

    /// The run in `folder` if this process works on it.
    pub fn live(&self, folder: &Path) -> Option<Arc<Observed>> {
        let same = |run: &&Arc<Observed>| std::path::absolute(&run.folder).is_ok_and(|path| path == folder);
        self.live.lock().iter().find(same).cloned()
    }

    /// The page of the other process that works on the run in `folder`, if it has one.
    pub fn elsewhere(&self, folder: &Path) -> Option<Relay> {
        Relay::of(folder, self.powers.token.as_deref())
    }

    /// A row per run, the newest first.
    pub fn list(&self) -> Result<Value> {
        // A damaged run must not hide the others.
        let unreadable = |run: &Found, error: Error| {
            let error = full_message(error.as_ref());
            json!({"name": run.name, "state": "unreadable", "error": error, "step": 0, "curve": [], "started": "", "seconds": 0, "live": false})
        };
        let row = |run: Found| self.row(&run).unwrap_or_else(|error| unreadable(&run, error));
        let mut rows: Vec<Value> = self.all()?.into_iter().map(row).collect();
        let started = |row: &Value| row["started"].as_str().unwrap_or_default().to_owned();
        rows.sort_by(|a, b| started(b).cmp(&started(a)).then_with(|| a["name"].as_str().cmp(&b["name"].as_str())));
        Ok(rows.into())
    }

    fn row(&self, run: &Found) -> Result<Value> {
        let state = RunState::of(&run.path);
        if let Some((_, row)) = self.rows.lock().get(&run.path).filter(|(before, _)| *before == state) {
            return Ok(row.clone());
        }
        let record = Record::unmeasured(&run.path)?;
        let small = self.curve(&run.path);
        let planned = std::fs::read_to_string(run.path.join(RECIPE)).ok();
        let planned = planned.and_then(|text| parse(RECIPE, &text, &[]).ok()).map(|plan| plan.steps());
        let working = record.sessions.last().filter(|_| record.state == State::Running);
        let page = working.and_then(|session| session.page).map(|address| format!("http://{address}/"));
        let row = json!({
            "name": run.name, "pipeline": record.pipeline, "state": record.state, "step": record.steps, "planned": planned,
            "metric": small.as_ref().map(|small| small.metric), "last": small.as_ref().map(|small| small.last),
            "curve": small.map_or_else(Vec::new, |small| small.points),
            "started": record.started(), "seconds": record.seconds(), "page": page, "live": self.live(&run.path).is_some(),
        });
        self.rows.lock().insert(run.path.clone(), (state, row.clone()));
        Ok(row)
    }

    /// The metric of a run's small curve, with its last value and a few smoothed points. A file that cannot be
    /// read has none; the run's page names the error.
    fn curve(&self, folder: &Path) -> Option<SmallCurve> {
        let mut small = self.small.lock();
        small.entry(folder.to_owned()).or_insert_with(|| SmallLines::of(folder)).curve().ok().flatten()
    }

    /// Lines that were read of a run.
    pub fn cache(&self, run: &Found) -> Arc<RunCache> {
        self.caches.of(&run.path)
    }

    /// The contents of a run's page as JSON.
    pub fn report(&self, run: &Found) -> Result<String> {
        let mut record = Record::unmeasured(&run.path)?;
        if let Some(observed) = self.live(&run.path) {
            record.drawn = observed.drawn()?;
        }
        let cache = self.cache(run);
        let mut curves = cache.curves.lock();
        curves.refresh()?;
        Ok(serde_json::to_string(&page::page(&run.path, &record, &curves)?)?)
    }
}

/// A metric of a run in a row of the list.
struct SmallCurve {
    metric: &'static str,
    last: f64,
    points: Vec<f64>,
}

/// The metrics that a small curve may have, read as they grow. The first that a run has is drawn.
struct SmallLines {
    lines: GrowingLines,
    values: [Vec<f64>; SHOWN.len()],
}

const SHOWN: [&str; 2] = ["reward_mean", "loss"];

impl SmallLines {
    fn of(folder: &Path) -> Self {
        SmallLines { lines: GrowingLines::of(folder.join("metrics.jsonl")), values: Default::default() }
    }

    fn curve(&mut self) -> Result<Option<SmallCurve>> {
        let SmallLines { lines, values } = self;
        if lines.was_cut()? {
            *values = Default::default();
        }
        lines.each_new(|line| {
            let Ok((_, row)) = metrics_row(line.bytes) else { return Ok(()) };
            for (name, values) in SHOWN.iter().zip(&mut *values) {
                values.extend(row.get(*name).copied().filter(|value| value.is_finite()));
            }
            Ok(())
        })?;
        let drawn = |(metric, values): (&&'static str, &Vec<f64>)| {
            let every = values.len().div_ceil(POINTS).max(1);
            let points = (0..values.len()).step_by(every).map(|at| smoothed_at(values, at)).collect();
            Some(SmallCurve { metric, last: *values.last()?, points })
        };
        Ok(SHOWN.iter().zip(&*values).find_map(drawn))
    }
}
