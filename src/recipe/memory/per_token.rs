//! Memory of a token in a layer: numbers that are kept for the backward pass, and bytes without one.

use crate::model::{Activation, CHUNK, ExpertLayer, GatedDelta, ModelConfig};

/// Numbers per token that autograd keeps of one layer for its operations.
pub(super) fn per_token_of_layer(model: &ModelConfig, fused: bool, kernels: bool) -> u64 {
    let (hidden, inner) = (model.hidden_size as u64, model.active_width() as u64);
    let (q, k) = ((model.heads * model.head_dim) as u64, (model.kv_heads * model.head_dim) as u64);
    // Norms and projections keep their input, attention its input and output, the gate both halves
    // and its product.
    let plain = 4 * hidden + (q + 2 * k) + q + 3 * inner + per_token_of_branches(model);
    let normed = model.qk_norm_sizes().map_or(0, |_| 2 * q + 3 * k);
    // Rotated queries and keys, keys and values per query head, the output again, and the gate's
    // result.
    let apart = match (fused, kernels) {
        (true, _) => 0,
        // Rotated queries and keys.
        (_, true) => q + k,
        _ => (q + k) + 2 * q + q + 2 * inner,
    };
    plain + normed + apart + per_token_routed(model)
}

/// What norms of branches keep, their input, and what gates keep beyond their halves and product.
fn per_token_of_branches(model: &ModelConfig) -> u64 {
    let (hidden, inner) = (model.hidden_size as u64, model.active_width() as u64);
    let norms = model.norms_of_branches() as u64 * hidden;
    let bounded = model.experts.as_ref().is_some_and(|of| matches!(of.layer, ExpertLayer::Bounded { .. }));
    norms
        + match model.activation {
            // The bounded gate, a sigmoid and its product.
            _ if bounded => 3 * inner,
            Activation::Silu => 0,
            Activation::GeluTanh | Activation::Gelu => inner,
        }
}

/// Bytes of a token's scores that attention keeps where it is neither fused nor flash attention, with
/// numbers of `bytes` bytes. With bounds or sinks they are written out: bounded and as probabilities in
/// f32, and rounded. libtorch keeps probabilities of heads that share keys on a GPU.
pub(super) fn per_token_of_scores(model: &ModelConfig, longest: u64, bytes: u64, on_host: bool) -> u64 {
    let each = match (model.attention_cap.is_some() || model.has_sinks(), on_host || model.heads == model.kv_heads) {
        (true, _) => 8 + bytes,
        (false, false) => 4,
        (false, true) => 0,
    };
    model.heads as u64 * longest * each
}

/// Bytes of a token that are alive at a time where prompts of up to `longest` tokens are read and attention
/// writes its scores out in f32: three of each, and queries, keys and values for each head.
pub(super) fn per_token_of_read_scores(model: &ModelConfig, longest: u64) -> u64 {
    model.heads as u64 * (12 * longest + 10 * model.head_dim as u64)
}

/// Rows that are sent to experts and come back, and what the routers compute in f32.
fn per_token_routed(model: &ModelConfig) -> u64 {
    let hidden = model.hidden_size as u64;
    model.experts.as_ref().map_or(0, |of| 2 * (of.per_token as u64 + 1) * hidden + 4 * of.count as u64)
}

/// Bytes per token that are kept of all layers of a pass, and those of the largest.
pub(super) struct LayerBytes {
    pub all: u64,
    pub largest: u64,
    /// Those alive in the backward pass of a layer, beyond what is kept.
    pub backward: u64,
}

impl LayerBytes {
    /// Of layers that are alike.
    pub fn alike(model: &ModelConfig, layer: u64) -> Self {
        LayerBytes { all: model.layers() as u64 * layer, largest: layer, backward: layer }
    }

