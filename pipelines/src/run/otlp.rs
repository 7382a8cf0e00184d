//! Traces of groups and metrics of the run to an OpenTelemetry collector, over HTTP with protobuf. A
//! collector that is down costs the run nothing: what does not fit into the exporter's queue is dropped.

use std::time::{Duration, SystemTime};

use anyhow::{Context, Result};
use opentelemetry::metrics::{AsyncInstrument, Meter, MeterProvider, ObservableCounter, ObservableGauge};
use opentelemetry::trace::{Span, TraceContextExt, Tracer, TracerProvider};
use opentelemetry::{Context as Telemetry, KeyValue};
use opentelemetry_otlp::{MetricExporter, SpanExporter, WithExportConfig, WithHttpConfig};
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::metrics::{PeriodicReader, SdkMeterProvider};
use opentelemetry_sdk::trace::{SdkTracer, SdkTracerProvider};
use reqwest::blocking::Client;
use rollflow::net::tls_config;
use rollflow::observe::{Metric, Metrics};
use rollflow::recipe::Plan;

use super::traces::{Trace, Traces};

/// Time between two reports of metrics.
const EVERY: Duration = Duration::from_secs(10);

/// Time that the last spans and metrics have at the end of a run.
const LAST: Duration = Duration::from_secs(5);

/// Longest time of a request.
const LIMIT: Duration = Duration::from_secs(10);

/// Exports of a run. Dropping them sends what is left.
pub(crate) struct Otlp {
    tracing: SdkTracerProvider,
    metering: SdkMeterProvider,
    pub(crate) traces: Traces,
    /// Unregistered when dropped.
    _instruments: Vec<Instrument>,
}

enum Instrument {
    Counter { _of: ObservableCounter<f64> },
    Gauge { _of: ObservableGauge<f64> },
}

impl Otlp {
    /// Starts exports to the collector at `url`. Variables `OTEL_EXPORTER_OTLP_HEADERS` and the like hold.
    pub fn start(url: &str, plan: &Plan, metrics: &Metrics) -> Result<Self> {
        let at = |path: &str| format!("{}/v1/{path}", url.trim_end_matches('/'));
        let resource = Resource::builder()
            .with_service_name("rollflow")
            .with_attributes([KeyValue::new("run", plan.name.clone()), KeyValue::new("pipeline", plan.pipeline.word())])
            .build();
        let failed = || format!("observe.otlp = {url:?}");
        let tls = tls_config(plan.net.ca_file.as_deref())?;
        let http = Client::builder().tls_backend_preconfigured(tls).timeout(LIMIT).build().with_context(failed)?;
        let spans = SpanExporter::builder().with_http().with_http_client(http.clone()).with_endpoint(at("traces"));
        let numbers = MetricExporter::builder().with_http().with_http_client(http).with_endpoint(at("metrics"));
        let (spans, numbers) = (spans.build().with_context(failed)?, numbers.build().with_context(failed)?);
        let tracing = SdkTracerProvider::builder().with_batch_exporter(spans).with_resource(resource.clone()).build();
        let reader = PeriodicReader::builder(numbers).with_interval(EVERY).build();
        let metering = SdkMeterProvider::builder().with_reader(reader).with_resource(resource).build();
        let meter = metering.meter("rollflow");
        let instruments = Metric::ALL.iter().flat_map(|metric| instruments(&meter, *metric, metrics)).collect();
        let tracer = tracing.tracer("rollflow");
        let traces = Traces::new(plan.observe.otlp_every, move |trace| export(&tracer, &trace));
        Ok(Otlp { tracing, metering, traces, _instruments: instruments })
    }
}

impl Drop for Otlp {
    fn drop(&mut self) {
        for (what, ended) in
            [("spans", self.tracing.shutdown_with_timeout(LAST)), ("metrics", self.metering.shutdown_with_timeout(LAST))]
        {
            if let Err(error) = ended {
                tracing::warn!("the last {what} did not reach the collector of observe.otlp: {error}");
            }
        }
    }
}

/// The exported form of a metric: a counter or a gauge; a histogram as its sum and its count.
fn instruments(meter: &Meter, metric: Metric, metrics: &Metrics) -> Vec<Instrument> {
    let attributes = move |labels: Vec<String>| -> Vec<KeyValue> {
        let names = metric.labels().iter().map(|(name, _)| *name);
        names.zip(labels).map(|(name, label)| KeyValue::new(name, label)).collect()
    };
    let newest = metrics.clone();
    let read = move |observer: &dyn AsyncInstrument<f64>| {
        newest.series(metric).into_iter().for_each(|(labels, value)| observer.observe(value, &attributes(labels)));
    };
    let total = |suffix: &str, at: usize| {
        let metrics = metrics.clone();
        let read = move |observer: &dyn AsyncInstrument<f64>| {
            metrics.totals(metric).into_iter().for_each(|(labels, totals)| observer.observe(totals[at], &attributes(labels)));
        };
        let counter = meter.f64_observable_counter(format!("{}{suffix}", metric.name()));
        Instrument::Counter { _of: counter.with_description(metric.help()).with_callback(read).build() }
    };
    match metric.kind() {
        "gauge" => {
            let gauge = meter.f64_observable_gauge(metric.name()).with_description(metric.help());
            vec![Instrument::Gauge { _of: gauge.with_callback(read).build() }]
        }
        "counter" => {
            let counter = meter.f64_observable_counter(metric.name()).with_description(metric.help());
            vec![Instrument::Counter { _of: counter.with_callback(read).build() }]
        }
        _ => vec![total("_sum", 0), total("_count", 1)],
    }
}

/// Spans of a group: the whole way, and within it each stage with the wait for it.
fn export(tracer: &SdkTracer, trace: &Trace) {
    let (Some(first), Some(last)) = (trace.marks.first(), trace.marks.last()) else { return };
    let span = |name: &'static str, begin: SystemTime, within: &Telemetry| {
        tracer.span_builder(name).with_start_time(begin).start_with_context(tracer, within)
    };
    let mut root = span("group", first.at, &Telemetry::new());
    root.set_attribute(KeyValue::new("group", i64::try_from(trace.group).unwrap_or(i64::MAX)));
    trace.facts.iter().for_each(|(name, fact)| root.set_attribute(KeyValue::new(*name, fact.clone())));
    let within = Telemetry::new().with_remote_span_context(root.span_context().clone());
    for pair in trace.marks.windows(2) {
        span(pair[1].stage, pair[0].at, &within).end_with_timestamp(pair[1].at);
    }
    root.end_with_timestamp(last.at);
}
