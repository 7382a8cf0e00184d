//! Recorder of a run's metrics, and their text for Prometheus.
//!
//! A call finds its series by binary search under the metric's lock, without allocating. Memory is
//! bounded: an observation is counted in its bucket and not kept, whether a server runs or not.
//! `metrics-exporter-prometheus` writes the lines. Its recorder is not used: its counters are
//! whole numbers, and it keeps observations until a scrape.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use metrics::Key;
use metrics_exporter_prometheus::LabelSet;
use metrics_exporter_prometheus::formatting::{write_help_line, write_metric_line, write_type_line};
use parking_lot::Mutex;

use super::Metric;

/// The metrics of one run. Clones share them.
#[derive(Clone)]
pub struct Metrics(Arc<[Mutex<Family>]>);

/// Totals of all counters at one moment. The metrics of a run outlive its flows: a flow's totals are what
/// came after.
#[derive(Clone, Debug, Default)]
pub struct Baseline(BTreeMap<(Metric, Vec<String>), f64>);

impl Baseline {
    /// The total of a counter at that moment; 0 if it was missing.
    pub fn total(&self, metric: Metric, labels: &[&str]) -> f64 {
        let labels = labels.iter().map(|label| (*label).to_owned()).collect();
        self.0.get(&(metric, labels)).copied().unwrap_or(0.0)
    }
}

/// The series of one metric, sorted by their label values.
type Family = Vec<Series>;

/// One metric with its labels fixed.
struct Series {
    labels: Vec<String>,
    /// A counter's total, a gauge's value, a histogram's last observation.
    newest: f64,
    /// A histogram's number of observations by bucket, the one without bound last.
    counts: Vec<u64>,
    /// A histogram's sum of observations.
    sum: f64,
    /// The newest observation of a group in each bucket that has one.
    exemplars: BTreeMap<usize, Exemplar>,
}

/// An observation with the group that it is of.
struct Exemplar {
    group: u64,
    value: f64,
    /// Seconds since 1970.
    time: f64,
}

impl Default for Metrics {
    fn default() -> Self {
        Metrics::new()
    }
}

impl Metrics {
    /// Makes an empty set. Counters whose labels are all known begin at zero, so that rates are
    /// right from the first scrape.
    pub fn new() -> Self {
        let metrics = Metrics(Metric::ALL.iter().map(|_| Mutex::default()).collect());
        for &metric in Metric::ALL.iter().filter(|metric| metric.kind() == "counter") {
            match metric.labels() {
                [] => metrics.begin(metric, &[]),
                [(_, values)] => values.iter().for_each(|value| metrics.begin(metric, &[value])),
                _ => {}
            }
        }
        metrics
    }

    /// Sets a gauge. Label values are in the catalogue's order of labels, here and in all calls.
    ///
    /// # Panics
    /// If the metric is no gauge, or the values do not fit its labels in the catalogue: a bug of
    /// the caller that no run can repair. The other calls panic likewise.
    pub fn set(&self, metric: Metric, labels: &[&str], value: f64) {
        self.update(metric, labels, "set", "gauge", |series| series.newest = value);
    }

    /// Adds to a counter. An amount that is negative or not finite is ignored: counters only grow.
    pub fn add(&self, metric: Metric, labels: &[&str], amount: f64) {
        let amount = if amount.is_finite() { amount.max(0.0) } else { 0.0 };
        self.update(metric, labels, "add", "counter", |series| series.newest += amount);
    }

    /// Raises a counter to a total that was counted elsewhere; a smaller one is ignored.
    pub fn absolute(&self, metric: Metric, labels: &[&str], total: f64) {
        let total = if total.is_finite() { total } else { 0.0 };
        self.update(metric, labels, "absolute", "counter", |series| series.newest = series.newest.max(total));
    }

    /// Adds an observation to a histogram.
    pub fn observe(&self, metric: Metric, labels: &[&str], value: f64) {
        self.observe_of(metric, labels, value, None);
    }

    /// Adds an observation to a histogram, and keeps the id of its group as the exemplar of its bucket.
    pub fn observe_of(&self, metric: Metric, labels: &[&str], value: f64, group: Option<u64>) {
        let bounds = metric.buckets();
        let bucket = bounds.iter().position(|bound| value <= *bound).unwrap_or(bounds.len());
        self.update(metric, labels, "observe", "histogram", |series| {
            series.newest = value;
            series.sum += value;
            series.counts[bucket] += 1;
            if let Some(group) = group {
                let time = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs_f64();
                series.exemplars.insert(bucket, Exemplar { group, value, time });
            }
        });
    }

    /// Makes a series with the value 0 if it is missing.
    pub(crate) fn begin(&self, metric: Metric, labels: &[&str]) {
        self.update(metric, labels, "begin", metric.kind(), |_| ());
    }

    /// Removes all series whose `label` has this value: what it names is gone.
    pub(crate) fn end(&self, label: &str, value: &str) {
        for (metric, family) in Metric::ALL.iter().zip(self.0.iter()) {
            if let Some(at) = metric.labels().iter().position(|(name, _)| *name == label) {
                family.lock().retain(|series| series.labels[at] != value);
            }
        }
    }

