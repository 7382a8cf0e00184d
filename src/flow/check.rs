//! Checks of a graph before it runs. All errors are reported together.

use std::collections::BTreeMap;

use super::plan::{Graph, Kind, NodePlan};
use super::{StageSpec, Window};

/// Error of a graph: it can't run. Names are those of stages.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum GraphError {
    /// Empty graph: nothing was declared, or the flow has run already.
    #[error("the graph is empty: declare a source and a sink, and a new flow for every run")]
    Empty,
    /// Name that no thread can have.
    #[error("{0:?} is no name for a stage: use at least one character, and none that is NUL")]
    BadName(String),
    /// Name of several stages: reports and metrics need one each.
    #[error("{count} stages are named {name:?}: give each its own name")]
    DuplicateName {
        /// Name.
        name: String,
        /// Number of stages with it.
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
    #[error("{0:?} has no input: wire a port to it")]
    NoInput(String),
    /// Stage or method that was given a port of another flow.
    #[error("{0:?} was given a port of another flow: use ports of the flow that it belongs to")]
    ForeignPort(String),
    /// Cycle in the data (law F2): names along it; the first is repeated at the end.
    #[error("the data goes in a circle: {}; feedback goes over a weights edge", .0.join(" → "))]
    Cycle(Vec<String>),
    /// Edge that no item could enter.
    #[error("the edge {edge} holds no {unit}: set its capacity to at least 1")]
    ZeroCapacity {
        /// Edge, as `from → to`.
        edge: String,
        /// Capacity that is 0: `items` or `tokens`.
        unit: &'static str,
    },
    /// Stage without workers.
    #[error("{0:?} has no worker: give it at least 1")]
    NoWorkers(String),
    /// Several workers of a stage that can't be replicated: workers share no state.
    #[error("{stage:?} asks for {workers} workers but has no replica (it keeps state, or is a source or sink): give it 1")]
    NotReplicable {
        /// Stage.
        stage: String,
        /// Number of workers.
        workers: usize,
    },
    /// Tee without branches.
    #[error("{0:?} is a tee of none: give it at least 1")]
    EmptyTee(String),
    /// Merge without inputs.
    #[error("{0:?} is a merge of none: give it at least 1")]
    EmptyMerge(String),
    /// Window of a stage that is not a source.
    #[error("{0:?} has a window but is no source: attach the window to the source")]
    MisplacedWindow(String),
    /// Source that waits for admission which nothing can release.
    #[error("{stage:?} waits for admission that no stage of the graph releases; it is released by {released_by}")]
    NeverReleased {
        /// Source.
        stage: String,
        /// Calls that release it.
        released_by: &'static str,
    },
    /// Method that shares a second value of one type in the run context.
    #[error("`Flow::{0}` shares a second value of its type, and stages take one: share it once")]
    SharedTwice(&'static str),
    /// Method that sets the run context after the first stage.
    #[error("a setting that stages share was set after a stage was put on the graph (`Flow::{0}`): set it first")]
    LateContext(&'static str),
    /// Publisher of weights without a reader.
    #[error(
        "{0:?} publishes weights that nothing reads: give the reading end of the same `weights()` to a stage, or publish none"
    )]
    UnreadWeights(String),
    /// Reader of weights without a publisher: it would wait for ever.
    #[error("{0:?} reads weights that nothing publishes: add a stage that publishes them, or keep their publishing end")]
    UnpublishedWeights(String),
    /// Goal at a sink that does not exist.
    #[error("the run is to end at the sink {sink:?}, which does not exist; sinks: {}", .sinks.join(", "))]
    UnknownSink {
        /// Sink of the goal.
        sink: String,
        /// Sinks of the graph.
        sinks: Vec<String>,
    },
}

/// Formats all errors of a graph.
pub(crate) fn listed(errors: &[GraphError]) -> String {
    match errors {
        [one] => one.to_string(),
        many => {
            let lines: String = many.iter().map(|error| format!("\n- {error}")).collect();
            format!("the graph has {} problems:{lines}", many.len())
        }
    }
}

