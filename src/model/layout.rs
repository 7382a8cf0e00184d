//! Positions of a model's tensors in its flat buffer.
//!
//! Projections of the same input are adjacent (q, k, v; gate, up), so that each group is one matrix
//! and one multiplication. The separate tensors of a folder are slices of it.

use std::ops::Range;

use tch::Tensor;

use super::family::Norms;
use super::{ExpertLayer, Experts, GatedDelta, ModelConfig};

/// Token embeddings.
const EMBEDDING: &str = "model.embed_tokens.weight";

/// Projections of a gated delta net's input: queries, keys and values, gates, and the logits of beta and of
/// the step.
pub(super) const DELTA_INPUTS: [&str; 4] = ["in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"];

/// The gate of an expert of every token.
pub(super) const SHARED_GATE: &str = "shared_expert_gate";

/// Groups of projections of a layer.
pub(super) const GROUPS: usize = 5;

/// The tensor that turns a hidden state into logits.
pub(super) const HEAD: &str = "lm_head.weight";

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

/// A part of a model that is gathered, used and freed together where ranks hold slices of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Unit {
    /// The embedding.
    Embedding,
    /// A layer.
    Layer(usize),
    /// Final norm, and the head if it is not the embedding.
    End,
}

/// Numbers of a flat tensor, as a view.
pub(crate) fn part(flat: &Tensor, range: Range<usize>) -> Tensor {
    flat.narrow(0, range.start as i64, range.len() as i64)
}

/// Projections that read one input, as one matrix.
pub(super) struct Group {
    module: &'static str,
    /// Width of the input.
    pub input: usize,
    /// Names and rows, in buffer order.
    pub projections: Vec<(&'static str, usize)>,
}

impl Group {
    /// Name of a projection's tensors, without their kind.
    pub fn name(&self, layer: usize, projection: &str) -> String {
        format!("model.layers.{layer}.{}.{projection}", self.module)
    }
}

/// Groups of projections of each layer, in buffer order: of the attention's input, its output, the
/// feed-forward layer's input, its output, and of the gate of an expert of every token. Other experts are
/// no groups.
pub(super) fn groups(config: &ModelConfig, layer: usize) -> [Group; GROUPS] {
    let (hidden, inner, dim) = (config.hidden_size, config.intermediate_size, config.head_dim);
    let (q, kv) = (config.heads * dim, config.kv_heads * dim);
    let group = |module, input, names: &[&'static str], rows: &[usize]| {
        // A joint projection has the rows of all.
        let rows = if names.len() == 1 { vec![rows.iter().sum()] } else { rows.to_vec() };
        Group { module, input, projections: names.iter().copied().zip(rows).collect() }
    };
    let definition = config.family.definition();
    let (mlp, inner, gate_up, down, gate): (_, _, &[_], &[_], &[_]) = match config.experts_of(layer).map(|of| of.shared) {
        None => ("mlp", inner, definition.gate_up, &["down_proj"], &[]),
        Some(Some(width)) => ("mlp.shared_expert", width, definition.gate_up, &["down_proj"], &[SHARED_GATE]),
        Some(None) => ("mlp", inner, &[], &[], &[]),
    };
    let [input, output] = match config.delta_of(layer) {
        None => {
            let gate = if definition.gates_attention { q } else { 0 };
            [group("self_attn", hidden, definition.qkv, &[q + gate, kv, kv]), group("self_attn", q, &["o_proj"], &[hidden])]
        }
        Some(of) => [
            group("linear_attn", hidden, &DELTA_INPUTS, &[of.mixed(), of.values(), of.value_heads, of.value_heads]),
            group("linear_attn", of.values(), &["out_proj"], &[hidden]),
        ],
    };
    let (gate_up, down) = (group(mlp, hidden, gate_up, &[inner, inner]), group(mlp, inner, down, &[hidden]));
    [input, output, gate_up, down, group("mlp", hidden, gate, &[1])]
}

/// Every tensor of a model, end to end in one buffer, without gaps.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Layout {
    entries: Vec<Entry>,
    units: Vec<Vec<i64>>,
    /// Offset and first unit of each layer, and of what follows the last.
    layers: Vec<(usize, usize)>,
}

