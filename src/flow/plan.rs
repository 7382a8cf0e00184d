//! Graph as plain data, for checks and drawings.

use serde::Serialize;

use super::{Capacity, StageSpec};

/// Graph of stages by index, to be [drawn](Graph::to_mermaid).
#[derive(Clone, Debug, Serialize)]
pub struct Graph {
    pub(crate) name: String,
    /// Sources, stages, tees, merges and sinks, in the order of declaration.
    pub(crate) nodes: Vec<NodePlan>,
    /// Edges that carry data.
    pub(crate) edges: Vec<EdgePlan>,
    /// Edges that carry weights back (law F2).
    pub(crate) weights: Vec<WeightsPlan>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Kind {
    Source,
    /// Stage on an OS thread.
    Stage,
    /// Stage as a tokio task.
    Task,
    /// Copies every item to every branch.
    Tee,
    /// Joins several inputs.
    Merge,
    Sink,
}

#[derive(Clone, Debug, Serialize)]
pub(crate) struct NodePlan {
    pub(crate) name: String,
    pub(crate) kind: Kind,
    /// If true, it may have several workers.
    pub(crate) replicable: bool,
    #[serde(flatten)]
    pub(crate) spec: StageSpec,
}

#[derive(Clone, Debug, Serialize)]
pub(crate) struct EdgePlan {
    pub(crate) from: usize,
    /// None for a dangling edge.
    pub(crate) to: Option<usize>,
    /// Label of its items' type ([`Message::label`](super::Message::label)).
    pub(crate) carries: String,
    pub(crate) capacity: Capacity,
}

#[derive(Clone, Copy, Debug, Serialize)]
pub(crate) struct WeightsPlan {
    pub(crate) from: usize,
    pub(crate) to: usize,
}

impl Graph {
    /// Names of all stages, in the order of declaration.
    pub fn stages(&self) -> impl Iterator<Item = &str> {
        self.nodes.iter().map(|node| node.name.as_str())
    }

    /// Name of a node.
    pub(crate) fn name(&self, node: usize) -> &str {
        self.nodes.get(node).map_or("?", |node| node.name.as_str())
    }

    /// Name of an edge: `from → to`.
    pub(crate) fn edge_name(&self, edge: &EdgePlan) -> String {
        format!("{} → {}", self.name(edge.from), edge.to.map_or("?", |to| self.name(to)))
    }
}
