//! Positions of a model's tensors in its flat buffer.
//!
//! Projections of the same input are adjacent (q, k, v; gate, up), so that each group is one matrix
//! and one multiplication. The separate tensors of a folder are slices of it.

use std::ops::Range;

use super::{Head, ModelConfig};

/// Token embeddings.
const EMBEDDING: &str = "model.embed_tokens.weight";

/// The tensor that turns a hidden state into logits.
const HEAD: &str = "lm_head.weight";

/// The tensor that turns a hidden state into a score.
pub(super) const SCORE_HEAD: &str = "score.weight";

/// The part of a model that a tensor belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Role {
    /// Token embeddings; also the output head if both are tied.
    Embedding,
    /// Layers and norms.
    Body,
    /// Untied output head.
    Head,
    /// Score head.
    ScoreHead,
    /// An adapter's matrix.
    Adapter,
}

/// One tensor of a Hugging Face folder.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    /// Name in the folder.
    pub name: String,
    /// Shape in the folder.
    pub shape: Vec<usize>,
    /// Index of its first number in the flat buffer.
    pub offset: usize,
}

impl Entry {
    /// Number of elements.
    pub fn len(&self) -> usize {
        self.shape.iter().product()
    }

    /// Returns true if it has no elements; false for a checked configuration.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The part of the model that it belongs to, by its name.
    pub(crate) fn role(&self) -> Role {
        match self.name.as_str() {
            EMBEDDING => Role::Embedding,
            HEAD => Role::Head,
            // Alongside adapters it has PEFT's prefix.
            name if name.ends_with(SCORE_HEAD) => Role::ScoreHead,
            name if name.contains(".lora_") => Role::Adapter,
            _ => Role::Body,
        }
    }

    /// Range in the flat buffer.
    pub fn range(&self) -> Range<usize> {
        self.offset..self.offset + self.len()
    }
}

/// Every tensor of a model, end to end in one buffer, without gaps.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Layout {
    entries: Vec<Entry>,
    units: Vec<Vec<i64>>,
    /// Start of each layer, and end of the last.
    layers: Vec<usize>,
    /// Number of units per layer.
    units_per_layer: usize,
}

impl Layout {
    /// Empty layout.
    pub(crate) fn empty() -> Self {
        Layout { entries: Vec::new(), units: Vec::new(), layers: Vec::new(), units_per_layer: 0 }
    }

    /// The layout of a configuration. Pure.
    pub fn new(config: &ModelConfig) -> Self {
        let (hidden, inner, dim) = (config.hidden_size, config.intermediate_size, config.head_dim);
        let (q, kv) = (config.heads * dim, config.kv_heads * dim);
        let mut layout = Layout::empty();
        layout.add(&[EMBEDDING], &[config.vocab_size], Some(hidden));
        for layer in 0..config.layers() {
            layout.layers.push(layout.total());
            let mut add = |module: &str, names: &[&str], kind: &str, rows: &[usize], columns| {
                let name = |name: &&str| format!("model.layers.{layer}.{module}{name}.{kind}");
                layout.add(&names.iter().map(name).collect::<Vec<_>>(), rows, columns);
            };
            let definition = config.family.layer();
            let ([attention_norm, mlp_norm], qkv) = (definition.norms, [q, kv, kv]);
            let (attention, mlp) = ("self_attn.", "mlp.");
            add("", &[attention_norm], "weight", &[hidden], None);
            add(attention, definition.qkv, "weight", &definition.rows(&qkv), Some(hidden));
            if config.qkv_bias {
                add(attention, definition.qkv, "bias", &definition.rows(&qkv), None);
            }
            if let Some((q, k)) = config.qk_norm_sizes() {
                add(attention, &["q_norm"], "weight", &[q], None);
                add(attention, &["k_norm"], "weight", &[k], None);
            }
            add(attention, &["o_proj"], "weight", &[hidden], Some(q));
            if config.output_bias {
                add(attention, &["o_proj"], "bias", &[hidden], None);
            }
            add("", &[mlp_norm], "weight", &[hidden], None);
            add(mlp, definition.gate_up, "weight", &definition.rows(&[inner, inner]), Some(hidden));
            if config.mlp_bias {
                add(mlp, definition.gate_up, "bias", &definition.rows(&[inner, inner]), None);
            }
            add(mlp, &["down_proj"], "weight", &[hidden], Some(inner));
            if config.mlp_bias {
                add(mlp, &["down_proj"], "bias", &[hidden], None);
            }
        }
        layout.layers.push(layout.total());
        layout.units_per_layer = (layout.units.len() - 1) / config.layers().max(1);
        layout.add(&["model.norm.weight"], &[hidden], None);
        match config.head {
            Head::Score => layout.add(&[SCORE_HEAD], &[1], Some(hidden)),
            Head::LanguageModel if config.tied => {}
            Head::LanguageModel => layout.add(&[HEAD], &[config.vocab_size], Some(hidden)),
        }
        layout
    }

    /// Appends tensors that form one unit of computation: `rows` of equal width stacked, or vectors
    /// end to end.
    pub(crate) fn add<S: ToString>(&mut self, names: &[S], rows: &[usize], columns: Option<usize>) {
        for (name, &rows) in names.iter().zip(rows) {
            let shape = std::iter::once(rows).chain(columns).collect();
            let offset = self.total();
            self.entries.push(Entry { name: name.to_string(), shape, offset });
        }
        let all_rows: usize = rows.iter().sum();
        self.units.push(std::iter::once(all_rows).chain(columns).map(|size| size as i64).collect());
    }

    /// The tensors, in buffer order.
    pub fn entries(&self) -> &[Entry] {
        &self.entries
    }

    /// The tensor of that name.
    pub fn find(&self, name: &str) -> Option<&Entry> {
        self.entries.iter().find(|entry| entry.name == name)
    }

    /// Length of the buffer.
    pub fn total(&self) -> usize {
        self.entries.last().map_or(0, |entry| entry.range().end)
    }

    /// The embedding's place.
    pub(super) fn embedding(&self) -> Range<usize> {
        self.entries[0].range()
    }

    /// A layer's place.
    pub(super) fn layer(&self, index: usize) -> Range<usize> {
        self.layers[index]..self.layers[index + 1]
    }

    /// The final norm's place.
    pub(super) fn norm(&self) -> Range<usize> {
        let begin = self.layers[self.layers.len() - 1];
        self.entries.iter().map(Entry::range).find(|range| range.start == begin).unwrap_or(begin..begin)
    }

    /// Range of the head, if it is not tied.
    pub(super) fn head(&self) -> Option<Range<usize>> {
        let begin = self.norm().end;
        (begin < self.total()).then(|| begin..self.total())
    }

    /// Shapes of one layer's units, in buffer order; the same for all layers.
    pub(super) fn units_of_layer(&self) -> &[Vec<i64>] {
        &self.units[1..1 + self.units_per_layer]
    }

    /// Shapes of the matrices and vectors that are computed with, in buffer order.
    pub(super) fn units(&self) -> &[Vec<i64>] {
        &self.units
    }
}
