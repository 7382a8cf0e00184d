//! One evaluation: prompts that an engine completes under one version of the weights.
//!
//! [`Evaluation::advance`] computes on the caller's thread, one token of every completion at a time.
//! A failure, such as a prompt that is too long or a reward that errs, affects its own completions
//! only and is reported with them. Random numbers are keyed by prompt and sample (law N2), so that
//! evaluations of different weights differ by their weights alone.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use super::eval_summary::summary;
use super::{Agent, RolloutContext, Rollouts, advance, why_lost};
use crate::data::{Group, Prompt, Sample, Tokenizer, Version, is_reward};
use crate::engine::{EngineError, SamplingParams, TokenEngine};
use crate::observe::StepMetrics;
use crate::observe::logs::{Failure, JudgedAnswer};

type BoxError = Box<dyn std::error::Error + Send + Sync>;

/// Scores the completions of one prompt, and returns the failures of those that it could not score.
type EvalJudge = Arc<dyn Fn(Group) -> Result<(Group, Vec<Failure>), BoxError> + Send + Sync>;

/// Prompts, sampling and judge of an evaluation.
#[derive(Clone)]
pub struct EvalSpec {
    /// Prompts; their indices identify them.
    pub prompts: Vec<Prompt>,
    /// Completions sampled for each prompt; 0 samples none.
    pub samples: u32,
    /// Sampling parameters; with an agent, `max_new_tokens` is the longest turn.
    pub sampling: SamplingParams,
    /// Environment of multi-turn rollouts; none for single-turn ones.
    pub agent: Option<Agent>,
    /// If true, each prompt also gets a greedy completion.
    pub greedy: bool,
    /// Smallest reward of a correct completion.
    pub success: f64,
    /// Judge of the completions.
    pub judge: EvalJudge,
}

/// Error that ends an evaluation.
#[derive(Debug, thiserror::Error)]
pub enum EvaluationError {
    #[error(transparent)]
    Engine(#[from] EngineError),
    #[error("judging answers: {0}")]
    Judge(BoxError),
    #[error(
        "an answer to prompt {question} is of version {found}, and version {version} is evaluated: the engine changed its weights meanwhile"
    )]
    OtherWeights { question: usize, found: Version, version: Version },
}

/// Index of a prompt, and whether its completion is greedy.
type Question = (usize, bool);

/// One evaluation in progress on an engine of type `E`.
pub struct Evaluation<E: TokenEngine> {
    spec: Arc<EvalSpec>,
    version: Version,
    waiting: VecDeque<Question>,
    rollouts: Box<dyn Rollouts<E>>,
    in_flight: usize,
    answers: Vec<JudgedAnswer>,
}

impl<E: TokenEngine> Evaluation<E> {
    /// Begins an evaluation of the `engine`'s weights, or resumes one from its judged answers. Prompts
    /// whose completions are not all judged are sampled again.
    pub fn begin(
        spec: &Arc<EvalSpec>,
        tokenizer: &Arc<Tokenizer>,
        engine: &E,
        version: Version,
        judged: Vec<JudgedAnswer>,
    ) -> Self {
        let mut counts: BTreeMap<Question, u32> = BTreeMap::new();
        judged.iter().for_each(|answer| *counts.entry((answer.question, answer.greedy)).or_default() += 1);
        let whole = |question: &Question| counts.get(question).copied() == Some(spec.samples_of(*question));
        let questions = (0..spec.prompts.len()).flat_map(|at| [(at, true), (at, false)]);
        let waiting = questions.filter(|question| spec.samples_of(*question) > 0 && !whole(question)).collect();
        let answers = judged.iter().filter(|answer| whole(&(answer.question, answer.greedy))).cloned().collect();
        let rollouts = RolloutContext::detached(tokenizer).rollouts(spec.agent.as_ref(), engine);
        Evaluation { spec: spec.clone(), version, waiting, rollouts, in_flight: 0, answers }
    }

