//! The transformer: pure functions over [`Views`].
//!
//! Cost: one fused projection for q, k, v and one for gate and up; no token of padding is computed outside attention.

use std::sync::Arc;

use tch::{Kind, Tensor};

use super::attention::{MaskByWindow, causal, window_mask};
use super::packed::Rectangle;
use super::rope::{Rope, Tables};
use super::views::Layer;
use super::{KvCache, Layout, ModelConfig, Packed, Views, Weights, fused, log_probs_and_entropy};

/// A decoder of one configuration. It holds no weights, and each thread makes its own.
pub struct Decoder {
    config: ModelConfig,
    layout: Arc<Layout>,
    rope: Rope,
}

impl Decoder {
    /// A decoder for weights of this layout, which must be the configuration's.
    pub fn new(config: &ModelConfig, layout: Arc<Layout>) -> Self {
        Decoder { config: config.clone(), layout, rope: Rope::new(config) }
    }

    /// Its configuration.
    pub fn config(&self) -> &ModelConfig {
        &self.config
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

    /// Final hidden states `[tokens, hidden]` of whole sequences, normed: what [`Decoder::logits`] takes.
    pub fn hidden(&self, views: &Views, packed: &Packed) -> Tensor {
        self.whole(views, packed, None)
    }

    /// The same for packed rows `rows` alone, `[rows, hidden]`, in that order. Cheaper than choosing afterwards: the last layer
    /// computes nothing else beyond its attention.
    pub fn hidden_at(&self, views: &Views, packed: &Packed, rows: &Tensor) -> Tensor {
        self.whole(views, packed, Some(rows))
    }

    /// Logits `[M, vocabulary]` of hidden rows `[M, hidden]`; with a head that scores, the scores `[M, 1]`.
    pub fn logits(&self, views: &Views, rows: &Tensor) -> Tensor {
        rows.linear(&views.head, None::<&Tensor>)
    }

    /// Log-probabilities and entropies, `[M]` each, of `targets` after `rows`, without gradients. At most `chunk_rows` rows of logits
    /// exist at a time.
    pub fn token_log_probs(
        &self,
        views: &Views,
        rows: &Tensor,
        targets: &Tensor,
        temperature: f64,
        chunk_rows: usize,
    ) -> (Tensor, Tensor) {
        let _guard = tch::no_grad_guard();
        let chunk_rows = chunk_rows.max(1) as i64;
        let (log_probs, entropies): (Vec<_>, Vec<_>) = rows
            .split(chunk_rows, 0)
            .iter()
            .zip(targets.split(chunk_rows, 0))
            .map(|(rows, targets)| log_probs_and_entropy(&self.logits(views, rows), &targets, temperature))
            .unzip();
        (Tensor::cat(&log_probs, 0), Tensor::cat(&entropies, 0))
    }

    /// Runs whole prompts, writes keys and values of prompt `i` into each slot of `slots[i]` from position 0, and returns the logits
    /// after each prompt, `[prompts, vocabulary]`. Without gradients.
    pub fn prefill(&self, views: &Views, packed: &Packed, cache: &mut KvCache, slots: &[Vec<usize>]) -> Tensor {
        let _guard = tch::no_grad_guard();
        let last: Vec<i64> = packed.starts().zip(&packed.lens).map(|(start, len)| (start + len - 1) as i64).collect();
        let last = Tensor::from_slice(&last).to_device(views.embedding.device());
        let hidden = self.rectangular(views, packed, Some(&last), |layer, keys_values| cache.fill(layer, slots, keys_values));
        self.logits(views, &hidden)
    }

    /// One token further in each of the slots `first`, `first + 1`, …: token `i` stands at `positions[i]` of slot `first + i`. Returns
    /// the logits after it, `[slots, vocabulary]`. Without gradients.
    pub fn decode(&self, views: &Views, first: usize, tokens: &[i64], positions: &[usize], cache: &mut KvCache) -> Tensor {
        let _guard = tch::no_grad_guard();
        let device = views.embedding.device();
        let longest = positions.iter().max().map_or(0, |position| position + 1);
        let at: Vec<i64> = positions.iter().map(|&position| position as i64).collect();
        let tables = self.rope.with(longest, device, |tables| tables.at(&Tensor::from_slice(&at).to_device(device)));
        let step = cache.begin_step(first, positions, &self.config);
        let mut x = views.embedding.index_select(0, &Tensor::from_slice(tokens).to_device(device));
        for (index, layer) in views.layers.iter().enumerate() {
            x = self.block(layer, x, None, |qkv| {
                let (qk, v) = self.heads(layer, qkv, &[tokens.len() as i64], &tables);
                cache.attend(&step, index, &qk, &v, self.config.windows[index])
            });
        }
        self.logits(views, &self.norm(&x, &views.norm))
    }

    /// Whole sequences, by the attention that is faster for them.
    fn whole(&self, views: &Views, packed: &Packed, rows: Option<&Tensor>) -> Tensor {
        let device = views.embedding.device();
        if !fused::attends(packed.longest(), device) {
            return self.rectangular(views, packed, rows, |_, _| {});
        }
        let (cos, sin) = self.rope.with(packed.longest(), device, |tables| tables.first(packed.longest() as i64).pairs());
        let heads = fused::Heads { queries: self.config.heads as i64, keys: self.config.kv_heads as i64 };
        self.trunk(views, packed, rows, |index, layer, qkv| {
            fused::attention(&self.normed_heads(layer, qkv), (&cos, &sin), packed, heads, self.config.windows[index])
        })
    }

    /// The same by libtorch's attention over a rectangle of sequences. `keep` gets each layer's keys and values as
    /// `[sequences, longest, key heads, dim]` each.
    fn rectangular(
        &self,
        views: &Views,
        packed: &Packed,
        rows: Option<&Tensor>,
        mut keep: impl FnMut(usize, (&Tensor, &Tensor)),
    ) -> Tensor {
        let device = views.embedding.device();
        let rectangle = Rectangle::new(packed, device);
        let shape = [rectangle.rows, rectangle.columns];
        let tables = self.rope.with(packed.longest(), device, |tables| tables.first(rectangle.columns));
        let masks = MaskByWindow::new(&self.config.windows, |window| window_mask(rectangle.columns, window, device));
        self.trunk(views, packed, rows, |index, layer, qkv| {
            let (qk, v) = self.heads(layer, &rectangle.spread(qkv), &shape, &tables);
            let [q, k] = self.split_queries(&qk);
            keep(index, (&k, &v));
            rectangle.pack(causal(&q, &k, &v, masks.get(self.config.windows[index])))
        })
    }

    /// Embedding, layers and final norm over whole sequences, for `rows` only where given; `attend` turns the rows of a layer's fused
    /// projections into the rows attention gives back.
    fn trunk(
        &self,
        views: &Views,
        packed: &Packed,
        rows: Option<&Tensor>,
        mut attend: impl FnMut(usize, &Layer, &Tensor) -> Tensor,
    ) -> Tensor {
        let device = views.embedding.device();
        let mut x = views.embedding.index_select(0, &Tensor::from_slice(&packed.ids).to_device(device));
        for (index, layer) in views.layers.iter().enumerate() {
            let rows = rows.filter(|_| index + 1 == views.layers.len());
            x = self.block(layer, x, rows, |qkv| attend(index, layer, qkv));
        }
        self.norm(&x, &views.norm)
    }

    /// One layer. With `rows`, nothing after attention is computed for other rows.
    fn block(&self, layer: &Layer, x: Tensor, rows: Option<&Tensor>, attend: impl FnOnce(&Tensor) -> Tensor) -> Tensor {
        let attended = attend(&layer.qkv.forward(&self.norm(&x, &layer.input_norm)));
        let chosen = |all: Tensor| match rows {
            Some(rows) => all.index_select(0, rows),
            None => all,
        };
        let x = chosen(x) + layer.output.forward(&chosen(attended));
        let inner = fused::swiglu(&layer.gate_up.forward(&self.norm(&x, &layer.post_norm)));
        x + layer.down.forward(&inner)
    }

    /// Splits fused projections into heads: rotated queries and keys `[…shape, heads + key heads, dim]`, and values.
    fn heads(&self, layer: &Layer, qkv: &Tensor, shape: &[i64], tables: &Tables) -> (Tensor, Tensor) {
        let (heads, kv_heads, dim) = (self.config.heads as i64, self.config.kv_heads as i64, self.config.head_dim as i64);
        let qkv = self.normed_heads(layer, qkv).view([shape, &[heads + 2 * kv_heads, dim]].concat().as_slice());
        let [qk, v] = parts(&qkv, -2, [heads + kv_heads, kv_heads]);
        (tables.rotate(&qk), v)
    }

    /// Fused projections whose query and key heads are normed, in families that do so; of the same shape, `[rows, columns]`.
    fn normed_heads(&self, layer: &Layer, qkv: &Tensor) -> Tensor {
        let Some((q_norm, k_norm)) = &layer.qk_norm else { return qkv.shallow_clone() };
        let (heads, kv_heads, dim) = (self.config.heads as i64, self.config.kv_heads as i64, self.config.head_dim as i64);
        let parts = qkv.view([-1, heads + 2 * kv_heads, dim]).split_with_sizes([heads, kv_heads, kv_heads], 1);
        let normed = [self.norm(&parts[0], q_norm), self.norm(&parts[1], k_norm), parts[2].shallow_clone()];
        Tensor::cat(&normed, 1).view(qkv.size().as_slice())
    }

    fn split_queries(&self, qk: &Tensor) -> [Tensor; 2] {
        parts(qk, -2, [self.config.heads as i64, self.config.kv_heads as i64])
    }

    /// RMS norm over the last dimension, in f32.
    fn norm(&self, x: &Tensor, weight: &Tensor) -> Tensor {
        debug_assert_eq!(x.kind(), Kind::Float);
        fused::rms_norm(x, weight, self.config.rms_norm_eps)
    }
}

/// Two neighbouring parts of a dimension. One split, for the backward of two slices is two zero-filled copies and their sum.
fn parts(x: &Tensor, dim: i64, sizes: [i64; 2]) -> [Tensor; 2] {
    let mut parts = x.split_with_sizes(sizes, dim).into_iter();
    [(); 2].map(|()| parts.next().expect("as many parts as sizes"))
}
