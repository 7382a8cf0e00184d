//! One layer of the decoder: what mixes tokens, the feed-forward layer, and their norms.

use tch::{Device, Kind, Tensor};

use super::experts::Routed;
use super::family::QkNorm;
use super::fused::gpu::NormBy;
use super::fused::half;
use super::gated_delta::DeltaState;
use super::net_rows::NetRows;
use super::packed::{FlashRuns, Rectangle};
use super::rope::{ByLayer, Tables};
use super::routing::Recorded;
use super::views::{BranchNorms, Layer, Mixer, Mlp, Shared};
use super::{Activation, Decoder, ModelConfig, Packed, fused, wide};

/// Data that all layers of one pass over whole sequences share.
pub(super) struct Pass<'a> {
    pub packed: &'a Packed,
    pub attention: Attention,
    /// Rows of gated delta nets, if there are any.
    pub nets: Option<NetRows>,
    /// Experts that computed the tokens before.
    pub recorded: Option<Recorded>,
}

/// How attention is computed.
pub(super) enum Attention {
    /// Fused.
    Fused(ByLayer<Tables>),
    /// libtorch's flash attention, with each row's cosines and sines.
    Flash(ByLayer<Tables>, FlashRuns),
    /// By libtorch over a rectangle, with masks.
    Rectangular(ByLayer<Tables>, ByLayer<Option<Tensor>>, Rectangle),
}

impl Pass<'_> {
    /// The rectangle of attention, if it does not take the packed rows as they are.
    pub fn rectangle(&self) -> Option<&Rectangle> {
        match &self.attention {
            Attention::Rectangular(.., rectangle) => Some(rectangle),
            _ => None,
        }
    }
}

/// What a layer leaves of whole sequences.
pub(super) enum Left<'a> {
    /// Keys and values, `[cells, key heads, dim]` each: of the packed rows, or of the rectangle.
    KeysValues(&'a Tensor, &'a Tensor),
    /// States after each sequence.
    State(&'a DeltaState),
    /// What the router did.
    Routed(&'a Routed<'a>),
}

/// Receives what each layer leaves.
pub(super) type Keep<'a> = &'a mut dyn FnMut(usize, Left);

/// The residual stream. The newest contribution is added when the sum is needed, so that adding and norming
/// may be one operation.
pub(super) struct Stream {
    sum: Tensor,
    added: Option<Tensor>,
}

impl Stream {
    pub fn new(x: Tensor) -> Self {
        Stream { sum: x, added: None }
    }

    fn add(self, y: Tensor) -> Self {
        Stream { sum: self.whole(), added: Some(y) }
    }

    pub fn whole(self) -> Tensor {
        match self.added {
            Some(added) => self.sum + added,
            None => self.sum,
        }
    }
}

impl Decoder {
    /// One layer over whole sequences.
    pub(super) fn layer(&self, layer: &Layer, index: usize, pass: &Pass, x: Stream, rows: Option<&Tensor>, keep: Keep) -> Stream {
        let mix = |input: &Tensor, keep: Keep| match (&layer.mixer, self.config.delta_of(index), &pass.nets) {
            (Mixer::Delta(weights), Some(of), Some(rows)) => {
                let keep = |state: &DeltaState| keep(index, Left::State(state));
                weights.several(of, &layer.input.forward(input), rows, None, keep)
            }
            _ => self.by_gates(&layer.input.forward(input), |qkv| self.attend(layer, index, pass, qkv, keep)),
        };
        let recorded = pass.recorded.as_ref().and_then(|recorded| recorded.of_layer(&self.config, index, rows));
        self.block(layer, index, (x, rows), recorded.as_ref(), keep, mix)
    }

