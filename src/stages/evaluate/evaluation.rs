//! One evaluation: prompts that an engine answers under one version of the weights, as fast as it has slots.
//!
//! It computes on the thread of whoever calls [`Evaluation::advance`], one token of every answer under way at a time. What fails (a prompt that
//! is too long, a reward that errs) fails for its own answers only, which say why. Random numbers are keyed by prompt and sample (law N2), so
//! that evaluations of different weights differ by their weights alone.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use super::answering::Answering;
use super::summary::Summary;
use crate::data::chat::ChatError;
use crate::data::{Group, Prompt, Sample, Tokenizer, TokenizerError, Version, is_reward};
use crate::engine::{EngineError, SamplingParams, TokenEngine};
use crate::flow::StageError;
use crate::observe::logs::{Failure, JudgedAnswer};
use crate::stages::generate::agent::Agent;
use crate::stages::generate::why_lost;

/// Scores the answers to one prompt; tells which of them it could not score.
pub type ExamJudge = Arc<dyn Fn(Group) -> Result<(Group, Vec<Failure>), Box<dyn std::error::Error + Send + Sync>> + Send + Sync>;

/// What is asked, and how.
#[derive(Clone)]
pub struct Exam {
    /// The prompts; their places here are their names.
    pub prompts: Vec<Prompt>,
    /// Answers sampled to each; 0 samples none.
    pub samples: u32,
    /// How they are sampled; where there is an environment, `max_new_tokens` is the longest turn.
    pub sampling: SamplingParams,
    /// The environment that they are answered in, if an answer is a rollout of several turns.
    pub agent: Option<Agent>,
    /// Whether each prompt is answered greedily, too.
    pub greedy: bool,
    /// An answer that earns at least this is right.
    pub success: f64,
    /// What it earns.
    pub judge: ExamJudge,
}

/// An evaluation that can't go on.
#[derive(Debug, thiserror::Error)]
pub enum EvaluationError {
    /// The engine.
    #[error(transparent)]
    Engine(#[from] EngineError),
    /// The tokenizer or the chat template.
    #[error(transparent)]
    Prompt(#[from] ChatError),
    /// The tokenizer.
    #[error(transparent)]
    Tokenizer(#[from] TokenizerError),
    /// The reward, which can't be asked at all.
    #[error("judging answers: {0}")]
    Judge(Box<dyn std::error::Error + Send + Sync>),
    /// An answer that other weights than those that are evaluated had a part in.
    #[error(
        "an answer to prompt {question} is of version {found}, and version {version} is evaluated: the engine changed its weights meanwhile"
    )]
    OtherWeights {
        /// The prompt's place.
        question: usize,
        /// The version of one of its tokens.
        found: Version,
        /// The version that is evaluated.
        version: Version,
    },
    /// The engine, the chat template or the tokenizer, in rollouts of several turns.
    #[error("{0}")]
    Rollouts(Box<dyn std::error::Error + Send + Sync>),
}

impl EvaluationError {
    pub(super) fn of_rollouts(error: StageError) -> Self {
        EvaluationError::Rollouts(error.into_cause().unwrap_or_else(|| "the engine is gone".into()))
    }
}

/// A prompt, and whether it is to be answered greedily.
type Question = (usize, bool);

/// One evaluation under way.
pub struct Evaluation {
    exam: Arc<Exam>,
    version: Version,
    waiting: VecDeque<Question>,
    answering: Answering,
    under_way: usize,
    answers: Vec<JudgedAnswer>,
}

impl Evaluation {
    /// Begins, or goes on with what was `answered` under the same weights: prompts whose answers are all there are not asked again. Give the
    /// engine weights first.
    pub fn begin(exam: &Arc<Exam>, tokenizer: &Arc<Tokenizer>, version: Version, answered: Vec<JudgedAnswer>) -> Self {
        let mut there: BTreeMap<Question, u32> = BTreeMap::new();
        answered.iter().for_each(|answer| *there.entry((answer.question, answer.greedy)).or_default() += 1);
        let whole = |question: &Question| there.get(question).copied() == Some(exam.answers_to(*question));
        let questions = (0..exam.prompts.len()).flat_map(|at| [(at, true), (at, false)]);
        let waiting = questions.filter(|question| exam.answers_to(*question) > 0 && !whole(question)).collect();
        let answers = answered.iter().filter(|answer| whole(&(answer.question, answer.greedy))).cloned().collect();
        let answering = Answering::new(exam, tokenizer);
        Evaluation { exam: exam.clone(), version, waiting, answering, under_way: 0, answers }
    }

