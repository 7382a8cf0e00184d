//! Checks of a graph before it runs. All errors are reported together.

use std::collections::BTreeMap;

use super::plan::{Graph, Kind};

/// Error of a graph: it can't run. Names are those of stages.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum GraphError {
    /// Empty graph: nothing was declared, or the flow has run already.
    #[error("the graph is empty: declare a source and a sink, and a new flow for every run")]
    Empty,
    /// Name that no thread can have.
    #[error("{0:?} is no name for a stage: use at least one character, and none that is NUL")]
    BadName(String),
    /// Name of several stages, and their number: reports and metrics need one each.
    #[error("{1} stages are named {0:?}: give each its own name")]
    DuplicateName(String, usize),
    /// Output without a consumer: its producer, and the type of its items.
    #[error("nothing consumes the output of {0:?} ({1}): wire it to a stage or a sink")]
    DanglingPort(String, String),
    /// Stage without input.
    #[error("{0:?} has no input: wire a port to it")]
    NoInput(String),
    /// Stage or method that was given a port of another flow.
    #[error("{0:?} was given a port of another flow: use ports of the flow that it belongs to")]
    ForeignPort(String),
    /// Cycle in the data (law F2): names along it; the first is repeated at the end.
    #[error("the data goes in a circle: {}; feedback goes over a weights edge", .0.join(" → "))]
    Cycle(Vec<String>),
    /// Edge `from → to` that no item could enter, and its capacity that is 0: items or tokens.
    #[error("the edge {0} holds no {1}: set its capacity to at least 1")]
    ZeroCapacity(String, &'static str),
    /// Stage without workers.
    #[error("{0:?} has no worker: give it at least 1")]
    NoWorkers(String),
    /// Several workers, and their number, of a stage that can't be replicated: workers share no
    /// state.
    #[error("{0:?} asks for {1} workers but has no replica (it keeps state, or is a source or sink): give it 1")]
    NotReplicable(String, usize),
    /// Tee without branches.
    #[error("{0:?} is a tee of none: give it at least 1")]
    EmptyTee(String),
    /// Merge without inputs.
    #[error("{0:?} is a merge of none: give it at least 1")]
    EmptyMerge(String),
    /// Window of a stage that is not a source.
    #[error("{0:?} has a window but is no source: attach the window to the source")]
    MisplacedWindow(String),
    /// A source that waits for admission which nothing can release, and the calls that release it.
    #[error("{0:?} waits for admission that no stage of the graph releases; it is released by {1}")]
    NeverReleased(String, &'static str),
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
    /// Goal at a sink that does not exist, and the names of the sinks.
    #[error("the run is to end at the sink {0:?}, which does not exist; sinks: {sinks}", sinks = .1.join(", "))]
    UnknownSink(String, Vec<String>),
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
        errors
    }

    /// Warns of more computing threads than `cores`: the stages slow each other down.
    pub(crate) fn warnings(&self, cores: usize) -> Vec<String> {
        let shares = self.nodes.iter().filter(|node| node.threads > 0).map(|node| (&node.name, node.workers * node.threads));
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
        errors.extend(twice.map(|(&name, &count)| GraphError::DuplicateName(name.into(), count)));
    }

    fn check_nodes(&self, errors: &mut Vec<GraphError>) {
        for (index, node) in self.nodes.iter().enumerate() {
            let name = || node.name.clone();
            let has_input = self.edges.iter().any(|edge| edge.to == Some(index));
            let has_output = self.edges.iter().any(|edge| edge.from == index);
            match node.kind {
                Kind::Tee if !has_output => errors.push(GraphError::EmptyTee(name())),
                Kind::Merge if !has_input => errors.push(GraphError::EmptyMerge(name())),
                Kind::Merge => {}
                _ if node.workers == 0 => errors.push(GraphError::NoWorkers(name())),
                _ if node.workers > 1 && !node.replicable => errors.push(GraphError::NotReplicable(name(), node.workers)),
                _ => {}
            }
            if !has_input && !matches!(node.kind, Kind::Source | Kind::Merge) {
                errors.push(GraphError::NoInput(name()));
            }
            if node.window && node.kind != Kind::Source {
                errors.push(GraphError::MisplacedWindow(name()));
            }
        }
    }

    fn check_edges(&self, errors: &mut Vec<GraphError>) {
        for edge in &self.edges {
            if edge.to.is_none() {
                errors.push(GraphError::DanglingPort(self.name(edge.from).into(), edge.carries.clone()));
            }
            for (unit, capacity) in [("items", edge.capacity.items), ("tokens", edge.capacity.tokens)] {
                if capacity == 0 {
                    errors.push(GraphError::ZeroCapacity(self.edge_name(edge), unit));
                }
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
    use crate::flow::plan::{EdgePlan, NodePlan};
    use crate::flow::{Capacity, StageSpec};

    /// Typed ports can't make a circle, so this goes by plain data: a source and stages `a`, `b`, `c`.
    fn graph(edges: &[(usize, usize)]) -> Graph {
        let kind = |name| if name == "source" { Kind::Source } else { Kind::Stage };
        let node = |name| NodePlan::new(name, kind(name), &StageSpec::default().threads(1), false);
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
        graph.nodes[1].workers = 2;
        assert!(graph.warnings(5).is_empty());
        let text = "the stages compute with 5 threads on 4 cores (source 1, a 2, b 1, c 1): lower threads or workers";
        assert_eq!(graph.warnings(4), [text]);
    }
}