    /// Of gated delta nets and gated attention over sequences of up to `longest` tokens, with numbers of
    /// `bytes` bytes. `apart`: their inputs are by libtorch's operations, each of which keeps its own. `fixed`:
    /// numbers that experts keep less where only adapters are trained. Factors are fitted to what the stand-in
    /// of a GPU counts.
    pub fn with_nets(model: &ModelConfig, of: &GatedDelta, longest: u64, bytes: u64, apart: bool, fixed: u64) -> Self {
        let Net { mixed, keys, values, pairs, states } = Net::new(of, longest);
        let (hidden, inner) = (model.hidden_size as u64, model.active_width() as u64);
        let (q, k) = ((model.heads * model.head_dim) as u64, (model.kv_heads * model.head_dim) as u64);
        let other = (4 * hidden + 3 * inner + per_token_routed(model) - fixed) * bytes;
        let attention = other + (8 * q + 7 * k) * bytes;
        // What is computed in f32 is kept in it.
        let inputs = if apart { 12 * mixed + 16 * keys } else { 0 };
        let net = other + inputs + mixed * bytes + 8 * keys + values * (20 + 2 * bytes) + 4 * pairs + 4 * states;
        let nets = of.layers.len() as u64;
        let all = nets * net + (model.layers() as u64 - nets) * attention;
        LayerBytes { all, largest: net.max(attention), backward: 32 * keys + 20 * values + 8 * states + 40 * pairs }
    }
}

/// Numbers of a token in a gated delta net.
struct Net {
    mixed: u64,
    /// Of keys, and of values, for each value head.
    keys: u64,
    values: u64,
    /// With the other tokens of its chunk.
    pairs: u64,
    /// Its share of the state after its chunk.
    states: u64,
}

impl Net {
    /// In sequences of up to `longest` tokens.
    fn new(of: &GatedDelta, longest: u64) -> Self {
        let chunk = longest.clamp(1, CHUNK as u64);
        let [heads, key_dim, value_dim] = [of.value_heads, of.key_dim, of.value_dim].map(|of| of as u64);
        let (mixed, keys, values) = (of.mixed() as u64, heads * key_dim, heads * value_dim);
        Net { mixed, keys, values, pairs: heads * chunk, states: keys * value_dim / chunk }
    }
}

/// Bytes per token that are alive at a time where prompts of a model with gated delta nets are read on a
/// GPU, in numbers of `bytes` bytes. Factors are fitted as those of [`LayerBytes::with_nets`].
pub(super) fn per_token_read_by_nets(model: &ModelConfig, of: &GatedDelta, bytes: u64) -> u64 {
    let Net { mixed, keys, values, pairs, states } = Net::new(of, CHUNK as u64);
    let (hidden, inner) = (model.hidden_size as u64, model.active_width() as u64);
    let qk = ((model.heads + model.kv_heads) * model.head_dim) as u64;
    let net = mixed * bytes + 16 * keys + values * (12 + bytes) + 12 * pairs + 4 * states;
    net.max((hidden + inner) * bytes + 19 * qk)
}

/// Those of [`per_token_of_layer`] that are kept for the gradients of experts and routers, which adapters
/// leave alone.
pub(super) fn per_token_for_experts(model: &ModelConfig) -> u64 {
    let hidden = model.hidden_size as u64;
    model.experts.as_ref().map_or(0, |of| of.per_token as u64 * (hidden + of.width as u64) + 2 * hidden)
}

/// Bytes per token that are alive at a time where prompts are read, by flash attention and our kernels, in
/// numbers of `bytes` bytes.
pub(super) fn per_token_read(model: &ModelConfig, bytes: u64) -> u64 {
    let (hidden, inner) = (model.hidden_size as u64, model.active_width() as u64);
    let (q, k) = ((model.heads * model.head_dim) as u64, (model.kv_heads * model.head_dim) as u64);
    // The stream and its norm; projections, rotated queries and keys, and the output.
    let attention = 2 * hidden + (q + 2 * k) + (q + k) + q;
    // Gate, up and their product; of experts with the rows that are sent to them, and then with those that come back.
    let sent = model.experts.as_ref().map_or(0, |of| of.per_token as u64 * hidden);
    let gate = if model.activation == Activation::Silu { 3 * inner } else { 4 * inner };
    let mlp = 2 * hidden + (sent + gate).max(2 * sent + inner);
    // Cosines and sines, in f32; and where experts' tokens come from and go, as 64-bit integers.
    let tables = 8 * model.head_dim as u64;
    let routes = model.experts.as_ref().map_or(0, |of| 8 * (7 * of.per_token + of.count) as u64);
    attention.max(mlp) * bytes + tables + routes
}
