//! One evaluation: prompts that an engine completes under one version of the weights.
//!
//! [`Evaluation::advance`] computes on the caller's thread, one token of every completion at a time.
//! A failure, such as a prompt that is too long or a reward that errs, affects its own completions
//! only and is reported with them. Random numbers are keyed by prompt and sample (law N2), so that
//! evaluations of different weights differ by their weights alone.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use super::{Agent, RolloutContext, Rollouts, advance, mean, why_lost};
use crate::algo::pass_at_k;
use crate::data::{Group, Prompt, Sample, Status, Tokenizer, Version, is_reward};
use crate::engine::{EngineError, SamplingParams, TokenEngine};
use crate::observe::logs::{Failure, JudgedAnswer};
use crate::observe::{Metric, StepMetrics};

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
    /// The engine failed.
    #[error(transparent)]
    Engine(#[from] EngineError),
    /// A completion could not be judged.
    #[error("judging answers: {0}")]
    Judge(BoxError),
    /// The engine answered with weights of `found` where those of `version` are evaluated.
    #[error(
        "an answer to prompt {question} is of version {found}, and version {version} is evaluated: the engine changed its weights meanwhile"
    )]
    OtherWeights {
        /// Place of the question in the evaluation, from 0.
        question: usize,
        /// Version that answered.
        found: Version,
        /// Version that is evaluated.
        version: Version,
    },
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
    /// whose completions are not all judged are sampled again. Answers to other prompts are dropped.
    pub fn begin(
        spec: &Arc<EvalSpec>,
        tokenizer: &Arc<Tokenizer>,
        engine: &E,
        version: Version,
        mut judged: Vec<JudgedAnswer>,
    ) -> Self {
        // Data may have changed since. An environment writes prompts itself.
        let is_of = |answer: &JudgedAnswer| spec.prompts.get(answer.question).is_some_and(|prompt| prompt.text == answer.prompt);
        judged.retain(|answer| spec.agent.is_some() || is_of(answer));
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
            Err(error @ (EngineError::Prompt { .. } | EngineError::TooLong { .. })) => {
                let rejected = |index| JudgedAnswer { error: Some(error.to_string()), ..self.answer(question, index) };
                Ok((0..samples).map(rejected).collect())
            }
            Err(error) => Err(error.into()),
        }
    }

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

/// Name of pass@k in a row, before k.
const PASS_AT: &str = "eval_pass_at_";

/// Row of metrics of these answers; those with a reward of at least `success` are correct. A metric
/// without data is missing: pass@k needs k judged answers to a prompt. An answer without a reward
/// only counts as an error.
fn summary(answers: &[JudgedAnswer], success: f64) -> StepMetrics {
    let judged = |greedy: bool| {
        answers.iter().filter(move |answer| answer.greedy == greedy).filter_map(|answer| Some((answer, answer.reward?)))
    };
    let right = |reward: f64| f64::from(reward >= success);
    let mut by_question: BTreeMap<usize, (usize, usize)> = BTreeMap::new();
    for (answer, reward) in judged(false) {
        let (all, correct) = by_question.entry(answer.question).or_default();
        *all += 1;
        *correct += usize::from(reward >= success);
    }
    let pass_at = |k: usize| mean(by_question.values().filter_map(|&(all, correct)| pass_at_k(all, correct, k)));
    let most = by_question.values().map(|(all, _)| *all).max().unwrap_or(0);
    let powers = std::iter::successors(Some(1), |k| Some(k * 2)).take_while(|k| *k < most);
    let asked = || answers.iter().filter(|answer| answer.tokens > 0);
    let errors = answers.iter().filter(|answer| answer.reward.is_none()).count();
    let known = [
        (Metric::EvalGreedyAccuracy, mean(judged(true).map(|(_, reward)| right(reward)))),
        (Metric::EvalGreedyAccuracyError, standard_error(judged(true).map(|(_, reward)| right(reward)))),
        (Metric::EvalGreedyReward, mean(judged(true).map(|(_, reward)| reward))),
        (Metric::EvalAccuracy, pass_at(1)),
        (
            Metric::EvalAccuracyError,
            standard_error(by_question.values().filter_map(|&(all, correct)| pass_at_k(all, correct, 1))),
        ),
        (Metric::EvalReward, mean(judged(false).map(|(_, reward)| reward))),
        (Metric::EvalLength, mean(asked().map(|answer| answer.tokens as f64))),
        (Metric::EvalTruncated, mean(asked().map(|answer| f64::from(answer.status == Status::Truncated)))),
        (Metric::EvalErrors, Some(errors as f64)),
    ];
    let named = known.into_iter().filter_map(|(metric, value)| Some((metric.key().to_owned(), value?)));
    let passes = powers.chain((most > 0).then_some(most)).filter_map(|k| Some((format!("{PASS_AT}{k}"), pass_at(k)?)));
    named.chain(passes).collect()
}

