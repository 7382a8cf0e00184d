//! What is asked of an engine and what it answers.

use std::collections::BTreeSet;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::EngineError;
use crate::data::{Answer, Spans, Status};

/// How tokens are chosen and when a text ends.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct SamplingParams {
    /// Divides the logits; 0 takes the likeliest token always.
    pub temperature: f32,
    /// Keeps the likeliest tokens whose probabilities sum to this; 1 keeps all.
    pub top_p: f32,
    /// Keeps that many of the likeliest tokens; 0 keeps all.
    pub top_k: usize,
    /// Drops tokens less likely than this share of the likeliest one's probability; 0 drops none.
    pub min_p: f32,
    /// Longest answer, or turn of one, in tokens.
    pub max_new_tokens: usize,
    /// Tokens that end the text, besides the tokenizer's own. The token stays in the answer.
    pub stop_token_ids: Vec<u32>,
    /// Strings that end the text. The tokens that complete one stay in the answer.
    pub stop: Vec<String>,
    /// Whether the tokenizer's end-of-text tokens are tokens like any other.
    pub ignore_eos: bool,
}

impl Default for SamplingParams {
    fn default() -> Self {
        SamplingParams {
            temperature: 1.0,
            top_p: 1.0,
            top_k: 0,
            min_p: 0.0,
            max_new_tokens: 128,
            stop_token_ids: Vec::new(),
            stop: Vec::new(),
            ignore_eos: false,
        }
    }
}

impl SamplingParams {
    /// Whether every token keeps its chance: the distribution is the model's own, at the temperature.
    pub fn keeps_all(&self) -> bool {
        self.top_k == 0 && self.top_p >= 1.0 && self.min_p <= 0.0
    }

    /// Whether the likeliest token is taken always.
    pub fn greedy(&self) -> bool {
        self.temperature == 0.0
    }

    /// Refuses values without meaning.
    pub fn check(&self) -> Result<(), EngineError> {
        let refuse = |field, found: String, expected| Err(EngineError::Params { field, found, expected });
        if !(self.temperature >= 0.0 && self.temperature.is_finite()) {
            return refuse("temperature", self.temperature.to_string(), "a finite number ≥ 0");
        }
        if !(self.top_p > 0.0 && self.top_p <= 1.0) {
            return refuse("top_p", self.top_p.to_string(), "a number above 0, at most 1");
        }
        if !(0.0..=1.0).contains(&self.min_p) {
            return refuse("min_p", self.min_p.to_string(), "a number from 0 to 1");
        }
        if self.max_new_tokens == 0 {
            return refuse("max_new_tokens", "0".into(), "at least 1");
        }
        if self.stop.iter().any(String::is_empty) {
            return refuse("stop", "an empty string".into(), "strings that are not empty");
        }
        Ok(())
    }
}

/// A prompt to be answered by samples `first` to `samples` of its group.
#[derive(Clone, Debug, PartialEq)]
pub struct Request {
    /// The prompt's place in the stream: it keys the randomness (law N2) and comes back with the answers.
    pub ordinal: u64,
    /// The prompt's tokens.
    pub tokens: Arc<[u32]>,
    /// The first sample that is asked for. It is 0 unless what comes before it was asked for already: the next turn of one conversation.
    pub first: u32,
    /// What is added to the positions that key the randomness (law N2): where an earlier request of the same conversation ended.
    pub offset: usize,
    /// How many answers the group has; those from `first` on are asked for.
    pub samples: u32,
    /// How they are sampled.
    pub params: Arc<SamplingParams>,
    /// What is there of them already, in any order: an answer that has ended comes back as it is, one that has not is continued. Tokens in
    /// it that were given, such as what a tool said, are those whose span has no version; what was sampled since the last of them counts
    /// towards `max_new_tokens`, and one that ends with a given token begins its next turn.
    pub answers: Vec<Answer>,
}

impl Request {
    /// All of a prompt's answers, from their beginning.
    pub fn new(ordinal: u64, tokens: impl Into<Arc<[u32]>>, samples: u32, params: Arc<SamplingParams>) -> Self {
        Request { ordinal, tokens: tokens.into(), first: 0, offset: 0, samples, params, answers: Vec::new() }
    }

    /// Most tokens that a sample can come to: all that is there, and a whole turn.
    pub fn longest(&self) -> usize {
        let begun = self.answers.iter().map(|answer| answer.tokens.len() - answer.turn().min(answer.tokens.len())).max();
        self.tokens.len() + begun.unwrap_or(0) + self.params.max_new_tokens
    }

    /// Says what is wrong with the answers that it brings along, for a model of `vocabulary` tokens.
    pub fn check_answers(&self, vocabulary: usize) -> Result<(), EngineError> {
        let mut seen = BTreeSet::new();
        for answer in &self.answers {
            let Answer { index, tokens, log_probs, versions, .. } = answer;
            let refuse = |problem: String| {
                Err(EngineError::Prompt { ordinal: self.ordinal, problem: format!("answer {index} {problem}") })
            };
            if !(self.first..self.samples).contains(index) || !seen.insert(*index) {
                return refuse(format!("is there already, or is none of those from {} to {}", self.first, self.samples));
            }
            if log_probs.len() != tokens.len() || versions.len() != tokens.len() {
                return refuse(format!(
                    "has {} tokens, {} log-probabilities and {} versions; they must be equally many",
                    tokens.len(),
                    log_probs.len(),
                    versions.len()
                ));
            }
            if let Some(token) = tokens.iter().find(|token| **token as usize >= vocabulary) {
                return refuse(format!("has token {token}, beyond the model's vocabulary of {vocabulary}"));
            }
        }
        Ok(())
    }
}

/// Why an answer ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum FinishReason {
    /// An end-of-text token, a stop token or a stop string.
    Stop,
    /// `max_new_tokens`.
    Length,
    /// It didn't: the engine would not make it, or not to its end.
    Refused,
}

impl From<FinishReason> for Status {
    fn from(reason: FinishReason) -> Self {
        match reason {
            FinishReason::Stop => Status::Completed,
            FinishReason::Length => Status::Truncated,
            FinishReason::Refused => Status::Aborted,
        }
    }
}

/// One answer, complete.
#[derive(Clone, Debug, PartialEq)]
pub struct Finished {
    /// The prompt's place in the stream.
    pub ordinal: u64,
    /// The answer's place in its group.
    pub index: u32,
    /// What was sampled, the token that ended it included.
    pub tokens: Vec<u32>,
    /// Log-probability of each under the distribution it was drawn from, after temperature and truncation; for greedy choices, of
    /// the model's own distribution.
    pub log_probs: Vec<f32>,
    /// The weights that sampled each.
    pub versions: Spans,
    /// Why it ended.
    pub finish: FinishReason,
    /// Of a refused one: why.
    pub refused: Option<String>,
}

impl Finished {
    /// An answer to prompt `ordinal` that has ended.
    pub fn new(ordinal: u64, answer: Answer, finish: FinishReason) -> Self {
        let Answer { index, tokens, log_probs, versions, .. } = answer;
        Finished { ordinal, index, tokens, log_probs, versions, finish, refused: None }
    }

    /// An answer to prompt `ordinal` that will not be made, as far as it is.
    pub fn refused(ordinal: u64, answer: Answer, why: String) -> Self {
        Finished { refused: Some(why), ..Finished::new(ordinal, answer, FinishReason::Refused) }
    }
}
