//! Estimate of the servers that a run could use, from the time of its stages. Pure: the caller passes
//! the time.
//!
//! A server that the generator has no work for is too many, and a trainer that waits for samples has
//! too few. So those present, times the share of time that the generator had work, over the share
//! that the trainer worked, keep both busy. The stages are those of the prebuilt pipelines.

use std::collections::VecDeque;
use std::time::Duration;

use super::{Metric, Metrics};
use crate::flow::{Report, State};

/// Shares are those of the last minutes: long enough for several steps, short enough for an
/// autoscaler.
const WINDOW: Duration = Duration::from_secs(300);

/// Time between two entries of the window.
const INTERVAL: Duration = Duration::from_secs(5);

/// Smallest share of its time that the trainer works, for the estimate.
const LEAST: f64 = 0.01;

/// Totals of a run that has servers, at some times of the last minutes.
#[derive(Debug, Default)]
pub(super) struct Demand {
    window: VecDeque<Totals>,
    /// Time of the last reading, and the integrals until then.
    newest: Option<(Duration, Integrals)>,
}

#[derive(Clone, Copy, Debug)]
struct Totals {
    at: Duration,
    integrals: Integrals,
    /// Seconds that the generator and the trainer worked, means over their workers.
    generator: f64,
    trainer: f64,
    /// Items that the trainer took.
    trained: f64,
}

/// Sums over time.
#[derive(Clone, Copy, Debug, Default)]
struct Integrals {
    /// Seconds of servers that got work.
    servers: f64,
    /// Seconds of items that waited for the trainer.
    waiting: f64,
}

impl Demand {
    /// Takes a reading of a run that has lasted `report.wall`, and sets the gauges.
    pub(super) fn record(&mut self, report: &Report, metrics: &Metrics) {
        let Some(servers) = metrics.newest(Metric::Engines, &["serving"]) else { return };
        let worked = |name: &str| {
            let stage = report.stages.iter().find(|stage| stage.name == name)?;
            let seconds = stage.time().of(State::Busy) as f64 / 1e9 / stage.workers.len().max(1) as f64;
            Some((seconds, stage.items_in as f64))
        };
        let Some(((generator, _), (trainer, trained))) = worked("generate").zip(worked("train")) else { return };
        let queued: u64 = report.edges.iter().filter(|edge| edge.to == "train").map(|edge| edge.depth_items).sum();
        let at = Duration::from_nanos(report.wall);
        let (before, mut integrals) = self.newest.unwrap_or((at, Integrals::default()));
        let seconds = at.saturating_sub(before).as_secs_f64();
        integrals.servers += seconds * servers;
        integrals.waiting += seconds * queued as f64;
        self.newest = Some((at, integrals));
        let now = Totals { at, integrals, generator, trainer, trained };
        if self.window.back().is_none_or(|last| at.saturating_sub(last.at) >= INTERVAL) {
            self.window.push_back(now);
        }
        while self.window.get(1).is_some_and(|second| at.saturating_sub(second.at) >= WINDOW) {
            self.window.pop_front();
        }
        let Some(first) = self.window.front().filter(|first| at > first.at) else { return };
        let passed = at.saturating_sub(first.at).as_secs_f64();
        let share = |seconds: f64| (seconds / passed).clamp(0.0, 1.0);
        let present = (integrals.servers - first.integrals.servers) / passed;
        let useful = present * share(now.generator - first.generator) / share(now.trainer - first.trainer).max(LEAST);
        metrics.set(Metric::EnginesUseful, &[], useful);
        // Little's law: the mean number that wait is the rate times the mean wait.
        let taken = now.trained - first.trained;
        if taken > 0.0 {
            metrics.set(Metric::TrainQueue, &[], (integrals.waiting - first.integrals.waiting) / taken);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::flow::{Capacity, EdgeReport, Ended, StageReport, Times};

    /// Gauges after ten minutes of four servers, in which the generator works this share of the time and
    /// the trainer that one, takes an item in two seconds, and `queued` wait for it.
    fn after(generator: f64, trainer: f64, queued: u64) -> (f64, f64) {
        let (metrics, mut demand) = (Metrics::new(), Demand::default());
        metrics.set(Metric::Engines, &["serving"], 4.0);
        for at in (0..600).map(|second| second * 1_000_000_000_u64) {
            let stage = |name: &str, share: f64| {
                let mut time = Times::default();
                time.add(State::Busy, (share * at as f64) as u64);
                time.add(State::Starved, ((1.0 - share) * at as f64) as u64);
                let items_in = at / 2_000_000_000;
                let (name, advice) = (name.into(), String::new());
                StageReport { name, advice, workers: vec![time; 2], items_in, items_out: 0, tokens_in: 0, tokens_out: 0 }
            };
            let stages = vec![stage("generate", generator), stage("train", trainer)];
            let capacity = Capacity::items(4);
            let edge = EdgeReport {
                from: "batch".into(),
                to: "train".into(),
                capacity,
                sent: 0,
                tokens_sent: 0,
                received: 0,
                depth_items: queued,
                depth_tokens: 0,
                credit_out: 0,
            };
            let report =
                Report { ended: Ended::Running, wall: at, flow: "test".into(), stages, edges: vec![edge], warnings: Vec::new() };
            demand.record(&report, &metrics);
        }
        let of = |metric| metrics.newest(metric, &[]).unwrap();
        (of(Metric::EnginesUseful), of(Metric::TrainQueue))
    }

    #[test]
    fn a_trainer_that_waits_could_use_more_engines_and_one_that_is_behind_fewer() {
        let near = |found: (f64, f64), useful: f64, seconds: f64| {
            assert!((found.0 - useful).abs() < 0.1 && (found.1 - seconds).abs() < 0.1, "{found:?}");
        };
        near(after(1.0, 0.5, 0), 8.0, 0.0);
        near(after(1.0, 1.0, 1), 4.0, 2.0);
        near(after(0.5, 1.0, 3), 2.0, 6.0);
        assert!(after(1.0, 0.0, 0).0.is_finite());
    }

    #[test]
    fn a_run_without_servers_has_no_estimate() {
        let (metrics, mut demand) = (Metrics::new(), Demand::default());
        let report = Report {
            ended: Ended::Running,
            wall: 1,
            flow: String::new(),
            stages: Vec::new(),
            edges: Vec::new(),
            warnings: Vec::new(),
        };
        demand.record(&report, &metrics);
        assert_eq!(metrics.newest(Metric::EnginesUseful, &[]), None);
    }
}
