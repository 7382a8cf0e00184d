//! One rollout: what was read, sampled and earned so far. It waits for its environment or for the engine, and knows what it asks of either.

mod outcome;
mod replay;

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Instant;

use serde_json::Value;

use super::dialogue::{Dialogue, Next, text_of};
use super::{Agent, StopReason};
use crate::data::chat::ChatError;
use crate::data::{Answer, ChatMessage, Tokenizer, Version};
use crate::env::{Action, Called, Environment, Grade, Step, ToolResult, ToolSpec, ToolUse, extract_tool_calls};
use replay::Known;
pub use replay::Saved;

/// Answers of one rollout in the ledger are kept apart by this.
const PART: u32 = 1 << 16;

/// The ledger's index of a part of a rollout.
pub fn slot(index: u32, part: usize) -> u32 {
    index + PART * part as u32
}

/// The rollout and the part that an index of the ledger means.
pub fn of_slot(slot: u32) -> (u32, usize) {
    (slot % PART, (slot / PART) as usize)
}

/// What the model has read and said without interruption: a sample, in the end.
#[derive(Clone, Debug)]
struct Part {
    context: Arc<[u32]>,
    answer: Answer,
}

pub struct Rollout {
    pub index: u32,
    pub environment: Option<Box<dyn Environment>>,
    tools: Vec<ToolSpec>,
    dialogue: Option<Dialogue>,
    done: Vec<Part>,
    part: Part,
    /// What an interrupted run has of it, by part: it is played again from there, without the engine.
    recorded: VecDeque<Answer>,
    /// What was saved of it as of the newest token that it was given.
    saved: Option<Saved>,
    /// What its environment has heard of the turn that the engine makes now, besides what was recorded of it.
    heard: Vec<u32>,
    /// The calls of the turn that its environment answers now.
    calls: Vec<Called>,
    turns: usize,
    used: ToolUse,
    rewards: Vec<f64>,
    began: Instant,
    stop: Option<StopReason>,
    grade: Option<Grade>,
    failure: Option<String>,
    /// Whether what the engine is making of it is too old to be used.
    pub expired: bool,
}

/// What came of an environment's answer.
pub struct Stepped {
    /// What comes next; none: a turn, unless a limit is reached.
    pub ahead: Option<Ahead>,
    /// What the ledger is to be given: a part's index, and tokens.
    pub given: Option<(u32, Vec<u32>)>,
}

/// What comes next.
pub enum Ahead {
    /// The engine makes a turn.
    Turn,
    /// The environment answers one.
    Step(Action),
    /// It is over, and the environment grades it.
    Over,
    /// The same, because this turn was cut off by its length.
    Cut(Action),
    /// What was recorded does not fit what the environment says now: it begins anew, without it.
    Diverged,
}

impl Rollout {
    /// Before its reset.
    pub fn new(index: u32, recorded: Vec<Answer>, saved: Option<Saved>) -> Self {
        Rollout {
            index,
            environment: None,
            tools: Vec::new(),
            dialogue: None,
            done: Vec::new(),
            part: Part { context: [].into(), answer: Answer::new(index) },
            recorded: recorded.into(),
            saved,
            heard: Vec::new(),
            calls: Vec::new(),
            turns: 0,
            used: ToolUse::default(),
            rewards: Vec::new(),
            began: Instant::now(),
            stop: None,
            grade: None,
            failure: None,
            expired: false,
        }
    }

    /// What the engine is asked with: the tokens before the answer, the answer so far, and where in the conversation they begin.
    pub fn request(&self) -> (&Arc<[u32]>, &Answer, usize) {
        (&self.part.context, &self.part.answer, self.done.iter().map(|part| part.answer.tokens.len()).sum())
    }

    /// Its present part's index in the ledger.
    pub fn slot(&self) -> u32 {
        slot(self.index, self.done.len())
    }

    /// Indices of all its parts there.
    pub fn slots(&self) -> impl Iterator<Item = u32> {
        let index = self.index;
        (0..(self.done.len() + 1).max(self.done.len() + self.recorded.len())).map(move |part| slot(index, part))
    }

    /// Turns so far.
    pub fn turns(&self) -> usize {
        self.turns
    }

    /// Parts so far.
    pub fn parts(&self) -> usize {
        self.done.len() + 1
    }

    /// What was saved of it, until its environment has begun.
    pub fn saved(&self) -> Option<&Saved> {
        self.saved.as_ref()
    }

    pub fn stopped(&self) -> Option<StopReason> {
        self.stop
    }

    pub fn used(&self) -> &ToolUse {
        &self.used
    }

