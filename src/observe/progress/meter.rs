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
    total: Option<u64>,
    /// Steps that the run had taken when this process began, and steps that were counted by then.
    began: f64,
    counted: f64,
    window: VecDeque<Totals>,
    rewards: VecDeque<f64>,
    loss: Option<f64>,
    /// If true, the run samples; otherwise it shows no speed of generation.
    generates: bool,
    staleness: Option<f64>,
}

#[derive(Clone, Copy, Debug)]
struct Totals {
    at: Duration,
    steps: f64,
    generated: f64,
    trained: f64,
}

impl Meter {
    /// For a run of `total` steps, where that is known, which begins after `taken` steps. Counts that
    /// `metrics` has of another run are left out.
    pub fn new(total: Option<u64>, taken: u64, metrics: &Metrics) -> Self {
        let counted = metrics.newest(Metric::Steps, &[]).unwrap_or(0.0);
        Meter { total, began: taken as f64, counted, ..Meter::default() }
    }

    /// Takes the newest values after the run has lasted `at`.
    pub fn record(&mut self, at: Duration, metrics: &Metrics) {
        let count = |metric, labels: &[&str]| metrics.newest(metric, labels).unwrap_or(0.0);
        let totals = Totals {
            at,
            steps: self.began + count(Metric::Steps, &[]) - self.counted,
            generated: count(Metric::GeneratedTokens, &[]),
            trained: count(Metric::Tokens, &["trained"]),
        };
        let steps_before = self.window.back().map_or(self.began, |before| before.steps);
        if totals.steps > steps_before
            && let Some(reward) = metrics.newest(Metric::RewardMean, &[])
        {
            self.rewards.push_back(reward);
            if self.rewards.len() > CURVE {
                self.rewards.pop_front();
            }
        }
        self.loss = metrics.newest(Metric::Loss, &[]);
        self.generates = totals.generated > 0.0;
        self.staleness = metrics.newest(Metric::StalenessMax, &[]);
        self.window.push_back(totals);
        // The oldest entry stays outside the window, so that the window is full.
        while self.window.get(1).is_some_and(|second| at.saturating_sub(second.at) >= WINDOW) {
            self.window.pop_front();
        }
    }

    /// Returns the present values of the line.
    pub fn snapshot(&self, bottleneck: Option<&str>) -> Snapshot {
        let step = self.window.back().map_or(0.0, |totals| totals.steps);
        let left = self.total.map(|total| total as f64 - step).filter(|&left| left > 0.0);
        let steps_per_second = self.rate(|totals| totals.steps).filter(|&rate| rate > 0.0);
        Snapshot {
            step: step as u64,
            total: self.total,
            reward: self.rewards.back().copied(),
            reward_curve: self.rewards.iter().copied().collect(),
            loss: self.loss,
            generated_per_second: self.rate(|totals| totals.generated).filter(|_| self.generates),
            trained_per_second: self.rate(|totals| totals.trained),
            staleness: self.staleness,
            bottleneck: bottleneck.map(str::to_owned),
            eta: left.zip(steps_per_second).and_then(|(left, rate)| Duration::try_from_secs_f64(left / rate).ok()),
        }
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
        let mut meter = Meter::new(Some(100), 0, &metrics);
        // A slow first minute must not weigh on what comes after it.
        for second in 0..60 {
            meter.record(Duration::from_secs(second), &metrics);
        }
        for second in 60..=80 {
            metrics.add(Metric::Steps, &[], 2.0);
            metrics.add(Metric::GeneratedTokens, &[], 1000.0);
            metrics.add(Metric::Tokens, &["trained"], 500.0);
            metrics.set(Metric::RewardMean, &[], second as f64);
            meter.record(Duration::from_secs(second), &metrics);
        }
        let snapshot = meter.snapshot(None);
        assert_eq!((snapshot.step, snapshot.total), (42, Some(100)));
        assert_eq!((snapshot.generated_per_second, snapshot.trained_per_second), (Some(1000.0), Some(500.0)));
        assert_eq!(snapshot.eta, Some(Duration::from_secs(29)));
        assert_eq!((snapshot.reward, snapshot.reward_curve.len()), (Some(80.0), 21));
    }

    #[test]
    fn steps_are_the_runs_after_a_resume_and_none_of_an_earlier_part() {
        let metrics = Metrics::new();
        // Forty steps of another part, and a hundred that an earlier process took.
        metrics.add(Metric::Steps, &[], 40.0);
        let mut meter = Meter::new(Some(130), 100, &metrics);
        meter.record(Duration::ZERO, &metrics);
        assert_eq!(meter.snapshot(None).step, 100);
        for second in 1..=10 {
            metrics.add(Metric::Steps, &[], 1.0);
            meter.record(Duration::from_secs(second), &metrics);
        }
        let snapshot = meter.snapshot(None);
        assert_eq!((snapshot.step, snapshot.total, snapshot.eta), (110, Some(130), Some(Duration::from_secs(20))));
    }

    #[test]
    fn nothing_is_claimed_before_anything_happened() {
        let mut meter = Meter::new(Some(10), 0, &Metrics::new());
        assert_eq!(meter.snapshot(None), Snapshot { total: Some(10), ..Snapshot::default() });
        meter.record(Duration::ZERO, &Metrics::new());
        meter.record(Duration::from_secs(1), &Metrics::new());
        let snapshot = meter.snapshot(None);
        assert_eq!((snapshot.eta, snapshot.reward, snapshot.generated_per_second), (None, None, None));
    }
}
