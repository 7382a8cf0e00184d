//! The transformer: pure functions over [`Views`].
//!
//! Cost: one fused projection for q, k, v and one for gate and up. Padding is computed only in
//! attention.

use std::sync::Arc;

use tch::{Device, Kind, Tensor};

use super::family::QkNorm;
use super::gated_delta::DeltaState;
use super::layout::part;
use super::packed::Rectangle;
use super::rope::{ByLayer, Rope, Tables};
use super::views::{BranchNorms, Layer, Mixer, Mlp};
use super::{Activation, Compute, KvCache, Layout, ModelConfig, Packed, Views, Weights, fused, wide};

/// Decoder of one configuration. It holds no weights; each thread creates its own.
pub struct Decoder {
    pub(super) config: ModelConfig,
    pub(super) layout: Arc<Layout>,
    rope: Rope,
}

/// Data that all layers of one pass over whole sequences share.
pub(super) struct Pass<'a> {
    packed: &'a Packed,
    /// For layers that take sequences apart.
    rectangle: Option<Rectangle>,
    attention: Attention,
}

/// How attention is computed.
enum Attention {
    /// Fused, with each layer's cosines and sines.
    Fused(ByLayer<(Tensor, Tensor)>),
    /// By libtorch over the rectangle, with masks.
    Rectangular(ByLayer<Tables>, ByLayer<Option<Tensor>>),
}

impl Pass<'_> {
    fn rectangle(&self) -> &Rectangle {
        self.rectangle.as_ref().expect("it is made where a layer needs it")
    }
}

/// What a layer leaves of whole sequences.
pub(super) enum Left<'a> {
    /// Keys and values, `[sequences, longest, key heads, dim]` each.
    KeysValues(&'a Tensor, &'a Tensor),
    /// States after each sequence.
    State(&'a DeltaState),
}

/// Receives what each layer leaves.
type Keep<'a> = &'a mut dyn FnMut(usize, Left);

impl Decoder {
    /// Creates a decoder for weights of `layout`, which must match `config`.
    pub fn new(config: &ModelConfig, layout: Arc<Layout>) -> Self {
        Decoder { config: config.clone(), layout, rope: Rope::new(config) }
    }

    /// Model configuration.
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// Allocates a cache of `slots` sequences of `positions` tokens, in the format and on the device
    /// of the model.
    pub fn cache(&self, slots: usize, positions: usize, compute: Compute) -> KvCache {
        KvCache::new(&self.config, slots, positions, compute)
    }

    /// The matrices of `flat`; gradients reach it in one piece.
    pub fn views(&self, flat: &Tensor) -> Views {
        Views::new(&self.config, &self.layout, flat)
    }

    /// The matrices of `weights`, adapters included.
    pub fn views_of(&self, weights: &Weights) -> Views {
        let views = self.views(&weights.flat);
        match &weights.adapter {
            Some(adapter) => views.adapted(&self.config, adapter),
            None => views,
        }
    }

    /// Final hidden states `[tokens, hidden]` of whole sequences, normed: input of
    /// [`Decoder::logits`].
    pub fn hidden(&self, views: &Views, packed: &Packed) -> Tensor {
        self.trunk(views, &self.pass(packed, &views.embedding), self.embed(views, &packed.ids), None, &mut |_, _| {})
    }

    /// [`Decoder::hidden`] of the packed rows `rows` only, in that order: `[rows, hidden]`, from
    /// the result of [`Decoder::embedded`]. Faster than a later selection: the last layer computes
    /// other rows only in attention.
    pub(crate) fn hidden_after(&self, views: &Views, packed: &Packed, rows: &Tensor, embedded: &Tensor) -> Tensor {
        let pass = self.pass(packed, &views.embedding);
        self.trunk(views, &pass, embedded.shallow_clone(), Some(rows), &mut |_, _| {})
    }

