//! Waits of the workers in a run that can't make progress (law F7).

use std::fmt;

use super::clock::State;
use super::stats::Board;

/// Wait of one worker.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StageWait {
    /// Name of the stage.
    pub stage: String,
    /// Index of the worker, from 0.
    pub worker: usize,
    /// Object of the wait.
    pub waits_for: WaitsFor,
}

/// Object of a worker's wait.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum WaitsFor {
    /// An item from these stages.
    Input {
        /// Producers.
        from: Vec<String>,
    },
    /// Room on the edges to these stages.
    Room {
        /// Consumers.
        to: Vec<String>,
    },
    /// Credit of the source's window.
    Credit {
        /// Items admitted so far.
        admitted: u64,
        /// Items that the window admits in total until it is raised.
        limit: u64,
        /// Calls that raise the window, if declared
        /// ([`Window::raised_by`](super::Window::raised_by)).
        raised_by: Option<&'static str>,
    },
    /// Weights that were not published.
    Weights {
        /// Oldest version that ends the wait; 0: any.
        at_least: u64,
        /// Stages of the graph that publish them.
        from: Vec<String>,
    },
    /// Something outside the engine, in the stage's own code.
    Other,
}

impl WaitsFor {
    /// Returns true if code outside the graph may end the wait.
    pub(crate) fn may_end_from_outside(&self) -> bool {
        matches!(self, WaitsFor::Credit { .. } | WaitsFor::Weights { .. } | WaitsFor::Other)
    }
}

impl fmt::Display for WaitsFor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            WaitsFor::Input { from } => write!(f, "input from {}", from.join(", ")),
            WaitsFor::Room { to } => write!(f, "room on its edge to {}", to.join(", ")),
            WaitsFor::Credit { admitted, limit, raised_by } => {
                write!(f, "credit: its window has admitted {admitted} of {limit} items, and nothing raises it")?;
                raised_by.map_or(Ok(()), |who| write!(f, " ({who} does)"))
            }
            WaitsFor::Weights { at_least, from } => {
                match at_least {
                    0 => f.write_str("the first weights")?,
                    version => write!(f, "weights of version {version} or newer")?,
                }
                match &from[..] {
                    [] => f.write_str(", which no stage of the graph publishes"),
                    from => write!(f, " from {}", from.join(", ")),
                }
            }
            WaitsFor::Other => f.write_str("something outside the graph"),
        }
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
        let workers = self.meters.iter().enumerate().flat_map(|(node, meters)| {
            meters.iter().enumerate().filter_map(move |(worker, meter)| Some((node, worker, meter, meter.state()?)))
        });
        let wait = |(node, worker, meter, state): (usize, usize, &std::sync::Arc<super::clock::Meter>, State)| StageWait {
            stage: self.graph.name(node).to_owned(),
            worker,
            waits_for: match state {
                State::Busy => WaitsFor::Other,
                State::Starved => WaitsFor::Input { from: self.producers(node, worker) },
                State::Blocked => WaitsFor::Room { to: self.full_consumers(node) },
                State::Credit => self.windows[node].as_ref().map_or(WaitsFor::Other, |window| WaitsFor::Credit {
                    admitted: window.admitted(),
                    limit: window.limit(),
                    raised_by: window.who_raises(),
                }),
                State::Weights => WaitsFor::Weights { at_least: meter.wanted(), from: self.publishers(node) },
            },
        };
        workers.map(wait).collect()
    }

    /// Returns the producers of a worker's input. Each worker of a merge has its own; other workers
    /// share one.
    fn producers(&self, node: usize, worker: usize) -> Vec<String> {
        let names: Vec<&str> =
            self.graph.edges.iter().filter(|edge| edge.to == Some(node)).map(|edge| self.graph.name(edge.from)).collect();
        match names.get(worker).filter(|_| names.len() > 1) {
            Some(own) => vec![(*own).to_owned()],
            None => names.into_iter().map(str::to_owned).collect(),
        }
    }

    fn full_consumers(&self, node: usize) -> Vec<String> {
        let out: Vec<_> = self.graph.edges.iter().zip(&self.gauges).filter(|(edge, _)| edge.from == node).collect();
        // An empty edge has room for any item.
        let is_full = |gauge: &super::edge::Gauge| {
            let flowed = gauge.read();
            flowed.sent > flowed.received
        };
        let full = out.iter().filter(|(_, gauge)| is_full(gauge)).collect::<Vec<_>>();
        let shown = if full.is_empty() { out.iter().collect() } else { full };
        shown.into_iter().filter_map(|(edge, _)| edge.to).map(|to| self.graph.name(to).to_owned()).collect()
    }

    fn publishers(&self, node: usize) -> Vec<String> {
        self.graph.weights.iter().filter(|edge| edge.to == node).map(|edge| self.graph.name(edge.from).to_owned()).collect()
    }
}
