//! `run.json`: what a run was, for whoever looks at it later: recipe, version, git state, seed, machine, times, parents, how it ended and at which
//! numbers. Nothing of the environment and no command line is in it, so that no secret is (the recipe beside it names the variable that holds a
//! token, never the token).

use std::collections::BTreeMap;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result};
use rollflow::flow::{Ended, Report};
use rollflow::observe::logs::{MetricStats, compute_stats_from_jsonl};
use rollflow::observe::report::StageShares;
use rollflow::recipe::Plan;
use rollflow::recipe::model::ModelSource;
use rollflow::recipe::reference_policy::ReferencePolicy;
use rollflow::recipe::reward::{PartRule, RewardRule};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::run_folder::{LOCK, RECIPE};

/// The record's file in a run's folder.
pub const RECORD: &str = "run.json";

/// How a run stands.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "snake_case")]
pub enum State {
    /// A process works on it.
    #[default]
    Running,
    /// It came to its end.
    Finished,
    /// It was interrupted and finished what was in flight.
    Drained,
    /// It was stopped.
    Stopped,
    /// It ended with an error.
    Failed,
    /// Its process ended without a word: killed, or the machine went down.
    Died,
}

impl State {
    /// The word that recorded runs use.
    pub fn word(self) -> &'static str {
        match self {
            State::Running => "running",
            State::Finished => "finished",
            State::Drained => "drained",
            State::Stopped => "stopped",
            State::Failed => "failed",
            State::Died => "died",
        }
    }
}

/// A run.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Record {
    /// Its name.
    pub name: String,
    /// Its pipeline.
    pub pipeline: String,
    /// Its seed, from which every draw follows.
    pub seed: u64,
    /// How it stands.
    pub state: State,
    /// One for each time that a process worked on it; the first began it, the others resumed it.
    pub sessions: Vec<Session>,
    /// Models that it began with, and the runs that made them.
    pub parents: Vec<Parent>,
    /// Steps that it logged.
    pub steps: u64,
    /// What its metrics did, by name.
    pub metrics: BTreeMap<String, MetricStats>,
    /// What its report draws of the last session: the graph, where the time went, how stale samples were.
    pub drawn: Drawn,
}

/// What of a session only the process itself could see.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Drawn {
    /// The graph, as `rollflow graph --format json` has it.
    pub graph: Value,
    /// Where each stage's time went.
    pub stages: Vec<StageShares>,
    /// What held it back.
    pub bottleneck: String,
    /// Trained samples by how many versions their oldest token lagged.
    pub staleness: Vec<(u64, u64)>,
}

/// A process's work on a run.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Session {
    /// When it began, UTC.
    pub started: String,
    /// When it ended, UTC; empty while it works.
    pub ended: String,
    /// How long it took.
    pub seconds: f64,
    /// How it ended.
    pub state: State,
    /// What it died of.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
    /// The version of rollflow.
    pub version: String,
    /// The state of the git repository that it was started in.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub git: Option<Git>,
    /// The machine.
    pub machine: Machine,
}

/// A repository's state.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Git {
    /// The commit that was checked out.
    pub commit: String,
    /// The branch; empty for none.
    pub branch: String,
    /// Whether tracked files had changed since.
    pub changed: bool,
}

/// What a session computed on.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Machine {
    /// Its name.
    pub host: String,
    /// Operating system and architecture.
    pub system: String,
    /// Its processor.
    pub processor: String,
    /// Threads that run at the same time.
    pub threads: usize,
    /// Its memory.
    pub memory_gib: u64,
}

/// A model that a run began with.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Parent {
    /// The recipe's key that names it.
    pub key: String,
    /// Its folder.
    pub path: PathBuf,
    /// The run that made it, if its folder is a checkpoint of one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub run: Option<PathBuf>,
}

impl Record {
    /// The record of the run in `folder`. A run without one, of an earlier version, is read from its recipe's place and its metrics.
    pub fn read(folder: &Path) -> Result<Self> {
        let path = folder.join(RECORD);
        let mut record = match std::fs::read_to_string(&path) {
            Ok(text) => serde_json::from_str(&text).with_context(|| format!("reading {}", path.display()))?,
            Err(_) => Record::default(),
        };
        if record.name.is_empty() {
            record.name = folder.file_name().map_or_else(String::new, |name| name.to_string_lossy().into_owned());
        }
        let open = record.state == State::Running;
        if open && !is_worked_on(folder) {
            record.state = State::Died;
        }
        if open || record.metrics.is_empty() {
            record.take_metrics(folder);
        }
        Ok(record)
    }

