//! Observations do not pile up in a run that no scraper reads.

use std::process::Command;

use rollflow::observe::{Metric, Metrics};

const CHILD: &str = "ROLLFLOW_METRICS_MEMORY_CHILD";
const OBSERVATIONS: u64 = 4_000_000;

fn resident_kib() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
    line.trim().trim_end_matches(" kB").parse().unwrap()
}

/// Not a test of its own: the process whose memory the test below reads.
#[test]
fn child() {
    if std::env::var_os(CHILD).is_none() {
        return;
    }
    let metrics = Metrics::new();
    metrics.observe(Metric::ResponseLength, &[], 1.0);
    let before = resident_kib();
    (0..OBSERVATIONS).for_each(|_| metrics.observe(Metric::ResponseLength, &[], 7.0));
    println!("\ngrown by {} KiB", resident_kib().saturating_sub(before));
}

#[test]
fn unscraped_observations_do_not_grow_the_process() {
    let mut child = Command::new(std::env::current_exe().unwrap());
    let output = child.args(["--exact", "metrics_memory::child", "--nocapture"]).env(CHILD, "").output().unwrap();
    let out = String::from_utf8(output.stdout).unwrap();
    let grown = out.lines().find_map(|line| line.strip_prefix("grown by ")?.strip_suffix(" KiB"));
    let grown: u64 = grown.unwrap_or_else(|| panic!("{out}")).parse().unwrap();
    // Kept one by one they would take 8 bytes each, 31 MiB.
    assert!(grown < 8 * 1024, "{grown} KiB for {OBSERVATIONS} observations");
}
