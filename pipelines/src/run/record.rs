//! `run.json`, the record of a run: recipe, version, git state, seed, machine, times, parents, outcome
//! and metrics. Of the environment it holds a few variables by name, and no command line, so it holds no
//! secret.

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use clap::ValueEnum;
use jiff::{Timestamp, Unit};
use rollflow::flow::{Ended, Report};
use rollflow::observe::StageShares;
use rollflow::observe::logs::{MetricStats, TIMINGS, compute_stats_from_jsonl, last_step, metrics_row};
use rollflow::recipe::{ModelSource, Plan};
use rollflow::serve::TinkerModel;
use rollflow::util::causes::full_message;
use rollflow::util::{atomic_file, lock_file};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::run::growing::GrowingLines;
use crate::run::provenance::{self, Git, Machine};
use crate::run::{LOCK, RECIPE, RECORD, python_files};

/// State of a run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ValueEnum)]
#[serde(rename_all = "snake_case")]
pub enum State {
    /// A process works on it.
    #[default]
    Running,
    /// Finished all its steps.
    Finished,
    /// Interrupted, after it finished what was in flight.
    Drained,
    /// Stopped.
    Stopped,
    /// Ended with an error.
    Failed,
    /// Ended without notice: its process was killed, or the machine failed.
    Died,
}

impl State {
    /// The word that recorded runs use.
    pub fn word(self) -> String {
        self.to_possible_value().map_or_else(String::new, |value| value.get_name().to_owned())
    }
}

/// A run.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Record {
    pub name: String,
    pub pipeline: String,
    pub seed: u64,
    /// The resolved recipe that it was begun with, or last resumed with.
    pub recipe: String,
    pub state: State,
    /// One for each time that a process worked on it; the first began it, the others resumed it.
    pub sessions: Vec<Session>,
    /// Models that it began with, and the runs that made them.
    pub parents: Vec<Parent>,
    /// Steps that it logged.
    pub steps: u64,
    pub metrics: BTreeMap<String, MetricStats>,
    /// Data of the last session for the report: graph, time per stage, staleness.
    pub drawn: Drawn,
}

/// Data of a session that only its process could observe.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Drawn {
    /// The graph, as `rollflow graph --format json` has it.
    pub graph: Value,
    pub stages: Vec<StageShares>,
    pub bottleneck: String,
    /// Totals, rates and the ledgers: what, and how much.
    pub summary: Vec<(String, String)>,
    /// Generated tokens of the run by fate, those in flight included; fates without tokens are left out.
    pub tokens: Vec<(String, f64)>,
    /// Trained samples by how many versions their oldest token lagged.
    pub staleness: Vec<(u64, u64)>,
}

/// A model that a run began with.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Parent {
    /// The recipe's key that names it.
    pub key: String,
    /// Folder of the model.
    pub path: PathBuf,
    /// The run that made it, if its folder is a checkpoint of one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub run: Option<PathBuf>,
}

impl Record {
    /// Reads the record of the run in `folder`. A run of an earlier version has none; its record is derived
    /// from recipe and metrics.
    pub fn read(folder: &Path) -> Result<Self> {
        let mut record = Record::unmeasured(folder)?;
        if !record.has_ended() {
            record.take_metrics(folder);
        }
        Ok(record)
    }

    /// Returns true if its numbers are final.
    fn has_ended(&self) -> bool {
        !matches!(self.state, State::Running | State::Died) && !self.metrics.is_empty()
    }

    /// [`Record::read`] without the metrics of a run that has not ended. Stage times of a run that died are
    /// those of its last step.
    pub fn unmeasured(folder: &Path) -> Result<Self> {
        let path = folder.join(RECORD);
        let mut record = match std::fs::read_to_string(&path) {
            Ok(text) => serde_json::from_str(&text).with_context(|| format!("reading {}", path.display()))?,
            Err(_) => Record::default(),
        };
        if TinkerModel::is_in(folder) {
            record = Record::of_model(folder)?;
        }
        if record.name.is_empty() {
            record.name = folder.file_name().map_or_else(String::new, |name| name.to_string_lossy().into_owned());
        }
        let open = record.state == State::Running;
        if open && !lock_file::is_taken(&folder.join(LOCK)) {
            // A server that starts again has its models again.
            record.state = if record.pipeline == TINKER { State::Stopped } else { State::Died };
            if let Some(session) = record.sessions.last_mut() {
                record.drawn.stages = session.measure_killed(folder);
            }
        } else if open && let Some(session) = record.sessions.last_mut() {
            session.seconds = session.seconds_until(now());
        }
        if !record.has_ended() {
            record.steps = last_step(&folder.join("metrics.jsonl")).unwrap_or(0);
        }
        Ok(record)
    }

