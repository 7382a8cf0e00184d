//! Recorder of a run's metrics: typed calls onto a Prometheus recorder.
//!
//! A call finds its series by binary search, without allocating, and then costs a few atomic
//! operations; a hot loop can keep the [`Series`]. The newest value of each series is readable, for
//! the progress line. Memory is bounded: observations are folded into buckets after every 8192 of
//! them, whether a server runs or not.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use metrics::{Counter, Gauge, Histogram, Key, Label, Level, Metadata, Recorder, SharedString};
use metrics_exporter_prometheus::{Matcher, PrometheusBuilder, PrometheusHandle, PrometheusRecorder};
use parking_lot::RwLock;

use super::catalog::{Kind, Metric, Spec};

/// Observations between folds into buckets.
const OBSERVATIONS_PER_UPKEEP: u64 = 8192;

const METADATA: Metadata<'static> = Metadata::new("rollflow", Level::INFO, None);

/// The metrics of one run. Clones share them.
#[derive(Clone)]
pub struct Metrics(Arc<Run>);

struct Run {
    recorder: PrometheusRecorder,
    fold: Arc<Fold>,
    /// One a metric, in the catalogue's order.
    families: Vec<RwLock<Family>>,
}

/// Folds observations into the buckets of their histograms. The exporter's queue loses whole blocks
/// of observations if one thread adds while another takes them out, because its newest block is
/// linked to the older ones only after it is visible. Hence the lock: observers share it, and a
/// fold holds it exclusively.
struct Fold {
    handle: PrometheusHandle,
    observations: AtomicU64,
    observing: RwLock<()>,
}

impl Fold {
    fn observe(&self, histogram: &Histogram, value: f64) {
        let observing = self.observing.read();
        histogram.record(value);
        drop(observing);
        if self.observations.fetch_add(1, Relaxed) % OBSERVATIONS_PER_UPKEEP == OBSERVATIONS_PER_UPKEEP - 1 {
            let _alone = self.observing.write();
            self.handle.run_upkeep();
        }
    }

    fn render(&self) -> String {
        let _alone = self.observing.write();
        self.handle.render()
    }
}

/// The series of one metric, sorted by their label values.
type Family = Vec<(Box<[String]>, Series)>;

/// One metric with its labels fixed. Clones share the value.
#[derive(Clone)]
pub struct Series(Arc<Value>);

struct Value {
    metric: Metric,
    /// Newest value, as the bits of an `f64`: a counter's total, a gauge's value, a histogram's
    /// last observation.
    newest: AtomicU64,
    instrument: Instrument,
}

enum Instrument {
    Whole(Counter),
    Fractional(Gauge),
    Gauge(Gauge),
    Histogram(Histogram, Arc<Fold>),
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
        let mut builder = PrometheusBuilder::new();
        for metric in Metric::ALL {
            if let Kind::Histogram(bounds) = metric.spec().kind {
                builder = builder
                    .set_buckets_for_metric(Matcher::Full(metric.name().to_owned()), bounds)
                    .expect("every histogram of the catalogue has buckets");
            }
        }
        let recorder = builder.build_recorder();
        for metric in Metric::ALL {
            let Spec { name, kind, help, .. } = metric.spec();
            let help = SharedString::const_str(help);
            match kind {
                Kind::Counter { fractional: false } => recorder.describe_counter(name.into(), None, help),
                Kind::Counter { fractional: true } | Kind::Gauge => recorder.describe_gauge(name.into(), None, help),
                Kind::Histogram(_) => recorder.describe_histogram(name.into(), None, help),
            }
        }
        let fold = Arc::new(Fold { handle: recorder.handle(), observations: AtomicU64::new(0), observing: RwLock::new(()) });
        let families = Metric::ALL.iter().map(|_| RwLock::default()).collect();
        let metrics = Metrics(Arc::new(Run { recorder, fold, families }));
        for metric in Metric::ALL {
            let Spec { kind, labels, .. } = metric.spec();
            match (kind, labels) {
                (Kind::Counter { .. }, []) => drop(metrics.series(*metric, &[])),
                (Kind::Counter { .. }, [label]) => label.values.iter().for_each(|value| drop(metrics.series(*metric, &[value]))),
                _ => {}
            }
        }
        metrics
    }

    /// Sets a gauge.
    ///
    /// # Panics
    /// As [`Metrics::series`] and [`Series::set`].
    pub fn set(&self, metric: Metric, labels: &[&str], value: f64) {
        self.series(metric, labels).set(value);
    }

    /// Adds to a counter.
    ///
    /// # Panics
    /// As [`Metrics::series`] and [`Series::add`].
    pub fn add(&self, metric: Metric, labels: &[&str], amount: f64) {
        self.series(metric, labels).add(amount);
    }

    /// Raises a counter to a total that was counted elsewhere.
    ///
    /// # Panics
    /// As [`Metrics::series`] and [`Series::absolute`].
    pub fn absolute(&self, metric: Metric, labels: &[&str], total: f64) {
        self.series(metric, labels).absolute(total);
    }

    /// Adds an observation to a histogram.
    ///
    /// # Panics
    /// As [`Metrics::series`] and [`Series::observe`].
    pub fn observe(&self, metric: Metric, labels: &[&str], value: f64) {
        self.series(metric, labels).observe(value);
    }

    /// Returns the newest value: a counter's total, a gauge's value, a histogram's last
    /// observation. `None` if nothing was recorded.
    pub fn newest(&self, metric: Metric, labels: &[&str]) -> Option<f64> {
        let family = self.family(metric).read();
        let at = position(&family, labels).ok()?;
        Some(family[at].1.newest())
    }

    /// The series of a metric with these label values, in the catalogue's order of labels.
    ///
    /// # Panics
    /// If the values do not fit the metric's labels in the catalogue: a bug of the caller that no run
    /// can repair.
    pub fn series(&self, metric: Metric, labels: &[&str]) -> Series {
        let family = self.family(metric);
        {
            let known = family.read();
            if let Ok(at) = position(&known, labels) {
                return known[at].1.clone();
            }
        }
        let mut known = family.write();
        match position(&known, labels) {
            Ok(at) => known[at].1.clone(),
            Err(at) => {
                let series = self.register(metric, labels);
                known.insert(at, (labels.iter().map(|&value| value.to_owned()).collect(), series.clone()));
                series
            }
        }
    }

    /// Everything in the Prometheus text format 0.0.4.
    pub fn render(&self) -> String {
        let mut text = self.0.fold.render();
        for metric in Metric::ALL {
            if metric.spec().kind == (Kind::Counter { fractional: true }) {
                let name = metric.name();
                text = text.replace(&format!("# TYPE {name} gauge\n"), &format!("# TYPE {name} counter\n"));
            }
        }
        text
    }

    fn family(&self, metric: Metric) -> &RwLock<Family> {
        &self.0.families[metric as usize]
    }

    fn register(&self, metric: Metric, values: &[&str]) -> Series {
        let Spec { name, kind, labels, .. } = metric.spec();
        assert_eq!(values.len(), labels.len(), "{name} has {} labels, given were the values {values:?}", labels.len());
        for (label, value) in labels.iter().zip(values) {
            let allowed = label.values.is_empty() || label.values.contains(value);
            assert!(allowed, "{name}: {value:?} is no value of the label {}; there are {:?}", label.name, label.values);
        }
        let pairs: Vec<Label> =
            labels.iter().zip(values).map(|(label, &value)| Label::new(label.name, value.to_owned())).collect();
        let (key, recorder) = (Key::from_parts(name, pairs), &self.0.recorder);
        let (instrument, start) = match kind {
            Kind::Counter { fractional: false } => (Instrument::Whole(recorder.register_counter(&key, &METADATA)), 0.0),
            Kind::Counter { fractional: true } => (Instrument::Fractional(recorder.register_gauge(&key, &METADATA)), 0.0),
            Kind::Gauge => (Instrument::Gauge(recorder.register_gauge(&key, &METADATA)), 0.0),
            Kind::Histogram(_) => {
                let histogram = recorder.register_histogram(&key, &METADATA);
                (Instrument::Histogram(histogram, Arc::clone(&self.0.fold)), f64::NAN)
            }
        };
        Series(Arc::new(Value { metric, newest: AtomicU64::new(f64::to_bits(start)), instrument }))
    }
}

