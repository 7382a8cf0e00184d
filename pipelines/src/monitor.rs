//! What Prometheus and Grafana need for runs: scrape configurations, rules and alerts, and a dashboard.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use rollflow::observe::Metric;
use rollflow::util::atomic_file;
use serde_json::{Value, json};

/// Recording rules and alerts.
pub const RULES: &str = include_str!("../../monitoring/rules.yml");

/// A chart of the dashboard: title, unit of Grafana, and queries, each with its legend.
struct Panel {
    title: &'static str,
    unit: &'static str,
    queries: Vec<(String, &'static str)>,
}

fn panel<const N: usize>(title: &'static str, unit: &'static str, queries: [(String, &'static str); N]) -> Panel {
    Panel { title, unit, queries: queries.into() }
}

/// A metric of the chosen runs.
fn of(metric: Metric) -> String {
    with(metric, "")
}

/// The same with further conditions on labels.
fn with(metric: Metric, labels: &str) -> String {
    let separator = if labels.is_empty() { "" } else { "," };
    format!("{}{{instance=~\"$instance\"{separator}{labels}}}", metric.name())
}

fn rate(series: String) -> String {
    format!("rate({series}[$__rate_interval])")
}

/// Mean of a histogram's newest observations.
fn mean(metric: Metric) -> String {
    let part = |end: &str| rate(of(metric).replacen(metric.name(), &format!("{}_{end}", metric.name()), 1));
    format!("{} / {}", part("sum"), part("count"))
}

/// A percentile of a histogram's newest observations.
fn percentile(share: f64, metric: Metric, by: &str) -> String {
    let buckets = rate(of(metric).replacen(metric.name(), &format!("{}_bucket", metric.name()), 1));
    format!("histogram_quantile({share}, sum by (instance, le{by}) ({buckets}))")
}

/// The charts by row. Those of the rows "Servers", "GPUs", "Evaluation" and "Environments" have data in
/// runs with such parts.
fn rows() -> Vec<(&'static str, Vec<Panel>)> {
    use Metric::*;
    let share = format!("{time} / ignoring(state) group_left sum without(state) ({time})", time = rate(of(StageTime)));
    let clipped = "clipped";
    vec![
        (
            "Learning",
            vec![
                panel("Reward", "short", [(of(RewardMean), "mean"), (of(RewardMin), "smallest"), (of(RewardMax), "largest")]),
                panel("Loss", "short", [(of(Loss), "loss")]),
                panel("Entropy", "short", [(of(Entropy), "nats")]),
                panel("Gradient norm", "short", [(of(GradNorm), "before clipping"), (of(GradNormClipped), clipped)]),
                panel(
                    "KL and clipping",
                    "short",
                    [(of(ApproxKl), "KL from the policy that sampled"), (of(ClipFraction), "clipped tokens")],
                ),
                panel(
                    "Gap between generator and trainer",
                    "short",
                    [(of(LogProbGapMean), "mean, nats"), (of(GapWarning), "warning")],
                ),
                panel("Length of responses", "short", [(of(LengthFinishedMean), "finished"), (of(LengthTrainedMean), "trained")]),
                panel("Groups with a success", "percentunit", [(of(PassRate), "share")]),
            ],
        ),
        (
            "Throughput",
            vec![
                panel(
                    "Tokens per second",
                    "short",
                    [(rate(of(GeneratedTokens)), "generated"), (rate(with(Tokens, "fate=\"trained\"")), "trained")],
                ),
                panel("Time of the stages", "percentunit", [(share, "{{stage}} {{state}}")]),
                panel(
                    "Fill of the edges",
                    "percentunit",
                    [(format!("{} / {}", of(EdgeItems), of(EdgeCapacityItems)), "{{from}} → {{to}}")],
                ),
                panel("Steps", "short", [(of(Step), "taken"), (of(PlannedSteps), "planned")]),
                panel(
                    "Durations",
                    "s",
                    [(mean(StepTime), "step"), (mean(SyncTime), "weight sync"), (mean(RewardTime), "reward of a group")],
                ),
                panel(
                    "Checkpoints",
                    "s",
                    [(format!("time() - {}", of(CheckpointSaved)), "age of the newest"), (mean(CheckpointTime), "time to write")],
                ),
            ],
        ),
        (
            "Staleness and ledger",
            vec![
                panel(
                    "Staleness of samples",
                    "short",
                    [
                        (percentile(0.5, SampleStaleness, ""), "median"),
                        (of(StalenessMax), "largest"),
                        (of(StalenessBound), "bound"),
                    ],
                ),
                panel("Generated tokens by their fate", "short", [(rate(of(Tokens)), "{{fate}}")]),
                panel("Ledger of tokens", "short", [(of(LedgerTokens), "{{fate}}")]),
                panel("Imbalance of the ledger", "short", [(of(LedgerImbalance), "{{what}}")]),
                panel("Weight versions", "short", [(of(WeightVersion), "{{role}}")]),
                panel("Dropped groups", "short", [(rate(of(GroupsDropped)), "{{reason}}")]),
            ],
        ),
        (
            "Servers",
            vec![
                panel("State", "short", [(with(EngineState, "state!=\"serving\""), "{{engine}} {{state}}")]),
                panel("Tokens per second", "short", [(rate(of(EngineTokens)), "{{engine}}")]),
                panel("Time to the first token", "s", [(percentile(0.9, EngineFirstToken, ", engine"), "{{engine}}, 9 in 10")]),
                panel("Versions", "short", [(of(EngineVersion), "{{engine}}")]),
                panel("Failed requests", "short", [(rate(of(EngineErrors)), "{{engine}} {{kind}}")]),
                panel(
                    "Requests at a time",
                    "short",
                    [(of(EngineInFlight), "{{engine}}"), (of(EngineLimit), "{{engine}}, limit")],
                ),
            ],
        ),
        (
            "Evaluation",
            vec![panel("Accuracy", "percentunit", [(of(EvalGreedyAccuracy), "greedy"), (of(EvalAccuracy), "sampled")])],
        ),
        (
            "Environments",
            vec![
                panel(
                    "Time of a step",
                    "s",
                    [(mean(EnvironmentTime), "mean"), (percentile(0.9, EnvironmentTime, ""), "9 in 10")],
                ),
                panel("Rollouts by their end", "short", [(rate(of(RolloutStops)), "{{reason}}")]),
            ],
        ),
        (
            "Machine",
            vec![
                panel("Processor", "short", [(rate(of(ProcessCpu)), "cores in use")]),
                panel("Memory", "bytes", [(of(ProcessMemory), "resident")]),
                panel("Free disk", "bytes", [(of(DiskFree), "free")]),
            ],
        ),
        (
            "GPUs",
            vec![
                panel("Memory", "bytes", [(of(GpuMemory), "{{gpu}}"), (of(GpuMemoryTotal), "{{gpu}}, total")]),
                panel("Use", "percentunit", [(of(GpuUse), "{{gpu}}")]),
            ],
        ),
    ]
}

/// The dashboard, in Grafana's format.
pub fn dashboard() -> Value {
    const WIDTH: usize = 8;
    const HEIGHT: usize = 7;
    let source = json!({"type": "prometheus", "uid": "${source}"});
    let (mut panels, mut y) = (Vec::new(), 0);
    for (title, charts) in rows() {
        let place = json!({"h": 1, "w": 24, "x": 0, "y": y});
        panels.push(json!({"type": "row", "title": title, "gridPos": place, "collapsed": false, "panels": []}));
        y += 1;
        for (at, Panel { title, unit, queries }) in charts.iter().enumerate() {
            let place = json!({"h": HEIGHT, "w": WIDTH, "x": WIDTH * (at % 3), "y": y + HEIGHT * (at / 3)});
            let targets: Vec<Value> = queries
                .iter()
                .zip('A'..)
                .map(|((query, legend), id)| {
                    // Several runs may be chosen.
                    let legend = format!("{legend} {{{{instance}}}}");
                    json!({"refId": id, "expr": query, "legendFormat": legend, "datasource": source})
                })
                .collect();
            panels.push(json!({
                "type": "timeseries", "title": title, "gridPos": place, "datasource": source, "targets": targets,
                "fieldConfig": {"defaults": {"unit": unit, "custom": {"lineWidth": 1, "fillOpacity": 8}}, "overrides": []},
                "options": {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}},
            }));
        }
        y += HEIGHT * charts.len().div_ceil(3);
    }
    for (panel, id) in panels.iter_mut().zip(1..) {
        panel["id"] = json!(id);
    }
    json!({
        "uid": "rollflow", "title": "rollflow", "tags": ["rollflow"], "schemaVersion": 39, "version": 1, "editable": true,
        "refresh": "10s", "time": {"from": "now-1h", "to": "now"}, "panels": panels,
        "templating": {"list": [
            {"name": "source", "type": "datasource", "query": "prometheus", "label": "Prometheus"},
            {
                "name": "instance", "type": "query", "label": "Run", "datasource": source, "multi": true, "includeAll": true, "refresh": 2,
                "query": {"query": format!("label_values({}, instance)", Metric::BuildInfo.name()), "refId": "instance"},
            },
        ]},
    })
}

/// Configuration of a Prometheus that asks these addresses, such as 127.0.0.1:9464.
pub fn prometheus(addresses: &[String]) -> String {
    let targets: Vec<String> = addresses.iter().map(|address| format!("\"{address}\"")).collect();
    format!(
        "global:\n  scrape_interval: 5s\n  evaluation_interval: 15s\n\nrule_files: [rules.yml]\n\nscrape_configs:\n  - job_name: rollflow\n    \
         static_configs:\n      - targets: [{}]\n",
        targets.join(", ")
    )
}

/// Scrape configuration for Kubernetes, which finds pods of runs by their annotations.
pub const KUBERNETES: &str = include_str!("../../monitoring/kubernetes.yml");

/// Writes all files into `folder`, and returns their paths.
///
/// # Errors
/// A file can't be written.
pub fn write(folder: &Path, addresses: &[String]) -> Result<Vec<PathBuf>> {
    let files = [
        ("prometheus.yml", prometheus(addresses)),
        ("rules.yml", RULES.to_owned()),
        ("dashboard.json", format!("{:#}\n", dashboard())),
        ("kubernetes.yml", KUBERNETES.to_owned()),
    ];
    atomic_file::create_folder(folder).with_context(|| format!("making {}", folder.display()))?;
    let put = |(name, text): (&str, String)| {
        let path = folder.join(name);
        atomic_file::write(&path, text).with_context(|| format!("writing {}", path.display()))?;
        Ok(path)
    };
    files.into_iter().map(put).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_dashboard_in_the_repository_is_up_to_date() {
        let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("../monitoring/dashboard.json");
        let text = format!("{:#}\n", dashboard());
        if std::env::var_os("ROLLFLOW_WRITE_DOCS").is_some() {
            std::fs::write(&file, &text).unwrap();
        }
        assert!(std::fs::read_to_string(file).unwrap() == text, "run ROLLFLOW_WRITE_DOCS=1 cargo test --workspace monitor");
    }

    /// Rules that name a metric that is not there would never fire, and nothing would say so.
    #[test]
    fn every_metric_of_the_rules_is_in_the_catalogue() {
        let known = |name: &str| {
            let plain = ["_sum", "_count", "_bucket"].iter().find_map(|end| name.strip_suffix(end)).unwrap_or(name);
            Metric::ALL.iter().any(|metric| [name, plain].contains(&metric.name()))
        };
        let words = RULES.split(|c: char| !(c.is_ascii_alphanumeric() || "_:".contains(c)));
        let named: Vec<&str> = words.filter(|word| word.starts_with("rollflow_")).collect();
        assert!(named.len() > 30);
        assert_eq!(named.into_iter().filter(|name| !known(name)).collect::<Vec<_>>(), Vec::<&str>::new());
        assert!(!known("rollflow_step_seconds"));
    }

    #[test]
    fn every_alert_has_its_section_in_the_documents() {
        let page = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/how_to/alerts.md");
        let page = std::fs::read_to_string(page).unwrap();
        let alerts: Vec<&str> = RULES.lines().filter_map(|line| line.trim().strip_prefix("- alert: ")).collect();
        assert_eq!(alerts.len(), RULES.matches("runbook: docs/how_to/alerts.md#rollflow").count());
        for alert in alerts {
            assert!(page.contains(&format!("\n## {alert}\n")), "docs/how_to/alerts.md has no section {alert}");
            assert!(RULES.contains(&format!("#{}\n", alert.to_lowercase())), "{alert}");
        }
    }
}
