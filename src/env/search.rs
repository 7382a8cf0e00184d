//! Questions that are answered from a collection of texts, which the model searches.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use serde_json::{Value, json};

use super::{Action, Deadline, EnvError, Environment, Episode, Grade, Step, ToolCall, ToolResult, ToolSpec};
use crate::data::ChatMessage;

/// How soon further mentions of a word count for less, and how much a long text must have more of them (BM25's k1 and b).
const SATURATION: f64 = 1.2;
const LENGTH: f64 = 0.75;
/// Most of a text that a result shows, in characters.
const SHOWN: usize = 400;

/// Texts that can be searched by words, ranked by BM25. Built once, shared by all rollouts.
#[derive(Debug, Default)]
pub struct Corpus {
    texts: Vec<String>,
    /// In words.
    lengths: Vec<f64>,
    mean_length: f64,
    /// Which texts have a word, and how often.
    postings: BTreeMap<String, Vec<(usize, f64)>>,
}

impl Corpus {
    /// Of these texts. O(words).
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

    /// Of a file in which each line that is not blank is a text.
    pub fn lines(path: &Path) -> std::io::Result<Self> {
        let text = std::fs::read_to_string(path)?;
        Ok(Corpus::new(text.lines().map(str::trim).filter(|line| !line.is_empty())))
    }

    /// How many texts there are.
    pub fn len(&self) -> usize {
        self.texts.len()
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.texts.is_empty()
    }

    /// The `most` texts that fit the query best, the best first; among equals in their own order. Texts without any of its words are none.
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

/// The model calls `search` with a query and reads what was found, and says its answer with `complete_task`. It is right if the answer is the
/// prompt's ground truth, however it is written: case, blanks, articles and punctuation don't count.
#[derive(Clone, Debug)]
pub struct SearchEnvironment {
    corpus: Arc<Corpus>,
    results: usize,
    truth: Option<String>,
    answer: Option<String>,
}

impl SearchEnvironment {
    /// Before its reset; a search shows that many texts.
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
    fn reset(&mut self, episode: &Episode, _: Deadline) -> Result<Vec<ChatMessage>, EnvError> {
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

    fn step(&mut self, action: &Action, _: Deadline) -> Result<Step, EnvError> {
        let results = action.calls.iter().map(|call| self.call(call)).collect();
        Ok(Step::results(results).done(self.answer.is_some()))
    }

    fn observe(&self) -> Value {
        json!({ "answer": self.answer })
    }

    fn grade(&mut self, _: Deadline) -> Result<Grade, EnvError> {
        let plain = |text: &String| words(text).filter(|word| !["a", "an", "the"].contains(&word.as_str())).collect::<Vec<_>>();
        let Some(truth) = &self.truth else {
            return Err(EnvError::new("the prompt has no ground truth, metadata[\"answer\"], to grade by"));
        };
        Ok(Grade::correct(self.answer.as_ref().is_some_and(|answer| plain(answer) == plain(truth))))
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::data::Prompt;

    #[test]
    fn rare_words_decide_and_short_texts_come_before_long_ones() {
        let corpus =
            Corpus::new(["the cat sat", "the dog sat on the mat", "the cat and the dog and the long, long walk home", "fish"]);
        assert_eq!(corpus.search("cat", 2), ["the cat sat", "the cat and the dog and the long, long walk home"]);
        assert_eq!(corpus.search("THE mat?", 1), ["the dog sat on the mat"]);
        assert!(corpus.search("bird", 3).is_empty() && Corpus::new([""; 0]).search("x", 1).is_empty());
    }

    #[test]
    fn an_answer_is_graded_however_it_is_written() {
        let later = Deadline::within(Duration::from_secs(9));
        let corpus = Arc::new(Corpus::new(["The Aare flows through Bern.", "The Limmat flows through Zurich."]));
        let mut prompt = Prompt::from("Which river flows through Bern?");
        prompt.metadata.insert("answer".into(), "the Aare".into());
        let mut search = SearchEnvironment::new(corpus, 1);
        search.reset(&Episode { prompt, ..Episode::default() }, later).unwrap();
        let call = |name: &str, key: &str, value: &str| Action {
            calls: vec![ToolCall::new(name, [(key.to_owned(), value.into())].into_iter().collect())],
            ..Action::default()
        };
        let found = search.step(&call("search", "query", "river Bern"), later).unwrap();
        assert_eq!((found.results[0].content.as_str(), found.done), ("1. The Aare flows through Bern.", false));
        assert_eq!(search.grade(later).unwrap(), Grade::correct(false));
        assert!(search.step(&call("complete_task", "answer", " aare. "), later).unwrap().done);
        assert_eq!(search.grade(later).unwrap(), Grade::correct(true));
    }
}
