//! One rollout: what was read, sampled and earned so far. It waits for its environment or for the engine, and knows what it asks of either.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::dialogue::{Dialogue, Next, text_of};
use super::{Agent, StopReason};
use crate::data::chat::ChatError;
use crate::data::{Answer, ChatMessage, Metadata, Prompt, Sample, Status, Tokenizer, Version};
use crate::env::{Action, Called, Environment, Grade, Step, ToolResult, ToolSpec, ToolUse, extract_tool_calls};

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

/// A rollout between two turns, besides its tokens: what an environment that can be restored spares from being played again.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Saved {
    pub environment: Value,
    messages: Vec<ChatMessage>,
    turns: usize,
    used: ToolUse,
    rewards: Vec<f64>,
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

    /// From where it was saved, which is where its newest turn begins.
    fn go_on(&mut self, saved: Saved, tokenizer: &Tokenizer) -> Result<(), ChatError> {
        for (at, answer) in std::mem::take(&mut self.recorded).into_iter().enumerate() {
            // A part that was begun anew has what it reads at its beginning.
            let read = if at == 0 { 0 } else { answer.versions.per_token().take_while(Option::is_none).count() };
            let context = if at == 0 { self.part.context.clone() } else { answer.tokens[..read].into() };
            self.done.push(Part { context, answer: piece(&answer, read..answer.tokens.len()) });
        }
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

    /// What is to be kept of it now, if its environment can be restored.
    pub fn save(&self) -> Option<Value> {
        let environment = self.environment.as_ref()?.save()?;
        let messages = self.dialogue.as_ref()?.messages().to_vec();
        let saved = Saved { environment, messages, turns: self.turns, used: self.used.clone(), rewards: self.rewards.clone() };
        serde_json::to_value(saved).ok()
    }

    /// Before a turn: a limit ends it, or the turn is there already, or the engine makes it. `room` is what a turn may take.
    pub fn ask(&mut self, agent: &Agent, room: usize, eos: &[u32], tokenizer: &Tokenizer) -> Result<Ahead, ChatError> {
        self.stop = self.limit(agent, room);
        if self.stop.is_some() {
            return Ok(Ahead::Over);
        }
        let at = self.part.answer.tokens.len();
        let Some(recorded) = self.recorded.front().filter(|recorded| recorded.tokens.len() > at) else {
            self.recorded.clear();
            return Ok(Ahead::Turn);
        };
        let sampled = recorded.versions.per_token().skip(at).take_while(Option::is_some).count();
        let versions: Vec<Version> = recorded.versions.per_token().skip(at).take(sampled).flatten().collect();
        for (offset, version) in versions.into_iter().enumerate() {
            self.part.answer.push(recorded.tokens[at + offset], recorded.log_probs[at + offset], version);
        }
        let last = at + sampled == recorded.tokens.len();
        if last && self.recorded.len() == 1 && !recorded.has_ended() {
            self.recorded.clear();
            return Ok(Ahead::Turn);
        }
        let by_itself = recorded.tokens[..at + sampled].last().is_some_and(|token| eos.contains(token));
        let cut = if last { recorded.status == Status::Truncated } else { !by_itself && sampled >= room };
        self.turn_over(cut, agent, tokenizer)
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
        self.turn_over(cut, agent, tokenizer)
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
        if cut {
            self.stop = Some(StopReason::MaxTokens);
            return Ok(Ahead::Over);
        }
        let calls = self.calls.iter().flatten().cloned().collect();
        Ok(Ahead::Step(Action { text, calls, malformed: self.calls.iter().filter(|called| called.is_err()).count() }))
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
        let parts = self.recorded.len();
        let Some(recorded) = self.recorded.front_mut() else { return given(Some((self.slot(), tokens))) };
        let known = recorded.tokens.get(at..at + tokens.len());
        if recorded.tokens.len() == at && parts == 1 {
            self.recorded.clear();
            return given(Some((self.slot(), tokens)));
        }
        if known != Some(&tokens[..]) {
            return ahead(Ahead::Diverged);
        }
        if rewritten {
            *recorded = piece(recorded, tokens.len()..recorded.tokens.len());
        }
        given(None)
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

    /// The environment failed.
    pub fn failed(&mut self, why: String) {
        (self.stop, self.failure) = (Some(StopReason::EnvironmentFailed), Some(why));
    }

    /// Its samples, one a part, with all that is known of it in their metadata.
    pub fn samples(
        self,
        prompt: &Prompt,
        temperature: f32,
        mask_older: bool,
        tokenizer: &Tokenizer,
    ) -> Result<Vec<Sample>, ChatError> {
        let complete = self.stop.is_some_and(StopReason::is_complete);
        let metadata = self.metadata();
        let parts = self.done.into_iter().chain([self.part]);
        let sample = |(at, part): (usize, Part)| {
            // One whose environment could not even begin has its prompt all the same.
            let context = if part.context.is_empty() { tokenizer.encode_prompt(prompt)?.into() } else { part.context };
            let mut sample = Sample::begin(prompt, self.index, &context);
            sample.part = at as u32;
            sample.response = tokenizer.decode(&part.answer.tokens)?;
            sample.status = if complete { Status::Completed } else { Status::Truncated };
            sample.temperature = Some(temperature).filter(|temperature| *temperature > 0.0);
            sample.answered(&part.answer.tokens, &part.answer.log_probs, &part.answer.versions);
            sample.metadata.extend(metadata.clone());
            if mask_older {
                sample.mask_older();
            }
            Ok(sample)
        };
        parts.enumerate().map(sample).collect()
    }

    fn metadata(&self) -> Metadata {
        let mut metadata = Metadata::new();
        let mut set = |key: &str, value: Value| drop(metadata.insert(key.to_owned(), value));
        set("turns", self.turns.into());
        set("stop_reason", self.stop.map(StopReason::label).into());
        set("tool_calls", self.used.to_json());
        set("turn_rewards", json!(self.rewards));
        if let Some(dialogue) = &self.dialogue {
            set("conversation", json!(dialogue.messages()));
        }
        if let Some(failure) = &self.failure {
            set("environment_failure", failure.as_str().into());
        }
        if let Some(Grade { reward, correct, metadata: more }) = &self.grade {
            set("environment_reward", json!(reward + self.rewards.iter().sum::<f64>()));
            set("grade", json!(reward));
            if let Some(correct) = correct {
                set("correct", (*correct).into());
            }
            metadata.extend(more.clone());
        }
        metadata
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