    /// Embeddings of packed tokens, detached; with `leaf`, a leaf that accumulates a gradient.
    pub(crate) fn embedded(&self, views: &Views, packed: &Packed, leaf: bool) -> Tensor {
        let _guard = tch::no_grad_guard();
        self.embed(views, &packed.ids).set_requires_grad(leaf)
    }

    /// Adds the gradient of the embeddings of `ids`, and of the head's weight, to a flat f32
    /// gradient. `by_embedded` is the gradient by the result of [`Decoder::embedded`]. Sums are in
    /// f32 (law N5): in 16 bits, adding 1 to 256 changes nothing.
    pub(crate) fn add_embedding_and_head(&self, gradient: &Tensor, ids: &[i64], by_embedded: &Tensor, by_head: Option<&Tensor>) {
        let _guard = tch::no_grad_guard();
        self.add_embedding(&part(gradient, self.layout.embedding()), ids, by_embedded);
        if let Some(by_head) = by_head {
            let head = self.layout.head().unwrap_or_else(|| self.layout.embedding());
            let _sum = part(gradient, head).g_add_(&by_head.reshape([-1]));
        }
    }

    /// The embedding's part of [`Decoder::add_embedding_and_head`], added to its flat gradient.
    pub(super) fn add_embedding(&self, gradient: &Tensor, ids: &[i64], by_embedded: &Tensor) {
        let _guard = tch::no_grad_guard();
        let ids = Tensor::from_slice(ids).to_device(gradient.device());
        let by_embedded = scaled(by_embedded.to_kind(Kind::Float), self.embedding_factor(by_embedded.kind()));
        let _sum = gradient.view([-1, self.config.hidden_size as i64]).index_add_(0, &ids, &by_embedded);
    }

    /// Logits `[M, vocabulary]` of hidden rows `[M, hidden]`; with a score head, scores `[M, 1]`.
    /// Always in f32 (law N5).
    pub fn logits(&self, views: &Views, rows: &Tensor) -> Tensor {
        capped(wide::linear(rows, &views.head), self.config.logits_cap.filter(|_| !self.config.scores))
    }

    /// Computes whole prompts and returns the logits after each, `[prompts, vocabulary]`. Writes
    /// keys and values of prompt `i` into every slot of `slots[i]`, from position 0. Without
    /// gradients.
    pub fn prefill(&self, views: &Views, packed: &Packed, cache: &mut KvCache, slots: &[Vec<usize>]) -> Tensor {
        let _guard = tch::no_grad_guard();
        let last: Vec<i64> = packed.starts().zip(&packed.lens).map(|(start, len)| (start + len - 1) as i64).collect();
        let last = Tensor::from_slice(&last).to_device(views.embedding.device());
        let pass = self.rectangular(packed, &views.embedding);
        let mut keep = |layer, left: Left| match left {
            Left::KeysValues(keys, values) => cache.fill(layer, slots, keys, values),
            Left::State(state) => cache.fill_state(layer, slots, state),
        };
        let hidden = self.trunk(views, &pass, self.embed(views, &packed.ids), Some(&last), &mut keep);
        self.logits(views, &hidden)
    }

    /// Decodes one token in each slot from `first` on: token `i` has position `positions[i]` in
    /// slot `first + i`. Returns the logits after it, `[slots, vocabulary]`. Without gradients.
    pub fn decode(&self, views: &Views, first: usize, tokens: &[i64], positions: &[usize], cache: &mut KvCache) -> Tensor {
        let _guard = tch::no_grad_guard();
        let device = views.embedding.device();
        let longest = positions.iter().max().map_or(0, |position| position + 1);
        let at: Vec<i64> = positions.iter().map(|&position| position as i64).collect();
        let at = Tensor::from_slice(&at).to_device(device);
        let tables = self.rope.by_layer(longest, device, |tables| tables.at(&at));
        let step = cache.begin_step(first, positions, &self.config);
        let mut x = self.embed(views, tokens);
        for (index, layer) in views.layers.iter().enumerate() {
            x = self.block(layer, x, None, |input| match (&layer.mixer, self.config.delta_of(index)) {
                (Mixer::Delta(weights), Some(of)) => weights.step(of, &layer.input.forward(input), &cache.state(&step, index)),
                _ => self.attention(layer, input, |qkv| {
                    let (qk, v) = self.heads(layer, qkv, &[tokens.len() as i64], tables.get(index));
                    cache.attend(&step, index, &qk, &v)
                }),
            });
        }
        self.logits(views, &self.finish(&views.norm, &x))
    }

