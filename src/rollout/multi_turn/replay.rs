//! Resumption of interrupted rollouts.
//!
//! If its environment can be restored, a rollout resumes at its newest turn. Otherwise its recorded
//! turns are replayed, and the environment's responses are compared with the recorded ones.

use std::ops::Range;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::dialogue::Dialogue;
use super::rollout::{Part, Rollout};
use crate::data::{Answer, ChatMessage, DataError, Status, Tokenizer, Version, number};
use crate::env::ToolUse;

/// State of a rollout between two turns, without its tokens.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct SavedRollout {
    pub environment: Value,
    messages: Vec<ChatMessage>,
    turns: usize,
    #[serde(rename = "used")]
    tool_calls: ToolUse,
    #[serde(with = "number")]
    rewards: Vec<f64>,
}

impl Rollout {
    /// Restores the rollout at the beginning of its newest turn.
    pub fn restore(&mut self, saved: SavedRollout, tokenizer: &Tokenizer) -> Result<(), DataError> {
        let record = std::mem::take(&mut self.recorded);
        self.done = self.parts_of(record.into());
        if let Some(Part { context, answer }) = self.done.pop() {
            let given = piece(&answer, 0..answer.tokens.len() - answer.turn());
            // The record has the ledger's index; the engine counts rollouts.
            self.part = Part { context, answer: Answer { index: self.index, status: Status::Pending, ..given } };
            self.recorded.push_back(answer);
        }
        let (dialogue, _) = Dialogue::begin(saved.messages, &self.tools, tokenizer)?;
        self.dialogue = Some(dialogue);
        (self.turns, self.tool_calls, self.rewards) = (saved.turns, saved.tool_calls, saved.rewards);
        Ok(())
    }

    /// Returns true if the record holds more than was replayed.
    pub fn is_replaying(&self) -> bool {
        let replayed = self.part.answer.tokens.len();
        self.recorded.len() > 1 || self.recorded.front().is_some_and(|recorded| recorded.tokens.len() > replayed)
    }

    /// Takes over the rest of the record: its sampled tokens count although no environment responds to
    /// them (law D4).
    pub fn take_over_record(&mut self) {
        if !self.is_replaying() {
            return;
        }
        let mut parts = self.parts_of(self.to_record());
        if let Some(last) = parts.pop() {
            (self.done, self.part) = (parts, last);
        }
        self.recorded.clear();
    }

    /// Splits a record into parts. The first part has the context of this rollout's first part.
    fn parts_of(&self, record: Vec<Answer>) -> Vec<Part> {
        let first = self.done.first().unwrap_or(&self.part).context.clone();
        let part = |(at, answer): (usize, Answer)| {
            // The record of a later part begins with its context.
            let read = if at == 0 { 0 } else { answer.versions.per_token().take_while(Option::is_none).count() };
            let context = if at == 0 { first.clone() } else { answer.tokens[..read].into() };
            Part { context, answer: piece(&answer, read..answer.tokens.len()) }
        };
        record.into_iter().enumerate().map(part).collect()
    }

    /// State to be kept for a resume; none if the environment cannot be restored.
    pub fn save(&self) -> Option<Value> {
        let environment = self.environment.as_ref()?.save()?;
        let messages = self.dialogue.as_ref()?.messages().to_vec();
        let (turns, tool_calls, rewards) = (self.turns, self.tool_calls.clone(), self.rewards.clone());
        let saved = SavedRollout { environment, messages, turns, tool_calls, rewards };
        serde_json::to_value(saved).ok()
    }

    /// Replays the next recorded turn, of at most `room` tokens. Returns whether it was cut off by its
    /// length; none if the engine has to compute the turn or its rest.
    pub fn replay_turn(&mut self, room: usize, eos: &[u32]) -> Option<bool> {
        let at = self.part.answer.tokens.len();
        let Some(recorded) = self.recorded.front().filter(|recorded| recorded.tokens.len() > at) else {
            self.recorded.clear();
            return None;
        };
        let sampled = recorded.versions.per_token().skip(at).take_while(Option::is_some).count();
        let versions: Vec<Version> = recorded.versions.per_token().skip(at).take(sampled).flatten().collect();
        for (offset, version) in versions.into_iter().enumerate() {
            self.part.answer.push(recorded.tokens[at + offset], recorded.log_probs[at + offset], version);
        }
        self.part.answer.routes = recorded.routes.clone();
        let last = at + sampled == recorded.tokens.len();
        if last && self.recorded.len() == 1 && !recorded.has_ended() {
            self.recorded.clear();
            return None;
        }
        let by_itself = recorded.tokens[..at + sampled].last().is_some_and(|token| eos.contains(token));
        Some(if last { recorded.status == Status::Truncated } else { !by_itself && sampled >= room })
    }

    /// Returns true if the environment's response, which begins at `at` in the present part, is the
    /// recorded one; `None` if the record ends before it. The record of a `rewritten` part begins with
    /// its context.
    pub fn matches_record(&mut self, tokens: &[u32], at: usize, rewritten: bool) -> Option<bool> {
        let parts = self.recorded.len();
        let recorded = self.recorded.front_mut()?;
        if recorded.tokens.len() == at && parts == 1 {
            self.recorded.clear();
            return None;
        }
        let is_same = recorded.tokens.get(at..at + tokens.len()) == Some(tokens);
        if is_same && rewritten {
            *recorded = piece(recorded, tokens.len()..recorded.tokens.len());
        }
        Some(is_same)
    }
}

/// The tokens of `range`, with the status of the whole.
fn piece(of: &Answer, range: Range<usize>) -> Answer {
    let mut piece = Answer::new(of.index);
    for (at, version) in of.versions.per_token().enumerate().skip(range.start).take(range.len()) {
        match version {
            Some(version) => piece.push(of.tokens[at], of.log_probs[at], version),
            None => piece.give(&of.tokens[at..=at]),
        }
    }
    Answer { status: of.status, routes: of.routes.clone(), ..piece }
}
