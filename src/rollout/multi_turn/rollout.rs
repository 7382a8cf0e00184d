//! One multi-turn rollout: the tokens read and sampled, and the rewards of its turns so far.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Instant;

use serde_json::{Value, json};

use super::dialogue::{Dialogue, text_of};
use super::replay::SavedRollout;
use crate::data::{
    Answer, ChatMessage, DataError, Metadata, Prompt, Sample, Status, Tokenizer, Version, number, scoring_temperature,
};
use crate::engine::TextStream;
use crate::env::{Action, Environment, Grade, Step, ToolCall, ToolResult, ToolSpec, ToolUse, extract_tool_calls};
use crate::rollout::agent::{Agent, StopReason, Turn};
use crate::rollout::{ENVIRONMENT_FAILURE, REFUSED, RolloutContext};

/// Factor between the parts of a rollout in the ledger's indices.
const PART: u32 = 1 << 16;

/// Ledger index of a part of a rollout.
pub fn ledger_index(index: u32, part: usize) -> u32 {
    index + PART * part as u32
}

/// Rollout and part of a ledger index.
pub fn split_ledger_index(ledger_index: u32) -> (u32, usize) {
    (ledger_index % PART, (ledger_index / PART) as usize)
}

/// Context and completion of a contiguous piece of a rollout, which becomes one sample.
#[derive(Clone, Debug)]
pub struct Part {
    pub context: Arc<[u32]>,
    pub answer: Answer,
}

pub struct Rollout {
    pub index: u32,
    pub environment: Option<Box<dyn Environment>>,
    pub tools: Vec<ToolSpec>,
    pub dialogue: Option<Dialogue>,
    pub done: Vec<Part>,
    pub part: Part,
    /// Completions of an interrupted run, by part. They are replayed without the engine.
    pub recorded: VecDeque<Answer>,
    /// State of the interrupted rollout as of its newest given token.
    pub saved: Option<SavedRollout>,
    /// Tokens and text of the present turn that were streamed to the environment.
    streamed: (Vec<u32>, TextStream),
    /// Calls of the turn that the environment works on.
    calls: Vec<Result<ToolCall, ToolResult>>,
    pub turns: usize,
    pub tool_calls: ToolUse,
    pub rewards: Vec<f64>,
    began: Instant,
    pub stop: Option<StopReason>,
    pub grade: Option<Grade>,
    pub failure: Option<String>,
    /// If true, the turn that the engine computes is not used: the rollout restarts after it.
    pub expired: bool,
}

/// Result of an environment's step: the next step (none if a turn comes next, unless a limit is
/// reached), and the ledger index and tokens to be recorded as given.
pub type Stepped = (Option<NextStep>, Option<(u32, Vec<u32>)>);

/// Next step of a rollout.
pub enum NextStep {
    /// The engine computes a turn.
    Turn,
    /// The environment responds to a turn.
    Environment(Action),
    /// The environment grades the rollout, after a turn that was cut off by its length if there is
    /// one.
    Grade { cut_off: Option<Action> },
    /// The environment contradicts the record: the rollout restarts without it.
    Restart,
}

impl Rollout {
    /// Rollout before its environment's reset.
    pub fn new(index: u32, recorded: Vec<Answer>, saved: Option<SavedRollout>) -> Self {
        Rollout {
            index,
            environment: None,
            tools: Vec::new(),
            dialogue: None,
            done: Vec::new(),
            part: Part { context: [].into(), answer: Answer::new(index) },
            recorded: recorded.into(),
            saved,
            streamed: Default::default(),
            calls: Vec::new(),
            turns: 0,
            tool_calls: ToolUse::default(),
            rewards: Vec::new(),
            began: Instant::now(),
            stop: None,
            grade: None,
            failure: None,
            expired: false,
        }
    }

    /// The engine's request: context, completion so far, and number of tokens in earlier parts.
    pub fn request(&self) -> (&Arc<[u32]>, &Answer, usize) {
        (&self.part.context, &self.part.answer, self.done.iter().map(|part| part.answer.tokens.len()).sum())
    }

    pub fn ledger_index(&self) -> u32 {
        ledger_index(self.index, self.done.len())
    }

