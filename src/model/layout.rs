//! Where each tensor of a model lies in the one flat buffer that holds all of them.
//!
//! Projections that read the same input lie next to each other (q, k, v; gate, up), so that each group is one matrix and one
//! multiplication, while a folder's separate tensors stay slices of it.

use super::{Head, ModelConfig};

/// The tensor that turns a hidden state into a score.
pub(super) const SCORE_HEAD: &str = "score.weight";

/// One tensor of a Hugging Face folder.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    /// Its name there.
    pub name: String,
    /// Its shape there.
    pub shape: Vec<usize>,
    /// Where it starts in the flat buffer.
    pub offset: usize,
}

impl Entry {
    /// How many numbers.
    pub fn len(&self) -> usize {
        self.shape.iter().product()
    }

    /// Never, for a checked configuration.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Its place in the flat buffer.
    pub fn range(&self) -> std::ops::Range<usize> {
        self.offset..self.offset + self.len()
    }
}

/// Every tensor of a model, end to end in one buffer, without gaps.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Layout {
    entries: Vec<Entry>,
    units: Vec<Vec<i64>>,
}

impl Layout {
    /// Of nothing yet.
    pub(super) fn empty() -> Self {
        Layout { entries: Vec::new(), units: Vec::new() }
    }

    /// The layout of a configuration. Pure.
    pub fn new(config: &ModelConfig) -> Self {
        let (hidden, inner, dim) = (config.hidden_size, config.intermediate_size, config.head_dim);
        let (q, kv) = (config.heads * dim, config.kv_heads * dim);
        let mut layout = Layout::empty();
        layout.add(&["model.embed_tokens.weight"], &[config.vocab_size], Some(hidden));
        for layer in 0..config.layers() {
            let name = |rest: &str| format!("model.layers.{layer}.{rest}");
            let mut add = |names: &[&str], rows: &[usize], columns| {
                let names: Vec<String> = names.iter().map(|rest| name(rest)).collect();
                layout.add(&names, rows, columns);
            };
            let qkv = [q, kv, kv];
            add(&["input_layernorm.weight"], &[hidden], None);
            add(&["self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight"], &qkv, Some(hidden));
            if config.qkv_bias {
                add(&["self_attn.q_proj.bias", "self_attn.k_proj.bias", "self_attn.v_proj.bias"], &qkv, None);
            }
            if config.qk_norm() {
                add(&["self_attn.q_norm.weight"], &[dim], None);
                add(&["self_attn.k_norm.weight"], &[dim], None);
            }
            add(&["self_attn.o_proj.weight"], &[hidden], Some(q));
            if config.output_bias {
                add(&["self_attn.o_proj.bias"], &[hidden], None);
            }
            add(&["post_attention_layernorm.weight"], &[hidden], None);
            add(&["mlp.gate_proj.weight", "mlp.up_proj.weight"], &[inner, inner], Some(hidden));
            if config.mlp_bias {
                add(&["mlp.gate_proj.bias", "mlp.up_proj.bias"], &[inner, inner], None);
            }
            add(&["mlp.down_proj.weight"], &[hidden], Some(inner));
            if config.mlp_bias {
                add(&["mlp.down_proj.bias"], &[hidden], None);
            }
        }
        layout.add(&["model.norm.weight"], &[hidden], None);
        match config.head {
            Head::Score => layout.add(&[SCORE_HEAD], &[1], Some(hidden)),
            Head::Words if config.tied => {}
            Head::Words => layout.add(&["lm_head.weight"], &[config.vocab_size], Some(hidden)),
        }
        layout
    }

    /// Tensors that are computed with as one: `rows` of equal width below each other, or vectors end to end.
    pub(super) fn add<S: ToString>(&mut self, names: &[S], rows: &[usize], columns: Option<usize>) {
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

    /// Shapes of the matrices and vectors that are computed with, in buffer order.
    pub(super) fn units(&self) -> &[Vec<i64>] {
        &self.units
    }
}