    /// The record of a model that a server trains for its clients.
    fn of_model(folder: &Path) -> Result<Self> {
        let model = TinkerModel::read(folder).with_context(|| format!("reading the model in {}", folder.display()))?;
        let created = i64::try_from(model.created).ok().and_then(|created| Timestamp::from_second(created).ok());
        let trained = if model.rank == 0 { "all weights".to_owned() } else { format!("adapters of rank {}", model.rank) };
        let started = created.unwrap_or_default().to_string();
        Ok(Record {
            name: model.id,
            pipeline: TINKER.to_owned(),
            seed: model.seed,
            state: if model.unloaded { State::Finished } else { State::Running },
            sessions: vec![Session { started, ..Session::default() }],
            drawn: Drawn {
                summary: vec![("trained".to_owned(), trained), ("session".to_owned(), model.session)],
                ..Drawn::default()
            },
            ..Record::default()
        })
    }

    /// Notes in the run's folder that this process works on it from now on, and serves its live page at
    /// `page`. Returns warnings of Python
    /// files that changed.
    pub fn begin(folder: &Path, plan: &Plan, page: Option<SocketAddr>) -> Result<Vec<String>> {
        let before = std::fs::read_to_string(folder.join(RECORD)).ok().and_then(|text| serde_json::from_str(&text).ok());
        let mut record: Record = before.unwrap_or_default();
        for session in record.sessions.iter_mut().filter(|session| session.state == State::Running) {
            session.state = State::Died;
            session.measure_killed(folder);
        }
        let python = python_files::checksums(plan);
        let warnings = record.sessions.last().map(|last| python_files::changes(&last.python, &python));
        record.sessions.push(Session { python, page, inputs: provenance::inputs(plan), ..Session::begin() });
        let record = Record {
            name: plan.name.clone(),
            pipeline: plan.pipeline.word().to_owned(),
            seed: plan.seed,
            recipe: plan.to_toml(),
            state: State::Running,
            parents: parents(plan),
            // The last session's.
            drawn: Drawn::default(),
            ..record
        };
        record.write(folder)?;
        Ok(warnings.unwrap_or_default())
    }

    /// Keeps the graph of the flow that begins.
    pub fn keep_graph(folder: &Path, graph: Value) -> Result<()> {
        let mut record = Record::unmeasured(folder)?;
        record.drawn.graph = graph;
        record.write(folder)
    }

    /// Address of the live page of the process that works on the run, for this machine.
    pub fn page(&self) -> Option<SocketAddr> {
        let session = self.sessions.last().filter(|_| self.state == State::Running)?;
        let mut address = session.page?;
        match address.ip() {
            IpAddr::V4(ip) if ip.is_unspecified() => address.set_ip(Ipv4Addr::LOCALHOST.into()),
            IpAddr::V6(ip) if ip.is_unspecified() => address.set_ip(Ipv6Addr::LOCALHOST.into()),
            _ => {}
        }
        Some(address)
    }

    /// Returns the run's record after this process's work, unwritten.
    pub fn ended(folder: &Path, result: &Result<Report>, drawn: Drawn) -> Result<Self> {
        let mut record = Record::read(folder)?;
        record.state = match result.as_ref().map(|report| report.ended) {
            Ok(Ended::Running) => State::Running,
            Ok(Ended::Finished) => State::Finished,
            Ok(Ended::Drained) => State::Drained,
            Ok(Ended::Stopped) => State::Stopped,
            Ok(Ended::Failed) | Err(_) => State::Failed,
        };
        if let Some(session) = record.sessions.last_mut() {
            let error = result.as_ref().err().map(|error| full_message(error.as_ref()));
            session.end(record.state, error);
        }
        // With the changes that were ordered during the run.
        if let Ok(recipe) = std::fs::read_to_string(folder.join(RECIPE)) {
            record.recipe = recipe;
        }
        record.take_metrics(folder);
        record.drawn = drawn;
        Ok(record)
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
        self.steps = last_step(&path).unwrap_or(0);
    }