    /// Notes in the run's folder that this process works on it from now on.
    pub fn begin(folder: &Path, plan: &Plan) -> Result<()> {
        let before = std::fs::read_to_string(folder.join(RECORD)).ok().and_then(|text| serde_json::from_str(&text).ok());
        let mut record: Record = before.unwrap_or_default();
        for session in record.sessions.iter_mut().filter(|session| session.state == State::Running) {
            session.state = State::Died;
        }
        let version = env!("CARGO_PKG_VERSION").to_owned();
        record.sessions.push(Session { started: utc(now()), version, git: git(), machine: machine(), ..Session::default() });
        let record = Record {
            name: plan.name.clone(),
            pipeline: plan.pipeline.word().to_owned(),
            seed: plan.seed,
            state: State::Running,
            parents: parents(plan),
            ..record
        };
        record.write(folder)
    }

    /// Notes how this process's work ended, and what the report draws of it.
    pub fn end(folder: &Path, result: &Result<Report>, drawn: Drawn) -> Result<()> {
        let mut record = Record::read(folder)?;
        let (state, error) = match result {
            Ok(report) => match report.ended {
                Ended::Finished => (State::Finished, None),
                Ended::Drained => (State::Drained, None),
                Ended::Stopped => (State::Stopped, None),
                Ended::Failed => (State::Failed, None),
            },
            Err(error) => (State::Failed, Some(format!("{error:#}"))),
        };
        record.state = state;
        if let Some(session) = record.sessions.last_mut() {
            let ended = now();
            (session.state, session.error, session.ended) = (state, error, utc(ended));
            session.seconds = ended.saturating_sub(seconds_of(&session.started).unwrap_or(ended)) as f64;
            if let Ok(report) = result {
                session.seconds = report.wall as f64 / 1e9;
            }
        }
        record.take_metrics(folder);
        record.drawn = drawn;
        record.write(folder)
    }

    /// When the run began, UTC.
    pub fn started(&self) -> &str {
        self.sessions.first().map_or("", |session| &session.started)
    }

    /// Seconds that processes worked on it.
    pub fn seconds(&self) -> f64 {
        self.sessions.iter().map(|session| session.seconds).sum()
    }

    fn take_metrics(&mut self, folder: &Path) {
        let path = folder.join("metrics.jsonl");
        // A run that never came to a step has none; a damaged file is the reader's to complain of, not the record's.
        self.metrics = compute_stats_from_jsonl(&path).unwrap_or_default();
        self.steps = rollflow::observe::logs::last_step(&path).unwrap_or(0);
    }

    fn write(&self, folder: &Path) -> Result<()> {
        let (path, writing) = (folder.join(RECORD), folder.join(".run.writing"));
        let text = serde_json::to_string_pretty(self).context("a record is JSON")?;
        std::fs::write(&writing, text + "\n")
            .and_then(|()| std::fs::rename(&writing, &path))
            .with_context(|| format!("writing {}", path.display()))
    }
}

/// The runs in `folder` and below, up to three folders deep, the newest first.
pub fn runs_below(folder: &Path) -> Result<Vec<(PathBuf, Record)>> {
    let mut found = Vec::new();
    look(folder, 3, &mut found).with_context(|| format!("looking for runs in {}", folder.display()))?;
    let mut runs = found.into_iter().map(|path| Ok((path.clone(), Record::read(&path)?))).collect::<Result<Vec<_>>>()?;
    runs.sort_by(|(a, of_a), (b, of_b)| of_b.started().cmp(of_a.started()).then_with(|| a.cmp(b)));
    Ok(runs)
}

fn look(folder: &Path, depth: usize, found: &mut Vec<PathBuf>) -> std::io::Result<()> {
    if folder.join(RECIPE).exists() {
        found.push(folder.to_owned());
        return Ok(());
    }
    for entry in std::fs::read_dir(folder)? {
        let path = entry?.path();
        if depth > 0 && path.is_dir() && !path.is_symlink() {
            look(&path, depth - 1, found)?;
        }
    }
    Ok(())
}

/// Whether a process holds the run's lock.
fn is_worked_on(folder: &Path) -> bool {
    File::open(folder.join(LOCK)).is_ok_and(|lock| matches!(lock.try_lock_shared(), Err(std::fs::TryLockError::WouldBlock)))
}