    /// Attention by `attend` from fused projections, of which it gets queries, keys and values; gated in some
    /// families.
    pub(super) fn by_gates(&self, projected: &Tensor, attend: impl FnOnce(&Tensor) -> Tensor) -> Tensor {
        if !self.config.family.definition().gates_attention {
            return attend(projected);
        }
        let (heads, kv_heads, dim) = (self.config.heads as i64, self.config.kv_heads as i64, self.config.head_dim as i64);
        let [queries, rest] = parts(projected, -1, [2 * heads * dim, 2 * kv_heads * dim]);
        // Each head's query, then its gate.
        let halves = queries.reshape([-1, heads, 2, dim]);
        let [query, gate] = [0, 1].map(|half| halves.select(2, half).reshape([-1, heads * dim]));
        attend(&Tensor::cat(&[query, rest], 1)) * gate.sigmoid()
    }

    /// Attention of one layer, from its fused projections.
    fn attend(&self, layer: &Layer, index: usize, pass: &Pass, qkv: &Tensor, keep: Keep) -> Tensor {
        let (config, window) = (&self.config, self.config.windows[index]);
        match &pass.attention {
            Attention::Fused(tables) => {
                let Tables { cos, sin } = tables.get(index);
                let (qkv, heads) = (self.normed_heads(layer, qkv), config.fused_heads());
                fused::attention(&qkv, (cos, sin), pass.packed, heads, window, layer.sinks())
            }
            Attention::Flash(tables, FlashRuns { queries, keys, key_rows, .. }) => {
                let (qk, v) = self.heads(layer, qkv, &[qkv.size()[0]], tables.get(index));
                let [q, k] = parts(&qk, -2, [config.heads as i64, config.kv_heads as i64]);
                keep(index, Left::KeysValues(&k, &v));
                let [k, v] = [k, v].map(|of| match key_rows {
                    Some(rows) => wide::gathered(&of, rows),
                    None => of,
                });
                let window = window.filter(|&window| (window as i64) < keys.longest);
                let out = fused::flash([&q, &k, &v], (queries, keys), config.attention_scale(), window, layer.sinks());
                out.reshape([q.size()[0], -1])
            }
            Attention::Rectangular(tables, masks, rectangle) => {
                let shape = [rectangle.rows, rectangle.columns];
                let (qk, v) = self.heads(layer, &rectangle.spread(qkv), &shape, tables.get(index));
                let [q, k] = parts(&qk, -2, [config.heads as i64, config.kv_heads as i64]);
                let [keys, values] = [&k, &v].map(|of| of.flatten(0, 1));
                keep(index, Left::KeysValues(&keys, &values));
                rectangle.pack(causal([&q, &k, &v], masks.get(index).as_ref(), &config.scores_of(layer)))
            }
        }
    }

    /// One layer, whose tokens `mix` mixes. With `rows`, only those rows are computed after that. `recorded`:
    /// experts that computed these before.
    pub(super) fn block(
        &self,
        layer: &Layer,
        index: usize,
        (x, rows): (Stream, Option<&Tensor>),
        recorded: Option<&Recorded>,
        keep: Keep,
        mix: impl FnOnce(&Tensor, Keep) -> Tensor,
    ) -> Stream {
        let (x, input) = self.normed_stream(x, layer.attention_norms.before.as_ref());
        let mixed = mix(&input, keep);
        // Without gradients nothing else holds them, and the widest tensors come last.
        drop(input);
        let (x, mixed) = match rows {
            Some(rows) => (Stream::new(wide::gathered(&x.whole(), rows)), wide::gathered(&mixed, rows)),
            None => (x, mixed),
        };
        let x = x.add(self.leave(layer.output.forward(&mixed), &layer.attention_norms));
        drop(mixed);
        let (x, input) = self.normed_stream(x, layer.mlp_norms.before.as_ref());
        let output = match (&layer.mlp, &self.config.experts) {
            (Mlp::Sparse { experts, shared }, Some(of)) => {
                let shared = shared.as_ref().map(|Shared { gate_up, down, gate }| {
                    [down.forward(&self.gated(&gate_up.forward(&input))), gate.forward(&input)]
                });
                let shared = shared.as_ref().map(|[rows, gates]| [rows, gates]);
                experts.forward(&input, of, shared, recorded, |routed| keep(index, Left::Routed(routed)))
            }
            (Mlp::Sparse { .. }, None) => unreachable!("sparse layers are those of experts"),
            (Mlp::Dense { gate_up, down }, _) => {
                // Gate and up are freed before the last product.
                let inner = self.gated(&gate_up.forward(&input));
                down.forward(&inner)
            }
        };
        x.add(self.leave(output, &layer.mlp_norms))
    }