    /// Writes it into the run's folder, atomically.
    pub fn write(&self, folder: &Path) -> Result<()> {
        let path = folder.join(RECORD);
        let text = serde_json::to_string_pretty(self).context("a record is JSON")? + "\n";
        atomic_file::write(&path, text).with_context(|| format!("writing {}", path.display()))
    }
}

/// Stands where a run has its pipeline, for a model that a server trains.
pub const TINKER: &str = "tinker";

/// The runs in `folder` and below, up to three folders deep, the newest first.
pub fn runs_below(folder: &Path) -> Result<Vec<(PathBuf, Record)>> {
    let record = |path: PathBuf| Record::read(&path).map(|record| (path, record));
    let mut runs = run_folders(folder)?.into_iter().map(record).collect::<Result<Vec<_>>>()?;
    runs.sort_by(|(a, of_a), (b, of_b)| of_b.started().cmp(of_a.started()).then_with(|| a.cmp(b)));
    Ok(runs)
}

/// Folders of the runs in `folder` and below, up to three folders deep, in no order.
pub fn run_folders(folder: &Path) -> Result<Vec<PathBuf>> {
    let (mut runs, mut folders) = (Vec::new(), vec![(folder.to_owned(), 3)]);
    while let Some((at, depth)) = folders.pop() {
        if at.join(RECIPE).exists() || TinkerModel::is_in(&at) {
            runs.push(at);
        } else if depth > 0 {
            for entry in std::fs::read_dir(&at).with_context(|| format!("looking for runs in {}", at.display()))? {
                let path = entry.with_context(|| format!("looking for runs in {}", at.display()))?.path();
                folders.extend((path.is_dir() && !path.is_symlink()).then_some((path, depth - 1)));
            }
        }
    }
    Ok(runs)
}

fn parents(plan: &Plan) -> Vec<Parent> {
    let mut folders = plan.models();
    if let ModelSource::Folder(of) = &plan.model.source {
        folders.insert(0, ("model.path".to_owned(), of.path.clone()));
    }
    let parent = |(key, path): (String, PathBuf)| {
        // RUN/checkpoints/step_000100
        let run = path.parent().and_then(Path::parent).filter(|run| run.join(RECIPE).exists()).map(Path::to_owned);
        // Parts of a reward share a key.
        let key = if key.starts_with("reward.part") { "reward.part.path".to_owned() } else { key };
        Parent { key, path, run }
    };
    folders.into_iter().map(parent).collect()
}

/// Bytes at the end of `timings.jsonl` that hold its last row.
const LAST_ROWS: u64 = 64 << 10;

/// A process's work on a run.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Session {
    /// UTC, as is `ended`.
    pub started: String,
    /// Empty while it works.
    pub ended: String,
    pub seconds: f64,
    pub state: State,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
    pub version: String,
    /// The state of the git repository that it was started in.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub git: Option<Git>,
    /// SHA-256 of the Python files that it called when it began.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub python: BTreeMap<String, String>,
    /// Checksums of the models and of the data in files that its recipe names, by their keys.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub inputs: BTreeMap<String, String>,
    /// Environment variables that change how it computes, without secrets.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub variables: BTreeMap<String, String>,
    pub machine: Machine,
    /// Address of its live page, if it serves one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub page: Option<SocketAddr>,
}

impl Session {
    /// This process's, from now on.
    fn begin() -> Self {
        let version = env!("CARGO_PKG_VERSION").to_owned();
        let variables = provenance::variables();
        Session {
            started: now().to_string(),
            version,
            git: provenance::git(),
            machine: provenance::machine(),
            variables,
            ..Session::default()
        }
    }

    /// Ends the session now.
    fn end(&mut self, state: State, error: Option<String>) {
        let ended = now();
        self.seconds = self.seconds_until(ended);
        (self.state, self.error, self.ended) = (state, error, ended.to_string());
    }

