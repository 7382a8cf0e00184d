//! Live view of a run: the rows of the final report, at any time, from any thread.

use std::sync::{Arc, OnceLock};

use super::clock::{Clock, Meter};
use super::edge::Gauge;
use super::plan::{Graph, Kind, NodePlan};
use super::report::{EdgeReport, Ended, Report, StageReport};

/// Live view of a run; clones read the same run. A reading costs the run one uncontended lock per
/// worker.
#[derive(Clone, Debug, Default)]
pub struct Stats(Arc<OnceLock<Board>>);

/// Everything that is measured in a run.
#[derive(Debug)]
pub(crate) struct Board {
    pub(crate) clock: Clock,
    pub(crate) graph: Graph,
    /// By node, by worker.
    pub(crate) meters: Vec<Vec<Arc<Meter>>>,
    /// By edge.
    pub(crate) gauges: Vec<Arc<Gauge>>,
    pub(crate) warnings: Vec<String>,
}

impl Stats {
    /// Returns the report until now; `None` before the run started.
    pub fn report(&self) -> Option<Report> {
        self.0.get().map(|board| board.report(Ended::Running))
    }

    pub(crate) fn board(&self) -> Option<&Board> {
        self.0.get()
    }

    pub(crate) fn publish(&self, board: Board) -> &Board {
        self.0.get_or_init(|| board)
    }
}

impl Board {
    pub(crate) fn report(&self, ended: Ended) -> Report {
        let stages = self.graph.nodes.iter().zip(&self.meters).map(|(node, meters)| {
            use std::sync::atomic::Ordering::Relaxed;
            let sum = |of: fn(&Meter) -> u64| meters.iter().map(|meter| of(meter)).sum();
            StageReport {
                name: node.name.clone(),
                advice: advice(node),
                workers: meters.iter().map(|meter| meter.read()).collect(),
                items_in: sum(|meter| meter.items_in.load(Relaxed)),
                items_out: sum(|meter| meter.items_out.load(Relaxed)),
                tokens_in: sum(|meter| meter.tokens_in.load(Relaxed)),
                tokens_out: sum(|meter| meter.tokens_out.load(Relaxed)),
            }
        });
        let edges = self.graph.edges.iter().zip(&self.gauges).map(|(edge, gauge)| {
            let flowed = gauge.read();
            EdgeReport {
                from: self.graph.name(edge.from).into(),
                to: edge.to.map_or_else(String::new, |to| self.graph.name(to).into()),
                capacity: gauge.capacity,
                sent: flowed.sent,
                tokens_sent: flowed.tokens_sent,
                received: flowed.received,
                depth_items: flowed.sent.saturating_sub(flowed.received),
                depth_tokens: flowed.tokens_sent.saturating_sub(flowed.tokens_received),
                credit_out: flowed.credit_out as u64,
            }
        });
        let (wall, flow, warnings) = (self.clock.now(), self.graph.name.clone(), self.warnings.clone());
        Report { ended, wall, flow, stages: stages.collect(), edges: edges.collect(), warnings }
    }
}

fn advice(node: &NodePlan) -> String {
    let usual = match node.kind {
        Kind::Source => "speed: the others wait for what it makes",
        Kind::Sink => "speed: the others wait for it to take more",
        Kind::Tee | Kind::Merge => "to carry at a time: fewer, larger items",
        Kind::Stage | Kind::Task if node.replicable => "workers",
        Kind::Stage | Kind::Task => "threads",
    };
    let more = || format!("give it more {}", node.spec.knob.as_deref().unwrap_or(usual));
    node.spec.advice.clone().unwrap_or_else(more)
}