    /// The stream, summed, and its norm by a weight, if there is one.
    pub(super) fn normed_stream(&self, x: Stream, norm: Option<&Tensor>) -> (Stream, Tensor) {
        if let (Some(added), Some(norm)) = (&x.added, norm)
            && let Some((sum, normed)) = fused::gpu::add_rms_norm(&x.sum, added, self.norm_by(norm))
        {
            return (Stream::new(sum), normed);
        }
        let sum = x.whole();
        let normed = self.normed(&sum, norm);
        (Stream::new(sum), normed)
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
    pub(super) fn heads(&self, layer: &Layer, qkv: &Tensor, shape: &[i64], tables: &Tables) -> (Tensor, Tensor) {
        let (heads, kv_heads, dim) = (self.config.heads as i64, self.config.kv_heads as i64, self.config.head_dim as i64);
        let qkv = self.normed_heads(layer, qkv).view([shape, &[heads + 2 * kv_heads, dim]].concat().as_slice());
        let [qk, v] = parts(&qkv, -2, [heads + kv_heads, kv_heads]);
        (tables.rotate(&qk), v)
    }

    /// Norms queries and keys within fused projections `[rows, columns]`, and bounds them and values, where the
    /// family does.
    pub(super) fn normed_heads(&self, layer: &Layer, qkv: &Tensor) -> Tensor {
        let bounded = |qkv: Tensor| match self.config.qkv_bound {
            None => self.paired(&qkv),
            Some(bound) => self.paired(&qkv.clamp(-bound, bound)),
        };
        let Some((q_norm, k_norm)) = layer.qk_norm() else { return bounded(qkv.shallow_clone()) };
        let (heads, kv_heads, dim) = (self.config.heads as i64, self.config.kv_heads as i64, self.config.head_dim as i64);
        let columns = [heads, kv_heads, kv_heads];
        let (split, parts) = match self.config.family.definition().qk_norm {
            QkNorm::Tokens => (qkv.shallow_clone(), columns.map(|heads| heads * dim)),
            _ => (qkv.view([-1, heads + 2 * kv_heads, dim]), columns),
        };
        let parts = split.split_with_sizes(parts, 1);
        let normed = [self.norm(&parts[0], q_norm), self.norm(&parts[1], k_norm), parts[2].shallow_clone()];
        bounded(Tensor::cat(&normed, 1).view(qkv.size().as_slice()))
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
    pub(super) fn norm(&self, x: &Tensor, weight: &Tensor) -> Tensor {
        let weight = &weight.to_kind(half::activations(weight.kind(), weight.device()));
        let by = self.norm_by(weight);
        if by.more == 0.0 {
            return fused::rms_norm(x, weight, by.eps);
        }
        // Factors and result are rounded once.
        fused::gpu::rms_norm(x, by).unwrap_or_else(|| {
            fused::rms_norm(&x.to_kind(Kind::Float), &(weight.to_kind(Kind::Float) + by.more), by.eps).to_kind(x.kind())
        })
    }

    /// How a weight's norm is computed.
    pub(super) fn norm_by<'a>(&self, weight: &'a Tensor) -> NormBy<'a> {
        let more = f64::from(u8::from(self.config.family.definition().norms_add_one));
        NormBy { weight, more, eps: self.config.rms_norm_eps }
    }
}

/// Mask of a layer with this window over sequences of `len` tokens; `None` if causality is enough.
pub(super) fn window_mask(len: i64, window: Option<usize>, device: Device) -> Option<Tensor> {
    let window = window.map(|window| window as i64).filter(|&window| window < len)?;
    Some(Tensor::ones([len, len], (Kind::Bool, device)).tril(0).triu(1 - window))
}

