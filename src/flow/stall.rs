//! Waits of the workers in a run that can't make progress (law F7).

use std::fmt;

use super::clock::{Meter, State};
use super::stats::Board;

/// Wait of one worker.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StageWait {
    /// Name of the stage.
    pub stage: String,
    /// Index of the worker, from 0.
    pub worker: usize,
    /// Kind of wait. *Busy* is one for something outside the engine, in the stage's own code.
    pub state: State,
    /// Object of the wait, such as `input from generate`: stages that make or take items or publish
    /// weights, or the calls that raise the window.
    pub waits_for: String,
}

impl StageWait {
    /// Returns true if code outside the graph may end the wait.
    pub(crate) fn may_end_from_outside(&self) -> bool {
        matches!(self.state, State::Credit | State::Weights | State::Busy)
    }
}

impl fmt::Display for StageWait {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", self.stage)?;
        if self.worker > 0 {
            write!(f, " (worker {})", self.worker)?;
        }
        write!(f, " waits for {}", self.waits_for)
    }
}

/// Formats waits as the list in an error.
pub(crate) fn listed(waits: &[StageWait]) -> String {
    waits.iter().map(|wait| format!("\n- {wait}")).collect()
}

impl Board {
    /// Returns the wait of every worker that is not gone.
    pub(crate) fn waits(&self) -> Vec<StageWait> {
        let wait = |node: usize, worker: usize, meter: &Meter| {
            let state = meter.state()?;
            let waits_for = match state {
                State::Busy => "something outside the graph".to_owned(),
                State::Starved => format!("input from {}", self.producers(node, worker)),
                State::Blocked => format!("room on its edge to {}", self.full_consumers(node)),
                State::Credit => self.credit(node),
                State::Weights => self.weights(node, meter.wanted()),
            };
            Some(StageWait { stage: self.graph.name(node).to_owned(), worker, state, waits_for })
        };
        let nodes = self.meters.iter().enumerate();
        nodes.flat_map(|(node, meters)| meters.iter().enumerate().filter_map(move |(at, meter)| wait(node, at, meter))).collect()
    }

    /// Returns the producers of a worker's input. Each worker of a merge has its own; other workers
    /// share one.
    fn producers(&self, node: usize, worker: usize) -> String {
        let inputs = self.graph.edges.iter().filter(|edge| edge.to == Some(node));
        let names: Vec<&str> = inputs.map(|edge| self.graph.name(edge.from)).collect();
        match names.get(worker).filter(|_| names.len() > 1) {
            Some(own) => (*own).to_owned(),
            None => names.join(", "),
        }
    }

    /// Returns the consumers at full edges, or all if none is full.
    fn full_consumers(&self, node: usize) -> String {
        let out = self.graph.edges.iter().zip(&self.gauges).filter(|(edge, _)| edge.from == node);
        let (full, others): (Vec<_>, Vec<_>) = out.partition(|(_, gauge)| {
            // An empty edge has room for any item.
            let flowed = gauge.read();
            flowed.sent > flowed.received
        });
        let shown = if full.is_empty() { others } else { full };
        let names: Vec<&str> = shown.into_iter().filter_map(|(edge, _)| edge.to).map(|to| self.graph.name(to)).collect();
        names.join(", ")
    }

    fn credit(&self, node: usize) -> String {
        let Some(window) = &self.graph.nodes[node].spec.window else { return "something outside the graph".to_owned() };
        let raised_by = window.who_raises().map(|who| format!(" ({who} does)")).unwrap_or_default();
        let (admitted, limit) = (window.admitted(), window.limit());
        format!("credit: its window has admitted {admitted} of {limit} items, and nothing raises it{raised_by}")
    }

    fn weights(&self, node: usize, at_least: u64) -> String {
        let edges = self.graph.weights.iter().filter(|edge| edge.to == node);
        let publishers: Vec<&str> = edges.map(|edge| self.graph.name(edge.from)).collect();
        let wanted = match at_least {
            0 => "the first weights".to_owned(),
            version => format!("weights of version {version} or newer"),
        };
        match &publishers[..] {
            [] => format!("{wanted}, which no stage of the graph publishes"),
            from => format!("{wanted} from {}", from.join(", ")),
        }
    }
}
