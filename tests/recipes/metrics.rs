//! What Prometheus sees of a run, read over a socket and by a parser that shares no code with the exporter.
//!
//! Holds F4 (time by state reaches Prometheus whole, also while a stage is in it), the catalogue (one declaration a metric, `docs/reference/metrics.md`
//! generated from it) and F3 for the server (nothing outlives it).

use std::collections::BTreeSet;
use std::io::ErrorKind;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::time::{Duration, Instant};

use crate::support::{
    exposition::Exposition,
    http::{get, get_as},
};
use rollflow::flow::{self, Flow, State, Until};
use rollflow::observe::catalog;
use rollflow::observe::logs::{MetricsLogger, StepMetrics};
use rollflow::observe::{Metric, Metrics, MetricsServer, ObserveError, sampled};

const ANY_PORT: SocketAddr = SocketAddr::new(std::net::IpAddr::V4(std::net::Ipv4Addr::LOCALHOST), 0);

/// Label values for one series of `metric`: the label's first value, or a name where the run decides.
fn some_labels(metric: Metric) -> Vec<&'static str> {
    metric.labels().iter().map(|(_, values)| values.first().copied().unwrap_or("generate")).collect()
}

/// One value into every metric there is.
fn record_everything(metrics: &Metrics) {
    for &metric in Metric::ALL {
        let labels = some_labels(metric);
        match (metric.kind(), metric.buckets()) {
            ("counter", _) => metrics.add(metric, &labels, 3.5),
            ("gauge", _) => metrics.set(metric, &labels, -0.25),
            (_, bounds) => [bounds[0], bounds[1], 1e9].into_iter().for_each(|value| metrics.observe(metric, &labels, value)),
        }
    }
}

#[test]
fn docs_list_the_catalogue() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/docs/reference/metrics.md");
    let generated = catalog::markdown();
    if std::env::var_os("ROLLFLOW_WRITE_DOCS").is_some() {
        std::fs::write(path, &generated).unwrap();
    }
    let written = std::fs::read_to_string(path).unwrap_or_default();
    assert!(
        written == generated,
        "docs/reference/metrics.md is not the catalogue's; write it anew with\n  ROLLFLOW_WRITE_DOCS=1 cargo test --test recipes"
    );
}

#[test]
fn names_are_unique_and_conventional_and_buckets_ascend() {
    let mut seen = BTreeSet::new();
    for metric in Metric::ALL {
        let (name, is_lower) = (metric.name(), |byte: u8| byte.is_ascii_lowercase() || byte == b'_');
        assert!(seen.insert(name), "{name} is declared twice");
        let prefixed = name.starts_with("rollflow_") || name.starts_with("process_");
        assert!(prefixed && name.bytes().all(is_lower), "{name}");
        assert_eq!(name.ends_with("_total"), metric.kind() == "counter", "{name}: counters, and only they, end in _total");
        assert!(metric.help().ends_with('.'), "{name}: the help text is a sentence");
        assert_eq!(Metric::from_key(metric.key()), Some(*metric));
        assert_eq!(metric.buckets().is_empty(), metric.kind() != "histogram", "{name}");
        assert!(metric.buckets().windows(2).all(|pair| pair[0] < pair[1]), "{name}: buckets ascend");
    }
}

/// OpenMetrics 1.0: counters are declared without `_total`, no line is empty, the text has an end, and a bucket names a group that is in it.
#[test]
fn open_metrics_have_the_same_values_and_show_groups() {
    let metrics = Metrics::new();
    metrics.add(Metric::Steps, &[], 3.0);
    metrics.observe_of(Metric::SampleReward, &[], 0.05, Some(7));
    metrics.observe_of(Metric::SampleReward, &[], 0.07, Some(8));
    metrics.observe(Metric::SampleReward, &[], 0.95);
    let text = metrics.render_openmetrics();
    assert!(text.ends_with("# EOF\n") && !text.contains("\n\n"), "{text}");
    assert!(text.contains("# TYPE rollflow_steps counter\nrollflow_steps_total 3\n"), "{text}");
    let buckets: Vec<&str> =
        text.lines().filter(|line| line.starts_with("rollflow_sample_reward_bucket") && line.contains(" # ")).collect();
    assert_eq!(buckets.len(), 1, "the newest of a bucket, and none without a group: {buckets:?}");
    assert!(buckets[0].starts_with("rollflow_sample_reward_bucket{le=\"0.1\"} 2 # {group=\"8\"} 0.07 1"), "{buckets:?}");
    assert!(!metrics.render().contains(" # {"), "the old format has no place for it");
}

