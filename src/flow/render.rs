//! Drawings of a graph: Mermaid, DOT and JSON. Weights edges are dashed.

use super::Capacity;
use super::plan::{EdgePlan, Graph, Kind, NodePlan};
use crate::util::untrusted;

impl Graph {
    /// Draws the graph as a Mermaid flowchart.
    pub fn to_mermaid(&self) -> String {
        let mut text = String::from("flowchart LR\n");
        for (index, node) in self.nodes.iter().enumerate() {
            let (open, close) = match node.kind {
                Kind::Source | Kind::Sink => ("([", "])"),
                Kind::Tee | Kind::Merge => ("{{", "}}"),
                Kind::Stage => ("[", "]"),
                Kind::Task => ("(", ")"),
            };
            text += &format!("  n{index}{open}\"{}\"{close}\n", html(&label(node)));
        }
        for (edge, to) in joined(self) {
            text += &format!("  n{} -->|\"{}\"| n{to}\n", edge.from, html(&edge_label(edge)));
        }
        for edge in &self.weights {
            text += &format!("  n{} -.->|weights| n{}\n", edge.from, edge.to);
        }
        text
    }

    /// Draws the graph as a Graphviz digraph.
    pub fn to_dot(&self) -> String {
        let mut text = format!("digraph {:?} {{\n  rankdir=LR;\n", self.name);
        for (index, node) in self.nodes.iter().enumerate() {
            let shape = match node.kind {
                Kind::Source | Kind::Sink => "oval",
                Kind::Tee | Kind::Merge => "hexagon",
                Kind::Stage => "box",
                Kind::Task => "box, style=rounded",
            };
            text += &format!("  n{index} [label={:?}, shape={shape}];\n", label(node));
        }
        for (edge, to) in joined(self) {
            text += &format!("  n{} -> n{to} [label={:?}];\n", edge.from, edge_label(edge));
        }
        for edge in &self.weights {
            text += &format!("  n{} -> n{} [label=\"weights\", style=dashed, constraint=false];\n", edge.from, edge.to);
        }
        text + "}\n"
    }

    /// Returns the plain data as JSON, with nodes by index.
    pub fn to_json(&self) -> String {
        serde_json::to_string_pretty(self).expect("names and numbers always serialise")
    }
}

/// Edges that have both ends.
fn joined(graph: &Graph) -> impl Iterator<Item = (&EdgePlan, usize)> {
    graph.edges.iter().filter_map(|edge| edge.to.map(|to| (edge, to)))
}

/// Label of a node, one fact a line.
fn label(NodePlan { name, kind, spec, .. }: &NodePlan) -> String {
    let mut text = name.clone();
    if spec.workers > 1 && *kind != Kind::Merge {
        text += &format!("\n{} workers{}", spec.workers, if spec.ordered { ", ordered" } else { "" });
    }
    if spec.threads > 0 {
        let plural = if spec.threads > 1 { "s" } else { "" };
        text += &format!("\n{} thread{plural}{}", spec.threads, if spec.workers > 1 { " each" } else { "" });
    }
    if spec.window.is_some() {
        text += "\nadmitted";
    }
    text
}

fn edge_label(edge: &EdgePlan) -> String {
    let Capacity { items, tokens } = edge.capacity;
    format!("{}\n{items} items, {} tokens", edge.carries, count(tokens as u64))
}

/// Formats a count in at most four digits: 950, 12.3k, 1.05M.
pub(crate) fn count(n: u64) -> String {
    let scaled = |unit: f64, suffix| {
        let value = n as f64 / unit;
        let decimals = if value < 9.995 { 2 } else { usize::from(value < 99.95) };
        format!("{value:.decimals$}{suffix}")
    };
    match n {
        0..10_000 => n.to_string(),
        10_000..1_000_000 => scaled(1e3, "k"),
        1_000_000..1_000_000_000 => scaled(1e6, "M"),
        _ => scaled(1e9, "G"),
    }
}

/// Mermaid reads labels as HTML. It reads `#39;` as a separate entity, so apostrophes stay.
fn html(text: &str) -> String {
    untrusted::html(text).replace("&#39;", "'").replace('\n', "<br/>")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn labels_are_escaped_for_mermaid_and_keep_apostrophes() {
        assert_eq!(html("judge's <b>\n\"a\" & c"), "judge's &lt;b&gt;<br/>&quot;a&quot; &amp; c");
    }
}
