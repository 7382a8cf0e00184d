//! A whole `metrics.jsonl` in a few numbers a metric.

use std::collections::BTreeMap;
use std::path::Path;

use super::{LogError, StepMetrics, read_metrics};
use crate::observe::chart::smoothed;

/// What a metric did over a run. Values that are not finite are left out.
#[derive(Clone, Copy, Debug, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct MetricStats {
    /// Steps that have it.
    pub count: usize,
    /// Its first value.
    pub first: f64,
    /// Its last.
    pub last: f64,
    /// Mean over the last tenth of its steps: what the run ended at, less what a single step is lucky by.
    pub last_tenth: f64,
    /// Mean over all steps.
    pub mean: f64,
    /// Standard deviation over all steps (population).
    pub std: f64,
    /// The smallest value.
    pub min: f64,
    /// The largest.
    pub max: f64,
    /// The smallest value of its smoothed curve.
    pub best_low: f64,
    /// The largest value of its smoothed curve.
    pub best_high: f64,
}

impl MetricStats {
    /// Of values in the order of steps; `None` where none is finite.
    pub fn of(values: impl IntoIterator<Item = f64>) -> Option<Self> {
        let values: Vec<f64> = values.into_iter().filter(|value| value.is_finite()).collect();
        let (first, last) = (*values.first()?, *values.last()?);
        let mean_of = |values: &[f64]| values.iter().sum::<f64>() / values.len() as f64;
        let mean = mean_of(&values);
        let extreme = |values: &[f64], pick: fn(f64, f64) -> f64| values.iter().copied().fold(values[0], pick);
        let curve = smoothed(&values);
        Some(MetricStats {
            count: values.len(),
            first,
            last,
            last_tenth: mean_of(&values[values.len() - values.len().div_ceil(10)..]),
            mean,
            std: (values.iter().map(|value| (value - mean).powi(2)).sum::<f64>() / values.len() as f64).sqrt(),
            min: extreme(&values, f64::min),
            max: extreme(&values, f64::max),
            best_low: extreme(&curve, f64::min),
            best_high: extreme(&curve, f64::max),
        })
    }
}

/// By metric, of rows in the order of steps.
pub fn compute_stats(rows: &[(u64, StepMetrics)]) -> BTreeMap<String, MetricStats> {
    let mut values: BTreeMap<&str, Vec<f64>> = BTreeMap::new();
    rows.iter().flat_map(|(_, row)| row).for_each(|(name, value)| values.entry(name).or_default().push(*value));
    values.into_iter().filter_map(|(name, values)| Some((name.to_owned(), MetricStats::of(values)?))).collect()
}

/// By metric, of a `metrics.jsonl`.
pub fn compute_stats_from_jsonl(path: impl AsRef<Path>) -> Result<BTreeMap<String, MetricStats>, LogError> {
    Ok(compute_stats(&read_metrics(path)?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_metrics_numbers_are_those_of_the_steps_that_have_it() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("metrics.jsonl");
        let rows: Vec<String> = (1..=20)
            .map(|step| format!("{{\"step\":{step},\"loss\":{step}{}}}\n", if step % 10 == 0 { ",\"eval\":\"NaN\"" } else { "" }))
            .collect();
        std::fs::write(&path, rows.concat()).unwrap();
        let stats = compute_stats_from_jsonl(&path).unwrap();
        assert_eq!(stats.keys().collect::<Vec<_>>(), ["loss"], "nothing is known of a metric that is never finite");
        let loss = stats["loss"];
        assert_eq!((loss.count, loss.first, loss.last, loss.min, loss.max, loss.mean), (20, 1.0, 20.0, 1.0, 20.0, 10.5));
        assert_eq!(loss.last_tenth, 19.5);
        assert!(loss.best_high <= 20.0 && loss.best_low >= 1.0 && loss.best_low < loss.best_high);
    }
}