    /// The oldest version that sampled in it, as an answer.
    pub fn oldest(&self) -> Answer {
        let parts = self.done.iter().chain([&self.part]);
        let oldest: Option<Version> = parts.filter_map(|part| part.answer.versions.oldest()).min();
        let mut answer = Answer::new(self.index);
        oldest.into_iter().for_each(|version| answer.push(0, 0.0, version));
        answer
    }

    /// The environment opened the conversation.
    pub fn began(&mut self, opening: Vec<ChatMessage>, tools: Vec<ToolSpec>, tokenizer: &Tokenizer) -> Result<(), ChatError> {
        let (dialogue, tokens) = Dialogue::begin(opening, &tools, tokenizer)?;
        (self.dialogue, self.tools, self.part.context) = (Some(dialogue), tools, tokens.into());
        match self.saved.take() {
            Some(saved) => self.go_on(saved, tokenizer),
            None => Ok(()),
        }
    }

    /// Before a turn: a limit ends it, or the turn is there already, or the engine makes it. `room` is what a turn may take.
    pub fn ask(&mut self, agent: &Agent, room: usize, eos: &[u32], tokenizer: &Tokenizer) -> Result<Ahead, ChatError> {
        self.stop = self.limit(agent, room);
        if self.stop.is_some() {
            return Ok(Ahead::Over);
        }
        match self.recorded_turn(room, eos) {
            Some(cut) => self.turn_over(cut, agent, tokenizer),
            None => Ok(Ahead::Turn),
        }
    }

    fn limit(&self, agent: &Agent, room: usize) -> Option<StopReason> {
        let messages = self.dialogue.as_ref().map(Dialogue::messages).unwrap_or_default();
        let length = self.part.context.len() + self.part.answer.tokens.len() + room;
        let reached = [
            (StopReason::StopCondition, agent.stop.as_ref().is_some_and(|stop| stop(messages))),
            (StopReason::MaxTurns, self.turns >= agent.max_turns),
            (StopReason::MaxToolCalls, agent.max_tool_calls.is_some_and(|most| self.used.count() >= most)),
            (StopReason::MaxTime, agent.max_time.is_some_and(|most| self.began.elapsed() >= most)),
            (StopReason::MaxTokens, agent.max_tokens.is_some_and(|most| length > most)),
        ];
        reached.into_iter().find(|(_, reached)| *reached).map(|(reason, _)| reason)
    }

    /// The engine ended a turn: `answer` is the part as it is now.
    pub fn sampled(&mut self, answer: Answer, cut: bool, agent: &Agent, tokenizer: &Tokenizer) -> Result<Ahead, ChatError> {
        self.part.answer = answer;
        self.heard.clear();
        self.turn_over(cut, agent, tokenizer)
    }

    /// The engine sampled one more token of the turn that it makes.
    pub fn hear(&mut self, token: u32, tokenizer: &Tokenizer) -> Result<(), ChatError> {
        if !self.environment.as_ref().is_some_and(|environment| environment.listens()) {
            return Ok(());
        }
        self.heard.push(token);
        let so_far = text_of(&[self.newest(), &self.heard].concat(), tokenizer)?;
        if let Some(environment) = &mut self.environment {
            environment.hear(&so_far);
        }
        Ok(())
    }

    /// The engine forgot the turn that it makes, and begins it anew. A conversation before it, or somebody who heard of it, has to go, too.
    pub fn forgotten(&mut self) {
        self.expired = self.turns > 0 || !self.heard.is_empty();
        self.heard.clear();
    }

    fn newest(&self) -> &[u32] {
        let Answer { tokens, .. } = &self.part.answer;
        &tokens[tokens.len() - self.part.answer.turn()..]
    }

    fn turn_over(&mut self, cut: bool, agent: &Agent, tokenizer: &Tokenizer) -> Result<Ahead, ChatError> {
        self.turns += 1;
        let text = text_of(self.newest(), tokenizer)?;
        if let Some(dialogue) = &mut self.dialogue {
            dialogue.said(text.clone());
        }
        self.calls = extract_tool_calls(&text, &*agent.parser, &self.tools);
        self.used.called(&self.calls);
        let sampled = self.part.answer.turn();
        let action = Action {
            text,
            calls: self.calls.iter().flatten().cloned().collect(),
            malformed: self.calls.iter().filter(|called| called.is_err()).count(),
            read: self.part.context.len() + self.part.answer.tokens.len() - sampled,
            sampled,
        };
        if cut {
            self.stop = Some(StopReason::MaxTokens);
            return Ok(Ahead::Cut(action));
        }
        Ok(Ahead::Step(action))
    }