/// Standard error of the mean of independent values; none for fewer than two.
fn standard_error(values: impl Iterator<Item = f64> + Clone) -> Option<f64> {
    let (count, centre) = (values.clone().count() as f64, mean(values.clone())?);
    let squares: f64 = values.map(|value| (value - centre).powi(2)).sum();
    (count > 1.0).then(|| (squares / (count - 1.0) / count).sqrt())
}

/// pass@k of a row, by k.
pub(crate) fn passes(row: &StepMetrics) -> BTreeMap<usize, f64> {
    row.iter().filter_map(|(name, value)| Some((name.strip_prefix(PASS_AT)?.parse().ok()?, *value))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn answer(question: usize, greedy: bool, reward: Option<f64>) -> JudgedAnswer {
        JudgedAnswer { question, greedy, reward, tokens: 2, ..JudgedAnswer::default() }
    }

    #[test]
    fn pass_at_k_is_estimated_by_prompt_and_apart_from_greedy_answers() {
        let sampled = [(0, 1.0), (0, 0.0), (0, 0.0), (0, 1.0), (1, 0.0), (1, 0.0), (1, 0.0), (1, 0.5)];
        let mut answers: Vec<_> = sampled.iter().map(|&(question, reward)| answer(question, false, Some(reward))).collect();
        answers.extend([answer(0, true, Some(1.0)), answer(1, true, None)]);
        let row = summary(&answers, 1.0);
        let of = |metric: Metric| row[metric.key()];
        assert_eq!((of(Metric::EvalAccuracy), of(Metric::EvalReward)), (0.25, 2.5 / 8.0));
        // Shares of 0.5 and 0: a standard deviation of √(2 · 0.25²), over two prompts.
        assert!((of(Metric::EvalAccuracyError) - 0.25).abs() < 1e-12);
        assert!(!row.contains_key(Metric::EvalGreedyAccuracyError.key()), "of one answer");
        // Question 0: one minus the probability of drawing the two wrong ones among four.
        let expected = [(1, 0.25), (2, (1.0 - 1.0 / 6.0) / 2.0), (4, 0.5)];
        let found = passes(&row);
        assert_eq!(found.len(), expected.len());
        assert!(expected.iter().all(|(k, value)| (found[k] - value).abs() < 1e-12), "{found:?}");
        assert_eq!((of(Metric::EvalGreedyAccuracy), of(Metric::EvalErrors)), (1.0, 1.0));
    }

    #[test]
    fn a_metric_without_data_is_missing() {
        let greedy = summary(&[answer(0, true, Some(0.0))], 1.0);
        assert!(!greedy.contains_key(Metric::EvalAccuracy.key()) && !greedy.contains_key(Metric::EvalReward.key()));
        assert!(passes(&greedy).is_empty());
        assert_eq!(summary(&[], 1.0), StepMetrics::from([(Metric::EvalErrors.key().to_owned(), 0.0)]));
    }
}
