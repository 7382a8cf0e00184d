//! Values of the progress line from totals and elapsed time. Pure: the caller passes the time.

use std::collections::VecDeque;
use std::time::Duration;

use super::Snapshot;
use crate::observe::{Metric, Metrics};

/// Rates are those of the last seconds: long enough to be steady, short enough to notice a change.
const WINDOW: Duration = Duration::from_secs(15);
/// Steps of the reward's curve.
const CURVE: usize = 160;

/// Remembers the last seconds of a run's totals.
#[derive(Debug, Default)]
pub struct Meter {
    /// Steps that the run had taken when this process began, and steps that were counted by then.
    began: f64,
    counted: f64,
    window: VecDeque<Totals>,
    line: Snapshot,
}

#[derive(Clone, Copy, Debug)]
struct Totals {
    at: Duration,
    steps: f64,
    generated: f64,
    trained: f64,
}

impl Meter {
    /// For a run of `total` steps, which begins after `taken` steps. Counts that `metrics` has of
    /// another run are left out.
    pub fn new(total: u64, taken: u64, metrics: &Metrics) -> Self {
        let counted = metrics.newest(Metric::Steps, &[]).unwrap_or(0.0);
        Meter { began: taken as f64, counted, line: Snapshot { total, ..Snapshot::default() }, ..Meter::default() }
    }

    /// Takes the newest values after the run has lasted `at`; returns those of the line.
    pub fn record(&mut self, at: Duration, metrics: &Metrics, bottleneck: Option<&str>) -> &Snapshot {
        let count = |metric, labels: &[&str]| metrics.newest(metric, labels).unwrap_or(0.0);
        let totals = Totals {
            at,
            steps: self.began + count(Metric::Steps, &[]) - self.counted,
            generated: count(Metric::GeneratedTokens, &[]),
            trained: count(Metric::Tokens, &["trained"]),
        };
        let steps_before = self.window.back().map_or(self.began, |before| before.steps);
        self.window.push_back(totals);
        // The oldest entry stays outside the window, so that the window is full.
        while self.window.get(1).is_some_and(|second| at.saturating_sub(second.at) >= WINDOW) {
            self.window.pop_front();
        }
        let left = self.line.total as f64 - totals.steps;
        let seconds_per_step = self.rate(|totals| totals.steps).filter(|&rate| rate > 0.0).map(f64::recip);
        let eta = seconds_per_step.filter(|_| left > 0.0).and_then(|seconds| Duration::try_from_secs_f64(left * seconds).ok());
        // A run that only trains shows no speed of generation.
        let generated_per_second = self.rate(|totals| totals.generated).filter(|_| totals.generated > 0.0);
        let trained_per_second = self.rate(|totals| totals.trained);
        let line = &mut self.line;
        if totals.steps > steps_before {
            line.rewards.extend(metrics.newest(Metric::RewardMean, &[]));
            line.rewards.drain(..line.rewards.len().saturating_sub(CURVE));
        }
        line.step = totals.steps as u64;
        line.loss = metrics.newest(Metric::Loss, &[]);
        line.staleness = metrics.newest(Metric::StalenessMax, &[]);
        line.bottleneck = bottleneck.map(str::to_owned);
        (line.eta, line.generated_per_second, line.trained_per_second) = (eta, generated_per_second, trained_per_second);
        line
    }

    fn rate(&self, of: impl Fn(&Totals) -> f64) -> Option<f64> {
        let (oldest, newest) = (self.window.front()?, self.window.back()?);
        let seconds = newest.at.saturating_sub(oldest.at).as_secs_f64();
        (seconds > 0.0).then(|| (of(newest) - of(oldest)) / seconds)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_and_eta_are_those_of_the_last_seconds() {
        let metrics = Metrics::new();
        let mut meter = Meter::new(100, 0, &metrics);
        // A slow first minute must not weigh on what comes after it.
        for second in 0..60 {
            meter.record(Duration::from_secs(second), &metrics, None);
        }
        for second in 60..=80 {
            metrics.add(Metric::Steps, &[], 2.0);
            metrics.add(Metric::GeneratedTokens, &[], 1000.0);
            metrics.add(Metric::Tokens, &["trained"], 500.0);
            metrics.set(Metric::RewardMean, &[], second as f64);
            meter.record(Duration::from_secs(second), &metrics, None);
        }
        let line = meter.line;
        assert_eq!((line.step, line.total, line.eta), (42, 100, Some(Duration::from_secs(29))));
        assert_eq!((line.generated_per_second, line.trained_per_second), (Some(1000.0), Some(500.0)));
        assert_eq!((line.rewards.last(), line.rewards.len()), (Some(&80.0), 21));
    }

    #[test]
    fn steps_are_the_runs_after_a_resume_and_none_of_an_earlier_part() {
        let metrics = Metrics::new();
        // Forty steps of another part, and a hundred that an earlier process took.
        metrics.add(Metric::Steps, &[], 40.0);
        let mut meter = Meter::new(130, 100, &metrics);
        assert_eq!(meter.record(Duration::ZERO, &metrics, None).step, 100);
        for second in 1..=10 {
            metrics.add(Metric::Steps, &[], 1.0);
            meter.record(Duration::from_secs(second), &metrics, None);
        }
        assert_eq!((meter.line.step, meter.line.eta), (110, Some(Duration::from_secs(20))));
    }

    #[test]
    fn nothing_is_claimed_before_anything_happened() {
        let mut meter = Meter::new(10, 0, &Metrics::new());
        meter.record(Duration::ZERO, &Metrics::new(), None);
        let line = meter.record(Duration::from_secs(1), &Metrics::new(), None);
        assert_eq!(*line, Snapshot { total: 10, trained_per_second: Some(0.0), ..Snapshot::default() });
    }
}
