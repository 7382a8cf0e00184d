//! `rollflow runs`: the runs in a folder.

use std::path::{Path, PathBuf};

use anyhow::{Result, ensure};
use clap::Args;
use serde_json::json;

use super::{out, refused};
use crate::run::record::{Record, State, runs_below};

/// List the runs in a folder, the newest first, or those that fit all conditions.
#[derive(Args)]
#[command(after_help = "Example:\n  rollflow runs --state finished --where 'reward_mean>0.9'")]
pub struct Runs {
    /// Folder to search, up to three levels deep.
    #[arg(default_value = "runs")]
    folder: PathBuf,
    /// Only those of this pipeline, as in grpo.
    #[arg(long)]
    pipeline: Option<String>,
    /// Only those in this state; may be given several times.
    #[arg(long, value_enum)]
    state: Vec<State>,
    /// Only those whose name or folder contains this.
    #[arg(long)]
    name: Option<String>,
    /// Show only runs whose metric ended so, as in reward_mean>0.9: its mean over the last tenth of
    /// the steps. May be given several times.
    #[arg(long = "where", value_name = "METRIC>NUMBER", value_parser = condition)]
    conditions: Vec<Condition>,
    /// The metric that is shown; reward_mean, or else loss, unless given.
    #[arg(long)]
    metric: Option<String>,
    /// Print a JSON object a run and line.
    #[arg(long)]
    json: bool,
}

#[derive(Clone)]
struct Condition {
    metric: String,
    above: bool,
    number: f64,
}

fn condition(text: &str) -> Result<Condition, &'static str> {
    const FORM: &str = "write it as reward_mean>0.9 or loss<0.1";
    let at = text.find(['>', '<']).ok_or(FORM)?;
    let number = text[at + 1..].trim().parse().map_err(|_| FORM)?;
    Ok(Condition { metric: text[..at].trim().to_owned(), above: text[at..].starts_with('>'), number })
}

impl Condition {
    fn holds(&self, record: &Record) -> bool {
        let ended = record.metrics.get(&self.metric).map(|stats| stats.last_tenth);
        ended.is_some_and(|ended| if self.above { ended > self.number } else { ended < self.number })
    }
}

impl Runs {
    pub fn run(self) -> Result<()> {
        if !self.folder.is_dir() {
            return Err(refused(format!("{} is no folder; give one that holds runs", self.folder.display())));
        }
        let mut runs = runs_below(&self.folder)?;
        runs.retain(|(path, record)| self.fits(path, record));
        ensure!(!runs.is_empty(), "no run fits in {}", self.folder.display());
        out::text(&match self.json {
            true => runs.iter().map(|(path, record)| format!("{}\n", listed(path, record))).collect(),
            false => self.table(&runs),
        })
    }

    fn fits(&self, path: &Path, record: &Record) -> bool {
        let named = |name: &String| record.name.contains(name) || path.to_string_lossy().contains(name);
        self.pipeline.as_ref().is_none_or(|pipeline| record.pipeline == *pipeline)
            && (self.state.is_empty() || self.state.contains(&record.state))
            && self.name.as_ref().is_none_or(named)
            && self.conditions.iter().all(|condition| condition.holds(record))
    }

    fn table(&self, runs: &[(PathBuf, Record)]) -> String {
        let head = ["run", "pipeline", "state", "started", "time", "steps", "ended at"];
        let mut rows = vec![head.map(str::to_owned).to_vec()];
        let shown = self.metric.as_deref().map_or(vec!["reward_mean", "loss"], |metric| vec![metric]);
        for (path, record) in runs {
            let metric = shown.iter().find_map(|name| Some(format!("{name} {:.4}", record.metrics.get(*name)?.last_tenth)));
            rows.push(vec![
                path.display().to_string(),
                record.pipeline.clone(),
                record.state.word(),
                record.started().replace('T', " ").trim_end_matches('Z').to_owned(),
                format!("{:.0}s", record.seconds()),
                record.steps.to_string(),
                metric.unwrap_or_else(|| "–".to_owned()),
            ]);
        }
        out::aligned(&rows)
    }
}

fn listed(path: &Path, record: &Record) -> serde_json::Value {
    json!({
        "run": path, "name": record.name, "pipeline": record.pipeline, "state": record.state, "seed": record.seed,
        "started": record.started(), "seconds": record.seconds(), "steps": record.steps, "parents": record.parents,
        "metrics": record.metrics,
    })
}