impl Graph {
    /// Finds all errors.
    pub(crate) fn errors(&self) -> Vec<GraphError> {
        let mut errors = Vec::new();
        if self.nodes.is_empty() {
            errors.push(GraphError::Empty);
        }
        self.check_names(&mut errors);
        self.check_nodes(&mut errors);
        self.check_edges(&mut errors);
        let mut finished = vec![false; self.nodes.len()];
        for node in 0..self.nodes.len() {
            self.find_cycles(node, &mut Vec::new(), &mut finished, &mut errors);
        }
        self.check_feedback(&mut errors);
        errors
    }

    /// Warns of more computing threads than `cores`: the stages slow each other down.
    pub(crate) fn warnings(&self, cores: usize) -> Vec<String> {
        let shares = self.nodes.iter().map(|node| (&node.name, node.spec.workers * node.spec.threads));
        let shares = shares.filter(|(_, threads)| *threads > 0);
        let asked: usize = shares.clone().map(|(_, threads)| threads).sum();
        if asked <= cores {
            return Vec::new();
        }
        let shares: Vec<String> = shares.map(|(name, threads)| format!("{name} {threads}")).collect();
        let shares = shares.join(", ");
        vec![format!("the stages compute with {asked} threads on {cores} cores ({shares}): lower threads or workers")]
    }

    fn check_names(&self, errors: &mut Vec<GraphError>) {
        let mut counts: BTreeMap<&str, usize> = BTreeMap::new();
        for node in &self.nodes {
            *counts.entry(&node.name).or_default() += 1;
        }
        let bad = counts.keys().filter(|name| name.is_empty() || name.contains('\0'));
        errors.extend(bad.map(|&name| GraphError::BadName(name.into())));
        let twice = counts.iter().filter(|(_, count)| **count > 1);
        errors.extend(twice.map(|(&name, &count)| GraphError::DuplicateName { name: name.into(), count }));
    }

    fn check_nodes(&self, errors: &mut Vec<GraphError>) {
        for (index, NodePlan { name, kind, replicable, spec }) in self.nodes.iter().enumerate() {
            let name = || name.clone();
            let has_input = self.edges.iter().any(|edge| edge.to == Some(index));
            let has_output = self.edges.iter().any(|edge| edge.from == index);
            match kind {
                Kind::Tee if !has_output => errors.push(GraphError::EmptyTee(name())),
                Kind::Merge if !has_input => errors.push(GraphError::EmptyMerge(name())),
                Kind::Merge => {}
                _ if spec.workers == 0 => errors.push(GraphError::NoWorkers(name())),
                _ if spec.workers > 1 && !replicable => {
                    errors.push(GraphError::NotReplicable { stage: name(), workers: spec.workers });
                }
                _ => {}
            }
            if !has_input && !matches!(kind, Kind::Source | Kind::Merge) {
                errors.push(GraphError::NoInput(name()));
            }
            if spec.window.is_some() && *kind != Kind::Source {
                errors.push(GraphError::MisplacedWindow(name()));
            }
        }
    }

    fn check_edges(&self, errors: &mut Vec<GraphError>) {
        for edge in &self.edges {
            if edge.to.is_none() {
                let (stage, carries) = (self.name(edge.from).into(), edge.carries.clone());
                errors.push(GraphError::DanglingPort { stage, carries });
            }
            for (unit, capacity) in [("items", edge.capacity.items), ("tokens", edge.capacity.tokens)] {
                if capacity == 0 {
                    errors.push(GraphError::ZeroCapacity { edge: self.edge_name(edge), unit });
                }
            }
        }
    }