#[test]
fn a_histogram_of_numbers_that_may_be_negative_has_no_sum_in_open_metrics() {
    let metrics = Metrics::new();
    metrics.observe(Metric::SampleReward, &[], -0.5);
    metrics.observe(Metric::StepTime, &[], 0.5);
    let (old, open) = (metrics.render(), metrics.render_openmetrics());
    for end in ["sum", "count"] {
        let has = |text: &str, metric: Metric| text.contains(&format!("\n{}_{end} ", metric.name()));
        assert!(has(&old, Metric::SampleReward) && !has(&open, Metric::SampleReward), "{open}");
        assert!(has(&old, Metric::StepTime) && has(&open, Metric::StepTime), "{open}");
    }
}

#[test]
fn a_scrape_shows_every_recorded_metric_with_its_kind_and_help() {
    let metrics = Metrics::new();
    record_everything(&metrics);
    let server = MetricsServer::start(ANY_PORT, metrics, &[]).unwrap();
    let answer = get(server.address(), "/metrics");
    assert_eq!((answer.status, answer.content_type.as_str()), (200, "text/plain; version=0.0.4; charset=utf-8"));
    if let Some(path) = std::env::var_os("ROLLFLOW_SCRAPE") {
        std::fs::write(path, &answer.body).unwrap();
    }

    let scrape = Exposition::parse(&answer.body).unwrap();
    for &metric in Metric::ALL {
        let (name, kind) = (metric.name(), metric.kind());
        let family = scrape.family(name).unwrap_or_else(|| panic!("{name} is missing"));
        assert_eq!((family.kind.as_str(), family.help.as_str()), (kind, metric.help()), "{name}");
        let labels: Vec<(&str, &str)> = metric.labels().iter().map(|label| label.0).zip(some_labels(metric)).collect();
        match (kind, metric.buckets()) {
            ("counter", _) => assert_eq!(family.value(name, &labels), Some(3.5), "{name}"),
            ("gauge", _) => assert_eq!(family.value(name, &labels), Some(-0.25), "{name}"),
            (_, bounds) => {
                let buckets = family.buckets(name);
                let bucket_bounds: Vec<f64> = buckets.iter().map(|bucket| bucket.0).collect();
                assert_eq!(bucket_bounds, [bounds, &[f64::INFINITY]].concat(), "{name}");
                assert!(buckets.windows(2).all(|pair| pair[0].1 <= pair[1].1), "{name}: buckets are cumulative: {buckets:?}");
                assert_eq!((buckets[0].1, buckets[1].1), (1.0, 2.0), "{name}: a bound belongs to its bucket");
                let count = family.value(&format!("{name}_count"), &labels);
                assert_eq!((buckets.last().map(|bucket| bucket.1), count), (Some(3.0), Some(3.0)), "{name}");
                let sum = family.value(&format!("{name}_sum"), &labels);
                assert_eq!(sum, Some(bounds[0] + bounds[1] + 1e9), "{name}");
            }
        }
    }
    let known: BTreeSet<&str> = Metric::ALL.iter().map(|metric| metric.name()).collect();
    assert!(
        scrape.families.iter().all(|family| known.contains(family.name.as_str())),
        "a scrape shows the catalogue and nothing else"
    );
}

#[test]
fn values_that_numbers_and_labels_make_awkward_survive_the_scrape() {
    let metrics = Metrics::new();
    metrics.set(Metric::Loss, &[], f64::NAN);
    metrics.set(Metric::RewardMax, &[], f64::INFINITY);
    metrics.set(Metric::EdgeItems, &["a \"b\" \\c\nd→e", ""], 7.0);
    let scrape = Exposition::parse(&metrics.render()).unwrap();
    let value = |metric: Metric, labels: &[(&str, &str)]| {
        scrape.family(metric.name()).and_then(|family| family.value(metric.name(), labels))
    };
    assert!(value(Metric::Loss, &[]).unwrap().is_nan());
    assert_eq!(value(Metric::RewardMax, &[]), Some(f64::INFINITY));
    assert_eq!(value(Metric::EdgeItems, &[("from", "a \"b\" \\c\nd→e"), ("to", "")]), Some(7.0));
}