    /// The environment answered a turn.
    pub fn stepped(&mut self, step: Step, tokenizer: &Tokenizer) -> Result<Stepped, ChatError> {
        let ahead = |ahead| Ok(Stepped { ahead: Some(ahead), given: None });
        let given = |given| Ok(Stepped { ahead: None, given });
        let Step { results, messages, reward, done, anew } = step;
        self.rewards.push(reward);
        self.used.came(&results);
        let told = in_order(&self.calls, results);
        let answer: Vec<_> = told.iter().map(ToolResult::message).chain(messages).collect();
        if done || answer.is_empty() {
            self.stop = Some(if done { StopReason::EnvironmentDone } else { StopReason::Answered });
            return ahead(Ahead::Over);
        }
        let newest = self.newest().to_vec();
        let Some(dialogue) = &mut self.dialogue else { return ahead(Ahead::Over) };
        let next = if anew {
            self.tools = self.environment.as_ref().map_or_else(Vec::new, |environment| environment.tools());
            let (other, tokens) = Dialogue::begin(answer, &self.tools, tokenizer)?;
            *dialogue = other;
            Next::Rewritten(tokens)
        } else {
            dialogue.answered(&newest, answer, tokenizer)?
        };
        let (tokens, rewritten) = match next {
            Next::Extends(tokens) => (tokens, false),
            Next::Rewritten(tokens) => (tokens, true),
        };
        if rewritten {
            let fresh = Part { context: tokens.as_slice().into(), answer: Answer::new(self.index) };
            self.done.push(std::mem::replace(&mut self.part, fresh));
            self.recorded.pop_front();
        } else {
            self.part.answer.give(&tokens);
        }
        // A part that was begun anew has all that it reads in the ledger; the first has its prompt elsewhere.
        let at = if rewritten { 0 } else { self.part.answer.tokens.len() - tokens.len() };
        match self.known(&tokens, at, rewritten) {
            Known::New => given(Some((self.slot(), tokens))),
            Known::Same => given(None),
            Known::Other => ahead(Ahead::Diverged),
        }
    }

    /// What hooks are shown of the newest turn.
    pub fn show(&self, ordinal: u64, agent: &Agent) {
        let Some(look) = &agent.each_turn else { return };
        let observed = self.environment.as_ref().map_or(Value::Null, |environment| environment.observe());
        look(&super::Turn {
            ordinal,
            index: self.index,
            turn: self.turns,
            messages: self.dialogue.as_ref().map(Dialogue::messages).unwrap_or_default(),
            calls: &self.calls,
            reward: self.rewards.last().copied().unwrap_or(0.0),
            observed: &observed,
        });
    }

    /// The environment gave a grade.
    pub fn graded(&mut self, grade: Grade) {
        self.grade = Some(grade);
    }

    /// The environment failed too often.
    pub fn failed(&mut self, why: String) {
        self.take_over_record();
        (self.stop, self.failure) = (Some(StopReason::EnvironmentFailed), Some(why));
    }

    /// The engine gave up the turn that it made, of which the part has `answer`.
    pub fn refused(&mut self, answer: Answer, why: String) {
        self.part.answer = answer;
        (self.stop, self.failure) = (Some(StopReason::EngineFailed), Some(why));
    }

    /// The environment did not answer a turn, or the grading, in time: that is the rollout's verdict.
    pub fn overran(&mut self) {
        (self.stop, self.grade) = (Some(StopReason::StepTimeout), Some(Grade::default()));
    }

    /// Returns true once its environment opened the conversation.
    pub fn has_begun(&self) -> bool {
        self.dialogue.is_some()
    }

    /// All of it as a record, to be played again in another environment.
    pub fn to_record(&self) -> Vec<Answer> {
        let mut parts: Vec<Answer> = Vec::new();
        let mut present = self.part.clone();
        let mut later = self.recorded.iter().cloned();
        if let Some(recorded) = later.next() {
            // It is being played: the record has more of the present part than was played.
            present.answer = recorded;
        }
        for Part { context, answer } in self.done.iter().cloned().chain([present]) {
            let index = slot(self.index, parts.len());
            // What a later part reads at its beginning stands in its record.
            let mut whole = Answer { index, ..Answer::default() };
            if !parts.is_empty() {
                whole.give(&context);
            }
            whole.extend(&answer);
            parts.push(whole);
        }
        parts.extend(later);
        parts.retain(|part| !part.tokens.is_empty());
        parts
    }
}

/// What the model is told of its calls, in their order: the results of those that were made, and what is wrong with the others.
fn in_order(calls: &[Called], results: Vec<ToolResult>) -> Vec<ToolResult> {
    let mut results = results.into_iter();
    let mut told: Vec<ToolResult> = Vec::new();
    for called in calls {
        match called {
            Ok(_) => told.extend(results.next()),
            Err(malformed) => told.push(ToolResult {
                name: malformed.name.clone(),
                content: format!("error: {malformed}"),
                ..ToolResult::default()
            }),
        }
    }
    told.extend(results);
    told
}