    /// Gives a session that could not write its end the time until its last step. Returns the shares of its
    /// stages until then.
    fn measure_killed(&mut self, folder: &Path) -> Vec<StageShares> {
        let mut last = None;
        let rows = GrowingLines::of_end(folder.join(TIMINGS), LAST_ROWS).each_new(|line| {
            let row = metrics_row(line.bytes).ok();
            last = row.and_then(|(_, row)| Some((*row.get("time_seconds")?, row))).or_else(|| last.take());
            Ok(())
        });
        let (Ok(()), Some((seconds, row))) = (rows, last) else { return Vec::new() };
        let Ok(last) = Timestamp::from_second(seconds as i64) else { return Vec::new() };
        self.seconds = self.seconds_until(last);
        // Before its first step, the last row is another session's.
        if self.started.parse::<Timestamp>().is_ok_and(|started| last < started) {
            return Vec::new();
        }
        StageShares::of_totals(row.iter().map(|(name, total)| (name.as_str(), *total)))
    }

    /// Seconds from its start to `then`; 0 if the clock was set back before its start.
    fn seconds_until(&self, then: Timestamp) -> f64 {
        let seconds = |started: Timestamp| (then - started).total(Unit::Second).unwrap_or(0.0);
        self.started.parse::<Timestamp>().map_or(0.0, seconds).max(0.0)
    }
}

/// To the second.
fn now() -> Timestamp {
    Timestamp::from_second(Timestamp::now().as_second()).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_time_of_a_killed_process_counts_until_its_last_step() {
        let folder = tempfile::tempdir().unwrap();
        let began = Timestamp::from_second(1_700_000_000).unwrap();
        let session = Session { started: began.to_string(), seconds: 1.0, ..Session::default() };
        Record { sessions: vec![session], ..Record::default() }.write(folder.path()).unwrap();
        let rows = format!("{{\"step\":1,\"time_seconds\":{}.5}}\n{{\"step\":2,\"ti", began.as_second() + 3600);
        std::fs::write(folder.path().join(TIMINGS), rows).unwrap();
        assert_eq!(Record::unmeasured(folder.path()).unwrap().seconds(), 3600.0);
        Record::begin(folder.path(), &Plan::default(), None).unwrap();
        assert_eq!(Record::unmeasured(folder.path()).unwrap().sessions[0].seconds, 3600.0, "also after a resume");
    }

    #[test]
    fn the_stage_times_of_a_killed_process_are_those_of_its_last_step() {
        let folder = tempfile::tempdir().unwrap();
        let row =
            "{\"step\":1,\"time_seconds\":1700003600.5,\"stage_train_busy_seconds\":3.0,\"stage_train_starved_seconds\":1.0}\n";
        std::fs::write(folder.path().join(TIMINGS), row).unwrap();
        for (began, stages) in [(1_700_000_000, 1), (1_700_003_601, 0)] {
            let session = Session { started: Timestamp::from_second(began).unwrap().to_string(), ..Session::default() };
            Record { sessions: vec![session], ..Record::default() }.write(folder.path()).unwrap();
            let found = Record::unmeasured(folder.path()).unwrap().drawn.stages;
            assert_eq!(found.len(), stages, "the row is of a session before the second");
            assert!(found.iter().all(|stage| stage.name == "train" && stage.shares["busy"] == 0.75), "{found:?}");
        }
    }

    #[test]
    fn the_time_of_a_run_is_that_of_its_process_also_when_its_last_flow_was_shorter() {
        let folder = tempfile::tempdir().unwrap();
        let began = Timestamp::from_second(now().as_second() - 3600).unwrap();
        let session = Session { started: began.to_string(), ..Session::default() };
        Record { sessions: vec![session], ..Record::default() }.write(folder.path()).unwrap();
        let flow = Report { ended: Ended::Finished, wall: 5_000_000_000, ..Report::before("flow") };
        let record = Record::ended(folder.path(), &Ok(flow), Drawn::default()).unwrap();
        assert!(record.state == State::Finished && (3600.0..3610.0).contains(&record.seconds()), "{}", record.seconds());
    }

    #[test]
    fn a_session_begins_without_the_stage_times_and_tokens_of_the_one_before() {
        let folder = tempfile::tempdir().unwrap();
        let stages = vec![StageShares::default()];
        let drawn =
            Drawn { stages, bottleneck: "bottleneck: train".into(), tokens: vec![("lost".into(), 9.0)], ..Drawn::default() };
        Record { state: State::Drained, drawn, ..Record::default() }.write(folder.path()).unwrap();
        Record::begin(folder.path(), &Plan::default(), None).unwrap();
        let Drawn { stages, bottleneck, tokens, .. } = Record::unmeasured(folder.path()).unwrap().drawn;
        assert!(stages.is_empty() && bottleneck.is_empty() && tokens.is_empty());
    }
}