    /// Submits prompts to free slots, computes one token of every completion, and returns the answers
    /// that were judged. If all rollouts wait for environments, it waits a few milliseconds.
    pub fn advance(&mut self, engine: &mut E) -> Result<Vec<JudgedAnswer>, EvaluationError> {
        let mut judged = Vec::new();
        let mut room = self.rollouts.room(engine);
        while room > 0
            && let Some(question) = self.waiting.pop_front()
        {
            room = room.saturating_sub(self.spec.samples_of(question) as usize);
            judged.extend(self.submit(engine, question)?);
        }
        advance(&mut *self.rollouts, engine)?;
        // The order of groups must not depend on how long environments take.
        let groups = if self.rollouts.awaits_environments() { Vec::new() } else { self.rollouts.take_groups() };
        for group in groups {
            self.in_flight -= 1;
            judged.extend(self.judge(group)?);
        }
        self.answers.extend(judged.iter().cloned());
        Ok(judged)
    }

    /// Returns true if all completions are judged.
    pub fn is_done(&self) -> bool {
        self.waiting.is_empty() && self.in_flight == 0
    }

    /// Answers judged so far.
    pub fn answers(&self) -> &[JudgedAnswer] {
        &self.answers
    }

    /// Metrics of the answers judged so far, by the catalogue's names. A metric without data is
    /// missing.
    pub fn summary(&self) -> StepMetrics {
        summary(&self.answers, self.spec.success)
    }

    /// Submits a prompt. Returns answers with the error if the engine rejects it.
    fn submit(&mut self, engine: &mut E, question: Question) -> Result<Vec<JudgedAnswer>, EvaluationError> {
        let ((at, greedy), samples) = (question, self.spec.samples_of(question));
        let prompt = Prompt { ordinal: 2 * at as u64 + u64::from(greedy), ..self.spec.prompts[at].clone() };
        let sampling = &self.spec.sampling;
        let params = if greedy { SamplingParams { temperature: 0.0, ..sampling.clone() } } else { sampling.clone() };
        match self.rollouts.admit(engine, prompt, samples, params) {
            Ok(()) => {
                self.in_flight += 1;
                Ok(Vec::new())
            }
            Err(error @ EngineError::Prompt { .. }) => {
                let rejected = |index| JudgedAnswer { error: Some(error.to_string()), ..self.answer(question, index) };
                Ok((0..samples).map(rejected).collect())
            }
            Err(error) => Err(error.into()),
        }
    }

    /// Answer without its judgement.
    fn answer(&self, (question, greedy): Question, index: u32) -> JudgedAnswer {
        let prompt = self.spec.prompts[question].text.clone();
        JudgedAnswer { version: self.version, question, greedy, index, prompt, ..JudgedAnswer::default() }
    }

    fn judge(&self, group: Group) -> Result<Vec<JudgedAnswer>, EvaluationError> {
        let (question, greedy) = ((group.id() / 2) as usize, group.id() % 2 == 1);
        let mut versions = group.samples.iter().flat_map(|of| [of.versions.oldest(), of.versions.newest()]).flatten();
        if let Some(found) = versions.find(|found| *found != self.version) {
            return Err(EvaluationError::OtherWeights { question, found, version: self.version });
        }
        let (group, failures) = (self.spec.judge)(group).map_err(EvaluationError::Judge)?;
        // A rollout of several parts is one answer and ends with its last part.
        let judged = group.samples.chunk_by(|one, next| one.index == next.index).filter_map(|parts| {
            let sample = parts.last()?;
            // A lost rollout is not a wrong answer.
            let lost = parts.iter().find_map(why_lost).map(|why| format!("it was lost: {why}"));
            Some(JudgedAnswer {
                prompt: sample.prompt.clone(),
                response: sample.response.clone(),
                reward: sample.reward.filter(|reward| lost.is_none() && is_reward(*reward)),
                status: sample.status,
                tokens: parts.iter().map(Sample::generated).sum(),
                error: lost.or_else(|| failures.iter().find(|failure| failure.sample == sample.index).map(Failure::to_string)),
                ..self.answer((question, greedy), sample.index)
            })
        });
        Ok(judged.collect())
    }
}

impl EvalSpec {
    fn samples_of(&self, (_, greedy): Question) -> u32 {
        if greedy { u32::from(self.greedy) } else { self.samples }
    }
}