/// Causal attention within each row of a rectangle. `q` is `[rows, columns, heads, dim]`; `k` and
/// `v` have the key heads instead. Returns `[rows · columns, heads · dim]`.
pub(super) fn causal(qkv: [&Tensor; 3], mask: Option<&Tensor>, of: &Scores) -> Tensor {
    let [q, k, v] = qkv.map(|x| x.transpose(1, 2));
    let grouped = q.size()[1] != k.size()[1];
    let out = match of {
        Scores { scale, cap: None, sinks: None } => {
            Tensor::scaled_dot_product_attention(&q, &k, &v, mask, 0.0, mask.is_none(), Some(*scale), grouped)
        }
        of => written_out(&q, &k, &v, mask, of),
    };
    let (rows, columns) = (out.size()[0], out.size()[2]);
    out.transpose(1, 2).reshape([rows * columns, -1])
}

/// How attention scores become probabilities.
pub(super) struct Scores<'a> {
    /// Factor of query-key products.
    pub scale: f64,
    pub cap: Option<f64>,
    /// Of each query head, a score of no key.
    pub sinks: Option<&'a Tensor>,
}

impl Scores<'_> {
    /// Probabilities of keys, in f32, from scores `[.., queries, keys]` and sinks in the shape `[.., queries,
    /// 1]`.
    pub fn probabilities(scores: &Tensor, sinks: Option<Tensor>) -> Tensor {
        match sinks {
            None => scores.softmax(-1, Kind::Float),
            Some(sinks) => {
                let keys = scores.size()[scores.dim() - 1];
                Tensor::cat(&[scores, &sinks.to_kind(Kind::Float)], -1).softmax(-1, Kind::Float).narrow(-1, 0, keys)
            }
        }
    }
}

impl ModelConfig {
    /// The scores of a layer.
    pub(super) fn scores_of<'a>(&self, layer: &'a Layer) -> Scores<'a> {
        Scores { scale: self.attention_scale(), cap: self.attention_cap, sinks: layer.sinks() }
    }
}

/// The same with capped scores or sinks, which libtorch's attention does not know; `[rows, heads, columns,
/// dim]`. Holds the scores of all heads, in f32.
fn written_out(q: &Tensor, k: &Tensor, v: &Tensor, mask: Option<&Tensor>, of: &Scores) -> Tensor {
    let repeated = |x: &Tensor| x.repeat_interleave_self_int(q.size()[1] / x.size()[1], 1, None);
    let (columns, device) = (q.size()[2], q.device());
    let seen = mask.map_or_else(|| Tensor::ones([columns, columns], (Kind::Bool, device)).tril(0), Tensor::shallow_clone);
    let scores = q.to_kind(Kind::Float).matmul(&repeated(k).to_kind(Kind::Float).transpose(2, 3)) * of.scale;
    let scores = capped(scores, of.cap).masked_fill(&seen.logical_not(), f64::NEG_INFINITY);
    let (rows, heads) = (q.size()[0], q.size()[1]);
    let sinks = of.sinks.map(|sinks| sinks.view([1, heads, 1, 1]).expand([rows, heads, q.size()[2], 1], false));
    Scores::probabilities(&scores, sinks).to_kind(q.kind()).matmul(&repeated(v))
}

/// `cap · tanh(x / cap)`.
pub(crate) fn capped(x: Tensor, cap: Option<f64>) -> Tensor {
    cap.map_or_else(|| x.shallow_clone(), |cap| (&x / cap).tanh() * cap)
}

pub(super) fn scaled(x: Tensor, factor: f64) -> Tensor {
    if factor == 1.0 { x } else { x * factor }
}

/// Splits a dimension in two. One split is cheaper than two slices, whose backward pass is two
/// zero-filled copies and a sum.
pub(super) fn parts(x: &Tensor, dim: i64, sizes: [i64; 2]) -> [Tensor; 2] {
    let mut parts = x.split_with_sizes(sizes, dim).into_iter();
    [(); 2].map(|()| parts.next().expect("as many parts as sizes"))
}