#[test]
fn counters_stand_at_zero_before_anything_happened_and_gauges_are_absent() {
    let scrape = Exposition::parse(&Metrics::new().render()).unwrap();
    let tokens = scrape.family(Metric::Tokens.name()).unwrap();
    assert_eq!(tokens.value(Metric::Tokens.name(), &[("fate", "poisoned")]), Some(0.0));
    assert!(scrape.family(Metric::Loss.name()).is_none());
}

#[test]
fn counters_only_grow_and_take_totals_counted_elsewhere() {
    let metrics = Metrics::new();
    let busy = ["train", "busy"];
    for total in [1.25, 3.75, 2.0, f64::NAN] {
        metrics.absolute(Metric::StageTime, &busy, total);
    }
    metrics.add(Metric::StageTime, &busy, -1.0);
    metrics.add(Metric::StageTime, &busy, f64::INFINITY);
    assert_eq!(metrics.newest(Metric::StageTime, &busy), Some(3.75));
    // Halves of a whole counter are not lost on the way.
    (0..4).for_each(|_| metrics.add(Metric::Steps, &[], 0.5));
    let scrape = Exposition::parse(&metrics.render()).unwrap();
    assert_eq!(scrape.family(Metric::Steps.name()).unwrap().value(Metric::Steps.name(), &[]), Some(2.0));
}

#[test]
fn threads_lose_no_count() {
    const EACH: usize = 50_000;
    let metrics = Metrics::new();
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                for _ in 0..EACH {
                    metrics.add(Metric::GeneratedTokens, &[], 1.0);
                    metrics.add(Metric::StageTime, &["reward", "busy"], 0.5);
                    metrics.observe(Metric::ResponseLength, &[], 3.0);
                }
            });
        }
        // Scrapes take observations out while others come in.
        scope.spawn(|| (0..100).for_each(|_| drop(metrics.render())));
    });
    let scrape = Exposition::parse(&metrics.render()).unwrap();
    let value = |metric: Metric, name: &str, labels: &[(&str, &str)]| scrape.family(metric.name()).unwrap().value(name, labels);
    let all = (4 * EACH) as f64;
    assert_eq!(value(Metric::GeneratedTokens, Metric::GeneratedTokens.name(), &[]), Some(all));
    assert_eq!(value(Metric::StageTime, Metric::StageTime.name(), &[("stage", "reward"), ("state", "busy")]), Some(all / 2.0));
    assert_eq!(value(Metric::ResponseLength, &format!("{}_count", Metric::ResponseLength.name()), &[]), Some(all));
}

#[test]
fn runs_in_one_process_do_not_see_each_other() {
    let (one, other) = (Metrics::new(), Metrics::new());
    one.set(Metric::Loss, &[], 1.0);
    assert_eq!((one.newest(Metric::Loss, &[]), other.newest(Metric::Loss, &[])), (Some(1.0), None));
    assert!(!other.render().contains(Metric::Loss.name()));
}

#[test]
fn a_logged_row_reaches_the_gauges_of_the_same_keys() {
    let mut metrics = Metrics::new();
    let row: StepMetrics = [(Metric::Loss.key(), 0.5), ("my_own", 2.0), (Metric::Steps.key(), 9.0)]
        .map(|(key, value)| (key.to_owned(), value))
        .into();
    MetricsLogger::log(&mut metrics, 4, &row).unwrap();
    assert_eq!((metrics.newest(Metric::Loss, &[]), metrics.newest(Metric::Steps, &[])), (Some(0.5), Some(0.0)));
}

#[test]
#[should_panic(expected = "add was called on rollflow_loss, which is a gauge")]
fn a_call_that_does_not_fit_the_kind_names_both() {
    Metrics::new().add(Metric::Loss, &[], 1.0);
}

#[test]
#[should_panic(expected = "\"traned\" is no value of the label fate")]
fn a_misspelt_label_value_is_named() {
    Metrics::new().add(Metric::Tokens, &["traned"], 1.0);
}

#[test]
fn a_busy_port_is_an_error_that_names_the_address() {
    let holder = TcpListener::bind(ANY_PORT).unwrap();
    let address = holder.local_addr().unwrap();
    let error = MetricsServer::start(address, Metrics::new(), &[]).unwrap_err();
    assert!(matches!(error, ObserveError::Busy { address: named } if named == address), "{error:?}");
    assert!(error.to_string().contains(&address.to_string()) && error.to_string().contains("--metrics"), "{error}");
}

#[test]
fn health_is_answered_and_other_paths_are_not_found() {
    let server = MetricsServer::start(ANY_PORT, Metrics::new(), &[]).unwrap();
    assert_eq!((get(server.address(), "/healthz").status, get(server.address(), "/nothing").status), (200, 404));
}

