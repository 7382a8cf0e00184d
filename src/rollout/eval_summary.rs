//! Metrics of an evaluation's answers. Pure.

use std::collections::BTreeMap;

use super::mean;
use crate::algo::pass_at_k;
use crate::data::Status;
use crate::observe::logs::JudgedAnswer;
use crate::observe::{Metric, Metrics, StepMetrics};

/// Metrics of an evaluation. A metric without data is `None`; pass@k needs k judged answers to a
/// prompt.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct EvalSummary {
    /// Share of prompts whose greedy completion is correct.
    pub greedy_accuracy: Option<f64>,
    /// Mean reward of greedy completions.
    pub greedy_reward: Option<f64>,
    /// Share of correct samples, mean over prompts.
    pub accuracy: Option<f64>,
    /// Mean reward of samples.
    pub reward: Option<f64>,
    /// pass@k by k: probability that one of k samples is correct, mean over prompts.
    pub pass_at: BTreeMap<usize, f64>,
    /// Mean length of all completions, in tokens.
    pub length: Option<f64>,
    /// Share of completions that the length limit cut off.
    pub truncated: Option<f64>,
    /// Number of completions without a reward.
    pub errors: usize,
    /// Number of completions.
    pub answers: usize,
}

impl EvalSummary {
    /// Metrics of these answers; those with a reward of at least `success` are correct. An answer without
    /// a reward only counts as an error.
    pub fn of(answers: &[JudgedAnswer], success: f64) -> Self {
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
        EvalSummary {
            greedy_accuracy: mean(judged(true).map(|(_, reward)| right(reward))),
            greedy_reward: mean(judged(true).map(|(_, reward)| reward)),
            accuracy: pass_at(1),
            reward: mean(judged(false).map(|(_, reward)| reward)),
            pass_at: powers.chain((most > 0).then_some(most)).filter_map(|k| Some((k, pass_at(k)?))).collect(),
            length: mean(asked().map(|answer| answer.tokens as f64)),
            truncated: mean(asked().map(|answer| f64::from(answer.status == Status::Truncated))),
            errors: answers.iter().filter(|answer| answer.reward.is_none()).count(),
            answers: answers.len(),
        }
    }

    /// Row of `metrics.jsonl`, keyed by the metric catalogue's names.
    pub fn row(&self) -> StepMetrics {
        let known = [
            (Metric::EvalGreedyAccuracy, self.greedy_accuracy),
            (Metric::EvalGreedyReward, self.greedy_reward),
            (Metric::EvalAccuracy, self.accuracy),
            (Metric::EvalReward, self.reward),
            (Metric::EvalLength, self.length),
            (Metric::EvalTruncated, self.truncated),
            (Metric::EvalErrors, Some(self.errors as f64)),
        ];
        let named = known.into_iter().filter_map(|(metric, value)| Some((metric.key().to_owned(), value?)));
        named.chain(self.pass_at.iter().map(|(k, value)| (format!("eval_pass_at_{k}"), *value))).collect()
    }

    /// Sets the gauges that have a label and are therefore no part of the row.
    pub fn publish(&self, metrics: &Metrics) {
        self.pass_at.iter().for_each(|(k, value)| metrics.set(Metric::EvalPassAt, &[&k.to_string()], *value));
    }
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
        let summary = EvalSummary::of(&answers, 1.0);
        assert_eq!((summary.accuracy, summary.reward), (Some(0.25), Some(2.5 / 8.0)));
        // Question 0: one minus the probability of drawing the two wrong ones among four.
        let expected = [(1, 0.25), (2, (1.0 - 1.0 / 6.0) / 2.0), (4, 0.5)];
        assert_eq!(summary.pass_at.len(), expected.len());
        assert!(expected.iter().all(|(k, value)| (summary.pass_at[k] - value).abs() < 1e-12), "{:?}", summary.pass_at);
        assert_eq!((summary.greedy_accuracy, summary.errors, summary.answers), (Some(1.0), 1, 10));
        assert_eq!(summary.row()["eval_pass_at_4"], 0.5);
    }

    #[test]
    fn a_metric_without_data_is_none() {
        let greedy = EvalSummary::of(&[answer(0, true, Some(0.0))], 1.0);
        assert_eq!((greedy.accuracy, greedy.reward, greedy.pass_at.len()), (None, None, 0));
        assert_eq!(EvalSummary::of(&[], 1.0), EvalSummary::default());
    }
}