    /// Checks that weights have two ends, in the graph or outside, and that windows can be raised.
    fn check_feedback(&self, errors: &mut Vec<GraphError>) {
        let any = |has: &dyn Fn(&StageSpec) -> bool| self.nodes.iter().any(|node| has(&node.spec));
        for NodePlan { name, spec, .. } in &self.nodes {
            if spec.publishes.iter().any(|id| !id.has_readers() && !any(&|other| other.subscribes.contains(id))) {
                errors.push(GraphError::UnreadWeights(name.clone()));
            }
            if spec.subscribes.iter().any(|id| !id.has_weights_or_publisher() && !any(&|other| other.publishes.contains(id))) {
                errors.push(GraphError::UnpublishedWeights(name.clone()));
            }
            let raised = |window: &Window| any(&|other| other.raises.as_ref().is_some_and(|own| own.is_same(window)));
            if let Some(window) = spec.window.as_ref().filter(|window| window.only_stages_raise() && !raised(window)) {
                let released_by = window.who_raises().unwrap_or("a stage of the graph");
                errors.push(GraphError::NeverReleased { stage: name.clone(), released_by });
            }
        }
    }

    /// Finds one chain of names for every edge that closes a cycle, depth first.
    fn find_cycles(&self, node: usize, path: &mut Vec<usize>, finished: &mut [bool], errors: &mut Vec<GraphError>) {
        if let Some(start) = path.iter().position(|&other| other == node) {
            let circle = path[start..].iter().chain([&node]);
            errors.push(GraphError::Cycle(circle.map(|&node| self.name(node).to_owned()).collect()));
            return;
        }
        if std::mem::replace(&mut finished[node], true) {
            return;
        }
        path.push(node);
        for next in self.edges.iter().filter(|edge| edge.from == node).filter_map(|edge| edge.to) {
            self.find_cycles(next, path, finished, errors);
        }
        path.pop();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::flow::Capacity;
    use crate::flow::plan::EdgePlan;

    /// Typed ports can't make a circle, so this goes by plain data: a source and stages `a`, `b`, `c`.
    fn graph(edges: &[(usize, usize)]) -> Graph {
        let kind = |name: &str| if name == "source" { Kind::Source } else { Kind::Stage };
        let spec = StageSpec::default().threads(1);
        let node = |name: &str| NodePlan { name: name.into(), kind: kind(name), replicable: false, spec: spec.clone() };
        let edge = |&(from, to)| EdgePlan { from, to: Some(to), carries: "u64".into(), capacity: Capacity::items(1) };
        let (nodes, edges) = (["source", "a", "b", "c"].map(node).to_vec(), edges.iter().map(edge).collect());
        Graph { name: "plain".into(), nodes, edges, weights: Vec::new() }
    }

    #[test]
    fn f2_every_circle_is_reported_with_its_chain_and_a_diamond_is_none() {
        let chains = |edges: &[(usize, usize)]| {
            let errors = graph(edges).errors().into_iter();
            errors.map(|error| error.to_string()).filter(|text| text.contains("circle")).collect::<Vec<_>>()
        };
        let circle = chains(&[(0, 1), (1, 2), (2, 3), (3, 1)]);
        assert_eq!(circle, ["the data goes in a circle: a → b → c → a; feedback goes over a weights edge"]);
        assert!(chains(&[(0, 1), (0, 2), (1, 3), (2, 3)]).is_empty());
        let two = chains(&[(0, 1), (1, 1), (0, 2), (2, 3), (3, 2)]);
        assert!(two.len() == 2 && two[0].contains("a → a;") && two[1].contains("b → c → b;"), "{two:?}");
    }

    #[test]
    fn more_threads_than_cores_are_a_warning_with_each_stages_share() {
        let mut graph = graph(&[]);
        graph.nodes[1].spec.workers = 2;
        assert!(graph.warnings(5).is_empty());
        let text = "the stages compute with 5 threads on 4 cores (source 1, a 2, b 1, c 1): lower threads or workers";
        assert_eq!(graph.warnings(4), [text]);
    }
}
