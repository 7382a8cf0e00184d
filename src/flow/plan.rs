//! A graph as plain data: what the checks read, what is drawn, and what recipes and tests can compare.

use serde::Serialize;

use super::Capacity;

/// A graph of stages by index.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Graph {
    /// The flow's name.
    pub name: String,
    /// Sources, stages, tees, merges and sinks, in the order of their declaration.
    pub nodes: Vec<NodePlan>,
    /// What carries data.
    pub edges: Vec<EdgePlan>,
    /// What carries weights back (law F2); never part of a cycle of data.
    pub weights: Vec<WeightsPlan>,
}

/// What a node is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Kind {
    /// Makes items.
    Source,
    /// Turns items into items, on an OS thread.
    Stage,
    /// Turns items into items, as a tokio task.
    Task,
    /// Copies every item to every branch.
    Tee,
    /// Joins several inputs.
    Merge,
    /// Takes items out of the graph.
    Sink,
}

/// One node.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct NodePlan {
    /// Its name, unique in the graph.
    pub name: String,
    /// What it is.
    pub kind: Kind,
    /// How many workers share its input.
    pub workers: usize,
    /// Whether it may have more than one.
    pub replicable: bool,
    /// Whether its workers' output is brought into order.
    pub ordered: bool,
    /// Cores that each worker computes with.
    pub threads: usize,
    /// Whether it waits for admission.
    pub window: bool,
    /// What to give it more of when it is the bottleneck.
    pub knob: Option<String>,
}

/// One edge.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct EdgePlan {
    /// The producer's index.
    pub from: usize,
    /// The consumer's index; `None` while it dangles.
    pub to: Option<usize>,
    /// The type that it carries, without its path, or the type's [`Message::label`](super::Message::label).
    pub carries: String,
    /// What it may hold.
    pub capacity: Capacity,
}

/// One weights edge from a publisher to a subscriber.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct WeightsPlan {
    /// The publisher's index.
    pub from: usize,
    /// The subscriber's index.
    pub to: usize,
}

impl Graph {
    /// A node's name.
    pub(crate) fn name(&self, node: usize) -> &str {
        self.nodes.get(node).map_or("?", |node| node.name.as_str())
    }

    /// An edge's name: `from → to`.
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
