//! Brings a flow's live statistics into the metrics and keeps the progress line moving, a few times a second.
//!
//! Time by state is exported while a stage is still in the state, so that a stalled stage is
//! visible (law F4). The sampler owns one named thread. Dropping it exports a last time and joins
//! the thread (law F3).

use std::collections::BTreeMap;
use std::path::Path;
use std::thread::JoinHandle;
use std::time::Duration;

use crossbeam_channel::{RecvTimeoutError, Sender};

use super::demand::Demand;
use super::machine::MachineSampler;
use super::progress::Progress;
use super::{Baseline, Console, Metric, Metrics, ObserveError};
use crate::flow::{Report, State, Stats};

/// Fresher than any scrape, and an export of twenty stages costs some ten microseconds.
const INTERVAL: Duration = Duration::from_millis(250);

/// Times and sizes of the machine, in samples of the stages.
const EACH: u32 = 4;

/// Calls `run`, which runs the flow of `stats`, and brings the statistics into `metrics` meanwhile, with
/// those of this process, its GPUs and the disk that `folder` is on.
///
/// # Errors
/// The machine gives no thread; then `run` is not called.
pub fn sampled<R>(stats: Stats, metrics: &Metrics, folder: &Path, run: impl FnOnce() -> R) -> Result<R, ObserveError> {
    let _sampler = StageSampler::start(stats, metrics.clone(), Some(folder), None)?;
    Ok(run())
}

/// Calls `run` like [`sampled`], and shows progress on standard error, below the lines of `console`,
/// for a run of `total` steps that begins after `taken` steps: redrawn on a terminal, elsewhere a
/// plain line every few seconds.
pub fn sampled_with_progress<R>(
    stats: Stats,
    metrics: &Metrics,
    folder: &Path,
    console: &Console,
    total: u64,
    taken: u64,
    run: impl FnOnce() -> R,
) -> Result<R, ObserveError> {
    let progress = Progress::new(console, total, taken, metrics);
    let _sampler = StageSampler::start(stats, metrics.clone(), Some(folder), Some(progress))?;
    Ok(run())
}

