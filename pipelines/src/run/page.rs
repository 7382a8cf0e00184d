//! Contents of a run's page, from the files in its folder: also of one that still runs, or died. The
//! page is `report.html`, and what the live page draws.

use std::collections::BTreeSet;
use std::fs::File;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result};
use rollflow::observe::logs::{MetricStats, Rollout, metrics_rows};
use rollflow::observe::{Curves, HtmlReport, duration};
use rollflow::util::atomic_file;

use crate::run::curves::RunCurves;
use crate::run::record::{Record, State, TINKER};
use crate::run::{PAGE, RECIPE};

/// Writes the page of the run with this record; returns the page's path.
pub fn write(folder: &Path, record: &Record) -> Result<PathBuf> {
    let (path, rollouts) = (folder.join(PAGE), folder.join("rollouts.jsonl"));
    let mut curves = RunCurves::of(folder);
    curves.refresh()?;
    let report = page(folder, record, &curves)?;
    let report = if rollouts.exists() {
        let file = File::open(&rollouts).with_context(|| format!("reading {}", rollouts.display()))?;
        let lines = BufReader::new(file).split(b'\n').map_while(Result::ok);
        // A line that was torn by a crash is no sample.
        report.samples(lines.filter_map(|line| Rollout::without_columns(&line).ok()))
    } else {
        report
    };
    atomic_file::write(&path, report.to_html()).with_context(|| format!("writing {}", path.display()))?;
    Ok(path)
}

/// Contents of the page without samples.
pub(crate) fn page(folder: &Path, record: &Record, curves: &RunCurves) -> Result<HtmlReport> {
    let evaluations = folder.join("evaluations.jsonl");
    let evaluations = if evaluations.exists() { metrics_rows(evaluations)?.collect::<Result<_, _>>()? } else { Vec::new() };
    Ok(HtmlReport {
        name: record.name.clone(),
        state: record.state.word(),
        outcome: outcome(record),
        tiles: tiles(record, &curves.curves),
        curves: curves.curves.drawn(),
        axes: curves.axes.drawn(),
        pass_at: evaluations
            .iter()
            .flat_map(|(_, row)| row.keys())
            .filter_map(|name| name.strip_prefix("eval_pass_at_")?.parse().ok())
            .collect::<BTreeSet<usize>>(),
        evaluations: evaluations.into_iter().map(|(_, row)| row).collect(),
        stages: record.drawn.stages.clone(),
        bottleneck: record.drawn.bottleneck.clone(),
        staleness: record.drawn.staleness.clone(),
        graph: record.drawn.graph.clone(),
        facts: facts(record),
        recipe: std::fs::read_to_string(folder.join(RECIPE)).unwrap_or_default(),
        ..HtmlReport::default()
    })
}

fn outcome(record: &Record) -> String {
    let (steps, time) = (record.steps, lasted(record));
    let error = record.sessions.last().and_then(|session| session.error.as_deref());
    if record.pipeline == TINKER {
        return match record.state {
            State::Running => format!("The server's clients have updated the model {steps} times."),
            State::Finished => format!("The model was unloaded after {steps} updates."),
            _ => format!("The server ended after {steps} updates of the model; one that starts on its folder has it again."),
        };
    }
    match (record.state, error) {
        (State::Running, _) => format!("The run is at step {steps}."),
        (State::Died, _) => format!("The run's process ended without notice after step {steps}; rollflow resume continues it."),
        (State::Finished, _) => format!("The run finished after {steps} steps in {time}."),
        (State::Drained, _) => format!("The run was interrupted after {steps} steps in {time}; rollflow resume continues it."),
        (State::Stopped, _) => format!("The run was stopped after {steps} steps in {time}."),
        (State::Failed, Some(error)) => format!("The run failed after {steps} steps: {error}"),
        (State::Failed, None) => format!("The run failed after {steps} steps."),
    }
}

