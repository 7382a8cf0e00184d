//! Search among the samples of a run, a page at a time.

use std::cmp::Reverse;
use std::time::{Duration, Instant};

use anyhow::Result;
use serde::Deserialize;
use serde_json::{Value, json};

use super::index::{Entry, SampleIndex};
use crate::command::condition::{Condition, ConditionError, status_word};

/// Samples of an answer.
const PAGE: usize = 100;
/// Time for which a request reads texts. The next request continues.
const BUDGET: Duration = Duration::from_secs(2);
/// Characters of a completion in a list.
const EXCERPT: usize = 120;

/// A reader's search.
#[derive(Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Query {
    step: Option<u64>,
    min_reward: Option<f64>,
    max_reward: Option<f64>,
    min_length: Option<u32>,
    max_length: Option<u32>,
    status: Option<String>,
    source: Option<String>,
    /// Contained in the prompt or the completion, in any case.
    text: Option<String>,
    /// A condition, as in `rollflow tail --where`.
    #[serde(rename = "where")]
    condition: Option<String>,
    order: Order,
    /// Candidates to pass over: `next` of the answer before.
    from: usize,
    /// If true, the answer has [`SampleIndex::sketch`].
    sketch: bool,
}

#[derive(Clone, Copy, Debug, Default, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Order {
    /// Newest step first.
    #[default]
    Step,
    /// Highest reward first.
    Best,
    Worst,
    Longest,
    Shortest,
}

impl Query {
    fn admits(&self, index: &SampleIndex, entry: &Entry) -> bool {
        let rewarded = self.min_reward.is_some() || self.max_reward.is_some();
        self.step.is_none_or(|step| entry.step == step)
            && (!rewarded || !entry.reward.is_nan())
            && self.min_reward.is_none_or(|low| entry.reward >= low)
            && self.max_reward.is_none_or(|high| entry.reward <= high)
            && self.min_length.is_none_or(|low| entry.length >= low)
            && self.max_length.is_none_or(|high| entry.length <= high)
            && self.status.as_deref().is_none_or(|status| status_word(entry.status) == status)
            && self.source.as_deref().is_none_or(|source| index.sources[usize::from(entry.source)] == source)
    }

    /// Lines that may fit, as far as the index knows, in the order of the answer.
    fn candidates<'a>(&self, index: &'a SampleIndex) -> Vec<&'a Entry> {
        let mut found: Vec<&Entry> = index.entries.iter().filter(|entry| self.admits(index, entry)).collect();
        let newest = |entry: &&Entry| (Reverse(entry.step), entry.group, entry.index, entry.part);
        match self.order {
            Order::Step => found.sort_by_key(newest),
            Order::Best => found.sort_by(|a, b| rank(b, f64::NEG_INFINITY).total_cmp(&rank(a, f64::NEG_INFINITY))),
            Order::Worst => found.sort_by(|a, b| rank(a, f64::INFINITY).total_cmp(&rank(b, f64::INFINITY))),
            Order::Longest => found.sort_by_key(|entry| Reverse(entry.length)),
            Order::Shortest => found.sort_by_key(|entry| entry.length),
        }
        found
    }
}

/// The reward, or `without`.
fn rank(entry: &Entry, without: f64) -> f64 {
    if entry.reward.is_nan() { without } else { entry.reward }
}

/// Samples that fit, at most a page: `rows`; `found`, their number, if the index knows it; `next`, the
/// place where the next page begins, if there is one; `searched`, the candidates that were looked at
/// until then, of `of`; and `total`, all samples.
pub fn search(index: &SampleIndex, query: &Query) -> Result<Result<Value, ConditionError>> {
    let condition = match query.condition.as_deref().map(Condition::parse).transpose() {
        Ok(condition) => condition,
        Err(error) => return Ok(Err(error)),
    };
    let text = query.text.as_ref().filter(|text| !text.is_empty()).map(|text| text.to_lowercase());
    let (candidates, started) = (query.candidates(index), Instant::now());
    let (mut rows, mut at) = (Vec::new(), query.from.min(candidates.len()));
    let mut file = if candidates.is_empty() { None } else { Some(index.open()?) };
    while at < candidates.len() && rows.len() < PAGE && started.elapsed() < BUDGET {
        let entry = candidates[at];
        at += 1;
        let Some(row) = file.as_mut().and_then(|file| entry.row(file)) else { continue };
        let holds =
            |text: &String| row.response.to_lowercase().contains(text) || row.prompt.render().to_lowercase().contains(text);
        if text.as_ref().is_none_or(holds) {
            let (step, advantage) = (row.step, row.advantage);
            let sample = row.into_sample();
            if condition.as_ref().is_none_or(|condition| condition.holds(Some(step), &sample)) {
                let excerpt: String = sample.response.trim().chars().take(EXCERPT).collect();
                rows.push(json!({
                    "step": step, "group": entry.group, "index": entry.index, "part": entry.part, "length": entry.length,
                    "reward": sample.reward, "advantage": advantage, "status": entry.status, "response": excerpt,
                }));
            }
        }
    }
    let is_exact = text.is_none() && condition.is_none();
    Ok(Ok(json!({
        "rows": rows, "found": is_exact.then_some(candidates.len()), "next": (at < candidates.len()).then_some(at),
        "searched": at, "of": candidates.len(), "total": index.entries.len(),
        "sketch": query.sketch.then(|| index.sketch()),
    })))
}
