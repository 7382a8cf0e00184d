//! A rollout that an interrupted run has begun: what is kept of it between two turns, and how it comes back to where it was.
//!
//! Where its environment can be restored it goes on from its newest turn. Otherwise its recorded turns are played again, and what the environment
//! says is held against what it said then.

use std::ops::Range;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::{Part, Rollout};
use crate::data::chat::ChatError;
use crate::data::{Answer, ChatMessage, Status, Tokenizer, Version, number};
use crate::env::ToolUse;
use crate::stages::generate::agent::dialogue::Dialogue;

/// A rollout between two turns, besides its tokens: what an environment that can be restored spares from being played again.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Saved {
    pub environment: Value,
    messages: Vec<ChatMessage>,
    turns: usize,
    used: ToolUse,
    #[serde(with = "number::many")]
    rewards: Vec<f64>,
}

/// What is on record of what an environment says.
pub(super) enum Known {
    /// Nothing: the record ends before.
    New,
    /// The same.
    Same,
    /// Something else.
    Other,
}

impl Rollout {
    /// From where it was saved, which is where its newest turn begins.
    pub(super) fn go_on(&mut self, saved: Saved, tokenizer: &Tokenizer) -> Result<(), ChatError> {
        let record = std::mem::take(&mut self.recorded);
        self.done = self.parts_of(record.into());
        if let Some(Part { context, answer }) = self.done.pop() {
            let given = piece(&answer, 0..answer.tokens.len() - answer.turn());
            self.part = Part { context, answer: Answer { status: Status::Pending, ..given } };
            self.recorded.push_back(answer);
        }
        let (dialogue, _) = Dialogue::begin(saved.messages, &self.tools, tokenizer)?;
        self.dialogue = Some(dialogue);
        (self.turns, self.used, self.rewards) = (saved.turns, saved.used, saved.rewards);
        Ok(())
    }

    /// Takes over all that a record has, played or not: what was sampled counts, even if no environment answers it any more.
    pub(super) fn take_over_record(&mut self) {
        if self.recorded.is_empty() {
            return;
        }
        let mut parts = self.parts_of(self.to_record());
        if let Some(last) = parts.pop() {
            (self.done, self.part) = (parts, last);
        }
        self.recorded.clear();
    }

    /// A record by its parts. The first reads what the first of this rollout does.
    fn parts_of(&self, record: Vec<Answer>) -> Vec<Part> {
        let first = self.done.first().unwrap_or(&self.part).context.clone();
        let part = |(at, answer): (usize, Answer)| {
            // A part that was begun anew has what it reads at its beginning.
            let read = if at == 0 { 0 } else { answer.versions.per_token().take_while(Option::is_none).count() };
            let context = if at == 0 { first.clone() } else { answer.tokens[..read].into() };
            Part { context, answer: piece(&answer, read..answer.tokens.len()) }
        };
        record.into_iter().enumerate().map(part).collect()
    }

    /// What is to be kept of it now, if its environment can be restored.
    pub fn save(&self) -> Option<Value> {
        let environment = self.environment.as_ref()?.save()?;
        let messages = self.dialogue.as_ref()?.messages().to_vec();
        let saved = Saved { environment, messages, turns: self.turns, used: self.used.clone(), rewards: self.rewards.clone() };
        serde_json::to_value(saved).ok()
    }

    /// Plays the next turn that is on record. Gives whether it was cut off by its length, of which there may be `room`; none if the engine has to
    /// make the turn, from its beginning or from where the record ends.
    pub(super) fn recorded_turn(&mut self, room: usize, eos: &[u32]) -> Option<bool> {
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
        let last = at + sampled == recorded.tokens.len();
        if last && self.recorded.len() == 1 && !recorded.has_ended() {
            self.recorded.clear();
            return None;
        }
        let by_itself = recorded.tokens[..at + sampled].last().is_some_and(|token| eos.contains(token));
        Some(if last { recorded.status == Status::Truncated } else { !by_itself && sampled >= room })
    }

    /// Holds what the environment says now, from `at` on in the present part, against the record. A part that was `rewritten` has all that it reads
    /// in there.
    pub(super) fn known(&mut self, tokens: &[u32], at: usize, rewritten: bool) -> Known {
        let parts = self.recorded.len();
        let Some(recorded) = self.recorded.front_mut() else { return Known::New };
        if recorded.tokens.len() == at && parts == 1 {
            self.recorded.clear();
            return Known::New;
        }
        if recorded.tokens.get(at..at + tokens.len()) != Some(tokens) {
            return Known::Other;
        }
        if rewritten {
            *recorded = piece(recorded, tokens.len()..recorded.tokens.len());
        }
        Known::Same
    }
}

/// These tokens of an answer, and how it stands.
fn piece(of: &Answer, range: Range<usize>) -> Answer {
    let mut piece = Answer::new(of.index);
    for (at, version) in of.versions.per_token().enumerate().skip(range.start).take(range.len()) {
        match version {
            Some(version) => piece.push(of.tokens[at], of.log_probs[at], version),
            None => piece.give(&of.tokens[at..=at]),
        }
    }
    Answer { status: of.status, ..piece }
}