/// Index of the series with these label values in the sorted list, or its insertion point.
fn position(family: &[(Box<[String]>, Series)], values: &[&str]) -> Result<usize, usize> {
    family.binary_search_by(|(known, _)| known.iter().map(String::as_str).cmp(values.iter().copied()))
}

impl Series {
    /// Sets a gauge.
    ///
    /// # Panics
    /// If the metric is no gauge.
    pub fn set(&self, value: f64) {
        let Instrument::Gauge(gauge) = &self.0.instrument else { self.misused("set") };
        self.0.newest.store(value.to_bits(), Relaxed);
        gauge.set(value);
    }

    /// Adds to a counter. What is negative or no number is ignored, for counters only grow.
    ///
    /// # Panics
    /// If the metric is no counter.
    pub fn add(&self, amount: f64) {
        let amount = if amount > 0.0 && amount.is_finite() { amount } else { 0.0 };
        self.grow(|total| total + amount, "add");
    }

    /// Raises a counter to a total that was counted elsewhere; a smaller one is ignored.
    ///
    /// # Panics
    /// If the metric is no counter.
    pub fn absolute(&self, total: f64) {
        let given = if total.is_finite() { total } else { 0.0 };
        self.grow(|total| total.max(given), "absolute");
    }

    /// Adds an observation to a histogram.
    ///
    /// # Panics
    /// If the metric is no histogram.
    pub fn observe(&self, value: f64) {
        let Instrument::Histogram(histogram, fold) = &self.0.instrument else { self.misused("observe") };
        self.0.newest.store(value.to_bits(), Relaxed);
        fold.observe(histogram, value);
    }

    /// The newest value: a counter's total, a gauge's value, a histogram's last observation.
    pub fn newest(&self) -> f64 {
        f64::from_bits(self.0.newest.load(Relaxed))
    }

    fn grow(&self, next: impl Fn(f64) -> f64, call: &str) {
        let update = |bits| Some(next(f64::from_bits(bits)).to_bits());
        let before = match self.0.newest.fetch_update(Relaxed, Relaxed, update) {
            Ok(before) | Err(before) => f64::from_bits(before),
        };
        let after = next(before);
        match &self.0.instrument {
            // Both calls give the right total in whatever order threads make them.
            Instrument::Whole(counter) => counter.absolute(after as u64),
            Instrument::Fractional(gauge) => gauge.increment(after - before),
            _ => self.misused(call),
        }
    }

    fn misused(&self, call: &str) -> ! {
        let Spec { name, kind, .. } = self.0.metric.spec();
        panic!("{call} was called on {name}, which is a {}: counters add, gauges set, histograms observe", kind.word())
    }
}