fn parents(plan: &Plan) -> Vec<Parent> {
    let mut folders: Vec<(&str, &Path)> = Vec::new();
    if let ModelSource::Folder(of) = &plan.model.source {
        folders.push(("model.path", &of.path));
    }
    if let Some(path) = plan.critic.as_ref().and_then(|critic| critic.path.as_deref()) {
        folders.push(("critic.path", path));
    }
    if let Some(ReferencePolicy::Frozen(frozen)) = plan.reference.as_ref().map(|reference| &reference.policy)
        && let Some(path) = &frozen.path
    {
        folders.push(("reference.path", path));
    }
    match &plan.reward.rule {
        RewardRule::Model(of) => folders.push(("reward.path", &of.path)),
        RewardRule::Parts(of) => folders.extend(of.part.iter().filter_map(|part| match &part.rule {
            PartRule::Model(of) => Some(("reward.part.path", &*of.path)),
            _ => None,
        })),
        _ => {}
    }
    let parent = |(key, path): (&str, &Path)| {
        // RUN/checkpoints/step_000100
        let run = path.parent().and_then(Path::parent).filter(|run| run.join(RECIPE).exists()).map(Path::to_owned);
        Parent { key: key.to_owned(), path: path.to_owned(), run }
    };
    folders.into_iter().map(parent).collect()
}

/// The repository around the folder that the command runs in, if there is one and git is.
fn git() -> Option<Git> {
    let ask = |args: &[&str]| {
        let output = Command::new("git").args(args).output().ok().filter(|output| output.status.success())?;
        Some(String::from_utf8_lossy(&output.stdout).trim().to_owned())
    };
    Some(Git {
        commit: ask(&["rev-parse", "HEAD"])?,
        branch: ask(&["branch", "--show-current"]).unwrap_or_default(),
        changed: !ask(&["status", "--porcelain", "--untracked-files=no"])?.is_empty(),
    })
}

fn machine() -> Machine {
    let read = |path: &str| std::fs::read_to_string(path).unwrap_or_default();
    let field = |text: &str, name: &str| {
        let line = text.lines().find(|line| line.starts_with(name))?;
        Some(line.split_once(':')?.1.trim().to_owned())
    };
    let kib = field(&read("/proc/meminfo"), "MemTotal").and_then(|text| text.trim_end_matches("kB").trim().parse::<u64>().ok());
    Machine {
        host: read("/proc/sys/kernel/hostname").trim().to_owned(),
        system: format!("{} {}", std::env::consts::OS, std::env::consts::ARCH),
        processor: field(&read("/proc/cpuinfo"), "model name").unwrap_or_default(),
        threads: std::thread::available_parallelism().map_or(1, usize::from),
        memory_gib: kib.map_or(0, |kib| kib.div_ceil(1 << 20)),
    }
}

/// Seconds since the beginning of 1970.
fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs())
}

/// `2026-11-21T22:14:05Z` (Howard Hinnant's algorithm for days, of which a year begins in March).
fn utc(seconds: u64) -> String {
    let (days, time) = (seconds / 86_400, seconds % 86_400);
    let since = days + 719_468;
    let (era, day) = (since / 146_097, since % 146_097);
    let year = (day - day / 1_460 + day / 36_524 - day / 146_096) / 365;
    let day = day - (365 * year + year / 4 - year / 100);
    let month = (5 * day + 2) / 153;
    let (year, day) = (year + era * 400, day - (153 * month + 2) / 5 + 1);
    let (year, month) = if month < 10 { (year, month + 3) } else { (year + 1, month - 9) };
    format!("{year:04}-{month:02}-{day:02}T{:02}:{:02}:{:02}Z", time / 3600, time / 60 % 60, time % 60)
}

/// The inverse.
fn seconds_of(text: &str) -> Option<u64> {
    let number = |from: usize, to: usize| text.get(from..to)?.parse::<u64>().ok();
    let (year, month, day) = (number(0, 4)?, number(5, 7)?, number(8, 10)?);
    let year = if month <= 2 { year - 1 } else { year };
    let (era, of_era) = (year / 400, year % 400);
    let of_year = (153 * if month > 2 { month - 3 } else { month + 9 } + 2) / 5 + day - 1;
    let days = era * 146_097 + of_era * 365 + of_era / 4 - of_era / 100 + of_year - 719_468;
    Some(days * 86_400 + number(11, 13)? * 3600 + number(14, 16)? * 60 + number(17, 19)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_written_as_the_calendar_has_them() {
        for (seconds, text) in [
            (0, "1970-01-01T00:00:00Z"),
            (951_782_400, "2000-02-29T00:00:00Z"),
            (1_709_251_199, "2024-02-29T23:59:59Z"),
            (1_709_251_200, "2024-03-01T00:00:00Z"),
            (4_102_444_800, "2100-01-01T00:00:00Z"),
        ] {
            assert_eq!((utc(seconds).as_str(), seconds_of(text)), (text, Some(seconds)));
        }
    }
}