/// Time that processes worked on the run.
fn lasted(record: &Record) -> String {
    duration(Duration::try_from_secs_f64(record.seconds()).unwrap_or_default())
}

/// A few numbers that a reader looks for first.
fn tiles(record: &Record, curves: &Curves) -> Vec<(String, String)> {
    let tile = |label: &str, name: &str, decimals: usize, pick: fn(&MetricStats) -> f64| {
        Some((label.to_owned(), format!("{:.decimals$}", pick(&curves.stats(name)?))))
    };
    let reward = tile("reward, last tenth", "reward_mean", 3, |reward| reward.last_tenth);
    let loss = tile("loss, last tenth", "loss", 4, |loss| loss.last_tenth).filter(|_| reward.is_none());
    let tiles = [
        Some(("steps".to_owned(), record.steps.to_string())),
        (record.seconds() > 0.0).then(|| ("time".to_owned(), lasted(record))),
        reward,
        tile("reward, best (smoothed)", "reward_mean", 3, |reward| reward.best_high),
        loss,
        tile("greedy accuracy, last", "eval_greedy_accuracy_ratio", 3, |greedy| greedy.last),
        tile("tokens an answer", "length_finished_mean_tokens", 1, |length| length.last_tenth),
    ];
    tiles.into_iter().flatten().collect()
}

fn facts(record: &Record) -> Vec<(String, String)> {
    let mut facts = vec![
        ("pipeline".to_owned(), record.pipeline.clone()),
        ("seed".to_owned(), record.seed.to_string()),
        ("state".to_owned(), record.state.word()),
    ];
    facts.extend(record.drawn.summary.iter().cloned());
    for (at, session) in record.sessions.iter().enumerate() {
        let which = if at == 0 { "started".to_owned() } else { format!("resumed ({at})") };
        let ended =
            if session.ended.is_empty() { String::new() } else { format!(", {} {}", session.state.word(), session.ended) };
        facts.push((which, format!("{}{ended}", session.started)));
    }
    // A model of a server has none of these.
    if let Some(session) = record.sessions.last().filter(|session| !session.version.is_empty()) {
        facts.push(("rollflow".to_owned(), session.version.clone()));
        if let Some(git) = &session.git {
            let changed = if git.changed { ", with changes that are not committed" } else { "" };
            facts.push(("git".to_owned(), format!("{} {}{changed}", git.commit, git.branch)));
        }
        let machine = &session.machine;
        let shown = format!(
            "{}, {}, {} ({} threads, {} GiB)",
            machine.host, machine.system, machine.processor, machine.threads, machine.memory_gib
        );
        facts.push(("machine".to_owned(), shown));
        facts.extend(machine.gpus.iter().map(|gpu| ("GPU".to_owned(), gpu.clone())));
        facts.extend(session.inputs.iter().map(|(key, sum)| (format!("contents of {key}"), sum.clone())));
    }
    for parent in &record.parents {
        let of = parent.run.as_ref().map_or(String::new(), |run| format!(", of the run {}", run.display()));
        facts.push((parent.key.clone(), format!("{}{of}", parent.path.display())));
    }
    facts
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::run::record::Session;

    #[test]
    fn a_page_survives_a_clock_that_was_set_back_and_damaged_columns_of_tokens() {
        let folder = tempfile::tempdir().unwrap();
        let line = r#"{"step":1,"group":2,"index":0,"response":"an answer","tokens":[1,?],"versions":[]}"#;
        std::fs::write(folder.path().join("rollouts.jsonl"), line).unwrap();
        let session = Session { seconds: -5.0, ..Session::default() };
        let record = Record { state: State::Finished, sessions: vec![session], ..Record::default() };
        let page = std::fs::read_to_string(write(folder.path(), &record).unwrap()).unwrap();
        assert!(page.contains("The run finished after 0 steps in 0s.") && page.contains("\"response\":\"an answer\""));
    }
}
