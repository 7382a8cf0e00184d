//! Report of a run: a row per stage and per edge, and one line that names the bottleneck (law F4).

use std::fmt;

use super::Capacity;
use super::clock::{State, Times};
use super::render::count;

/// Row of one stage.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StageReport {
    /// Name.
    pub name: String,
    /// Change that helps when it is the bottleneck.
    pub advice: String,
    /// Time of each worker.
    pub workers: Vec<Times>,
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
    /// Sum over all workers.
    pub fn time(&self) -> Times {
        self.workers.iter().copied().sum()
    }

    /// Share of the workers' time in `state`, from 0 to 1.
    pub fn share(&self, state: State) -> f64 {
        let time = self.time();
        time.of(state) as f64 / time.wall.max(1) as f64
    }
}

/// Row of one edge.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EdgeReport {
    /// Producer.
    pub from: String,
    /// Consumer.
    pub to: String,
    /// Capacity.
    pub capacity: Capacity,
    /// Items that entered.
    pub sent: u64,
    /// Tokens of the items that entered.
    pub tokens_sent: u64,
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
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ended {
    /// None yet: the report is of one moment of the run.
    Running,
    /// Finished: sources were exhausted, or the goal was reached.
    Finished,
    /// Drained by Ctrl-C or [`Control::drain`](super::Control::drain).
    Drained,
    /// Stopped by a second Ctrl-C or [`Control::stop`](super::Control::stop).
    Stopped,
    /// Failed: a stage failed, or no stage could make progress.
    Failed,
}

/// Report of a run, after its end or at one moment of it. Its `Display` is a table, with shares of
/// the workers' time by state.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Report {
    /// End.
    pub ended: Ended,
    /// Nanoseconds from begin to end, or until now.
    pub wall: u64,
    /// Name of the flow.
    pub flow: String,
    /// Stages, in the order of declaration.
    pub stages: Vec<StageReport>,
    /// Edges.
    pub edges: Vec<EdgeReport>,
    /// Warnings about the graph.
    pub warnings: Vec<String>,
}

impl Report {
    /// Report of a flow that did not begin because the program was interrupted before.
    pub fn before(flow: &str) -> Self {
        let (stages, edges, warnings) = (Vec::new(), Vec::new(), Vec::new());
        Report { ended: Ended::Drained, wall: 0, flow: flow.to_owned(), stages, edges, warnings }
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

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ended = match self.ended {
            Ended::Running => "runs",
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
            rows.push(vec![format!("{} → {}", edge.from, edge.to), capacity, count(edge.received), count(edge.depth_items)]);
        }
        table(f, &rows)?;
        for warning in &self.warnings {
            writeln!(f, "warning: {warning}")?;
        }
        f.write_str(&self.bottleneck())
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