    /// The attention that is faster for these sequences, where and as `like` is computed.
    pub(super) fn pass<'a>(&self, packed: &'a Packed, like: &Tensor) -> Pass<'a> {
        let longest = packed.longest();
        if !fused::attends(longest, like.kind(), like.device()) {
            return self.rectangular(packed, like);
        }
        let rotations = self.rope.by_layer(longest, like.device(), |tables| tables.first(longest as i64).pairs());
        let rectangle = self.config.delta.as_ref().map(|_| Rectangle::new(packed, like.device()));
        Pass { packed, rectangle, attention: Attention::Fused(rotations) }
    }

    fn rectangular<'a>(&self, packed: &'a Packed, embedding: &Tensor) -> Pass<'a> {
        let device = embedding.device();
        let rectangle = Rectangle::new(packed, device);
        let tables = self.rope.by_layer(packed.longest(), device, |tables| tables.first(rectangle.columns));
        let masks = ByLayer::new(self.config.windows.iter(), |window| window_mask(rectangle.columns, *window, device));
        Pass { packed, rectangle: Some(rectangle), attention: Attention::Rectangular(tables, masks) }
    }

    /// Layers and final norm over whole embedded sequences, for `rows` only where given.
    fn trunk(&self, views: &Views, pass: &Pass, embedded: Tensor, rows: Option<&Tensor>, keep: Keep) -> Tensor {
        let mut x = embedded;
        for (index, layer) in views.layers.iter().enumerate() {
            let rows = rows.filter(|_| index + 1 == views.layers.len());
            x = self.layer(layer, index, pass, x, rows, keep);
        }
        self.finish(&views.norm, &x)
    }

    /// The embeddings of tokens.
    fn embed(&self, views: &Views, tokens: &[i64]) -> Tensor {
        self.embed_by(&views.embedding, tokens)
    }

    /// The embeddings of tokens, by the matrix `embedding`.
    pub(super) fn embed_by(&self, embedding: &Tensor, tokens: &[i64]) -> Tensor {
        let tokens = Tensor::from_slice(tokens).to_device(embedding.device());
        scaled(embedding.index_select(0, &tokens), self.embedding_factor(embedding.kind()))
    }

    /// Factor of the embeddings.
    fn embedding_factor(&self, kind: Kind) -> f64 {
        let factor = self.config.embedding_multiplier;
        // Granite's is a number, Gemma's a tensor.
        match self.config.family.definition().norms_add_one && factor != 1.0 {
            true => Tensor::from(factor).to_kind(kind).double_value(&[]),
            false => factor,
        }
    }

    /// One layer over whole sequences.
    pub(super) fn layer(&self, layer: &Layer, index: usize, pass: &Pass, x: Tensor, rows: Option<&Tensor>, keep: Keep) -> Tensor {
        self.block(layer, x, rows, |input| match (&layer.mixer, self.config.delta_of(index)) {
            (Mixer::Delta(weights), Some(of)) => {
                let keep = |state: &DeltaState| keep(index, Left::State(state));
                weights.whole(of, &layer.input.forward(input), pass.rectangle(), &pass.packed.lens, keep)
            }
            _ => self.attention(layer, input, |qkv| self.attend(layer, index, pass, qkv, keep)),
        })
    }

    /// Attention over a normed input by `attend`, which gets its projections; gated in some families.
    fn attention(&self, layer: &Layer, input: &Tensor, attend: impl FnOnce(&Tensor) -> Tensor) -> Tensor {
        let projected = layer.input.forward(input);
        if !self.config.family.definition().gates_attention {
            return attend(&projected);
        }
        let (heads, kv_heads, dim) = (self.config.heads as i64, self.config.kv_heads as i64, self.config.head_dim as i64);
        let [queries, rest] = parts(&projected, -1, [2 * heads * dim, 2 * kv_heads * dim]);
        // Each head's query, then its gate.
        let halves = queries.reshape([-1, heads, 2, dim]);
        let [query, gate] = [0, 1].map(|half| halves.select(2, half).reshape([-1, heads * dim]));
        attend(&Tensor::cat(&[query, rest], 1)) * gate.sigmoid()
    }

    /// Norms the last layer's output: input of [`Decoder::logits`].
    pub(super) fn finish(&self, norm: &Tensor, x: &Tensor) -> Tensor {
        let normed = self.norm(x, norm);
        let divisor = self.config.logits_scaling;
        if self.config.scores || divisor == 1.0 { normed } else { normed / divisor }
    }

    /// Attention of one layer, from its fused projections.
    fn attend(&self, layer: &Layer, index: usize, pass: &Pass, qkv: &Tensor, keep: Keep) -> Tensor {
        let (config, window) = (&self.config, self.config.windows[index]);
        match &pass.attention {
            Attention::Fused(rotations) => {
                let (cos, sin) = rotations.get(index);
                let (queries, keys, scale) = (config.heads as i64, config.kv_heads as i64, config.attention_scale());
                let heads = fused::Heads { queries, keys, scale, cap: config.attention_cap };
                fused::attention(&self.normed_heads(layer, qkv), (cos, sin), pass.packed, heads, window)
            }
            Attention::Rectangular(tables, masks) => {
                let rectangle = pass.rectangle();
                let shape = [rectangle.rows, rectangle.columns];
                let (qk, v) = self.heads(layer, &rectangle.spread(qkv), &shape, tables.get(index));
                let [q, k] = parts(&qk, -2, [config.heads as i64, config.kv_heads as i64]);
                keep(index, Left::KeysValues(&k, &v));
                rectangle.pack(causal(&q, &k, &v, masks.get(index).as_ref(), config.attention_scale(), config.attention_cap))
            }
        }
    }

    /// One layer, whose tokens `mix` mixes. With `rows`, only those rows are computed after that.
    fn block(&self, layer: &Layer, x: Tensor, rows: Option<&Tensor>, mix: impl FnOnce(&Tensor) -> Tensor) -> Tensor {
        let mixed = mix(&self.normed(&x, layer.attention_norms.before.as_ref()));
        let chosen = |all: Tensor| match rows {
            Some(rows) => all.index_select(0, rows),
            None => all,
        };
        let x = chosen(x) + self.leave(layer.output.forward(&chosen(mixed)), &layer.attention_norms);
        let input = self.normed(&x, layer.mlp_norms.before.as_ref());
        let output = match (&layer.mlp, &self.config.experts) {
            (Mlp::Sparse(sparse), Some(experts)) => sparse.forward(&input, experts),
            (Mlp::Sparse(_), None) => unreachable!("sparse layers are those of experts"),
            (Mlp::Dense { gate_up, down }, _) => down.forward(&self.gated(&gate_up.forward(&input))),
        };
        x + self.leave(output, &layer.mlp_norms)
    }

    /// Activation of the gate, times the other half.
    fn gated(&self, gate_up: &Tensor) -> Tensor {
        let approximate = match self.config.activation {
            Activation::Silu => return fused::swiglu(gate_up),
            Activation::GeluTanh => "tanh",
            Activation::Gelu => "none",
        };
        let halves = gate_up.chunk(2, -1);
        halves[0].gelu(approximate) * &halves[1]
    }

    /// Norms by a weight, if there is one.
    fn normed(&self, x: &Tensor, norm: Option<&Tensor>) -> Tensor {
        norm.map_or_else(|| x.shallow_clone(), |norm| self.norm(x, norm))
    }

    /// Contribution of a branch to the residual stream.
    fn leave(&self, y: Tensor, norms: &BranchNorms) -> Tensor {
        scaled(self.normed(&y, norms.after.as_ref()), self.config.residual_multiplier)
    }

    /// Splits fused projections into rotated queries and keys, `[…shape, heads + key heads, dim]`,
    /// and values.
    fn heads(&self, layer: &Layer, qkv: &Tensor, shape: &[i64], tables: &Tables) -> (Tensor, Tensor) {
        let (heads, kv_heads, dim) = (self.config.heads as i64, self.config.kv_heads as i64, self.config.head_dim as i64);
        let qkv = self.normed_heads(layer, qkv).view([shape, &[heads + 2 * kv_heads, dim]].concat().as_slice());
        let [qk, v] = parts(&qkv, -2, [heads + kv_heads, kv_heads]);
        (tables.rotate(&qk), v)
    }

    /// Norms queries and keys within fused projections `[rows, columns]`, if the family has such
    /// norms.
    fn normed_heads(&self, layer: &Layer, qkv: &Tensor) -> Tensor {
        let Mixer::Attention { qk_norm: Some((q_norm, k_norm)) } = &layer.mixer else { return self.paired(qkv) };
        let (heads, kv_heads, dim) = (self.config.heads as i64, self.config.kv_heads as i64, self.config.head_dim as i64);
        let columns = [heads, kv_heads, kv_heads];
        let (split, parts) = match self.config.family.definition().qk_norm {
            QkNorm::Tokens => (qkv.shallow_clone(), columns.map(|heads| heads * dim)),
            _ => (qkv.view([-1, heads + 2 * kv_heads, dim]), columns),
        };
        let parts = split.split_with_sizes(parts, 1);
        let normed = [self.norm(&parts[0], q_norm), self.norm(&parts[1], k_norm), parts[2].shallow_clone()];
        self.paired(&Tensor::cat(&normed, 1).view(qkv.size().as_slice()))
    }

    /// Where only some columns of a head are rotated, orders those of queries and keys so that all pairs are
    /// half a head apart. Their products stay the same.
    fn paired(&self, qkv: &Tensor) -> Tensor {
        let (dim, rotated) = (self.config.head_dim as i64, self.config.rotated_columns() as i64);
        if rotated == dim {
            return qkv.shallow_clone();
        }
        let (turning, kv_heads) = (self.config.heads as i64 + self.config.kv_heads as i64, self.config.kv_heads as i64);
        let [qk, v] = parts(&qkv.view([-1, turning + kv_heads, dim]), 1, [turning, kv_heads]);
        let sizes = [rotated / 2, rotated / 2, (dim - rotated) / 2, (dim - rotated) / 2];
        let columns = qk.split_with_sizes(sizes, -1);
        let ordered = Tensor::cat(&[&columns[0], &columns[2], &columns[1], &columns[3]], -1);
        Tensor::cat(&[ordered, v], 1).view(qkv.size().as_slice())
    }

    /// RMS norm over the last dimension.
    fn norm(&self, x: &Tensor, weight: &Tensor) -> Tensor {
        let eps = self.config.rms_norm_eps;
        if !self.config.family.definition().norms_add_one {
            return fused::rms_norm(x, weight, eps);
        }
        // Factors and result are rounded once.
        fused::rms_norm(&x.to_kind(Kind::Float), &(weight.to_kind(Kind::Float) + 1.0), eps).to_kind(x.kind())
    }
}

