//! Sink that writes every step to the logs, the metrics and the rollout file.

use std::collections::BTreeMap;

use crate::flow::{Sink, StageError};
use crate::observe::logs::{Every, JsonLines, Rollout};
use crate::observe::{Metric, Metrics, MetricsLogger};
use crate::stages::train::{CheckpointGate, Trained, staleness};
use crate::train::TokenScores;

use super::lengths::LengthBias;
use super::step_row;
use crate::rollout::{Census, Fate, RANGES, Totals};

/// Sink that records trained steps.
pub struct RunLog<W> {
    metrics: Metrics,
    loggers: Vec<Box<dyn MetricsLogger>>,
    rollouts: Option<(JsonLines<Rollout>, Every)>,
    look: Vec<Look<W>>,
    gate: Option<CheckpointGate>,
    steps_since_publish: u64,
    length_bias: LengthBias,
}

type Look<W> = Box<dyn FnMut(&Trained<W>) + Send>;

impl<W> RunLog<W> {
    /// Updates these metrics.
    pub fn new(metrics: &Metrics) -> Self {
        RunLog {
            metrics: metrics.clone(),
            loggers: Vec::new(),
            rollouts: None,
            look: Vec::new(),
            gate: None,
            steps_since_publish: 0,
            length_bias: LengthBias::default(),
        }
    }

    /// Adds a logger for every step's row.
    pub fn logger(mut self, logger: impl MetricsLogger + 'static) -> Self {
        self.loggers.push(Box::new(logger));
        self
    }

    /// Writes the samples of the first step and every `every`-th, with their log-probabilities; 0 writes
    /// none.
    pub fn rollouts(self, writer: JsonLines<Rollout>, every: impl Into<Every>) -> Self {
        RunLog { rollouts: Some((writer, every.into())), ..self }
    }

    /// Calls this closure with every step and its batch.
    pub fn each(mut self, look: impl FnMut(&Trained<W>) + Send + 'static) -> Self {
        self.look.push(Box::new(look));
        self
    }

    /// Lets the trainer with the same gate publish a step's checkpoint once the step is fully
    /// written.
    pub fn gate(self, gate: &CheckpointGate) -> Self {
        RunLog { gate: Some(gate.clone()), ..self }
    }

    fn count(&mut self, trained: &Trained<W>) {
        let metrics = &self.metrics;
        metrics.observe(Metric::StepTime, &[], trained.seconds);
        for sample in trained.batch.samples() {
            let generated = sample.generated();
            let trained_tokens = sample.learned();
            metrics.add(
                Metric::Tokens,
                &["trained"],
                if generated > 0 { trained_tokens } else { sample.response_length() } as f64,
            );
            metrics.add(Metric::Tokens, &["masked"], generated.saturating_sub(trained_tokens) as f64);
            if let Some(lag) = staleness(sample, trained.version) {
                metrics.observe_of(Metric::SampleStaleness, &[], lag as f64, Some(sample.group_index));
            }
        }
        for (source, (groups, tokens)) in trained.batch.by_source() {
            metrics.add(Metric::SourceGroups, &[source], groups as f64);
            metrics.add(Metric::SourceTokens, &[source], tokens as f64);
        }
        for dropped in &trained.batch.dropped {
            metrics.add(Metric::GroupsDropped, &[&dropped.reason], 1.0);
            metrics.add(Metric::Tokens, &[Fate::of_reason(&dropped.reason).label()], dropped.generated() as f64);
        }
        for sample in trained.batch.dropped_samples() {
            metrics.add(Metric::SamplesDropped, &[&sample.reason], 1.0);
            metrics.add(Metric::Tokens, &[Fate::of_reason(&sample.reason).label()], sample.generated as f64);
        }
        match &trained.totals {
            Some(totals) => publish(metrics, totals),
            None => metrics.set(Metric::TokensInFlight, &[], in_flight(metrics)),
        }
        for (lag, of) in &trained.forward.gap.by_lag {
            metrics.set(Metric::ImportanceRatio, &[&lag.to_string()], of.ratio());
        }
        for range in RANGES {
            trained
                .settings
                .get(&Census::key(range))
                .iter()
                .for_each(|of| metrics.set(Metric::CurriculumPrompts, &[range], **of));
        }
        for (name, mean) in trained.batch.reward_parts() {
            metrics.set(Metric::RewardPart, &[&name], mean);
        }
        self.steps_since_publish = if trained.publish.is_some() { 0 } else { self.steps_since_publish + 1 };
        self.metrics.set(Metric::PublishLag, &[], self.steps_since_publish as f64);
        self.metrics.set(Metric::Step, &[], trained.step as f64);
        // Last: a reader who sees the step sees its tokens too.
        self.metrics.add(Metric::Steps, &[], 1.0);
    }
}