    /// Ledger indices of all parts, recorded ones included.
    pub fn ledger_indices(&self) -> impl Iterator<Item = u32> + use<> {
        let index = self.index;
        (0..self.done.len() + self.recorded.len().max(1)).map(move |part| ledger_index(index, part))
    }

    /// Returns true once the environment has opened the conversation.
    pub fn has_begun(&self) -> bool {
        self.dialogue.is_some()
    }

    /// Completion of one token, sampled by the oldest version of this rollout; empty if nothing was
    /// sampled.
    pub fn oldest(&self) -> Answer {
        let parts = self.done.iter().chain([&self.part]);
        let oldest: Option<Version> = parts.filter_map(|part| part.answer.versions.oldest()).min();
        let mut answer = Answer::new(self.index);
        oldest.into_iter().for_each(|version| answer.push(0, 0.0, version));
        answer
    }

    /// Opens the conversation with the environment's messages.
    pub fn begin(&mut self, opening: Vec<ChatMessage>, tools: Vec<ToolSpec>, tokenizer: &Tokenizer) -> Result<(), DataError> {
        // What a rollout waited for before its environment opened takes none of its time.
        self.began = Instant::now();
        let (dialogue, tokens) = Dialogue::begin(opening, &tools, tokenizer)?;
        (self.dialogue, self.tools, self.part.context) = (Some(dialogue), tools, tokens.into());
        match self.saved.take() {
            Some(saved) => self.restore(saved, tokenizer),
            None => Ok(()),
        }
    }

    /// Checks the limits and takes the next turn from the record, or leaves it to the engine. `room`
    /// is the longest turn in tokens.
    pub fn next_turn(&mut self, agent: &Agent, room: usize, tokenizer: &Tokenizer) -> Result<NextStep, DataError> {
        self.stop = self.limit(agent, room);
        if self.stop.is_some() {
            return Ok(NextStep::Grade { cut_off: None });
        }
        match self.replay_turn(room, tokenizer.eos_token_ids()) {
            Some(cut_off) => self.end_turn(cut_off, agent, tokenizer),
            None => Ok(NextStep::Turn),
        }
    }

    fn limit(&self, agent: &Agent, room: usize) -> Option<StopReason> {
        let (limits, messages) = (&agent.limits, self.dialogue.as_ref().map(Dialogue::messages).unwrap_or_default());
        let length = self.part.context.len() + self.part.answer.tokens.len() + room;
        let reached = [
            (StopReason::StopCondition, agent.stop.as_ref().is_some_and(|stop| stop(messages))),
            (StopReason::MaxTurns, self.turns >= limits.max_turns.max(1)),
            (StopReason::MaxToolCalls, limits.max_tool_calls.is_some_and(|most| self.tool_calls.count() >= most as u64)),
            (StopReason::MaxTime, limits.max_time.is_some_and(|most| self.began.elapsed().as_secs_f64() >= most)),
            (StopReason::MaxTokens, limits.max_tokens.is_some_and(|most| length > most)),
        ];
        reached.into_iter().find(|(_, reached)| *reached).map(|(reason, _)| reason)
    }

    /// Adds a turn that the engine has ended. `answer` is the whole present part.
    pub fn add_turn(
        &mut self,
        answer: Answer,
        cut_off: bool,
        agent: &Agent,
        tokenizer: &Tokenizer,
    ) -> Result<NextStep, DataError> {
        self.part.answer = answer;
        self.streamed = Default::default();
        self.end_turn(cut_off, agent, tokenizer)
    }

    /// Streams one token of the present turn to an environment that listens.
    pub fn stream(&mut self, token: u32, tokenizer: &Tokenizer) -> Result<(), DataError> {
        if self.expired || !self.environment.as_ref().is_some_and(|environment| environment.listens()) {
            return Ok(());
        }
        if self.streamed.0.is_empty() {
            self.streamed.0.extend_from_slice(newest(&self.part.answer));
        }
        let (tokens, stream) = &mut self.streamed;
        tokens.push(token);
        // A special token at the end of a turn is no text of it.
        let grew = !tokenizer.is_special(token) && stream.read(tokens, |tokens| tokenizer.decode_all(tokens))?;
        if let Some(environment) = self.environment.as_mut().filter(|_| grew) {
            environment.hear(&stream.text);
        }
        Ok(())
    }

