//! Curves of a run, and its time and tokens by step, which other axes are made of.
//!
//! Both take rows as they come, so that a page of a long run continues where it stopped.

use std::collections::BTreeMap;

use serde::Serialize;
use serde_json::{Value, json};

use crate::observe::Metric;
use crate::observe::logs::{MetricStats, StepMetrics, around, smoothed_at};

/// Points of a curve that are drawn.
const POINTS: usize = 320;
/// Values around a point that its band is made of: of more, evenly chosen ones.
const BAND: usize = 200;

/// Values of every metric by step. Memory: 16 bytes a number.
#[derive(Clone, Debug, Default)]
pub struct Curves(BTreeMap<String, Vec<(f64, f64)>>);

impl Curves {
    /// Takes the row of a step in. Values that are not finite are no points.
    pub fn add(&mut self, step: u64, row: StepMetrics) {
        for (name, value) in row.into_iter().filter(|(_, value)| value.is_finite()) {
            self.0.entry(name).or_default().push((step as f64, value));
        }
    }

    /// Statistics of a metric; `None` if it has no points.
    pub fn stats(&self, metric: &str) -> Option<MetricStats> {
        MetricStats::of(self.0.get(metric)?.iter().map(|(_, value)| *value))
    }

    /// Every metric as a curve: its help text, and points of step, smoothed value, the two values between
    /// which eight in ten of the steps around lie, and the step's own value. Of a long run, a few hundred
    /// steps are points.
    pub fn drawn(&self) -> BTreeMap<String, Value> {
        let curve = |(name, points): (&String, &Vec<(f64, f64)>)| {
            let help = Metric::from_key(name).map_or("", Metric::help);
            (name.clone(), json!({ "help": help, "points": banded(points) }))
        };
        self.0.iter().map(curve).collect()
    }
}

/// Seconds and trained tokens until each step, over all processes of a run.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct StepAxes {
    /// Steps, ascending.
    pub steps: Vec<u64>,
    /// Seconds that the processes worked until the end of each.
    pub seconds: Vec<f64>,
    /// Tokens trained until then.
    pub tokens: Vec<f64>,
    /// Totals of earlier processes, and those of the last row.
    #[serde(skip)]
    earlier: [f64; 2],
    #[serde(skip)]
    last: [f64; 2],
    /// When the last row's process began.
    #[serde(skip)]
    began: f64,
}

impl StepAxes {
    /// Takes a row of `timings.jsonl` in. Its totals are those of its process. A resumed process begins
    /// where the elapsed time is less than before, or where it began later and has fewer tokens.
    pub fn add(&mut self, step: u64, row: &StepMetrics) {
        let of = |key: &str| row.get(key).copied().filter(|value| value.is_finite());
        let Some(elapsed) = of("elapsed_seconds") else { return };
        let now = [elapsed, of("trained_tokens").unwrap_or_default()];
        let began = of("time_seconds").unwrap_or_default() - elapsed;
        if elapsed < self.last[0] || began > self.began + 1.0 && now[1] < self.last[1] {
            self.earlier = [self.earlier[0] + self.last[0], self.earlier[1] + self.last[1]];
        }
        (self.last, self.began) = (now, began);
        self.steps.push(step);
        self.seconds.push(self.earlier[0] + now[0]);
        self.tokens.push(self.earlier[1] + now[1]);
    }

    /// The same at a few hundred steps, between which a reader interpolates.
    pub fn drawn(&self) -> StepAxes {
        let (every, last) = (self.steps.len().div_ceil(POINTS).max(1), self.steps.len().saturating_sub(1));
        let kept = || (0..self.steps.len()).filter(|at| at % every == 0 || *at == last);
        StepAxes {
            steps: kept().map(|at| self.steps[at]).collect(),
            seconds: kept().map(|at| rounded(self.seconds[at])).collect(),
            tokens: kept().map(|at| self.tokens[at]).collect(),
            ..StepAxes::default()
        }
    }
}

/// Points of the drawn line: step, the mean of the values around, their tenth and ninetieth
/// percentile, and the step's own value.
fn banded(points: &[(f64, f64)]) -> Vec<[f64; 5]> {
    let values: Vec<f64> = points.iter().map(|point| point.1).collect();
    let every = points.len().div_ceil(POINTS).max(1);
    let last = points.len().saturating_sub(1);
    let drawn = (0..points.len()).filter(|at| at % every == 0 || *at == last);
    drawn
        .map(|at| {
            let (near, middle) = (around(&values, at), smoothed_at(&values, at));
            let mut near: Vec<f64> = near.iter().step_by(near.len().div_ceil(BAND)).copied().collect();
            let mut at_share = |share: f64| {
                let place = ((near.len() - 1) as f64 * share).round() as usize;
                *near.select_nth_unstable_by(place, f64::total_cmp).1
            };
            let (low, high) = (at_share(0.1), at_share(0.9));
            [points[at].0, rounded(middle), rounded(low), rounded(high), rounded(values[at])]
        })
        .collect()
}

/// Six digits are more than an eye sees.
fn rounded(value: f64) -> f64 {
    format!("{value:.5e}").parse().unwrap_or(value)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn time_and_tokens_add_up_over_the_processes_of_a_run() {
        let mut axes = StepAxes::default();
        // The second process begins at 1100, the third at 1200 and takes longer to its first step.
        let rows = [(1, 1010.0, 10.0, 100.0), (2, 1020.0, 20.0, 200.0), (3, 1105.0, 5.0, 50.0), (4, 1207.0, 7.0, 40.0)];
        for (step, time, elapsed, tokens) in rows {
            let row = [("time_seconds", time), ("elapsed_seconds", elapsed), ("trained_tokens", tokens)];
            axes.add(step, &row.into_iter().map(|(key, value)| (key.to_owned(), value)).collect());
        }
        assert_eq!((&axes.seconds[..], &axes.tokens[..]), (&[10.0, 20.0, 25.0, 32.0][..], &[100.0, 200.0, 250.0, 290.0][..]));
        assert_eq!(axes.drawn().steps, [1, 2, 3, 4]);
    }
}