/// No web page can read the metrics by a name of its own that points here (DNS rebinding).
#[test]
fn only_known_hosts_are_answered() {
    let server = MetricsServer::start(ANY_PORT, Metrics::new(), &["trainer.lan".to_owned()]).unwrap();
    let (address, port) = (server.address(), server.address().port());
    let asked = |host: &str| get_as(address, "/metrics", host);
    for host in [format!("127.0.0.1:{port}"), format!("localhost:{port}"), "trainer.lan".to_owned(), format!("[::1]:{port}")] {
        assert_eq!(asked(&host).status, 200, "{host}");
    }
    let refused = asked(&format!("evil.example:{port}"));
    assert_eq!(refused.status, 403);
    assert!(refused.body.contains("evil.example") && refused.body.contains("net.allowed_hosts"), "{}", refused.body);
    assert_eq!(get_as(address, "/nothing", "evil.example").status, 403);
}

#[test]
fn dropping_the_server_frees_the_port_and_cuts_connections() {
    let server = MetricsServer::start(ANY_PORT, Metrics::new(), &[]).unwrap();
    let address = server.address();
    assert_eq!(get(address, "/healthz").status, 200);
    // A client that connected and never asks must not hold the run up.
    let mut silent = TcpStream::connect(address).unwrap();
    drop(server);
    let refused = TcpStream::connect(address).unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::ConnectionRefused);
    let ended = std::io::Read::read(&mut silent, &mut [0]);
    assert!(matches!(ended, Ok(0) | Err(_)), "the silent connection was cut: {ended:?}");
}

#[test]
fn a_live_run_is_scraped_and_its_last_numbers_are_the_reports() {
    let metrics = Metrics::new();
    let server = MetricsServer::start(ANY_PORT, metrics.clone(), &[]).unwrap();
    let (address, deadline) = (server.address(), Instant::now() + Duration::from_secs(60));

    let mut flow = Flow::new("watched");
    let numbers = flow.source("numbers", flow::from_iter(0..20_u64));
    // The first item holds its stage until Prometheus has seen it there, busy: the state is exported before it is left.
    let seen = flow.stage(
        "watched",
        numbers,
        flow::map(move |number: u64| {
            let busy = || {
                let scrape = Exposition::parse(&get(address, "/metrics").body).unwrap();
                let time = Metric::StageTime.name();
                scrape.family(time)?.value(time, &[("stage", "watched"), ("state", "busy")])
            };
            while number == 0 && busy().is_none_or(|seconds| seconds == 0.0) {
                assert!(Instant::now() < deadline, "the stage's time never reached Prometheus");
                std::thread::sleep(Duration::from_millis(20));
            }
            number
        }),
    );
    flow.sink("count", seen, |_: u64| {});
    let report = sampled(flow.stats(), &metrics, &std::env::temp_dir(), || flow.run(Until::finished())).unwrap().unwrap();

    let scrape = Exposition::parse(&get(address, "/metrics").body).unwrap();
    let value = |metric: Metric, labels: &[(&str, &str)]| {
        scrape.family(metric.name()).and_then(|family| family.value(metric.name(), labels))
    };
    for stage in &report.stages {
        let seconds =
            State::ALL.map(|state| value(Metric::StageTime, &[("stage", &stage.name), ("state", state.name())]).unwrap());
        let wall = stage.workers.iter().map(|worker| worker.wall).sum::<u64>() as f64 / 1e9;
        assert!((seconds.iter().sum::<f64>() - wall).abs() < 1e-6, "{}: {seconds:?} do not sum to {wall}", stage.name);
        assert_eq!(value(Metric::StageItemsIn, &[("stage", &stage.name)]), Some(stage.items_in as f64));
        assert_eq!(value(Metric::StageItemsOut, &[("stage", &stage.name)]), Some(stage.items_out as f64));
    }
    for edge in &report.edges {
        let ends = [("from", edge.from.as_str()), ("to", edge.to.as_str())];
        assert_eq!(value(Metric::EdgeItems, &ends), Some(0.0));
        assert_eq!(value(Metric::EdgeCapacityItems, &ends), Some(edge.capacity.items as f64));
        assert_eq!(value(Metric::EdgeCapacityTokens, &ends), Some(edge.capacity.tokens as f64));
    }
    assert_eq!(report.edges.len(), 2);
}