    /// Asks as slots come free, computes one token of every answer, and judges those that are whole. Gives what was judged. Where all answers
    /// wait for their environments, so does this call, some milliseconds at most.
    pub fn advance<E: TokenEngine>(&mut self, engine: &mut E) -> Result<Vec<JudgedAnswer>, EvaluationError> {
        let mut judged = Vec::new();
        let mut room = self.answering.room(engine);
        while room > 0
            && let Some(question) = self.waiting.pop_front()
        {
            room = room.saturating_sub(self.exam.answers_to(question) as usize);
            judged.extend(self.ask(engine, question)?);
        }
        self.answering.advance(engine)?;
        for group in self.answering.take_groups() {
            self.under_way -= 1;
            judged.extend(self.judge(group)?);
        }
        self.answers.extend(judged.iter().cloned());
        Ok(judged)
    }

    /// Whether all is asked and judged.
    pub fn is_done(&self) -> bool {
        self.waiting.is_empty() && self.under_way == 0
    }

    /// All that was judged so far.
    pub fn answers(&self) -> &[JudgedAnswer] {
        &self.answers
    }

    /// What it comes to so far.
    pub fn summary(&self) -> Summary {
        Summary::of(&self.answers, self.exam.success)
    }

    /// Gives answers at once if the prompt can't be asked.
    fn ask<E: TokenEngine>(&mut self, engine: &mut E, question: Question) -> Result<Vec<JudgedAnswer>, EvaluationError> {
        let ((at, greedy), samples) = (question, self.exam.answers_to(question));
        let prompt = Prompt { ordinal: 2 * at as u64 + u64::from(greedy), ..self.exam.prompts[at].clone() };
        let sampling = &self.exam.sampling;
        let params = if greedy { SamplingParams { temperature: 0.0, ..sampling.clone() } } else { sampling.clone() };
        match self.answering.ask(engine, prompt, samples, params) {
            Ok(()) => {
                self.under_way += 1;
                Ok(Vec::new())
            }
            Err(EvaluationError::Engine(error @ EngineError::Prompt { .. })) => {
                let refused = |index| JudgedAnswer {
                    version: self.version,
                    question: at,
                    greedy,
                    index,
                    prompt: self.exam.prompts[at].text.clone(),
                    error: Some(error.to_string()),
                    ..JudgedAnswer::default()
                };
                Ok((0..samples).map(refused).collect())
            }
            Err(error) => Err(error),
        }
    }

    fn judge(&self, group: Group) -> Result<Vec<JudgedAnswer>, EvaluationError> {
        let (question, greedy) = ((group.id() / 2) as usize, group.id() % 2 == 1);
        let mut versions = group.samples.iter().flat_map(|of| [of.versions.oldest(), of.versions.newest()]).flatten();
        if let Some(found) = versions.find(|found| *found != self.version) {
            return Err(EvaluationError::OtherWeights { question, found, version: self.version });
        }
        let (group, failures) = (self.exam.judge)(group).map_err(EvaluationError::Judge)?;
        // A rollout of several parts is one answer, and ends with the last of them.
        let judged = group.samples.chunk_by(|one, next| one.index == next.index).filter_map(|parts| {
            let sample = parts.last()?;
            // What an engine or an environment lost is no wrong answer.
            let lost = parts.iter().find_map(why_lost).map(|why| format!("it was lost: {why}"));
            Some(JudgedAnswer {
                version: self.version,
                question,
                greedy,
                index: sample.index,
                prompt: sample.prompt.clone(),
                response: sample.response.clone(),
                reward: sample.reward.filter(|reward| lost.is_none() && is_reward(*reward)),
                status: sample.status,
                tokens: parts.iter().map(Sample::generated).sum(),
                error: lost.or_else(|| failures.iter().find(|failure| failure.sample == sample.index).map(Failure::to_string)),
            })
        });
        Ok(judged.collect())
    }
}

impl Exam {
    fn answers_to(&self, (_, greedy): Question) -> u32 {
        if greedy { u32::from(self.greedy) } else { self.samples }
    }
}
