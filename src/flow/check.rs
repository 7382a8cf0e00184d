//! Checks of a graph before it runs. All errors are reported together. Pure functions over plain
//! data.

use std::collections::BTreeMap;
use std::fmt;

use super::{Graph, Kind};

/// Error of a graph: it can't run.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum GraphError {
    /// Empty graph: nothing was declared, or the flow has run already.
    #[error("the graph is empty: declare a source and a sink, and a new flow for every run")]
    Empty,
    /// Name that no thread can have.
    #[error("{name:?} is no name for a stage: use at least one character, and none that is NUL")]
    BadName {
        /// Name.
        name: String,
    },
    /// Name of several stages: reports and metrics need one each.
    #[error("{count} stages are named {name:?}: give each its own name")]
    DuplicateName {
        /// Name.
        name: String,
        /// Number of stages with this name.
        count: usize,
    },
    /// Output without a consumer.
    #[error("nothing consumes the output of {stage:?} ({carries}): wire it to a stage or a sink")]
    DanglingPort {
        /// Producer.
        stage: String,
        /// Type of its items.
        carries: String,
    },
    /// Stage without input.
    #[error("{stage:?} has no input: wire a port to it")]
    NoInput {
        /// Stage.
        stage: String,
    },
    /// Port of another flow.
    #[error("{user:?} was given a port of another flow: use ports of the flow that it belongs to")]
    ForeignPort {
        /// Stage or method that it was given to.
        user: String,
    },
    /// Cycle in the data (law F2).
    #[error("the data goes in a circle: {}; feedback goes over a weights edge", chain.join(" → "))]
    Cycle {
        /// Names along the cycle; the first is repeated at the end.
        chain: Vec<String>,
    },
    /// Edge that no item could enter.
    #[error("the edge {edge} holds no {unit}: set its capacity to at least 1")]
    ZeroCapacity {
        /// `from → to`.
        edge: String,
        /// Items or tokens.
        unit: &'static str,
    },
    /// Stage without workers.
    #[error("{stage:?} has no worker: give it at least 1")]
    NoWorkers {
        /// Stage.
        stage: String,
    },
    /// Several workers of a stage that can't be replicated: workers share no state.
    #[error("{stage:?} asks for {workers} workers but has no replica (it keeps state, or is a source or sink): give it 1")]
    NotReplicable {
        /// Stage.
        stage: String,
        /// Workers that it asks for.
        workers: usize,
    },
    /// Tee without branches, or merge without inputs.
    #[error("{stage:?} is a {kind} of none: give it at least 1")]
    NoBranches {
        /// Tee or merge.
        stage: String,
        /// `tee` or `merge`.
        kind: &'static str,
    },
    /// Window of a stage that is not a source.
    #[error("{stage:?} has a window but is no source: attach the window to the source")]
    MisplacedWindow {
        /// Stage.
        stage: String,
    },
    /// A source that waits for admission which nothing can release.
    #[error("{stage:?} waits for admission that no stage of the graph releases; it is released by {by}")]
    NeverReleased {
        /// Source.
        stage: String,
        /// Calls that release it.
        by: &'static str,
    },
    /// A second value of one type in the run context.
    #[error("`Flow::{call}` shares a second value of its type, and stages take one: share it once")]
    SharedTwice {
        /// Method.
        call: &'static str,
    },
    /// Setting of the run context after the first stage.
    #[error("a setting that stages share was set after a stage was put on the graph (`Flow::{call}`): set it first")]
    LateContext {
        /// Method.
        call: &'static str,
    },
    /// Weights without a reader.
    #[error(
        "{stage:?} publishes weights that nothing reads: give the reading end of the same `weights()` to a stage, or publish none"
    )]
    UnreadWeights {
        /// Publisher.
        stage: String,
    },
    /// Weights without a publisher: their reader would wait for ever.
    #[error("{stage:?} reads weights that nothing publishes: add a stage that publishes them, or keep their publishing end")]
    UnpublishedWeights {
        /// Reader.
        stage: String,
    },
    /// Goal at a sink that does not exist.
    #[error("the run is to end at the sink {name:?}, which does not exist; sinks: {}", sinks.join(", "))]
    UnknownSink {
        /// Name in the goal.
        name: String,
        /// Names of the sinks.
        sinks: Vec<String>,
    },
}

/// Warning about a graph that can run.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum GraphWarning {
    /// More computing threads than cores: the stages slow each other down.
    #[error("the stages compute with {asked} threads on {cores} cores ({shares}): lower threads or workers")]
    ThreadBudget {
        /// Sum over all stages.
        asked: usize,
        /// Cores of the machine.
        cores: usize,
        /// Threads by stage.
        shares: String,
    },
}

/// All errors of a graph.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GraphErrors(pub Vec<GraphError>);

impl fmt::Display for GraphErrors {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0.as_slice() {
            [one] => one.fmt(f),
            many => {
                write!(f, "the graph has {} problems:", many.len())?;
                many.iter().try_for_each(|error| write!(f, "\n- {error}"))
            }
        }
    }
}

