//! Report of a run: a row per stage and per edge, and one line that names the bottleneck (law F4).

use std::fmt;

use serde::Serialize;

use super::clock::{State, Times};
use super::render::count;
use super::verdict::{in_short, verdict};
use super::{Capacity, GraphWarning, Kind};

/// State of a run at one moment.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Snapshot {
    /// Name of the flow.
    pub flow: String,
    /// Nanoseconds since the run began.
    pub wall: u64,
    /// Stages, in the order of declaration.
    pub stages: Vec<StageReport>,
    /// Edges.
    pub edges: Vec<EdgeReport>,
}

/// Time of one worker. `time.total() == wall`, to the nanosecond.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct WorkerTime {
    /// Nanoseconds from begin to end, or until now.
    pub wall: u64,
    /// Nanoseconds by state.
    pub time: Times,
}

/// Row of one stage.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct StageReport {
    /// Name.
    pub name: String,
    /// Kind of node.
    pub kind: Kind,
    /// Setting to raise when it is the bottleneck.
    pub knob: String,
    /// Times by worker.
    pub workers: Vec<WorkerTime>,
    /// Items received.
    pub items_in: u64,
    /// Items sent; a tee counts every copy.
    pub items_out: u64,
    /// Tokens received.
    pub tokens_in: u64,
    /// Tokens sent.
    pub tokens_out: u64,
}

impl StageReport {
    /// Nanoseconds by state, summed over all workers.
    pub fn time(&self) -> Times {
        let mut sum = Times::default();
        for worker in &self.workers {
            State::ALL.iter().for_each(|&state| sum.add(state, worker.time.of(state)));
        }
        sum
    }

    /// Share of the workers' time in `state`, from 0 to 1.
    pub fn share(&self, state: State) -> f64 {
        let wall: u64 = self.workers.iter().map(|worker| worker.wall).sum();
        if wall == 0 { 0.0 } else { self.time().of(state) as f64 / wall as f64 }
    }
}

/// Row of one edge.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct EdgeReport {
    /// `from → to`.
    pub name: String,
    /// Producer.
    pub from: String,
    /// Consumer.
    pub to: String,
    /// Capacity.
    pub capacity: Capacity,
    /// Items that entered.
    pub sent: u64,
    /// Items that were taken out.
    pub received: u64,
    /// Items in the queue. After the run: items dropped in flight.
    pub depth_items: u64,
    /// Tokens in the queue. After the run: tokens dropped in flight.
    pub depth_tokens: u64,
    /// Token credit in use; 0 after the run.
    pub credit_out: u64,
}

/// End of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Ended {
    /// Finished: sources were exhausted, or the goal was reached.
    Finished,
    /// Drained by Ctrl-C or [`Control::drain`](super::Control::drain).
    Drained,
    /// Stopped by a second Ctrl-C or [`Control::stop`](super::Control::stop).
    Stopped,
    /// Failed: a stage failed, or no stage could make progress.
    Failed,
}

/// Report of a finished run. Its `Display` is a table, with shares of the workers' time by state.
#[derive(Clone, Debug)]
pub struct Report {
    /// End.
    pub ended: Ended,
    /// Nanoseconds from begin to end.
    pub wall: u64,
    /// Name of the flow.
    pub flow: String,
    /// Stages, in the order of declaration.
    pub stages: Vec<StageReport>,
    /// Edges.
    pub edges: Vec<EdgeReport>,
    /// Bottleneck and the setting that moves it, in one line.
    pub bottleneck: String,
    /// Warnings about the graph.
    pub warnings: Vec<GraphWarning>,
}

impl Report {
    pub(crate) fn new(snapshot: Snapshot, ended: Ended, warnings: Vec<GraphWarning>) -> Self {
        let bottleneck = verdict(&snapshot);
        let Snapshot { flow, wall, stages, edges } = snapshot;
        Report { ended, wall, flow, stages, edges, bottleneck, warnings }
    }

    /// Report of a flow that did not begin because the program was interrupted before.
    pub fn before(flow: &str) -> Self {
        let bottleneck = "interrupted before it began".to_owned();
        Report {
            ended: Ended::Drained,
            wall: 0,
            flow: flow.to_owned(),
            stages: vec![],
            edges: vec![],
            bottleneck,
            warnings: vec![],
        }
    }

    /// Returns a stage by name.
    pub fn stage(&self, name: &str) -> Option<&StageReport> {
        self.stages.iter().find(|stage| stage.name == name)
    }

    /// Returns an edge by the names of its ends.
    pub fn edge(&self, from: &str, to: &str) -> Option<&EdgeReport> {
        self.edges.iter().find(|edge| edge.from == from && edge.to == to)
    }
}

impl Snapshot {
    /// Bottleneck and the setting that moves it, in one line.
    pub fn bottleneck(&self) -> String {
        verdict(self)
    }

    /// Bottleneck so far, in a few words: `generate busy 93%`.
    pub fn limit(&self) -> Option<String> {
        in_short(self)
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ended = match self.ended {
            Ended::Finished => "finished",
            Ended::Drained => "drained",
            Ended::Stopped => "stopped",
            Ended::Failed => "failed",
        };
        writeln!(f, "{} {ended} after {:.3} s", self.flow, self.wall as f64 / 1e9)?;
        let states = State::ALL.map(|state| state.name().to_owned());
        let mut rows = vec![cells(["stage", "workers", "in", "out"]).chain(states).collect()];
        for stage in &self.stages {
            let shares = State::ALL.map(|state| format!("{:.1}%", 100.0 * stage.share(state)));
            let counts = [stage.workers.len() as u64, stage.items_in, stage.items_out].map(count);
            rows.push([stage.name.clone()].into_iter().chain(counts).chain(shares).collect());
        }
        table(f, &rows)?;
        rows = vec![cells(["edge", "capacity", "carried", "dropped"]).collect()];
        for edge in &self.edges {
            let Capacity { items, tokens } = edge.capacity;
            let capacity = format!("{} items, {} tokens", count(items as u64), count(tokens as u64));
            rows.push(vec![edge.name.clone(), capacity, count(edge.received), count(edge.depth_items)]);
        }
        table(f, &rows)?;
        for warning in &self.warnings {
            writeln!(f, "warning: {warning}")?;
        }
        f.write_str(&self.bottleneck)
    }
}

fn cells<const N: usize>(texts: [&str; N]) -> impl Iterator<Item = String> {
    texts.map(str::to_owned).into_iter()
}

/// Writes rows with the first column aligned left and the others right.
fn table(f: &mut fmt::Formatter<'_>, rows: &[Vec<String>]) -> fmt::Result {
    let columns = rows.first().map_or(0, Vec::len);
    let width = |column: usize| rows.iter().map(|row| row[column].chars().count()).max().unwrap_or(0);
    let widths: Vec<usize> = (0..columns).map(width).collect();
    for row in rows {
        write!(f, "  {:<1$}", row[0], widths[0])?;
        for (cell, width) in row.iter().zip(&widths).skip(1) {
            write!(f, "  {cell:>width$}")?;
        }
        writeln!(f)?;
    }
    Ok(())
}