    /// The engine discarded the present turn and restarts it. Earlier turns are as old, and a streamed
    /// turn cannot be taken back: then the whole rollout has to restart.
    pub fn turn_discarded(&mut self) {
        self.expired |= self.turns > 0 || !self.streamed.0.is_empty();
        self.streamed = Default::default();
    }

    fn end_turn(&mut self, cut_off: bool, agent: &Agent, tokenizer: &Tokenizer) -> Result<NextStep, DataError> {
        self.turns += 1;
        let text = text_of(newest(&self.part.answer), tokenizer)?;
        if let Some(dialogue) = &mut self.dialogue {
            dialogue.push_turn(text.clone());
        }
        self.calls = extract_tool_calls(&text, &*agent.parser, &self.tools);
        self.tool_calls.called(&self.calls);
        let sampled = self.part.answer.turn();
        let action = Action {
            text,
            calls: self.calls.iter().flatten().cloned().collect(),
            malformed: self.calls.iter().filter(|called| called.is_err()).count(),
            read: self.part.context.len() + self.part.answer.tokens.len() - sampled,
            sampled,
        };
        if cut_off {
            self.stop = Some(StopReason::MaxTokens);
            return Ok(NextStep::Grade { cut_off: Some(action) });
        }
        Ok(NextStep::Environment(action))
    }

    /// Adds the environment's response to the newest turn.
    pub fn add_step(&mut self, step: Step, tokenizer: &Tokenizer) -> Result<Stepped, DataError> {
        let next = |next| Ok((Some(next), None));
        let Step { results, messages, reward, done, restarts } = step;
        self.rewards.push(reward);
        self.tool_calls.came(&results);
        let results = in_order(&self.calls, results);
        let response: Vec<_> = results.iter().map(ToolResult::message).chain(messages).collect();
        if done || response.is_empty() {
            if self.is_replaying() {
                return next(NextStep::Restart);
            }
            self.stop = Some(if done { StopReason::EnvironmentDone } else { StopReason::Answered });
            return next(NextStep::Grade { cut_off: None });
        }
        let Some(dialogue) = &mut self.dialogue else { return next(NextStep::Grade { cut_off: None }) };
        let (tokens, rewritten) = if restarts {
            self.tools = self.environment.as_ref().map_or_else(Vec::new, |environment| environment.tools());
            let (other, tokens) = Dialogue::begin(response, &self.tools, tokenizer)?;
            *dialogue = other;
            (tokens, true)
        } else {
            dialogue.respond(newest(&self.part.answer), response, tokenizer)?
        };
        if rewritten {
            let fresh = Part { context: tokens.as_slice().into(), answer: Answer::new(self.index) };
            let replayed = std::mem::replace(&mut self.part, fresh);
            let more = self.recorded.pop_front().is_some_and(|recorded| recorded.tokens.len() > replayed.answer.tokens.len());
            self.done.push(replayed);
            if more {
                return next(NextStep::Restart);
            }
        } else {
            self.part.answer.give(&tokens);
        }
        // The ledger holds the whole context of a rewritten part, but not that of the first part.
        let at = if rewritten { 0 } else { self.part.answer.tokens.len() - tokens.len() };
        match self.matches_record(&tokens, at, rewritten) {
            None => Ok((None, Some((self.ledger_index(), tokens)))),
            Some(true) => Ok((None, None)),
            Some(false) => next(NextStep::Restart),
        }
    }

    /// Calls the agent's hook with the newest turn.
    pub fn call_hook(&self, ordinal: u64, agent: &Agent) {
        let Some(hook) = &agent.each_turn else { return };
        let observed = self.environment.as_ref().map_or(Value::Null, |environment| environment.observe());
        hook(&Turn {
            ordinal,
            index: self.index,
            turn: self.turns,
            messages: self.dialogue.as_ref().map(Dialogue::messages).unwrap_or_default(),
            calls: &self.calls,
            reward: self.rewards.last().copied().unwrap_or(0.0),
            observed: &observed,
        });
    }

