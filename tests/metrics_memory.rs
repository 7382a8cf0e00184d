//! Observations do not pile up in a run that nobody scrapes. A binary of its own, since it reads the whole process' memory.

#[cfg(target_os = "linux")]
#[test]
fn unscraped_observations_do_not_grow_the_process() {
    use rollflow::observe::{Metric, Metrics};

    const OBSERVATIONS: u64 = 4_000_000;
    let resident_kib = || -> u64 {
        let status = std::fs::read_to_string("/proc/self/status").unwrap();
        let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
        line.trim().trim_end_matches(" kB").parse().unwrap()
    };
    let lengths = Metrics::new().series(Metric::ResponseLength, &[]);
    lengths.observe(1.0);
    let before = resident_kib();
    (0..OBSERVATIONS).for_each(|_| lengths.observe(7.0));
    let grown = resident_kib().saturating_sub(before);
    // Kept one by one they would take 8 bytes each, 31 MiB.
    assert!(grown < 8 * 1024, "{grown} KiB for {OBSERVATIONS} observations");
}
