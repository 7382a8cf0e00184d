//! Memory of a token in a layer: numbers that are kept for the backward pass, and bytes without one.

use crate::model::ModelConfig;

/// Numbers per token that autograd keeps of one layer for its operations.
pub(super) fn per_token_of_layer(model: &ModelConfig, fused: bool, kernels: bool) -> u64 {
    let (hidden, inner) = (model.hidden_size as u64, model.active_width() as u64);
    let (q, k) = ((model.heads * model.head_dim) as u64, (model.kv_heads * model.head_dim) as u64);
    // Norms and projections keep their input, attention its input and output, the gate both halves
    // and its product.
    let plain = 4 * hidden + (q + 2 * k) + q + 3 * inner;
    let normed = model.qk_norm_sizes().map_or(0, |_| 2 * q + 3 * k);
    // Rotated queries and keys, keys and values per query head, the output again, and the gate's
    // result.
    let apart = match (fused, kernels) {
        (true, _) => 0,
        // Rotated queries and keys.
        (_, true) => q + k,
        _ => (q + k) + 2 * q + q + 2 * inner,
    };
    // Rows that are sent to experts and come back, and what the routers compute in f32.
    let routed = model.experts.as_ref().map_or(0, |of| 2 * (of.per_token as u64 + 1) * hidden + 4 * of.count as u64);
    let attention = plain + normed + apart + routed;
    // Projections, the convolution's output, queries, keys and values per value head, and the pairs of tokens of
    // a chunk, in f32 counted once.
    let net = model.delta.as_ref().map_or(0, |of| {
        let (keys, values) = (of.value_heads * of.key_dim, of.value_heads * of.value_dim);
        let mixed = 2 * of.key_heads * of.key_dim + values;
        4 * hidden + 3 * inner + (3 * mixed + 6 * keys + 8 * values + 256 * of.value_heads) as u64
    });
    attention.max(net)
}

/// Those of [`per_token_of_layer`] that are kept for the gradients of experts and routers, which adapters leave alone.
pub(super) fn per_token_for_experts(model: &ModelConfig) -> u64 {
    let hidden = model.hidden_size as u64;
    model.experts.as_ref().map_or(0, |of| of.per_token as u64 * (hidden + of.width as u64) + 2 * hidden)
}

/// Bytes per token that are alive at a time where prompts are read, by flash attention and our kernels, in numbers
/// of `bytes` bytes.
pub(super) fn per_token_read(model: &ModelConfig, bytes: u64) -> u64 {
    let (hidden, inner) = (model.hidden_size as u64, model.active_width() as u64);
    let (q, k) = ((model.heads * model.head_dim) as u64, (model.kv_heads * model.head_dim) as u64);
    // The stream and its norm; projections, rotated queries and keys, and the output.
    let attention = 2 * hidden + (q + 2 * k) + (q + k) + q;
    // Gate, up and their product; of experts with the rows that are sent to them, and then with those that come back.
    let sent = model.experts.as_ref().map_or(0, |of| of.per_token as u64 * hidden);
    let mlp = 2 * hidden + (sent + 3 * inner).max(2 * sent + inner);
    // Cosines and sines, in f32; and where experts' tokens come from and go, as 64-bit integers.
    let tables = 8 * model.head_dim as u64;
    let routes = model.experts.as_ref().map_or(0, |of| 8 * (7 * of.per_token + of.count) as u64);
    attention.max(mlp) * bytes + tables + routes
}