    /// Returns the newest value: a counter's total, a gauge's value, a histogram's last
    /// observation. `None` if nothing was recorded.
    pub fn newest(&self, metric: Metric, labels: &[&str]) -> Option<f64> {
        let family = self.0[metric as usize].lock();
        position(&family, labels).ok().map(|at| family[at].newest)
    }

    /// Returns the label values and the newest value of each series of a metric.
    pub fn series(&self, metric: Metric) -> Vec<(Vec<String>, f64)> {
        self.0[metric as usize].lock().iter().map(|series| (series.labels.clone(), series.newest)).collect()
    }

    /// Returns the totals of all counters now.
    pub fn baseline(&self) -> Baseline {
        let counters = Metric::ALL.iter().copied().filter(|metric| metric.kind() == "counter");
        let series =
            counters.flat_map(|metric| self.series(metric).into_iter().map(move |(labels, total)| ((metric, labels), total)));
        Baseline(series.collect())
    }

    /// Returns the label values of each series of a histogram, with the sum and the number of its values.
    pub fn totals(&self, metric: Metric) -> Vec<(Vec<String>, [f64; 2])> {
        let count = |series: &Series| series.counts.iter().sum::<u64>() as f64;
        let family = self.0[metric as usize].lock();
        family.iter().map(|series| (series.labels.clone(), [series.sum, count(series)])).collect()
    }

    /// Everything in the Prometheus text format 0.0.4, in the catalogue's order. Metrics without a
    /// value are left out.
    pub fn render(&self) -> String {
        self.text(false)
    }

    /// The same in OpenMetrics 1.0, in which buckets show a group by its id.
    pub fn render_openmetrics(&self) -> String {
        self.text(true) + "# EOF\n"
    }

    fn text(&self, open: bool) -> String {
        let mut text = String::new();
        for (metric, family) in Metric::ALL.iter().zip(self.0.iter()) {
            let family = family.lock();
            if !family.is_empty() {
                let name = metric.name();
                let name = if open { name.strip_suffix("_total").unwrap_or(name) } else { name };
                write_help_line(&mut text, name, None, None, metric.help());
                write_type_line(&mut text, name, None, None, metric.kind());
                family.iter().for_each(|series| series.render(*metric, open, &mut text));
                if !open {
                    text.push('\n');
                }
            }
        }
        text
    }

    /// Applies `change` to the series, which is made if it is missing.
    fn update(&self, metric: Metric, labels: &[&str], call: &str, kind: &str, change: impl FnOnce(&mut Series)) {
        let (name, its) = (metric.name(), metric.kind());
        assert!(its == kind, "{call} was called on {name}, which is a {its}: counters add, gauges set, histograms observe");
        let mut family = self.0[metric as usize].lock();
        let at = position(&family, labels).unwrap_or_else(|at| {
            family.insert(at, Series::new(metric, labels));
            at
        });
        change(&mut family[at]);
    }
}

/// Index of the series with these label values in the sorted list, or its insertion point.
fn position(family: &[Series], values: &[&str]) -> Result<usize, usize> {
    family.binary_search_by(|series| series.labels.iter().map(String::as_str).cmp(values.iter().copied()))
}

impl Series {
    fn new(metric: Metric, values: &[&str]) -> Self {
        let (name, labels) = (metric.name(), metric.labels());
        assert_eq!(values.len(), labels.len(), "{name} has {} labels, given were the values {values:?}", labels.len());
        for ((label, allowed), value) in labels.iter().zip(values) {
            let fits = allowed.is_empty() || allowed.contains(value);
            assert!(fits, "{name}: {value:?} is no value of the label {label}; there are {allowed:?}");
        }
        let counts = vec![0; metric.buckets().len() + 1];
        Series {
            labels: values.iter().map(|value| (*value).to_owned()).collect(),
            newest: 0.0,
            counts,
            sum: 0.0,
            exemplars: BTreeMap::new(),
        }
    }

    fn render(&self, metric: Metric, open: bool, text: &mut String) {
        let name = metric.name();
        let labels: Vec<_> = metric.labels().iter().zip(&self.labels).map(|((name, _), value)| (*name, value.clone())).collect();
        let labels = LabelSet::from_key_and_global(&Key::from((name, &labels)), &Default::default());
        if metric.buckets().is_empty() {
            return write_metric_line::<&str, f64>(text, name, None, &labels, None, self.newest, None);
        }
        let mut count = 0;
        let bounds = metric.buckets().iter().map(f64::to_string).chain(["+Inf".to_owned()]);
        for (at, (bound, in_bucket)) in bounds.zip(&self.counts).enumerate() {
            count += in_bucket;
            write_metric_line(text, name, Some("bucket"), &labels, Some(("le", bound)), count, None);
            if let Some(Exemplar { group, value, time }) = self.exemplars.get(&at).filter(|_| open) {
                text.truncate(text.trim_end().len());
                *text += &format!(" # {{group=\"{group}\"}} {value} {time}\n");
            }
        }
        // In OpenMetrics, a histogram of numbers that may be negative has no sum, and none has a count without one.
        if open && metric.buckets().first().is_some_and(|bound| *bound < 0.0) {
            return;
        }
        write_metric_line::<&str, f64>(text, name, Some("sum"), &labels, None, self.sum, None);
        write_metric_line::<&str, u64>(text, name, Some("count"), &labels, None, count, None);
    }
}
