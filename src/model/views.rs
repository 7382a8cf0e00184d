//! The matrices of a model as views of its flat parameters.

use std::ops::Deref;
use std::sync::OnceLock;

use tch::{Device, Kind, Tensor};

use super::experts::Sparse;
use super::family::Norms;
use super::fused::{Panels, half};
use super::gated_delta::DeltaWeights;
use super::low_rank::{LayerRanks, LowRank};
use super::{Adapter, Layout, ModelConfig, Weights};

/// Matrices and vectors of a model. One split of the flat tensor creates them, and its backward
/// pass is one concatenation, so that gradients are flat.
pub struct Views {
    pub(super) embedding: Tensor,
    layers: Layers,
    pub(super) norm: Tensor,
    /// Output head: `[vocabulary, hidden]`, or `[1, hidden]` of a score head. The embedding if both
    /// are tied.
    pub head: Tensor,
}

/// The layers' matrices.
enum Layers {
    Held(Vec<Layer>),
    /// In 4 bits, each layer made when it is computed: the base, and low-rank products.
    Quantised {
        config: Box<ModelConfig>,
        base: Weights,
        low_ranks: Vec<LayerRanks>,
    },
}

/// A layer that is held, or was made for this use.
pub(super) enum LayerRef<'a> {
    Held(&'a Layer),
    Made(Box<Layer>),
}

impl Deref for LayerRef<'_> {
    type Target = Layer;

    fn deref(&self) -> &Layer {
        match self {
            LayerRef::Held(layer) => layer,
            LayerRef::Made(layer) => layer,
        }
    }
}

/// One transformer layer.
pub(super) struct Layer {
    pub attention_norms: BranchNorms,
    /// Projections of the attention's or delta net's input.
    pub input: Linear,
    pub mixer: Mixer,
    /// Projection of its output.
    pub output: Linear,
    pub mlp_norms: BranchNorms,
    pub mlp: Mlp,
}

/// What mixes tokens.
pub(super) enum Mixer {
    /// Attention, in some families with norms of queries and keys, or with sinks, `[heads]`.
    Attention { qk_norm: Option<(Tensor, Tensor)>, sinks: Option<Tensor> },
    /// A gated delta net.
    Delta(DeltaWeights),
}

/// A feed-forward layer.
pub(super) enum Mlp {
    /// Gate and up, then down.
    Dense { gate_up: Linear, down: Linear },
    /// Experts, and one that computes every token, if there is one.
    Sparse { experts: Sparse, shared: Option<Shared> },
}

/// A feed-forward layer of every token next to experts.
pub(super) struct Shared {
    pub gate_up: Linear,
    pub down: Linear,
    /// The gate of its output, `[1, hidden]`.
    pub gate: Linear,
}

/// Norms of a branch's input and of its output.
pub(super) struct BranchNorms {
    pub before: Option<Tensor>,
    pub after: Option<Tensor>,
}

impl BranchNorms {
    fn take(of: Norms, next: &mut impl FnMut() -> Tensor) -> Self {
        BranchNorms { before: of.before.map(|_| next()), after: of.after.map(|_| next()) }
    }
}

/// A projection.
pub(super) struct Linear {
    weight: Tensor,
    bias: Option<Tensor>,
    low_rank: Option<LowRank>,
    /// The weight as products without gradients read it, made for the first of them.
    panels: OnceLock<Option<Panels>>,
}

impl Linear {
    fn new(weight: Tensor, bias: Option<Tensor>) -> Self {
        Linear { weight, bias, low_rank: None, panels: OnceLock::new() }
    }

    pub fn forward(&self, x: &Tensor) -> Tensor {
        let bias = self.bias.as_ref();
        let projected = self.by_panels(x, bias).unwrap_or_else(|| half::linear(x, &self.weight, bias));
        match &self.low_rank {
            Some(low_rank) => low_rank.add(projected, x),
            None => projected,
        }
    }

    fn by_panels(&self, x: &Tensor, bias: Option<&Tensor>) -> Option<Tensor> {
        let has_gradients = [x, &self.weight].into_iter().chain(bias).any(Tensor::requires_grad);
        let suits = !has_gradients && Panels::suit(x);
        let panels = suits.then(|| self.panels.get_or_init(|| Panels::new(&self.weight)).as_ref());
        Some(panels.flatten()?.linear(x, bias))
    }
}

impl Views {
    pub(super) fn new(config: &ModelConfig, layout: &Layout, flat: &Tensor) -> Self {
        // The order of `Layout::new`.
        let mut next = split(flat, layout.units());
        let embedding = next();
        let layers = (0..config.layers()).map(|index| Layer::take(config, index, &mut next)).collect();
        let norm = next();
        let head = if config.shares_embedding() { embedding.shallow_clone() } else { next() };
        Views { embedding, layers: Layers::Held(layers), norm, head }
    }

    /// Returns true if threads may each compute some rows of a step: on a processor, where layers needn't be made
    /// first.
    pub(super) fn are_divisible(&self) -> bool {
        self.activations() == (Kind::Float, Device::Cpu) && matches!(self.layers, Layers::Held(_))
    }

    /// Format and device of what layers hand on.
    pub(super) fn activations(&self) -> (Kind, Device) {
        let device = self.embedding.device();
        (half::activations(self.embedding.kind(), device), device)
    }

    /// Views of a base in 4 bits.
    pub(super) fn quantised(config: &ModelConfig, weights: &Weights) -> Self {
        let (base, layout, hidden) = (weights.without_adapter(), &weights.layout, config.hidden_size as i64);
        let matrix = |range| base.numbers(range).view([-1, hidden]);
        let (embedding, norm) = (matrix(layout.embedding()), base.numbers(layout.norm()));
        let head = layout.head().map_or_else(|| embedding.shallow_clone(), matrix);
        let layers = Layers::Quantised { config: Box::new(config.clone()), base, low_ranks: Vec::new() };
        Views { embedding, layers, norm, head }
    }

