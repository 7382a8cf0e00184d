//! A whole `metrics.jsonl` in a few numbers a metric.

use std::collections::BTreeMap;
use std::path::PathBuf;

use super::metrics_rows;
use crate::data::{REWARD_LIMIT, number};
use crate::observe::ObserveError;

/// Statistics of a metric over a run. Values that are not finite are left out.
#[derive(Clone, Copy, Debug, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct MetricStats {
    /// Steps that have it.
    pub count: usize,
    /// First value.
    #[serde(with = "number")]
    pub first: f64,
    /// Last value.
    #[serde(with = "number")]
    pub last: f64,
    /// Mean over the last tenth of its steps: what the run ended at, less what a single step is lucky by.
    #[serde(with = "number")]
    pub last_tenth: f64,
    /// Mean over all steps.
    #[serde(with = "number")]
    pub mean: f64,
    /// Standard deviation over all steps (population).
    #[serde(with = "number")]
    pub std: f64,
    /// The smallest value.
    #[serde(with = "number")]
    pub min: f64,
    /// The largest.
    #[serde(with = "number")]
    pub max: f64,
    /// The smallest value of its smoothed curve.
    #[serde(with = "number")]
    pub best_low: f64,
    /// The largest value of its smoothed curve.
    #[serde(with = "number")]
    pub best_high: f64,
}

impl MetricStats {
    /// Computes statistics of values in the order of steps; `None` if none is finite.
    pub fn of(values: impl IntoIterator<Item = f64>) -> Option<Self> {
        let values: Vec<f64> = values.into_iter().filter(|value| value.is_finite()).collect();
        let (first, last) = (*values.first()?, *values.last()?);
        let (mean, mean_of) = (mean(&values), mean);
        let extreme = |values: &[f64], pick: fn(f64, f64) -> f64| values.iter().copied().fold(values[0], pick);
        let curve = smoothed(&values);
        Some(MetricStats {
            count: values.len(),
            first,
            last,
            last_tenth: mean_of(&values[values.len() - values.len().div_ceil(10)..]),
            mean,
            std: deviation(&values, mean),
            min: extreme(&values, f64::min),
            max: extreme(&values, f64::max),
            best_low: extreme(&curve, f64::min),
            best_high: extreme(&curve, f64::max),
        })
    }
}

/// Moving mean over a twentieth of the series to each side. Centred, so that the line does not lag.
/// At the ends the window is as wide as the values allow, so that a single value there does not
/// look like a trend.
pub fn smoothed(values: &[f64]) -> Vec<f64> {
    let reach = reach(values);
    let width = 2 * reach + 1;
    // A window is the end of a block of its width and the beginning of the next. Nothing is subtracted, so
    // that a large value does not touch windows that it is not in.
    let mut begins = vec![0.0; values.len() + 2 * reach];
    begins[reach..][..values.len()].copy_from_slice(values);
    let mut ends = begins.clone();
    begins.chunks_mut(width).for_each(|block| (1..block.len()).for_each(|at| block[at] += block[at - 1]));
    ends.chunks_mut(width).for_each(|block| (1..block.len()).rev().for_each(|at| block[at - 1] += block[at]));
    let window = |at: usize| if at.is_multiple_of(width) { ends[at] } else { ends[at] + begins[at + width - 1] };
    let value = |at: usize| match window(at) {
        sum if sum.is_finite() => sum / around(values, at).len() as f64,
        _ => smoothed_at(values, at),
    };
    (0..values.len()).map(value).collect()
}

/// One value of [`smoothed`].
pub fn smoothed_at(values: &[f64], at: usize) -> f64 {
    mean(around(values, at))
}

fn reach(values: &[f64]) -> usize {
    values.len() / 20
}

/// The values that the smoothed one at `at` is made of.
pub(in crate::observe) fn around(values: &[f64], at: usize) -> &[f64] {
    let reach = reach(values);
    &values[at.saturating_sub(reach)..(at + reach + 1).min(values.len())]
}

/// The mean, NaN for none. Finite for finite values, also if their sum is not.
fn mean(values: &[f64]) -> f64 {
    let (sum, count) = (values.iter().sum::<f64>(), values.len() as f64);
    if sum.is_nan() || sum.is_finite() {
        sum / count
    } else {
        values.iter().map(|value| value / count).sum::<f64>().clamp(f64::MIN, f64::MAX)
    }
}

/// Population standard deviation from `mean`. Finite for finite values: large ones are scaled down
/// before they are squared.
fn deviation(values: &[f64], mean: f64) -> f64 {
    let largest = values.iter().fold(0.0_f64, |largest, value| largest.max(value.abs()));
    let scale = if largest > REWARD_LIMIT { largest } else { 1.0 };
    let squares = values.iter().map(|value| (value / scale - mean / scale).powi(2)).sum::<f64>();
    (squares / values.len() as f64).sqrt() * scale
}

/// By metric, of a `metrics.jsonl`. Memory: 8 bytes a number.
pub fn compute_stats_from_jsonl(path: impl Into<PathBuf>) -> Result<BTreeMap<String, MetricStats>, ObserveError> {
    let mut columns = BTreeMap::<String, Vec<f64>>::new();
    for row in metrics_rows(path)? {
        for (name, value) in row?.1 {
            columns.entry(name).or_default().push(value);
        }
    }
    Ok(columns.into_iter().filter_map(|(name, values)| Some((name, MetricStats::of(values)?))).collect())
}