impl Layout {
    /// Empty layout.
    pub(crate) fn empty() -> Self {
        Layout { entries: Vec::new(), units: Vec::new(), layers: Vec::new() }
    }

    /// The layout of a configuration. Pure.
    pub fn new(config: &ModelConfig) -> Self {
        let (hidden, definition) = (config.hidden_size, config.family.definition());
        let mut layout = Layout::empty();
        layout.add(&[EMBEDDING], &[config.vocab_size], Some(hidden));
        for layer in 0..config.layers() {
            layout.begin_layer();
            let ([qkv, output, gate_up, down, shared_gate], [attention, mlp]) = (groups(config, layer), definition.norms);
            layout.add_norms(layer, attention, hidden);
            if let Some(of) = config.delta_of(layer) {
                layout.add_projections(layer, &qkv, false);
                layout.add_delta(layer, of);
                layout.add_projections(layer, &output, false);
            } else {
                layout.add_projections(layer, &qkv, config.qkv_bias);
                if let Some((q, k)) = config.qk_norm_sizes() {
                    layout.add_norm(layer, "self_attn.q_norm", q);
                    layout.add_norm(layer, "self_attn.k_norm", k);
                }
                if definition.sinks {
                    layout.add(&[format!("model.layers.{layer}.self_attn.sinks")], &[config.heads], None);
                }
                layout.add_projections(layer, &output, config.output_bias);
            }
            layout.add_norms(layer, mlp, hidden);
            layout.add_projections(layer, &gate_up, config.mlp_bias);
            layout.add_projections(layer, &down, config.mlp_bias);
            if let Some(experts) = config.experts_of(layer) {
                layout.add_experts(layer, experts, hidden);
                layout.add_projections(layer, &shared_gate, false);
            }
        }
        layout.begin_layer();
        layout.add(&["model.norm.weight"], &[hidden], None);
        if config.scores {
            layout.add(&[SCORE_HEAD], &[1], Some(hidden));
        } else if !config.tied {
            layout.add(&[HEAD], &[config.vocab_size], Some(hidden));
        }
        layout
    }

    fn add_norms(&mut self, layer: usize, norms: Norms, size: usize) {
        [norms.before, norms.after].into_iter().flatten().for_each(|name| self.add_norm(layer, name, size));
    }

    fn add_norm(&mut self, layer: usize, name: &str, size: usize) {
        self.add(&[format!("model.layers.{layer}.{name}.weight")], &[size], None);
    }

    fn add_delta(&mut self, layer: usize, of: &GatedDelta) {
        let name = |name: &str| [format!("model.layers.{layer}.linear_attn.{name}")];
        // A convolution of one channel each.
        self.add_shaped(&name("conv1d.weight"), &[of.mixed(), 1, of.kernel]);
        self.add(&name("dt_bias"), &[of.value_heads], None);
        self.add(&name("A_log"), &[of.value_heads], None);
        self.add(&name("norm.weight"), &[of.value_dim], None);
    }

    fn add_experts(&mut self, layer: usize, of: &Experts, hidden: usize) {
        if of.layer != ExpertLayer::SwiGlu {
            return self.add_bounded_experts(layer, of, hidden);
        }
        let name = |name: &str| [format!("model.layers.{layer}.mlp.{name}")];
        let all = |names: &[&str]| -> Vec<String> {
            let of_one = |at: usize| names.iter().map(move |name| format!("model.layers.{layer}.mlp.experts.{at}.{name}.weight"));
            (0..of.count).flat_map(of_one).collect()
        };
        self.add(&name("gate.weight"), &[of.count], Some(hidden));
        self.add(&all(&["gate_proj", "up_proj"]), &vec![of.width; 2 * of.count], Some(hidden));
        self.add(&all(&["down_proj"]), &vec![hidden; of.count], Some(of.width));
    }