    /// A layer's matrices. Of a base in 4 bits they are computed, and freed with the result.
    pub(super) fn layer(&self, index: usize) -> LayerRef<'_> {
        match &self.layers {
            Layers::Held(layers) => LayerRef::Held(&layers[index]),
            Layers::Quantised { config, base, low_ranks } => {
                let mut layer = Layer::new(config, &base.layout, index, &base.numbers(base.layout.layer(index)));
                if let Some(of_layer) = low_ranks.get(index) {
                    layer.adapt(of_layer.share());
                }
                LayerRef::Made(Box::new(layer))
            }
        }
    }

    /// Returns true if no layer's experts depend on the host.
    pub(super) fn groups_experts(&self) -> bool {
        let layers = match &self.layers {
            Layers::Held(layers) => layers,
            Layers::Quantised { config, .. } => return config.experts.is_none(),
        };
        layers.iter().all(|layer| match &layer.mlp {
            Mlp::Dense { .. } => true,
            Mlp::Sparse { experts, .. } => experts.is_grouped(),
        })
    }

    /// Adds the low-rank products of `adapter`, and its score head if there is one.
    pub(super) fn adapted(mut self, config: &ModelConfig, adapter: &Adapter) -> Self {
        let (low_ranks, head) = adapter.views(config);
        match &mut self.layers {
            Layers::Held(layers) => layers.iter_mut().zip(low_ranks).for_each(|(layer, of)| layer.adapt(of)),
            Layers::Quantised { low_ranks: own, .. } => *own = low_ranks,
        }
        Views { head: head.unwrap_or(self.head), ..self }
    }
}

impl Layer {
    /// Views of one layer, from its part of the parameters.
    pub fn new(config: &ModelConfig, layout: &Layout, index: usize, part: &Tensor) -> Self {
        Layer::take(config, index, &mut split(part, layout.units_of_layer(index)))
    }

    /// Sinks of its attention, if it has any.
    pub fn sinks(&self) -> Option<&Tensor> {
        match &self.mixer {
            Mixer::Attention { sinks, .. } => sinks.as_ref(),
            Mixer::Delta(_) => None,
        }
    }

    /// Norms of its queries and keys, if it has any.
    pub fn qk_norm(&self) -> Option<(&Tensor, &Tensor)> {
        match &self.mixer {
            Mixer::Attention { qk_norm, .. } => qk_norm.as_ref().map(|(q, k)| (q, k)),
            Mixer::Delta(_) => None,
        }
    }

    /// Sets the low-rank products of its projections.
    pub fn adapt(&mut self, LayerRanks { groups: [qkv, output, gate_up, down, gate], router, experts }: LayerRanks) {
        (self.input.low_rank, self.output.low_rank) = (qkv, output);
        match &mut self.mlp {
            Mlp::Dense { gate_up: of_input, down: of_output } => (of_input.low_rank, of_output.low_rank) = (gate_up, down),
            Mlp::Sparse { experts: sparse, shared } => {
                (sparse.low_ranks, sparse.router_rank) = (experts, router);
                if let Some(shared) = shared {
                    (shared.gate_up.low_rank, shared.down.low_rank, shared.gate.low_rank) = (gate_up, down, gate);
                }
            }
        }
    }

    fn take(config: &ModelConfig, index: usize, next: &mut impl FnMut() -> Tensor) -> Self {
        let [attention, mlp] = config.family.definition().norms;
        let is_attention = config.delta_of(index).is_none();
        Layer {
            attention_norms: BranchNorms::take(attention, next),
            input: Linear::new(next(), (is_attention && config.qkv_bias).then(&mut *next)),
            mixer: match is_attention {
                true => Mixer::Attention {
                    qk_norm: config.qk_norm_sizes().map(|_| (next(), next())),
                    sinks: config.has_sinks().then(&mut *next),
                },
                false => Mixer::Delta(DeltaWeights::take(config, next)),
            },
            output: Linear::new(next(), (is_attention && config.output_bias).then(&mut *next)),
            mlp_norms: BranchNorms::take(mlp, next),
            mlp: match config.experts_of(index) {
                None => Mlp::Dense {
                    gate_up: Linear::new(next(), config.mlp_bias.then(&mut *next)),
                    down: Linear::new(next(), config.mlp_bias.then(&mut *next)),
                },
                Some(of) => {
                    let plain = |next: &mut dyn FnMut() -> Tensor| Linear::new(next(), None);
                    let shared = of.shared.map(|_| (plain(next), plain(next)));
                    let experts = Sparse::take(of, config.hidden_size, next);
                    let shared = shared.map(|(gate_up, down)| Shared { gate_up, down, gate: plain(next) });
                    Mlp::Sparse { experts, shared }
                }
            },
        }
    }
}

/// Gives the tensors of these shapes that a flat tensor holds end to end, one at a time. Vectors are in the
/// format of activations.
pub(super) fn split(flat: &Tensor, shapes: &[Vec<i64>]) -> impl FnMut() -> Tensor {
    let sizes: Vec<i64> = shapes.iter().map(|shape| shape.iter().product()).collect();
    let mut parts = flat.split_with_sizes(sizes, 0).into_iter().zip(shapes);
    let of_vectors = half::activations(flat.kind(), flat.device());
    move || match parts.next().expect("views follow the layout") {
        (part, shape) if shape.len() == 1 => part.to_kind(of_vectors),
        (part, shape) => part.view(shape.as_slice()),
    }
}
