//! `rollflow compare`: runs side by side.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use anyhow::Result;
use clap::Args;
use rollflow::observe::logs::MetricStats;
use serde_json::{Value, json};

use super::out::{self, short};
use super::read_runs;
use crate::run::recipe_keys::differences;
use crate::run::record::Record;

/// Metrics that tell most, which are compared unless others are asked for.
const TELLING: [&str; 9] = [
    "reward_mean",
    "eval_greedy_accuracy_ratio",
    "eval_accuracy_ratio",
    "eval_reward_mean",
    "loss",
    "entropy_nats",
    "grad_norm",
    "length_finished_mean_tokens",
    "log_prob_gap_mean_nats",
];

/// Compare runs: outcomes, last and best metrics, and the differences of their recipes.
#[derive(Args)]
#[command(after_help = "Example:\n  rollflow compare runs/mine runs/other --metric reward_mean --metric entropy_nats")]
pub struct Compare {
    /// The runs' folders.
    #[arg(required = true, num_args = 2..)]
    runs: Vec<PathBuf>,
    /// A metric to compare; may be given several times, `all` compares every one.
    #[arg(long, value_name = "METRIC")]
    metric: Vec<String>,
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
}

impl Compare {
    pub fn run(self) -> Result<()> {
        let records = read_runs(&self.runs)?;
        let differences = differences(&self.runs)?;
        let runs: Vec<Value> = self.runs.iter().zip(&records).map(|(run, record)| self.as_json(run, record)).collect();
        out::text(&match self.json {
            true => json!({"runs": runs, "recipe": differences}).to_string() + "\n",
            false => self.table(&records, &differences),
        })
    }

    /// Names of metrics that any of the runs has.
    fn metrics<'r>(&'r self, records: &'r [Record]) -> Vec<&'r str> {
        let known: BTreeSet<&str> = records.iter().flat_map(|record| record.metrics.keys()).map(String::as_str).collect();
        match self.metric.as_slice() {
            [] => TELLING.into_iter().filter(|name| known.contains(name)).collect(),
            [all] if all == "all" => known.into_iter().collect(),
            some => some.iter().map(String::as_str).collect(),
        }
    }

    fn as_json(&self, run: &Path, record: &Record) -> Value {
        let metric = |name: &str| {
            let stats = record.metrics.get(name)?;
            Some(json!({"last_tenth": stats.last_tenth, "last": stats.last, "best": best(name, stats)}))
        };
        let names = self.metrics(std::slice::from_ref(record));
        let metrics: BTreeMap<&str, Option<Value>> = names.into_iter().map(|name| (name, metric(name))).collect();
        json!({"run": run, "state": record.state, "steps": record.steps, "seconds": record.seconds(), "seed": record.seed, "metrics": metrics})
    }

    fn table(&self, records: &[Record], differences: &BTreeMap<String, Vec<Option<String>>>) -> String {
        let row = |name: &str, cell: &dyn Fn(&Record) -> String| {
            [name.to_owned()].into_iter().chain(records.iter().map(cell)).collect::<Vec<_>>()
        };
        let none = || "–".to_owned();
        let heads = self.runs.iter().map(|run| run.display().to_string());
        let mut rows = vec![
            [String::new()].into_iter().chain(heads).collect(),
            row("state", &|record| record.state.word()),
            row("steps", &|record| record.steps.to_string()),
            row("seconds", &|record| format!("{:.1}", record.seconds())),
        ];
        let shown = |name: &str, stats: &MetricStats| format!("{} (best {})", short(stats.last_tenth), short(best(name, stats)));
        for name in self.metrics(records) {
            rows.push(row(name, &|record| record.metrics.get(name).map_or_else(none, |stats| shown(name, stats))));
        }
        for (key, values) in differences {
            let values = values.iter().map(|value| value.clone().unwrap_or_else(none));
            rows.push([format!("recipe: {key}")].into_iter().chain(values).collect());
        }
        out::aligned(&rows) + "metrics: mean over the last tenth of the steps; best: of the smoothed curve\n"
    }
}

/// Returns the smallest value of a metric that should be small, else the largest.
fn best(name: &str, stats: &MetricStats) -> f64 {
    if is_cost(name) { stats.best_low } else { stats.best_high }
}

fn is_cost(name: &str) -> bool {
    let costs =
        ["loss", "perplexity", "divergence", "grad_norm", "_gap_", "kl_", "truncated", "errors", "poisoned", "staleness", "lag"];
    costs.iter().any(|word| name.contains(word))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_best_value_of_a_cost_is_the_smallest() {
        for cost in ["loss", "perplexity_tokens", "teacher_divergence_mean_nats", "kl_loss_mean_nats"] {
            assert!(is_cost(cost), "{cost}");
        }
        assert!(!is_cost("reward_mean"));
    }
}
