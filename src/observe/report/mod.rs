//! `report.html`: a run on one self-contained page, with curves, times, staleness, the graph and
//! samples.
//!
//! The page is a template that contains its data as one JSON object, drawn by its script. Texts of
//! models are data there and never markup. The page of a run of thousands of steps has one to three
//! megabytes, most of it samples.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::Metric;
use super::logs::{Rollout, StepMetrics, around, smoothed};
use crate::data::number;

const PAGE: &str = include_str!("page.html");
const STYLE: &str = include_str!("page.css");
const SCRIPT: &str = include_str!("page.js");

/// Points of a curve that are drawn.
const POINTS: usize = 320;
/// Samples that a page holds.
const SAMPLES: usize = 1200;
/// Characters of a prompt or an answer that it holds.
const CHARACTERS: usize = 6000;

/// Contents of the page.
#[derive(Clone, Debug, Default, Serialize)]
pub struct HtmlReport {
    /// The run's name.
    pub name: String,
    /// State of the run, in a word.
    pub state: String,
    /// State of the run, in a sentence.
    pub outcome: String,
    /// The few numbers at the top: what, and how much.
    pub tiles: Vec<(String, String)>,
    /// Curves by metric ([`HtmlReport::curves`]).
    pub curves: BTreeMap<String, Value>,
    /// Rows of `evaluations.jsonl`.
    pub evaluations: Vec<StepMetrics>,
    /// Every k of which they have pass@k.
    pub pass_at: BTreeSet<usize>,
    /// Time of each stage by state.
    pub stages: Vec<StageShares>,
    /// Stage that limited the run.
    pub bottleneck: String,
    /// Trained samples by how many versions their oldest token lagged.
    pub staleness: Vec<(u64, u64)>,
    /// The graph, as [`Graph::to_json`](crate::flow::Graph::to_json) has it.
    pub graph: Value,
    /// Samples to browse ([`HtmlReport::samples`]).
    pub samples: Vec<Value>,
    /// Samples that were written and have no place on the page.
    pub samples_left_out: usize,
    /// The table at the end: what, and which.
    pub facts: Vec<(String, String)>,
    /// The recipe, resolved.
    pub recipe: String,
}

/// Shares of a stage's time.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct StageShares {
    /// Name of the stage.
    pub name: String,
    /// Number of workers.
    pub workers: usize,
    /// By state, from 0 to 1.
    #[serde(flatten, with = "number")]
    pub shares: BTreeMap<String, f64>,
}

impl HtmlReport {
    /// The page.
    pub fn to_html(&self) -> String {
        let data = serde_json::to_value(self).unwrap_or_default().to_string();
        // No text may end the script element around it.
        let data = data.replace('<', "\\u003c");
        let parts = [("{{STYLE}}", STYLE), ("{{SCRIPT}}", SCRIPT), ("{{TITLE}}", "rollflow"), ("{{DATA}}", &data)];
        parts.into_iter().fold(PAGE.to_owned(), |page, (mark, part)| page.replacen(mark, part, 1))
    }

    /// Every metric of these rows as a curve: its help text, and points of step, smoothed value, and
    /// between which values eight in ten of the steps around lie.
    pub fn curves(rows: impl IntoIterator<Item = (u64, StepMetrics)>) -> BTreeMap<String, Value> {
        let mut points: BTreeMap<String, Vec<(f64, f64)>> = BTreeMap::new();
        for (step, row) in rows {
            for (name, value) in row.into_iter().filter(|(_, value)| value.is_finite()) {
                points.entry(name).or_default().push((step as f64, value));
            }
        }
        let curve = |(name, points): (String, Vec<(f64, f64)>)| {
            let curve = json!({ "help": Metric::from_key(&name).map_or("", Metric::help), "points": banded(&points) });
            (name, curve)
        };
        points.into_iter().map(curve).collect()
    }

    /// Takes samples in, evenly chosen among all if they are more than the page holds.
    pub fn samples(mut self, rollouts: impl Iterator<Item = Rollout>) -> Self {
        let (mut kept, mut every, mut seen) = (Vec::new(), 1, 0);
        for rollout in rollouts {
            if seen % every == 0 {
                kept.push(shown(rollout));
            }
            seen += 1;
            if kept.len() > SAMPLES {
                every *= 2;
                let mut keep = [true, false].into_iter().cycle();
                kept.retain(|_| keep.next() == Some(true));
            }
        }
        (self.samples_left_out, self.samples) = (seen - kept.len(), kept);
        self
    }
}

/// The sample on the page; `answer` is the ground truth.
fn shown(rollout: Rollout) -> Value {
    let cut = |text: &str| match text.char_indices().nth(CHARACTERS) {
        Some((end, _)) => format!("{}… ({} characters)", &text[..end], text.chars().count()),
        None => text.to_owned(),
    };
    let answer = rollout.metadata.get("answer").map(|answer| match answer {
        Value::String(text) => cut(text),
        other => cut(&other.to_string()),
    });
    json!({
        "step": rollout.step, "group": rollout.group, "index": rollout.index, "status": rollout.status,
        "prompt": cut(&rollout.prompt.render()), "response": cut(&rollout.response), "answer": answer,
        "reward": rollout.reward, "advantage": rollout.advantage, "parts": rollout.reward_parts,
        "length": rollout.versions.generated(),
    })
}

/// Points of the drawn line: the smoothed value, and the tenth and ninetieth percentile of the
/// values it averages.
fn banded(points: &[(f64, f64)]) -> Vec<[f64; 4]> {
    let values: Vec<f64> = points.iter().map(|point| point.1).collect();
    let (line, every) = (smoothed(&values), points.len().div_ceil(POINTS).max(1));
    let last = points.len().saturating_sub(1);
    let drawn = (0..points.len()).filter(|at| at % every == 0 || *at == last);
    drawn
        .map(|at| {
            let mut near = around(&values, at).to_vec();
            near.sort_by(f64::total_cmp);
            let at_share = |share: f64| near[((near.len() - 1) as f64 * share).round() as usize];
            [points[at].0, rounded(line[at]), rounded(at_share(0.1)), rounded(at_share(0.9))]
        })
        .collect()
}

/// Six digits are more than an eye sees.
fn rounded(value: f64) -> f64 {
    format!("{value:.5e}").parse().unwrap_or(value)
}
