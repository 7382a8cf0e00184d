//! Questions whose answers the model finds by searching a collection of texts.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Instant;

use rollflow::data::ChatMessage;
use rollflow::env::{Action, EnvError, Environment, Episode, Grade, Step, ToolCall, ToolResult, ToolSpec};
use serde_json::{Value, json};

/// BM25's k1: saturation of repeated words.
const SATURATION: f64 = 1.2;
/// BM25's b: penalty on long texts.
const LENGTH: f64 = 0.75;
/// Longest part of a text in a search result, in characters.
const SHOWN: usize = 400;

/// Texts searched by words and ranked by BM25; all rollouts share one.
#[derive(Debug, Default)]
pub struct Corpus {
    texts: Vec<String>,
    /// Length of each text in words.
    lengths: Vec<f64>,
    mean_length: f64,
    /// Each word with the texts that contain it and its count there.
    postings: BTreeMap<String, Vec<(usize, f64)>>,
}

impl Corpus {
    /// Indexes these texts, in time linear in their words.
    pub fn new(texts: impl IntoIterator<Item = impl Into<String>>) -> Self {
        let texts: Vec<String> = texts.into_iter().map(Into::into).collect();
        let mut postings: BTreeMap<String, Vec<(usize, f64)>> = BTreeMap::new();
        let mut lengths = Vec::new();
        for (at, text) in texts.iter().enumerate() {
            let mut counts: BTreeMap<String, f64> = BTreeMap::new();
            words(text).for_each(|word| *counts.entry(word).or_default() += 1.0);
            lengths.push(counts.values().sum());
            counts.into_iter().for_each(|(word, count)| postings.entry(word).or_default().push((at, count)));
        }
        let mean_length = lengths.iter().sum::<f64>() / lengths.len().max(1) as f64;
        Corpus { texts, lengths, mean_length, postings }
    }

    /// Returns the `most` texts with the highest scores, best first; ties keep the file's order.
    /// Texts without a word of the query have no score.
    pub fn search(&self, query: &str, most: usize) -> Vec<&str> {
        let mut scores: BTreeMap<usize, f64> = BTreeMap::new();
        for word in words(query) {
            let Some(found) = self.postings.get(&word) else { continue };
            let (all, having) = (self.texts.len() as f64, found.len() as f64);
            let rarity = (1.0 + (all - having + 0.5) / (having + 0.5)).ln();
            for &(at, count) in found {
                let long = 1.0 - LENGTH + LENGTH * self.lengths[at] / self.mean_length;
                *scores.entry(at).or_default() += rarity * count * (SATURATION + 1.0) / (count + SATURATION * long);
            }
        }
        let mut ranked: Vec<(usize, f64)> = scores.into_iter().collect();
        ranked.sort_by(|(_, a), (_, b)| b.total_cmp(a));
        ranked.into_iter().take(most).map(|(at, _)| self.texts[at].as_str()).collect()
    }
}

fn words(text: &str) -> impl Iterator<Item = String> + '_ {
    text.split(|c: char| !c.is_alphanumeric()).filter(|word| !word.is_empty()).map(str::to_lowercase)
}

/// A task with the tools `search`, which returns texts for a query, and `complete_task`, which
/// submits the answer and ends the episode.
///
/// The answer is compared with the prompt's reference answer without case, blanks, articles and
/// punctuation.
#[derive(Clone, Debug)]
pub struct SearchEnvironment {
    corpus: Arc<Corpus>,
    results: usize,
    truth: Option<String>,
    answer: Option<String>,
}

impl SearchEnvironment {
    /// Creates the task; a search returns at most `results` texts.
    pub fn new(corpus: Arc<Corpus>, results: usize) -> Self {
        SearchEnvironment { corpus, results: results.max(1), truth: None, answer: None }
    }

    fn call(&mut self, call: &ToolCall) -> ToolResult {
        if call.name != "search" {
            self.answer = Some(call.text("answer").unwrap_or_default().to_owned());
            return ToolResult::of(call, "done");
        }
        let found = self.corpus.search(call.text("query").unwrap_or_default(), self.results);
        if found.is_empty() {
            return ToolResult::of(call, "nothing was found");
        }
        let lines = found.iter().enumerate().map(|(at, text)| {
            let shown: String = text.chars().take(SHOWN).collect();
            format!("{}. {shown}", at + 1)
        });
        ToolResult::of(call, lines.collect::<Vec<_>>().join("\n"))
    }
}

impl Environment for SearchEnvironment {
    fn reset(&mut self, episode: &Episode, _: Instant) -> Result<Vec<ChatMessage>, EnvError> {
        (self.truth, self.answer) = (episode.prompt.answer().map(str::to_owned), None);
        Ok(episode.conversation())
    }

    fn tools(&self) -> Vec<ToolSpec> {
        let only = |name: &str| json!({ "type": "object", "properties": { name: { "type": "string" } }, "required": [name] });
        vec![
            ToolSpec::new("search", "Finds texts by words.", only("query")),
            ToolSpec::new("complete_task", "Ends the task with its answer.", only("answer")),
        ]
    }

    fn step(&mut self, action: &Action, _: Instant) -> Result<Step, EnvError> {
        let results = action.calls.iter().map(|call| self.call(call)).collect();
        Ok(Step::results(results).done(self.answer.is_some()))
    }

    fn observe(&self) -> Value {
        json!({ "answer": self.answer })
    }

    fn grade(&mut self, _: Instant) -> Result<Grade, EnvError> {
        let plain = |text: &String| words(text).filter(|word| !["a", "an", "the"].contains(&word.as_str())).collect::<Vec<_>>();
        let Some(truth) = &self.truth else {
            return Err(EnvError::new("the prompt has no ground truth, metadata[\"answer\"], to grade by"));
        };
        Ok(Grade::correct(self.answer.as_ref().is_some_and(|answer| plain(answer) == plain(truth))))
    }
}
