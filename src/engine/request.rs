//! Requests to engines and their results.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::EngineError;
use crate::data::{Answer, Routes, Spans, Status};

/// Lowest temperature above 0, and largest penalty and bias: with them, no finite logit becomes infinite.
const COLDEST: f32 = 1e-20;
const LARGEST: f32 = 1e6;

/// Sampling parameters.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct SamplingParams {
    /// Divisor of the logits; 0 always takes the likeliest token. Default: 1.
    pub temperature: f32,
    /// Nucleus: keeps the likeliest tokens whose probabilities sum to this; 1 keeps all. Default:
    /// 1.
    pub top_p: f32,
    /// Number of likeliest tokens that are kept; 0 keeps all. Default: 0.
    pub top_k: usize,
    /// Drops tokens less likely than this share of the likeliest token's probability; 0 drops none.
    /// Default: 0.
    pub min_p: f32,
    /// Divides positive scores of tokens of prompt and completion, and multiplies others; 1 changes none.
    /// Above 1, repetitions are less likely. Default: 1.
    pub repetition_penalty: f32,
    /// Subtracted from the scores of the completion's tokens. Default: 0.
    pub presence_penalty: f32,
    /// Subtracted from the scores of the completion's tokens once for each time that it has them.
    /// Default: 0.
    pub frequency_penalty: f32,
    /// Added to the scores of tokens, before penalties and temperature
    /// ([`penalties`](super::penalties)).
    pub logit_bias: BTreeMap<u32, f32>,
    /// Longest completion, or turn of one, in tokens. Default: 128.
    pub max_new_tokens: usize,
    /// Tokens that end the completion, in addition to the tokenizer's. The token is kept.
    pub stop_token_ids: Vec<u32>,
    /// Strings that end the completion, special tokens included. The tokens that complete one are kept.
    pub stop: Vec<String>,
    /// If true, the tokenizer's end-of-text tokens are ordinary tokens. Default: false.
    pub ignore_eos: bool,
}

impl Default for SamplingParams {
    fn default() -> Self {
        SamplingParams {
            temperature: 1.0,
            top_p: 1.0,
            top_k: 0,
            min_p: 0.0,
            repetition_penalty: 1.0,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            logit_bias: BTreeMap::new(),
            max_new_tokens: 128,
            stop_token_ids: Vec::new(),
            stop: Vec::new(),
            ignore_eos: false,
        }
    }
}

impl SamplingParams {
    /// Returns true if no token is dropped.
    pub fn keeps_all(&self) -> bool {
        self.top_k == 0 && self.top_p >= 1.0 && self.min_p <= 0.0
    }

    /// Returns true if some scores are changed before temperature and truncation.
    pub fn adjusts(&self) -> bool {
        self.repetition_penalty != 1.0 || self.counts() || !self.logit_bias.is_empty()
    }

    /// Returns true if scores depend on what the completion, apart from its prompt, has already.
    pub fn counts(&self) -> bool {
        self.presence_penalty != 0.0 || self.frequency_penalty != 0.0
    }

    /// Returns true if log-probabilities of samples are those of the model.
    pub fn keeps_log_probs(&self) -> bool {
        !self.adjusts() && (self.greedy() || self.temperature == 1.0 && self.keeps_all())
    }

    /// Returns true if the likeliest token is always taken.
    pub fn greedy(&self) -> bool {
        self.temperature == 0.0
    }

    /// Rejects values out of range. Those in range leave finite logits finite.
    pub fn check(&self) -> Result<(), EngineError> {
        let adds = |number: f32| (-LARGEST..=LARGEST).contains(&number);
        let wrong = if !(self.temperature >= 0.0 && self.temperature.is_finite()) {
            ("temperature", self.temperature.to_string(), "a finite number ≥ 0")
        } else if self.temperature > 0.0 && self.temperature < COLDEST {
            ("temperature", self.temperature.to_string(), "at least 1e-20, or 0 for the likeliest token")
        } else if !(self.top_p > 0.0 && self.top_p <= 1.0) {
            ("top_p", self.top_p.to_string(), "a number above 0, at most 1")
        } else if !(0.0..=1.0).contains(&self.min_p) {
            ("min_p", self.min_p.to_string(), "a number from 0 to 1")
        } else if !(LARGEST.recip()..=LARGEST).contains(&self.repetition_penalty) {
            ("repetition_penalty", self.repetition_penalty.to_string(), "a number from 1e-6 to 1e6")
        } else if !adds(self.presence_penalty) {
            ("presence_penalty", self.presence_penalty.to_string(), "a number from -1e6 to 1e6")
        } else if !adds(self.frequency_penalty) {
            ("frequency_penalty", self.frequency_penalty.to_string(), "a number from -1e6 to 1e6")
        } else if let Some((token, bias)) = self.logit_bias.iter().find(|(_, bias)| !adds(**bias)) {
            ("logit_bias", format!("{bias} for token {token}"), "numbers from -1e6 to 1e6")
        } else if self.max_new_tokens == 0 {
            ("max_new_tokens", "0".into(), "at least 1")
        } else if self.stop.iter().any(String::is_empty) {
            ("stop", "an empty string".into(), "strings that are not empty")
        } else {
            return Ok(());
        };
        let (field, found, expected) = wrong;
        Err(EngineError::Params(format!("`{field}` is {found}; expected {expected}")))
    }