/// Mask of a layer with this window over sequences of `len` tokens; `None` if causality is enough.
fn window_mask(len: i64, window: Option<usize>, device: Device) -> Option<Tensor> {
    let window = window.map(|window| window as i64).filter(|&window| window < len)?;
    Some(Tensor::ones([len, len], (Kind::Bool, device)).tril(0).triu(1 - window))
}

/// Causal attention within each row of a rectangle. `q` is `[rows, columns, heads, dim]`; `k` and
/// `v` have the key heads instead. Returns `[rows · columns, heads · dim]`. Products are multiplied
/// by `scale`.
fn causal(q: &Tensor, k: &Tensor, v: &Tensor, mask: Option<&Tensor>, scale: f64, cap: Option<f64>) -> Tensor {
    let [q, k, v] = [q, k, v].map(|x| x.transpose(1, 2));
    let grouped = q.size()[1] != k.size()[1];
    let out = match cap {
        None => Tensor::scaled_dot_product_attention(&q, &k, &v, mask, 0.0, mask.is_none(), Some(scale), grouped),
        Some(_) => written_out(&q, &k, &v, mask, scale, cap),
    };
    let (rows, columns) = (out.size()[0], out.size()[2]);
    out.transpose(1, 2).reshape([rows * columns, -1])
}

