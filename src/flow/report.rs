//! What a run did: a row per stage and per edge, and one line that names the bottleneck (law F4).

use std::fmt;

use serde::Serialize;

use super::clock::{State, Times};
use super::render::count;
use super::verdict::{in_short, verdict};
use super::{Capacity, GraphWarning, Kind};

/// A run as of some moment.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Snapshot {
    /// The flow's name.
    pub flow: String,
    /// Nanoseconds since the run began.
    pub wall: u64,
    /// A row per stage, in the order of declaration.
    pub stages: Vec<StageReport>,
    /// A row per edge.
    pub edges: Vec<EdgeReport>,
}

/// One worker's time. `time.total() == wall`, to the nanosecond.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct WorkerTime {
    /// Nanoseconds from its begin to its end, or until now.
    pub wall: u64,
    /// Where they went.
    pub time: Times,
}

/// One stage.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct StageReport {
    /// Its name.
    pub name: String,
    /// What it is.
    pub kind: Kind,
    /// What to give it more of when it is the bottleneck.
    pub knob: String,
    /// Its workers' times.
    pub workers: Vec<WorkerTime>,
    /// Items that it received.
    pub items_in: u64,
    /// Items that it sent; a tee counts every copy.
    pub items_out: u64,
    /// Tokens that it received.
    pub tokens_in: u64,
    /// Tokens that it sent.
    pub tokens_out: u64,
}

impl StageReport {
    /// Nanoseconds by state, over all workers.
    pub fn time(&self) -> Times {
        let mut sum = Times::default();
        for worker in &self.workers {
            State::ALL.iter().for_each(|&state| sum.add(state, worker.time.of(state)));
        }
        sum
    }

    /// The part of its workers' time that went to `state`, from 0 to 1.
    pub fn share(&self, state: State) -> f64 {
        let wall: u64 = self.workers.iter().map(|worker| worker.wall).sum();
        if wall == 0 { 0.0 } else { self.time().of(state) as f64 / wall as f64 }
    }
}

/// One edge.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct EdgeReport {
    /// `from → to`.
    pub name: String,
    /// The producer.
    pub from: String,
    /// The consumer.
    pub to: String,
    /// What it may hold.
    pub capacity: Capacity,
    /// Items that entered.
    pub sent: u64,
    /// Items that were taken out.
    pub received: u64,
    /// Items in the queue. After the run: what was dropped in flight.
    pub depth_items: u64,
    /// Tokens in the queue. After the run: what was dropped in flight.
    pub depth_tokens: u64,
    /// Token credit that is taken; after the run 0.
    pub credit_out: u64,
}

/// How a run came to its end.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Ended {
    /// Its sources were exhausted, or its goal was reached.
    Finished,
    /// It was drained: by Ctrl-C or [`Control::drain`](super::Control::drain).
    Drained,
    /// It was stopped: by a second Ctrl-C or [`Control::stop`](super::Control::stop).
    Stopped,
    /// A stage failed.
    Failed,
}

/// What a run did. Its `Display` is the table; the columns of states are shares of the workers' time.
#[derive(Clone, Debug)]
pub struct Report {
    /// How it ended.
    pub ended: Ended,
    /// Nanoseconds from its begin to its end.
    pub wall: u64,
    /// The flow's name.
    pub flow: String,
    /// A row per stage, in the order of declaration.
    pub stages: Vec<StageReport>,
    /// A row per edge.
    pub edges: Vec<EdgeReport>,
    /// One line: what held the run back, and what to change.
    pub bottleneck: String,
    /// What was unwise about the graph.
    pub warnings: Vec<GraphWarning>,
}

impl Report {
    pub(crate) fn new(snapshot: Snapshot, ended: Ended, warnings: Vec<GraphWarning>) -> Self {
        let bottleneck = verdict(&snapshot);
        let Snapshot { flow, wall, stages, edges } = snapshot;
        Report { ended, wall, flow, stages, edges, bottleneck, warnings }
    }

    /// Of a run that was interrupted before this flow began.
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

    /// A stage by name.
    pub fn stage(&self, name: &str) -> Option<&StageReport> {
        self.stages.iter().find(|stage| stage.name == name)
    }

    /// An edge by its ends' names.
    pub fn edge(&self, from: &str, to: &str) -> Option<&EdgeReport> {
        self.edges.iter().find(|edge| edge.from == from && edge.to == to)
    }
}

impl Snapshot {
    /// One line: what holds the run back, and what to change.
    pub fn bottleneck(&self) -> String {
        verdict(self)
    }

    /// What holds the run back so far, in a few words: `generate busy 93%`.
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

/// The first column to the left, the others to the right.
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
