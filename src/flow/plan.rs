//! Graph as plain data, for checks, drawings and comparisons.

use serde::Serialize;

use super::Capacity;

/// Graph of stages by index.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Graph {
    /// Name of the flow.
    pub name: String,
    /// Sources, stages, tees, merges and sinks, in the order of declaration.
    pub nodes: Vec<NodePlan>,
    /// Edges that carry data.
    pub edges: Vec<EdgePlan>,
    /// Edges that carry weights back (law F2).
    pub weights: Vec<WeightsPlan>,
}

/// Kind of a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Kind {
    /// Source: makes items.
    Source,
    /// Stage on an OS thread.
    Stage,
    /// Stage as a tokio task.
    Task,
    /// Tee: copies every item to every branch.
    Tee,
    /// Merge: joins several inputs.
    Merge,
    /// Sink: takes items out of the graph.
    Sink,
}

/// Node of a graph.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct NodePlan {
    /// Name, unique in the graph.
    pub name: String,
    /// Kind.
    pub kind: Kind,
    /// Number of workers that share the input.
    pub workers: usize,
    /// If true, it may have several workers.
    pub replicable: bool,
    /// If true, the workers' output keeps the order of the input.
    pub ordered: bool,
    /// Cores that each worker computes with.
    pub threads: usize,
    /// If true, it waits for admission.
    pub window: bool,
    /// Setting to raise when it is the bottleneck.
    pub knob: Option<String>,
}

/// Edge of a graph.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct EdgePlan {
    /// Index of the producer.
    pub from: usize,
    /// Index of the consumer; none for a dangling edge.
    pub to: Option<usize>,
    /// Label of its items' type ([`Message::label`](super::Message::label)).
    pub carries: String,
    /// Capacity.
    pub capacity: Capacity,
}

/// Weights edge from a publisher to a subscriber.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct WeightsPlan {
    /// Index of the publisher.
    pub from: usize,
    /// Index of the subscriber.
    pub to: usize,
}

impl Graph {
    /// Name of a node.
    pub(crate) fn name(&self, node: usize) -> &str {
        self.nodes.get(node).map_or("?", |node| node.name.as_str())
    }

    /// Name of an edge: `from → to`.
    pub(crate) fn edge_name(&self, edge: &EdgePlan) -> String {
        format!("{} → {}", self.name(edge.from), edge.to.map_or("?", |to| self.name(to)))
    }
}

#[cfg(test)]
mod tests {
    use crate::flow::message::short_type_name;

    #[test]
    fn type_names_lose_their_paths() {
        assert_eq!(short_type_name::<u64>(), "u64");
        assert_eq!(short_type_name::<Vec<crate::data::Group>>(), "Vec<Group>");
        assert_eq!(short_type_name::<(String, Option<&'static str>)>(), "(String, Option<&str>)");
    }
}
