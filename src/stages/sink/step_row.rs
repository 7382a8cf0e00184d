//! Row of numbers of one step. Pure.

use super::lengths::Lengths;
use crate::algo::perplexity;
use crate::data::{Group, POISONED};
use crate::observe::{Metric, StepMetrics};
use crate::rollout::LOST;
use crate::stages::train::{Trained, staleness};

/// Returns the row of a step for logs and gauges, by the catalogue's names. Without scores
/// (supervised training) it has no rewards.
pub fn step_row<W>(trained: &Trained<W>) -> StepMetrics {
    let Trained { forward, optim, .. } = trained;
    let mut row = StepMetrics::new();
    let mut put = |metric: Metric, value: f64| {
        row.insert(metric.key().to_owned(), value);
    };
    let known = |value: f64| (!value.is_nan()).then_some(value);
    put(Metric::Loss, forward.loss);
    forward.router_loss.into_iter().for_each(|loss| put(Metric::RouterLoss, loss));
    forward.router_mismatch.share().into_iter().for_each(|share| put(Metric::RouterMismatch, share));
    let pairs = forward.metrics.pairs;
    if pairs.pairs > 0 {
        put(Metric::PairAccuracy, pairs.accuracy());
        put(Metric::PairMargin, pairs.margin());
    }
    // A score has none.
    if forward.tokens > 0 && (pairs.pairs == 0 || forward.entropy > 0.0) {
        known(forward.entropy).into_iter().for_each(|entropy| put(Metric::Entropy, entropy));
    }
    if let Some(nll) = forward.metrics.nll {
        put(Metric::Perplexity, perplexity(nll));
    }
    known(optim.grad_norm).into_iter().for_each(|norm| put(Metric::GradNorm, norm));
    known(optim.grad_norm_clipped).into_iter().for_each(|norm| put(Metric::GradNormClipped, norm));
    put(Metric::LearningRate, optim.lr);
    put(Metric::UpdatesSkipped, trained.updates_skipped as f64);
    for (source, (groups, tokens)) in trained.batch.by_source() {
        row.insert(format!("source_groups_{source}"), groups as f64);
        row.insert(format!("source_tokens_{source}"), tokens as f64);
    }
    let mut put = |metric: Metric, value: f64| {
        row.insert(metric.key().to_owned(), value);
    };
    let rewards: Vec<f64> = trained.batch.rewards().collect();
    if rewards.is_empty() && trained.batch.samples().all(|sample| sample.versions.newest().is_none()) {
        row.extend(trained.settings.clone());
        row.extend(trained.evaluated.clone());
        return row;
    }
    if !rewards.is_empty() {
        let mean = rewards.iter().sum::<f64>() / rewards.len() as f64;
        let variance = rewards.iter().map(|reward| (reward - mean).powi(2)).sum::<f64>() / rewards.len() as f64;
        put(Metric::RewardMean, mean);
        put(Metric::RewardMin, rewards.iter().copied().fold(f64::INFINITY, f64::min));
        put(Metric::RewardMax, rewards.iter().copied().fold(f64::NEG_INFINITY, f64::max));
        put(Metric::RewardStd, variance.sqrt());
    }
    let kept = trained.batch.groups.iter().map(Group::rewards);
    let (poisoned, dropped): (Vec<_>, Vec<_>) = trained.batch.dropped.iter().partition(|dropped| {
        // Some of their samples have no reward.
        [POISONED, LOST].contains(&dropped.reason.as_str())
    });
    put(Metric::PoisonedGroups, poisoned.len() as f64);
    let groups: Vec<Vec<f64>> = kept.chain(dropped.into_iter().map(|dropped| dropped.rewards.clone())).collect();
    let passed = groups.iter().filter(|rewards| rewards.iter().any(|&reward| reward > 0.0)).count();
    if !rewards.is_empty() {
        put(Metric::PassRate, passed as f64 / groups.len() as f64);
    }
    put(Metric::SparedGroups, trained.batch.spared.len() as f64);
    put(Metric::SavedTokens, forward.saved_tokens as f64);
    let trained_on = [Metric::LengthTrainedMean, Metric::LengthTrainedMedian, Metric::LengthTrainedUpperDecile];
    let finished = [Metric::LengthFinishedMean, Metric::LengthFinishedMedian, Metric::LengthFinishedUpperDecile];
    for (metrics, lengths) in [(trained_on, Lengths::trained(&trained.batch)), (finished, Lengths::finished(&trained.batch))] {
        metrics.into_iter().zip(lengths.summary().into_iter().flatten()).for_each(|(metric, value)| put(metric, value));
    }
    put(Metric::ClipFraction, forward.metrics.clip_fraction());
    put(Metric::ApproxKl, forward.gap.approx_kl());
    put(Metric::LogProbGapMean, forward.gap.mean());
    put(Metric::LogProbGapMax, forward.gap.max());
    put(Metric::ImportanceSamples, forward.gap.effective_sample_share());
    put(Metric::ImportanceChi2, forward.gap.chi2());
    put(Metric::SequenceChi2, forward.gap.sequences.chi2());
    put(Metric::PerplexityRatio, forward.gap.sequences.perplexity_ratio());
    if let Some(coef) = forward.metrics.kl_coef {
        put(Metric::KlLoss, forward.metrics.kl());
        put(Metric::KlLossCoef, coef);
    }
    if let Some(sum) = forward.metrics.divergence_sum {
        put(Metric::TeacherDivergence, sum / forward.metrics.tokens.max(1) as f64);
    }
    if let Some(cost) = trained.kl_cost {
        put(Metric::KlReward, cost.mean);
        put(Metric::KlRewardCoef, cost.coef);
    }
    if let Some(critic) = &trained.critic {
        put(Metric::CriticLoss, critic.loss);
        put(Metric::CriticClipFraction, critic.metrics.clip_fraction());
        put(Metric::CriticValue, critic.value);
        put(Metric::CriticReturn, critic.returns);
        known(critic.optim.grad_norm).into_iter().for_each(|norm| put(Metric::CriticGradNorm, norm));
        put(Metric::CriticLearningRate, critic.optim.lr);
        critic.explained.into_iter().for_each(|explained| put(Metric::CriticExplained, explained));
    }
    let correction = &forward.metrics.correction;
    if !correction.weights.is_empty() {
        put(Metric::CorrectionWeight, correction.weights.mean());
        put(Metric::CorrectionWeightMax, correction.weights.units.max);
        put(Metric::CorrectionSamples, correction.weights.effective_sample_share());
    }
    if correction.tokens > 0 {
        put(Metric::CorrectionDropped, correction.dropped_token_share());
        put(Metric::CorrectionSequences, correction.dropped_sequence_share());
    }
    let lags: Vec<u64> = trained.batch.samples().filter_map(|sample| staleness(sample, trained.version)).collect();
    put(Metric::StalenessMax, lags.iter().copied().max().unwrap_or(0) as f64);
    put(Metric::TokenLag, mean_token_lag(trained));
    row.extend(trained.batch.reward_parts().into_iter().map(|(name, mean)| (format!("reward_part_{name}"), mean)));
    row.extend(trained.settings.clone());
    row.extend(trained.evaluated.clone());
    row.extend(forward.gap.by_lag.iter().map(|(lag, of)| (format!("importance_ratio_lag_{lag}"), of.ratio())));
    row
}

fn mean_token_lag<W>(trained: &Trained<W>) -> f64 {
    let (mut tokens, mut lag) = (0, 0);
    for (version, len) in trained.batch.samples().flat_map(|sample| sample.versions.iter()) {
        if let Some(version) = version {
            tokens += len;
            lag += trained.version.saturating_sub(version) as usize * len;
        }
    }
    lag as f64 / tokens.max(1) as f64
}