    /// Ends the rollout because its environment failed.
    pub fn fail(&mut self, reason: String) {
        (self.stop, self.failure) = (Some(StopReason::EnvironmentFailed), Some(reason));
    }

    /// Ends the rollout because the engine refused a turn. `answer` is the whole present part.
    pub fn refuse(&mut self, answer: Answer, reason: String) {
        self.part.answer = answer;
        (self.stop, self.failure) = (Some(StopReason::EngineFailed), Some(reason));
    }

    /// Ends the rollout with a grade of 0 because a step or the grading exceeded its time limit.
    pub fn time_out(&mut self) {
        (self.stop, self.grade) = (Some(StopReason::StepTimeout), Some(Grade::default()));
    }

    /// Samples in the order of the parts. Greedy samples (`temperature` 0) carry no temperature.
    pub fn into_samples(self, prompt: &Prompt, temperature: f32, context: &RolloutContext) -> Result<Vec<Sample>, DataError> {
        let tokenizer = &context.tokenizer;
        let complete = self.stop.is_some_and(StopReason::is_complete);
        let lost = self.failure.is_some();
        let metadata = self.metadata();
        let parts = self.done.into_iter().chain([self.part]);
        let sample = |(at, part): (usize, Part)| {
            // The context is empty if the environment never opened the conversation. Then the sample is lost,
            // and its prompt may be one that the chat template rejects.
            let tokens =
                if part.context.is_empty() { tokenizer.encode_prompt(prompt).unwrap_or_default().into() } else { part.context };
            let mut sample = Sample::begin(prompt, self.index, &tokens);
            sample.part = at as u32;
            sample.response = tokenizer.decode(&part.answer.tokens)?;
            sample.status = match complete {
                _ if lost => Status::Aborted,
                true => Status::Completed,
                false => Status::Truncated,
            };
            sample.temperature = Some(scoring_temperature(temperature));
            sample.answered(&part.answer.tokens, &part.answer.log_probs, &part.answer.versions);
            sample.routes = part.answer.routes;
            sample.metadata.extend(metadata.clone());
            if context.mask_older {
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
        set("tool_calls", self.tool_calls.to_json());
        set("turn_rewards", self.rewards.iter().map(|reward| number::to_json(*reward)).collect());
        if let Some(dialogue) = &self.dialogue {
            set("conversation", json!(dialogue.messages()));
        }
        if let Some(failure) = &self.failure {
            let key = if self.stop == Some(StopReason::EngineFailed) { REFUSED } else { ENVIRONMENT_FAILURE };
            set(key, failure.as_str().into());
        }
        if let Some(Grade { reward, correct, metadata: more }) = &self.grade {
            set("environment_reward", number::to_json(reward + self.rewards.iter().sum::<f64>()));
            set("grade", number::to_json(*reward));
            if let Some(correct) = correct {
                set("correct", (*correct).into());
            }
            metadata.extend(more.clone());
        }
        metadata
    }

    /// The rollout as a record that another environment can replay.
    pub fn to_record(&self) -> Vec<Answer> {
        let mut parts: Vec<Answer> = Vec::new();
        let mut present = self.part.clone();
        let mut later = self.recorded.iter().cloned();
        if let Some(recorded) = later.next() {
            // During a replay the record holds more of the present part.
            present.answer = recorded;
        }
        for Part { context, answer } in self.done.iter().cloned().chain([present]) {
            let index = ledger_index(self.index, parts.len());
            // The record of a later part begins with its context.
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

/// Tokens of the newest turn of a part.
fn newest(answer: &Answer) -> &[u32] {
    &answer.tokens[answer.tokens.len() - answer.turn()..]
}

/// Results in the order of the calls, with an error for each malformed call.
fn in_order(calls: &[Result<ToolCall, ToolResult>], results: Vec<ToolResult>) -> Vec<ToolResult> {
    let mut results = results.into_iter();
    let mut ordered: Vec<ToolResult> = Vec::new();
    for called in calls {
        match called {
            Ok(_) => ordered.extend(results.next()),
            Err(failed) => ordered.push(failed.clone()),
        }
    }
    ordered.extend(results);
    ordered
}
