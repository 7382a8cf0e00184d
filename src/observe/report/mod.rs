//! `report.html`: a run on one self-contained page, with curves, times, staleness, the graph and
//! samples.
//!
//! The page is a template that contains its data as one JSON object, drawn by its script. Texts of
//! models are data there and never markup. The page of a run of thousands of steps has one to three
//! megabytes, most of it samples. A server of live runs uses the same page without data
//! ([`HtmlReport::page_for`]) and sends [`FlowActivity`] during a run.

mod activity;
mod curves;

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

pub use activity::{EdgeActivity, FlowActivity};
pub use curves::{Curves, StepAxes};

use super::logs::{Rollout, StepMetrics};
use crate::data::number;
use crate::flow::{StageReport, State};

const PAGE: &str = include_str!("page.html");
const STYLE: &str = include_str!("page.css");
const SCRIPT: &str =
    concat!(include_str!("draw.js"), include_str!("graph.js"), include_str!("samples.js"), include_str!("page.js"));

/// Samples that a page holds, unless a single group has more.
const SAMPLES: usize = 1200;
/// Characters of a prompt or an answer that it holds.
const CHARACTERS: usize = 6000;

/// Stages of all pipelines, from source to sink. Timings name stages without an order.
const STAGES: [&str; 13] = [
    "samples",
    "rollouts",
    "prompts",
    "generate",
    "reward",
    "filter",
    "pairs",
    "reference",
    "teacher",
    "batch",
    "train",
    "sync",
    "evaluate",
];

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
    /// Curves by metric ([`Curves::drawn`]).
    pub curves: BTreeMap<String, Value>,
    /// Seconds and tokens by step, for other axes than steps.
    pub axes: StepAxes,
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

impl StageShares {
    /// Shares of a stage's whole time.
    pub fn of(stage: &StageReport) -> Self {
        let shares = State::ALL.iter().map(|&state| (state.name().to_owned(), stage.share(state))).collect();
        StageShares { name: stage.name.clone(), workers: stage.workers.len(), shares }
    }

    /// Shares by the totals of a row of `timings.jsonl`, in the order of the graph. The row has no numbers of
    /// workers: they are 0.
    pub fn of_totals<'a>(row: impl IntoIterator<Item = (&'a str, f64)>) -> Vec<Self> {
        let mut stages = BTreeMap::<(usize, &str), BTreeMap<&str, f64>>::new();
        for (key, seconds) in row {
            let part = key.strip_prefix("stage_").and_then(|key| key.strip_suffix("_seconds"));
            let Some((name, state)) = part.and_then(|part| part.rsplit_once('_')) else { continue };
            let place = STAGES.iter().position(|stage| *stage == name).unwrap_or(STAGES.len());
            stages.entry((place, name)).or_default().insert(state, seconds.max(0.0));
        }
        let share = |((_, name), seconds): ((usize, &str), BTreeMap<&str, f64>)| {
            let sum: f64 = seconds.values().sum();
            let of = |state: State| seconds.get(state.name()).map_or(0.0, |seconds| seconds / sum.max(1e-9));
            let shares = State::ALL.map(|state| (state.name().to_owned(), of(state)));
            StageShares { name: name.to_owned(), workers: 0, shares: BTreeMap::from(shares) }
        };
        stages.into_iter().map(share).collect()
    }
}

impl HtmlReport {
    /// The page.
    pub fn to_html(&self) -> String {
        let data = serde_json::to_value(self).unwrap_or_default().to_string();
        // No text may end the script element around it.
        filled(STYLE, SCRIPT, &data.replace('<', "\\u003c"))
    }

    /// The page without a run, with more style and script. `script` runs last; it draws a run by
    /// `draw(report)`, where `report` is an `HtmlReport` as JSON.
    pub fn page_for(style: &str, script: &str) -> String {
        filled(&format!("{STYLE}{style}"), &format!("{SCRIPT}{script}"), "null")
    }

    /// Takes samples in. If they are more than the page holds, groups are chosen evenly among all: a
    /// group is complete or left out. Samples of a group follow each other.
    pub fn samples(mut self, rollouts: impl Iterator<Item = Rollout>) -> Self {
        let (mut kept, mut held, mut every) = (Vec::<Vec<Value>>::new(), 0, 1);
        let (mut groups, mut seen, mut newest) = (0, 0, None);
        for rollout in rollouts {
            let of = Some((rollout.step, rollout.group));
            if newest != of {
                // A group is complete when the next begins.
                while held > SAMPLES && kept.len() > 1 {
                    every *= 2;
                    let mut keep = [true, false].into_iter().cycle();
                    kept.retain(|_| keep.next() == Some(true));
                    held = kept.iter().map(Vec::len).sum();
                }
                if groups % every == 0 {
                    kept.push(Vec::new());
                }
                (newest, groups) = (of, groups + 1);
            }
            if (groups - 1) % every == 0
                && let Some(group) = kept.last_mut()
            {
                group.push(shown(rollout));
                held += 1;
            }
            seen += 1;
        }
        (self.samples_left_out, self.samples) = (seen - held, kept.into_iter().flatten().collect());
        self
    }
}

/// The template with these parts. No part holds the mark of a later one.
fn filled(style: &str, script: &str, data: &str) -> String {
    let parts = [("{{STYLE}}", style), ("{{SCRIPT}}", script), ("{{TITLE}}", "rollflow"), ("{{DATA}}", data)];
    parts.into_iter().fold(PAGE.to_owned(), |page, (mark, part)| page.replacen(mark, part, 1))
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
        "step": rollout.step, "group": rollout.group, "index": rollout.index, "part": rollout.part, "status": rollout.status,
        "prompt": cut(&rollout.prompt.render()), "response": cut(&rollout.response), "answer": answer,
        "reward": rollout.reward, "advantage": rollout.advantage, "parts": rollout.reward_parts,
        "length": rollout.versions.generated(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stages_have_the_order_of_the_graph_and_shares_that_sum_to_1() {
        let row = [
            ("stage_own_thing_busy_seconds", 1.0),
            ("stage_train_busy_seconds", 3.0),
            ("stage_train_starved_seconds", 1.0),
            ("stage_prompts_credit_seconds", 2.0),
            ("elapsed_seconds", 4.0),
        ];
        let stages = StageShares::of_totals(row);
        let names: Vec<&str> = stages.iter().map(|stage| stage.name.as_str()).collect();
        assert_eq!(names, ["prompts", "train", "own_thing"]);
        assert_eq!((stages[1].shares["busy"], stages[1].shares["starved"], stages[0].shares["credit"]), (0.75, 0.25, 1.0));
    }
}