impl<W: Send + Sync + 'static> Sink for RunLog<W> {
    type In = Trained<W>;

    fn accept(&mut self, trained: Trained<W>) -> Result<(), StageError> {
        if trained.step == 0 {
            return Ok(());
        }
        self.count(&trained);
        self.look.iter_mut().for_each(|look| look(&trained));
        let row = step_row(&trained);
        let bias = self.length_bias.add(&trained.batch);
        // Counts over the whole process, unlike a resumed run: a gauge, not a number of the step.
        if let Some(ratio) = bias {
            self.metrics.set(Metric::LengthBias, &[], ratio);
        }
        // Before the row: a step with a row is complete, wherever the process is killed (law C2).
        if let Some((writer, every)) = &mut self.rollouts
            && every.records(trained.step)
        {
            rollouts(&trained).try_for_each(|rollout| writer.write(&rollout))?;
        }
        self.metrics.log(trained.step, &row)?;
        for logger in &mut self.loggers {
            logger.log(trained.step, &row)?;
        }
        self.gate.as_ref().map_or(Ok(()), |gate| gate.logged(trained.step))?;
        Ok(())
    }

    fn finish(&mut self) -> Result<(), StageError> {
        if let Some((writer, _)) = &mut self.rollouts {
            writer.sync()?;
        }
        for logger in &mut self.loggers {
            logger.finish()?;
        }
        Ok(())
    }
}

/// Lines of the rollout file for a step, with the trainer's numbers of each token.
fn rollouts<W>(trained: &Trained<W>) -> impl Iterator<Item = Rollout> + '_ {
    let scores = trained.forward.scores.iter().map(|scores| ((scores.group, scores.index, scores.part), scores));
    let scores: BTreeMap<(u64, u32, u32), &TokenScores> = scores.collect();
    let samples = trained.batch.groups.iter().flat_map(|group| group.samples.iter().map(move |sample| (group, sample)));
    samples.map(move |(group, sample)| {
        let mut rollout = Rollout::new(trained.step, sample, true);
        rollout.source.clone_from(&group.prompt.source);
        rollout.spared = trained.batch.spared.contains(&group.id());
        if let Some(scores) = scores.get(&(sample.group_index, sample.index, sample.part)) {
            rollout.score(&scores.positions, &scores.log_probs, &scores.entropies);
        }
        rollout
    })
}

/// Writes the ledger to gauges (law D4).
fn publish(metrics: &Metrics, totals: &Totals) {
    let of = |fates: &BTreeMap<Fate, u64>, fate: Fate| fates.get(&fate).copied().unwrap_or(0) as f64;
    for fate in Fate::ALL {
        metrics.set(Metric::LedgerTokens, &[fate.label()], of(&totals.tokens, fate));
    }
    for fate in Fate::ALL.into_iter().filter(|fate| *fate != Fate::Masked) {
        metrics.set(Metric::LedgerPrompts, &[fate.label()], of(&totals.groups, fate));
    }
    metrics.set(Metric::LedgerTokens, &["generated"], totals.generated as f64);
    metrics.set(Metric::LedgerTokens, &["in_flight"], totals.open_tokens as f64);
    metrics.set(Metric::TokensInFlight, &[], totals.open_tokens as f64);
    metrics.set(Metric::LedgerPrompts, &["entered"], totals.entered as f64);
    metrics.set(Metric::LedgerPrompts, &["open"], totals.open_groups as f64);
    let (tokens, prompts) = totals.imbalance();
    metrics.set(Metric::LedgerImbalance, &["tokens"], tokens as f64);
    metrics.set(Metric::LedgerImbalance, &["prompts"], prompts as f64);
}

/// Tokens in flight in a run without a ledger: generated ones that have no fate yet.
fn in_flight(metrics: &Metrics) -> f64 {
    let settled: f64 = Fate::ALL.iter().filter_map(|fate| metrics.newest(Metric::Tokens, &[fate.label()])).sum();
    (metrics.newest(Metric::GeneratedTokens, &[]).unwrap_or(0.0) - settled).max(0.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_step_includes_those_before_a_resume_and_the_count_does_not() {
        let metrics = Metrics::new();
        let mut log = RunLog::<()>::new(&metrics);
        for step in [0, 901] {
            log.accept(Trained { step, ..Trained::default() }).unwrap();
        }
        let newest = [Metric::Step, Metric::Steps].map(|metric| metrics.newest(metric, &[]));
        assert_eq!(newest, [Some(901.0), Some(1.0)]);
    }
}
