//! Metrics of an evaluation's answers. Pure.

use std::collections::BTreeMap;

use super::mean;
use crate::algo::pass_at_k;
use crate::data::Status;
use crate::observe::logs::JudgedAnswer;
use crate::observe::{Metric, StepMetrics};

/// Name of pass@k in a row, before k.
const PASS_AT: &str = "eval_pass_at_";

/// Row of metrics of these answers; those with a reward of at least `success` are correct. A metric
/// without data is missing: pass@k needs k judged answers to a prompt. An answer without a reward
/// only counts as an error.
pub(super) fn summary(answers: &[JudgedAnswer], success: f64) -> StepMetrics {
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
        (Metric::EvalGreedyReward, mean(judged(true).map(|(_, reward)| reward))),
        (Metric::EvalAccuracy, pass_at(1)),
        (Metric::EvalReward, mean(judged(false).map(|(_, reward)| reward))),
        (Metric::EvalLength, mean(asked().map(|answer| answer.tokens as f64))),
        (Metric::EvalTruncated, mean(asked().map(|answer| f64::from(answer.status == Status::Truncated)))),
        (Metric::EvalErrors, Some(errors as f64)),
    ];
    let named = known.into_iter().filter_map(|(metric, value)| Some((metric.key().to_owned(), value?)));
    let passes = powers.chain((most > 0).then_some(most)).filter_map(|k| Some((format!("{PASS_AT}{k}"), pass_at(k)?)));
    named.chain(passes).collect()
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