    /// [`check`](Self::check), for a model of `vocabulary` tokens.
    pub(crate) fn check_for(&self, vocabulary: usize) -> Result<(), EngineError> {
        let beyond = self.logit_bias.keys().find(|token| **token as usize >= vocabulary);
        beyond.map_or_else(
            || self.check(),
            |token| Err(EngineError::Params(format!("`logit_bias` names token {token}; the model has {vocabulary}, from 0"))),
        )
    }
}

/// Request for samples `first` to `samples` of a prompt's group.
#[derive(Clone, Debug, PartialEq)]
pub struct Request {
    /// Ordinal of the prompt, which keys the randomness (law N2).
    pub ordinal: u64,
    /// Tokens of the prompt.
    pub tokens: Arc<[u32]>,
    /// First requested sample. Above 0 only for the next turn of one conversation.
    pub first: u32,
    /// Offset of the positions that key the randomness (law N2): the end of the conversation's
    /// previous request.
    pub offset: usize,
    /// Size of the group.
    pub samples: u32,
    /// Seed of the randomness, instead of the engine's seed and the ordinal (law N2).
    pub seed: Option<u64>,
    /// Adapter to generate with, by name; `None` for the engine's own weights.
    pub adapter: Option<Arc<str>>,
    /// Sampling parameters.
    pub params: Arc<SamplingParams>,
    /// Whether completions bring the experts of their tokens, from an engine that records them. Default: true.
    pub routes: bool,
    /// Partial completions, in any order. One that has ended is returned unchanged, any other is
    /// continued. Given tokens, such as a tool's output, have spans without a version. Tokens
    /// sampled after the last given one count towards `max_new_tokens`.
    pub answers: Vec<Answer>,
}

impl Request {
    /// Request for a whole group, without partial completions.
    pub fn new(ordinal: u64, tokens: impl Into<Arc<[u32]>>, samples: u32, params: Arc<SamplingParams>) -> Self {
        let (tokens, answers) = (tokens.into(), Vec::new());
        Request { ordinal, tokens, first: 0, offset: 0, samples, seed: None, adapter: None, params, routes: true, answers }
    }

    /// Largest number of tokens that a sample can reach: all present tokens and a whole turn.
    pub fn longest(&self) -> usize {
        let begun = self.answers.iter().map(|answer| self.longest_of(answer)).max();
        begun.unwrap_or(self.tokens.len() + self.params.max_new_tokens)
    }

    /// Largest number of tokens that the sample with this partial completion can reach.
    pub(super) fn longest_of(&self, answer: &Answer) -> usize {
        self.tokens.len() + answer.tokens.len() - answer.turn().min(answer.tokens.len()) + self.params.max_new_tokens
    }

    /// Validates parameters, prompt and partial completions, for a model of `vocabulary` tokens.
    pub(super) fn check(&self, vocabulary: usize) -> Result<(), EngineError> {
        self.params.check_for(vocabulary)?;
        let refuse = |problem: String| Err(EngineError::Prompt { ordinal: self.ordinal, problem });
        if self.tokens.is_empty() {
            return refuse("it has no token; a model needs at least one to continue".to_owned());
        }
        let mut seen = BTreeSet::new();
        for answer in &self.answers {
            let Answer { index, tokens, log_probs, versions, .. } = answer;
            let refuse = |problem: String| refuse(format!("answer {index} {problem}"));
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

/// Reason for the end of a completion.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum FinishReason {
    /// An end-of-text token, a stop token or a stop string.
    Stop,
    /// Limit of `max_new_tokens`.
    Length,
}

impl From<FinishReason> for Status {
    fn from(reason: FinishReason) -> Self {
        match reason {
            FinishReason::Stop => Status::Completed,
            FinishReason::Length => Status::Truncated,
        }
    }
}

/// Finished completion.
#[derive(Clone, Debug, PartialEq)]
pub struct Finished {
    /// Ordinal of the prompt.
    pub ordinal: u64,
    /// Index of the sample in its group.
    pub index: u32,
    /// Sampled tokens, including the one that ended the completion.
    pub tokens: Vec<u32>,
    /// Log-probability of each token under the distribution that it was drawn from, after
    /// temperature and truncation; for greedy choices, under the model's own distribution.
    pub log_probs: Vec<f32>,
    /// Policy version of each token.
    pub versions: Spans,
    /// Experts that computed the prompt and the tokens, if the engine records them.
    pub routes: Option<Routes>,
    /// Reason for the end, or the engine's reason why it refused to finish the completion.
    pub finish: Result<FinishReason, String>,
}

impl Finished {
    /// Completion of prompt `ordinal` that has ended, or that the engine refused to finish.
    pub fn new(ordinal: u64, answer: Answer, finish: Result<FinishReason, String>) -> Self {
        let Answer { index, tokens, log_probs, versions, routes, .. } = answer;
        Finished { ordinal, index, tokens, log_probs, versions, routes, finish }
    }

    /// Status of the completion.
    pub fn status(&self) -> Status {
        self.finish.as_ref().map_or(Status::Aborted, |finish| (*finish).into())
    }
}
