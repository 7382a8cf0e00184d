//! Values of the progress line from totals and elapsed time. Pure: the caller passes the time.

use std::collections::VecDeque;
use std::time::Duration;

use super::Snapshot;
use crate::observe::{Metric, Metrics};

/// Shortest time that rates are taken over: long enough to be steady, short enough to notice a change.
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
    /// Totals at the beginning and after each of the last steps. Steps may take longer than the window.
    steps: VecDeque<Totals>,
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
        if self.steps.back().is_none_or(|before| totals.steps > before.steps) {
            self.steps.push_back(totals);
            shorten(&mut self.steps, at);
        }
        shorten(&mut self.window, at);
        let left = self.line.total as f64 - totals.steps;
        let seconds_per_step = rate(&self.steps, at, |totals| totals.steps).map(f64::recip);
        let eta = seconds_per_step.filter(|_| left > 0.0).and_then(|seconds| Duration::try_from_secs_f64(left * seconds).ok());
        // A run that only trains shows no speed of generation.
        let generated_per_second = rate(&self.window, at, |totals| totals.generated).filter(|_| totals.generated > 0.0);
        let trained_per_second = rate(&self.steps, at, |totals| totals.trained);
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
}

/// Drops the oldest totals, but those that the window begins with.
fn shorten(totals: &mut VecDeque<Totals>, now: Duration) {
    while totals.get(1).is_some_and(|second| now.saturating_sub(second.at) >= WINDOW) {
        totals.pop_front();
    }
}

fn rate(totals: &VecDeque<Totals>, now: Duration, of: impl Fn(&Totals) -> f64) -> Option<f64> {
    let (oldest, newest) = (totals.front()?, totals.back()?);
    let seconds = newest.at.saturating_sub(oldest.at).as_secs_f64();
    let since = now.saturating_sub(newest.at).as_secs_f64();
    step_rate(of(newest) - of(oldest), seconds, newest.steps - oldest.steps, since)
}

/// Growth per second over the `seconds` of some steps, the last of which ended `since` seconds ago. It
/// falls once the running step takes longer than the mean one. `None` if they took no time.
pub fn step_rate(growth: f64, seconds: f64, steps: f64, since: f64) -> Option<f64> {
    let late = (since - seconds / steps).max(0.0);
    (seconds > 0.0).then(|| growth / (seconds + late))
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
    fn eta_and_trained_tokens_are_steady_where_a_step_takes_a_minute() {
        let metrics = Metrics::new();
        let mut meter = Meter::new(100, 0, &metrics);
        for second in 0..=600 {
            if second > 0 && second % 60 == 0 {
                metrics.add(Metric::Steps, &[], 1.0);
                metrics.add(Metric::Tokens, &["trained"], 500.0);
            }
            let line = meter.record(Duration::from_secs(second), &metrics, None);
            let left = (second >= 60).then(|| Duration::from_secs((100 - line.step) * 60));
            assert_eq!((line.eta, line.trained_per_second), (left, left.map(|_| 500.0 / 60.0)), "second {second}");
        }
        let stalled = meter.record(Duration::from_secs(720), &metrics, None);
        assert_eq!(stalled.trained_per_second, Some(500.0 / 120.0), "the running step has taken two minutes");
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
        assert_eq!(*line, Snapshot { total: 10, ..Snapshot::default() });
    }
}