/// A running sampler; dropping it ends it.
#[derive(Debug)]
pub(super) struct StageSampler {
    stop: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl StageSampler {
    pub(super) fn start(
        stats: Stats,
        metrics: Metrics,
        folder: Option<&Path>,
        mut progress: Option<Progress>,
    ) -> Result<Self, ObserveError> {
        let (stop, stopped) = crossbeam_channel::bounded(0);
        let before = metrics.baseline();
        let folder = folder.map(Path::to_owned);
        let sample = move || {
            let (mut demand, machine) = (Demand::default(), MachineSampler::new(folder));
            for number in 0_u32.. {
                if number.is_multiple_of(EACH) {
                    machine.export(&metrics);
                }
                let ending = !matches!(stopped.recv_timeout(INTERVAL), Err(RecvTimeoutError::Timeout));
                let report = stats.report();
                let limit = report.as_ref().and_then(Report::limit);
                if let Some(report) = &report {
                    export(report, &before, &metrics);
                    demand.record(report, &metrics);
                }
                if ending {
                    progress.into_iter().for_each(|progress| progress.finish(&metrics, limit.as_deref()));
                    return;
                }
                progress.iter_mut().for_each(|progress| progress.update(&metrics, limit.as_deref()));
            }
        };
        let thread = std::thread::Builder::new().name("stage-sampler".into()).spawn(sample);
        let what = || "the thread that samples the stages".to_owned();
        let thread = thread.map_err(|source| ObserveError::Thread { what: what(), source })?;
        Ok(StageSampler { stop: Some(stop), thread: Some(thread) })
    }
}

impl Drop for StageSampler {
    fn drop(&mut self) {
        drop(self.stop.take());
        // A panic of the thread was already printed, and a destructor cannot return an error.
        self.thread.take().map(JoinHandle::join);
    }
}

/// Writes what a flow did so far into the metrics, on top of their totals `before` it.
fn export(report: &Report, before: &Baseline, metrics: &Metrics) {
    let raise = |metric, labels: &[&str], total: f64| metrics.absolute(metric, labels, before.total(metric, labels) + total);
    for stage in &report.stages {
        let (name, time) = (stage.name.as_str(), stage.time());
        for state in State::ALL {
            raise(Metric::StageTime, &[name, state.name()], time.of(state) as f64 / 1e9);
        }
        raise(Metric::StageItemsIn, &[name], stage.items_in as f64);
        raise(Metric::StageItemsOut, &[name], stage.items_out as f64);
    }
    // Two stages may be joined by several edges; together they are one series.
    let mut edges = BTreeMap::<[&str; 2], [f64; 4]>::new();
    for edge in &report.edges {
        let sums = edges.entry([&edge.from, &edge.to]).or_default();
        let parts = [edge.depth_items as f64, edge.depth_tokens as f64, edge.capacity.items as f64, edge.capacity.tokens as f64];
        sums.iter_mut().zip(parts).for_each(|(sum, part)| *sum += part);
    }
    for (ends, [items, tokens, capacity_items, capacity_tokens]) in edges {
        metrics.set(Metric::EdgeItems, &ends, items);
        metrics.set(Metric::EdgeTokens, &ends, tokens);
        metrics.set(Metric::EdgeCapacityItems, &ends, capacity_items);
        metrics.set(Metric::EdgeCapacityTokens, &ends, capacity_tokens);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::flow::{Capacity, EdgeReport, Ended, StageReport, Times};

    fn stage(name: &str, seconds: [(State, u64); 2]) -> StageReport {
        let mut time = Times::default();
        seconds.into_iter().for_each(|(state, seconds)| time.add(state, seconds * SECOND));
        time.wall = time.total();
        let workers = vec![time; 2];
        StageReport { name: name.into(), advice: String::new(), workers, items_in: 5, items_out: 4, tokens_in: 0, tokens_out: 0 }
    }

    const SECOND: u64 = 1_000_000_000;

    fn report() -> Report {
        let stages = vec![
            stage("prompts", [(State::Busy, 1), (State::Credit, 3)]),
            stage("generate", [(State::Busy, 9), (State::Starved, 1)]),
        ];
        let (from, to) = (String::from("prompts"), String::from("generate"));
        let capacity = Capacity::items(4).tokens(100);
        let edge = EdgeReport {
            from,
            to,
            capacity,
            sent: 5,
            tokens_sent: 75,
            received: 3,
            depth_items: 2,
            depth_tokens: 30,
            credit_out: 30,
        };
        let (ended, wall, edges) = (Ended::Running, 10 * SECOND, vec![edge.clone(), edge]);
        Report { ended, wall, flow: "test".into(), stages, edges, warnings: Vec::new() }
    }

    #[test]
    fn workers_and_parallel_edges_are_summed_and_the_limit_is_the_stage_that_others_wait_for() {
        let metrics = Metrics::new();
        (0..2).for_each(|_| export(&report(), &Baseline::default(), &metrics));
        assert_eq!(metrics.newest(Metric::StageTime, &["generate", "busy"]), Some(18.0));
        assert_eq!(metrics.newest(Metric::StageTime, &["generate", "weights"]), Some(0.0));
        assert_eq!(metrics.newest(Metric::StageItemsIn, &["generate"]), Some(5.0));
        let edge = [Metric::EdgeItems, Metric::EdgeTokens, Metric::EdgeCapacityItems, Metric::EdgeCapacityTokens];
        assert_eq!(edge.map(|metric| metrics.newest(metric, &["prompts", "generate"])), [4.0, 60.0, 8.0, 200.0].map(Some));
        assert_eq!(report().limit().as_deref(), Some("generate busy 90%"));
        assert_eq!(Report { stages: Vec::new(), ..report() }.limit(), None);
    }

    #[test]
    fn stages_of_a_later_flow_add_to_those_of_the_same_name() {
        let metrics = Metrics::new();
        for flows in [1.0, 2.0] {
            let before = metrics.baseline();
            (0..2).for_each(|_| export(&report(), &before, &metrics));
            assert_eq!(metrics.newest(Metric::StageTime, &["generate", "busy"]), Some(18.0 * flows));
            assert_eq!(metrics.newest(Metric::StageItemsOut, &["generate"]), Some(4.0 * flows));
        }
    }
}