impl std::error::Error for GraphErrors {}

impl Graph {
    /// Finds all errors and warnings of the graph on a machine with `cores` cores.
    pub fn check(&self, cores: usize) -> (Vec<GraphError>, Vec<GraphWarning>) {
        let mut errors = Vec::new();
        if self.nodes.is_empty() {
            errors.push(GraphError::Empty);
        }
        errors.extend(names(self));
        errors.extend(nodes(self));
        errors.extend(edges(self));
        errors.extend(cycles(self).into_iter().map(|chain| GraphError::Cycle { chain }));
        (errors, thread_budget(self, cores).into_iter().collect())
    }
}

fn names(graph: &Graph) -> Vec<GraphError> {
    let mut counts: BTreeMap<&str, usize> = BTreeMap::new();
    for node in &graph.nodes {
        *counts.entry(&node.name).or_default() += 1;
    }
    let bad = counts
        .keys()
        .filter(|name| name.is_empty() || name.contains('\0'))
        .map(|&name| GraphError::BadName { name: name.into() });
    let twice = counts.iter().filter(|(_, count)| **count > 1);
    bad.chain(twice.map(|(&name, &count)| GraphError::DuplicateName { name: name.into(), count })).collect()
}

fn nodes(graph: &Graph) -> Vec<GraphError> {
    let mut errors = Vec::new();
    for (index, node) in graph.nodes.iter().enumerate() {
        let stage = node.name.clone();
        let inputs = graph.edges.iter().filter(|edge| edge.to == Some(index)).count();
        let outputs = graph.edges.iter().filter(|edge| edge.from == index).count();
        match node.kind {
            Kind::Tee if outputs == 0 => errors.push(GraphError::NoBranches { stage: stage.clone(), kind: "tee" }),
            Kind::Merge if inputs == 0 => errors.push(GraphError::NoBranches { stage: stage.clone(), kind: "merge" }),
            Kind::Merge => {}
            _ if node.workers == 0 => errors.push(GraphError::NoWorkers { stage: stage.clone() }),
            _ if node.workers > 1 && !node.replicable => {
                errors.push(GraphError::NotReplicable { stage: stage.clone(), workers: node.workers });
            }
            _ => {}
        }
        if inputs == 0 && !matches!(node.kind, Kind::Source | Kind::Merge) {
            errors.push(GraphError::NoInput { stage: stage.clone() });
        }
        if node.window && node.kind != Kind::Source {
            errors.push(GraphError::MisplacedWindow { stage });
        }
    }
    errors
}

fn edges(graph: &Graph) -> Vec<GraphError> {
    let mut errors = Vec::new();
    for edge in &graph.edges {
        if edge.to.is_none() {
            errors.push(GraphError::DanglingPort { stage: graph.name(edge.from).into(), carries: edge.carries.clone() });
        }
        for (unit, capacity) in [("items", edge.capacity.items), ("tokens", edge.capacity.tokens)] {
            if capacity == 0 {
                errors.push(GraphError::ZeroCapacity { edge: graph.edge_name(edge), unit });
            }
        }
    }
    errors
}

/// Finds one chain of names for every edge that closes a cycle, depth first.
fn cycles(graph: &Graph) -> Vec<Vec<String>> {
    struct Search<'a> {
        graph: &'a Graph,
        finished: Vec<bool>,
        path: Vec<usize>,
        chains: Vec<Vec<String>>,
    }

    impl Search<'_> {
        fn visit(&mut self, node: usize) {
            if let Some(start) = self.path.iter().position(|&other| other == node) {
                let circle = self.path[start..].iter().chain([&node]);
                self.chains.push(circle.map(|&node| self.graph.name(node).to_owned()).collect());
                return;
            }
            if std::mem::replace(&mut self.finished[node], true) {
                return;
            }
            self.path.push(node);
            let graph = self.graph;
            for next in graph.edges.iter().filter(|edge| edge.from == node).filter_map(|edge| edge.to) {
                self.visit(next);
            }
            self.path.pop();
        }
    }

    let mut search = Search { graph, finished: vec![false; graph.nodes.len()], path: Vec::new(), chains: Vec::new() };
    (0..graph.nodes.len()).for_each(|node| search.visit(node));
    search.chains
}

fn thread_budget(graph: &Graph, cores: usize) -> Option<GraphWarning> {
    let asking = graph.nodes.iter().filter(|node| node.threads > 0);
    let shares: Vec<(&str, usize)> = asking.map(|node| (node.name.as_str(), node.workers * node.threads)).collect();
    let asked: usize = shares.iter().map(|(_, threads)| threads).sum();
    (asked > cores).then(|| GraphWarning::ThreadBudget {
        asked,
        cores,
        shares: shares.iter().map(|(name, threads)| format!("{name} {threads}")).collect::<Vec<_>>().join(", "),
    })
}
