//! One evaluation: prompts that an engine answers under one version of the weights, as fast as it has slots.
//!
//! It computes on the thread of whoever calls [`Evaluation::advance`], one token of every answer under way at a time. What fails (a prompt that
//! is too long, a reward that errs) fails for its own answers only, which say why. Random numbers are keyed by prompt and sample (law N2), so
//! that evaluations of different weights differ by their weights alone.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use super::summary::Summary;
use crate::data::chat::ChatError;
use crate::data::{Group, Prompt, Tokenizer, TokenizerError, Version};
use crate::engine::{EngineError, Request, SamplingParams, TokenEngine};
use crate::observe::logs::{Failure, JudgedAnswer};
use crate::stages::generate::assembly::Assembly;

/// Scores the answers to one prompt; tells which of them it could not score.
pub type ExamJudge = Arc<dyn Fn(Group) -> Result<(Group, Vec<Failure>), Box<dyn std::error::Error + Send + Sync>> + Send + Sync>;

/// What is asked, and how.
#[derive(Clone)]
pub struct Exam {
    /// The prompts; their places here are their names.
    pub prompts: Vec<Prompt>,
    /// Answers sampled to each; 0 samples none.
    pub samples: u32,
    /// How they are sampled.
    pub sampling: SamplingParams,
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
}

/// A prompt, and whether it is to be answered greedily.
type Question = (usize, bool);

/// One evaluation under way.
pub struct Evaluation {
    exam: Arc<Exam>,
    version: Version,
    waiting: VecDeque<Question>,
    open: Assembly,
    under_way: usize,
    answers: Vec<JudgedAnswer>,
}

impl Evaluation {
    /// Begins, or goes on with what was `answered` under the same weights: prompts whose answers are all there are not asked again. Give the
    /// engine weights first.
    pub fn begin(exam: &Arc<Exam>, version: Version, answered: Vec<JudgedAnswer>) -> Self {
        let mut there: BTreeMap<Question, u32> = BTreeMap::new();
        answered.iter().for_each(|answer| *there.entry((answer.question, answer.greedy)).or_default() += 1);
        let whole = |question: &Question| there.get(question).copied() == Some(exam.answers_to(*question));
        let questions = (0..exam.prompts.len()).flat_map(|at| [(at, true), (at, false)]);
        let waiting = questions.filter(|question| exam.answers_to(*question) > 0 && !whole(question)).collect();
        let answers = answered.iter().filter(|answer| whole(&(answer.question, answer.greedy))).cloned().collect();
        Evaluation { exam: exam.clone(), version, waiting, open: Assembly::new(false), under_way: 0, answers }
    }

    /// Asks as slots come free, computes one token of every answer, and judges those that are whole. Gives what was judged.
    pub fn advance<E: TokenEngine>(
        &mut self,
        engine: &mut E,
        tokenizer: &Tokenizer,
    ) -> Result<Vec<JudgedAnswer>, EvaluationError> {
        let mut judged = Vec::new();
        while (engine.free_slots() > 0 || engine.is_idle())
            && let Some(question) = self.waiting.pop_front()
        {
            judged.extend(self.ask(engine, tokenizer, question)?);
        }
        for finished in engine.step()? {
            if let Some(group) = self.open.add(finished, tokenizer)? {
                self.under_way -= 1;
                judged.extend(self.judge(group)?);
            }
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
    fn ask<E: TokenEngine>(
        &mut self,
        engine: &mut E,
        tokenizer: &Tokenizer,
        question: Question,
    ) -> Result<Vec<JudgedAnswer>, EvaluationError> {
        let ((at, greedy), samples) = (question, self.exam.answers_to(question));
        let prompt = Prompt { ordinal: 2 * at as u64 + u64::from(greedy), ..self.exam.prompts[at].clone() };
        let sampling = &self.exam.sampling;
        let params = if greedy { SamplingParams { temperature: 0.0, ..sampling.clone() } } else { sampling.clone() };
        let (ordinal, temperature) = (prompt.ordinal, params.temperature);
        let tokens: Arc<[u32]> = tokenizer.encode_prompt(&prompt)?.into();
        let request = Request {
            ordinal,
            tokens: tokens.clone(),
            first: 0,
            offset: 0,
            samples,
            params: Arc::new(params),
            answers: Vec::new(),
        };
        match engine.submit(request) {
            Ok(()) => {
                self.under_way += 1;
                self.open.open(prompt, tokens, samples, temperature);
                Ok(Vec::new())
            }
            Err(error @ EngineError::Prompt { .. }) => {
                let refused = |index| JudgedAnswer {
                    version: self.version,
                    question: at,
                    greedy,
                    index,
                    prompt: prompt.text.clone(),
                    error: Some(error.to_string()),
                    ..JudgedAnswer::default()
                };
                Ok((0..samples).map(refused).collect())
            }
            Err(error) => Err(error.into()),
        }
    }

    fn judge(&self, group: Group) -> Result<Vec<JudgedAnswer>, EvaluationError> {
        let (question, greedy) = ((group.id() / 2) as usize, group.id() % 2 == 1);
        let (group, failures) = (self.exam.judge)(group).map_err(EvaluationError::Judge)?;
        let judged = group.samples.iter().map(|sample| JudgedAnswer {
            version: self.version,
            question,
            greedy,
            index: sample.index,
            prompt: sample.prompt.clone(),
            response: sample.response.clone(),
            reward: sample.reward.filter(|reward| reward.is_finite()),
            status: sample.status,
            tokens: sample.generated(),
            error: failures.iter().find(|failure| failure.sample == sample.index).map(Failure::to_string),
        });
        Ok(judged.collect())
    }
}

impl Exam {
    fn answers_to(&self, (_, greedy): Question) -> u32 {
        if greedy { u32::from(self.greedy) } else { self.samples }
    }
}