/// The same with capped scores, which libtorch's attention does not know; `[rows, heads, columns, dim]`.
/// Holds the scores of all heads, in f32.
fn written_out(q: &Tensor, k: &Tensor, v: &Tensor, mask: Option<&Tensor>, scale: f64, cap: Option<f64>) -> Tensor {
    let repeated = |x: &Tensor| x.repeat_interleave_self_int(q.size()[1] / x.size()[1], 1, None);
    let (columns, device) = (q.size()[2], q.device());
    let seen = mask.map_or_else(|| Tensor::ones([columns, columns], (Kind::Bool, device)).tril(0), Tensor::shallow_clone);
    let scores = q.to_kind(Kind::Float).matmul(&repeated(k).to_kind(Kind::Float).transpose(2, 3)) * scale;
    let scores = capped(scores, cap).masked_fill(&seen.logical_not(), f64::NEG_INFINITY);
    scores.softmax(-1, Kind::Float).to_kind(q.kind()).matmul(&repeated(v))
}

/// `cap · tanh(x / cap)`.
pub(crate) fn capped(x: Tensor, cap: Option<f64>) -> Tensor {
    cap.map_or_else(|| x.shallow_clone(), |cap| (&x / cap).tanh() * cap)
}

/// Log-probabilities of targets `[M]`, and entropies, from logits `[M, V]` divided by
/// `temperature`. Both results are `[M]` in f32. Only log-probabilities carry gradients.
pub fn log_probs_and_entropy(logits: &Tensor, targets: &Tensor, temperature: f64) -> (Tensor, Tensor) {
    let logits = logits.to_kind(Kind::Float);
    let log_probs = if temperature == 1.0 { logits } else { logits / temperature };
    let log_probs = log_probs.log_softmax(-1, Kind::Float);
    let chosen = log_probs.gather(-1, &targets.unsqueeze(-1), false).squeeze_dim(-1);
    let detached = log_probs.detach();
    // A logit of minus infinity has no share in the entropy; 0 · -inf would make it NaN.
    let entropy = -(detached.exp() * detached.clamp_min(f64::from(f32::MIN))).sum_dim_intlist([-1i64].as_slice(), false, None);
    (chosen, entropy)
}

fn scaled(x: Tensor, factor: f64) -> Tensor {
    if factor == 1.0 { x } else { x * factor }
}

/// Splits a dimension in two. One split is cheaper than two slices, whose backward pass is two
/// zero-filled copies and a sum.
fn parts(x: &Tensor, dim: i64, sizes: [i64; 2]) -> [Tensor; 2] {
    let mut parts = x.split_with_sizes(sizes, dim).into_iter();
    [(); 2].map(|()| parts.next().expect("as many parts as sizes"))
}