    /// Experts whose matrices are multiplied from the right, with biases.
    fn add_bounded_experts(&mut self, layer: usize, of: &Experts, hidden: usize) {
        let name = |name: &str| [format!("model.layers.{layer}.mlp.{name}")];
        self.add(&name("router.weight"), &[of.count], Some(hidden));
        self.add(&name("router.bias"), &[of.count], None);
        for (module, input, output) in [("gate_up", hidden, 2 * of.width), ("down", of.width, hidden)] {
            self.add_shaped(&name(&format!("experts.{module}_proj")), &[of.count, input, output]);
            self.add(&name(&format!("experts.{module}_proj_bias")), &[of.count], Some(output));
        }
    }

    /// Appends a tensor of three dimensions, whose first two are rows of the unit.
    fn add_shaped(&mut self, name: &[String; 1], shape: &[usize; 3]) {
        self.add(name, &[shape[0] * shape[1]], Some(shape[2]));
        self.entries.iter_mut().last().into_iter().for_each(|entry| entry.shape = shape.to_vec());
    }

    fn add_projections(&mut self, layer: usize, group: &Group, bias: bool) {
        if group.projections.is_empty() {
            return;
        }
        let (names, rows): (Vec<&str>, Vec<usize>) = group.projections.iter().copied().unzip();
        for (kind, columns) in [("weight", Some(group.input)), ("bias", None)].into_iter().take(1 + usize::from(bias)) {
            let names: Vec<String> = names.iter().map(|name| format!("{}.{kind}", group.name(layer, name))).collect();
            self.add(&names, &rows, columns);
        }
    }

    /// Begins a layer, or ends the last one.
    pub(super) fn begin_layer(&mut self) {
        self.layers.push((self.total(), self.units.len()));
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

    /// The embedding's tensor under the name of a separate head.
    pub(crate) fn embedding_as_head(&self) -> Entry {
        Entry { name: HEAD.to_owned(), ..self.entries[0].clone() }
    }

    /// A layer's place.
    pub(super) fn layer(&self, index: usize) -> Range<usize> {
        self.layers[index].0..self.layers[index + 1].0
    }

    /// The final norm's place.
    pub(super) fn norm(&self) -> Range<usize> {
        let (begin, _) = self.layers[self.layers.len() - 1];
        self.entries.iter().map(Entry::range).find(|range| range.start == begin).unwrap_or(begin..begin)
    }

    /// Units from first to last, without gaps.
    pub(crate) fn unit_list(&self) -> impl Iterator<Item = Unit> + use<> {
        let layers = (0..self.layers.len() - 1).map(Unit::Layer);
        std::iter::once(Unit::Embedding).chain(layers).chain([Unit::End])
    }

    /// A unit's place.
    pub(crate) fn unit(&self, unit: Unit) -> Range<usize> {
        match unit {
            Unit::Embedding => self.embedding(),
            Unit::Layer(index) => self.layer(index),
            Unit::End => self.norm().start..self.total(),
        }
    }

    /// The score head's place: the last tensor, of a model as of adapters.
    pub(super) fn score_head(&self) -> Option<Range<usize>> {
        self.entries.last().filter(|entry| entry.role() == Role::ScoreHead).map(Entry::range)
    }

    /// Range of the head, if it is not tied.
    pub(super) fn head(&self) -> Option<Range<usize>> {
        let begin = self.norm().end;
        (begin < self.total()).then(|| begin..self.total())
    }

    /// Shapes of a layer's units, in buffer order.
    pub(super) fn units_of_layer(&self, index: usize) -> &[Vec<i64>] {
        &self.units[self.layers[index].1..self.layers[index + 1].1]
    }

    /// Shapes of the matrices and vectors that are computed with, in buffer order.
    pub(super) fn units(&self) -> &[Vec<i64>] {
        &self.units
    }
}
