//! The transformer: pure functions over [`Views`].
//!
//! Cost: one fused projection for q, k, v and one for gate and up. Padding is computed only in
//! attention.

use std::ops::Range;
use std::sync::Arc;

use tch::{Device, Kind, Tensor};

use super::block::{Attention, Keep, Left, Pass, Stream, capped, scaled, window_mask};
use super::fused::half;
use super::layout::part;
use super::net_rows::NetRows;
use super::packed::{FlashRuns, Rectangle};
use super::rope::{ByLayer, Rope};
use super::route_cache::RouteLog;
use super::routing::{Recorded, Watch};
use super::step::Step;
use super::views::Mixer;
use super::{Compute, KvCache, Layout, ModelConfig, Packed, StepThreads, Views, Weights, fused, upload, wide};

/// Decoder of one configuration. It holds no weights; each thread creates its own.
pub struct Decoder {
    pub(super) config: ModelConfig,
    pub(super) layout: Arc<Layout>,
    pub(super) rope: Rope,
}

impl Decoder {
    /// Creates a decoder for weights of `layout`, which must match `config`.
    pub fn new(config: &ModelConfig, layout: Arc<Layout>) -> Self {
        Decoder { config: config.clone(), layout, rope: Rope::new(config) }
    }

    /// Model configuration.
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// Allocates a cache of `slots` sequences of at least `positions` tokens, in the format of the activations
    /// and on the device of the model.
    pub fn cache(&self, slots: usize, positions: usize, compute: Compute) -> KvCache {
        KvCache::new(&self.config, slots, positions, compute)
    }

    /// The matrices of `flat`; gradients reach it in one piece.
    pub fn views(&self, flat: &Tensor) -> Views {
        Views::new(&self.config, &self.layout, flat)
    }

    /// The matrices of `weights`, adapters included.
    pub fn views_of(&self, weights: &Weights) -> Views {
        let views = match weights.is_quantised() {
            true => Views::quantised(&self.config, weights),
            false => self.views(&weights.flat),
        };
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
    /// other rows only in attention. `watch` gets what the routers did.
    pub(crate) fn hidden_after(
        &self,
        views: &Views,
        packed: &Packed,
        rows: &Tensor,
        embedded: &Tensor,
        watch: &mut Watch,
    ) -> Tensor {
        let pass = self.pass(packed, &views.embedding);
        let is_of_all = watch.is_of_all();
        let computed = (!is_of_all).then_some(rows);
        let hidden = self.trunk(views, &pass, embedded.shallow_clone(), computed, &mut |_, left: Left| watch.take(&left));
        if is_of_all { wide::gathered(&hidden, rows) } else { hidden }
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

    /// The embedding's part of [`Decoder::add_embedding_and_head`], added to its flat gradient. The padding token
    /// has none, as in transformers, whose embeddings leave it out: it often ends turns, too.
    pub(super) fn add_embedding(&self, gradient: &Tensor, ids: &[i64], by_embedded: &Tensor) {
        let _guard = tch::no_grad_guard();
        let mut by_embedded = scaled(by_embedded.to_kind(Kind::Float), self.embedding_factor(by_embedded.kind()));
        if let Some(pad) = self.config.pad_token_id.map(i64::from).filter(|pad| ids.contains(pad)) {
            let kept: Vec<bool> = ids.iter().map(|id| *id != pad).collect();
            by_embedded *= upload(&kept, gradient.device()).unsqueeze(-1);
        }
        let ids = upload(ids, gradient.device());
        let _sum = gradient.view([-1, self.config.hidden_size as i64]).index_add_(0, &ids, &by_embedded);
    }

    /// Logits `[M, vocabulary]` of hidden rows `[M, hidden]`; with a score head, scores `[M, 1]`.
    /// Always in f32 (law N5).
    pub fn logits(&self, views: &Views, rows: &Tensor) -> Tensor {
        capped(wide::linear(rows, &views.head), self.config.logits_cap.filter(|_| !self.config.scores))
    }

    /// Computes whole prompts and returns the logits after each, `[prompts, vocabulary]`. Writes
    /// keys and values of prompt `i` into slot `slots[i]`, from position 0. Without gradients.
    pub fn prefill(&self, views: &Views, packed: &Packed, cache: &mut KvCache, slots: &[usize]) -> Tensor {
        let _guard = tch::no_grad_guard();
        let last: Vec<i64> = packed.starts().zip(&packed.lens).map(|(start, len)| (start + len - 1) as i64).collect();
        let last = upload(&last, views.embedding.device());
        let pass = match self.flash(packed, &views.embedding) {
            Some(pass) => pass,
            None => self.rectangular(packed, &views.embedding),
        };
        let places = cache.places(slots, packed, pass.rectangle());
        let states: Vec<i64> = slots.iter().map(|&slot| slot as i64).collect();
        let states = upload(&states, views.embedding.device());
        let mut routes = cache.route_log();
        let is_of_all = routes.is_of_all();
        let mut keep = |layer, left: Left| match left {
            Left::KeysValues(keys, values) => cache.fill(layer, &places, keys, values),
            Left::State(state) => cache.fill_state(layer, &states, state),
            Left::Routed(_) => routes.take(&left),
        };
        let hidden = self.trunk(views, &pass, self.embed(views, &packed.ids), (!is_of_all).then_some(&last), &mut keep);
        let of_sequence =
            |((at, start), &len): ((usize, usize), &usize)| (0..len).map(move |position| (slots[at], position, start + position));
        cache.write_routes(routes, packed.starts().enumerate().zip(&packed.lens).flat_map(of_sequence));
        self.logits(views, &if is_of_all { hidden.index_select(0, &last) } else { hidden })
    }

    /// Decodes one token in each slot from `first` on: token `i` has position `positions[i]` in
    /// slot `first + i`. Returns the logits after it, `[slots, vocabulary]`. Without gradients.
    pub fn decode(&self, views: &Views, first: usize, tokens: &[i64], positions: &[usize], cache: &mut KvCache) -> Tensor {
        self.decode_by(&StepThreads::default(), views, first, (tokens, positions), cache)
    }

    /// [`Decoder::decode`] by several threads on a processor, each for some of the slots.
    pub(crate) fn decode_by(
        &self,
        threads: &StepThreads,
        views: &Views,
        first: usize,
        (tokens, positions): (&[i64], &[usize]),
        cache: &mut KvCache,
    ) -> Tensor {
        let _guard = tch::no_grad_guard();
        let (rows, parts) = (tokens.len(), if views.are_divisible() { threads.parts(tokens.len()) } else { 1 });
        let ranges: Vec<Range<usize>> = (0..parts).map(|part| rows * part / parts..rows * (part + 1) / parts).collect();
        let begin = |range: &Range<usize>| {
            self.begin_step(views, first + range.start, &tokens[range.clone()], &positions[range.clone()], cache)
        };
        let steps = ranges.iter().map(begin).collect();
        let shared = Shared { decoder: self, views, cache };
        let computed = threads.each(steps, |(step, tokens): (Step, Tensor)| {
            let (_guard, Shared { decoder, views, cache }) = (tch::no_grad_guard(), shared.all());
            let mut routes = cache.route_log();
            (decoder.decode_step(views, &step, &tokens, cache, &mut routes), routes)
        });
        let (mut logits, routes): (Vec<Tensor>, Vec<RouteLog>) = computed.into_iter().unzip();
        for (range, routes) in ranges.into_iter().zip(routes) {
            let start = range.start;
            cache.write_routes(routes, range.map(|row| (first + row, positions[row], row - start)));
        }
        if parts == 1 { logits.swap_remove(0) } else { Tensor::cat(&logits, 0) }
    }

    /// One step, from the tokens on the device.
    pub(super) fn decode_step(
        &self,
        views: &Views,
        step: &Step,
        tokens: &Tensor,
        cache: &KvCache,
        routes: &mut RouteLog,
    ) -> Tensor {
        let mut x = Stream::new(self.embed_rows(&views.embedding, tokens));
        for index in 0..self.config.layers() {
            let layer = views.layer(index);
            let mix = |input: &Tensor, _: Keep| match (&layer.mixer, self.config.delta_of(index)) {
                (Mixer::Delta(weights), Some(of)) => {
                    weights.step(of, &layer.input.forward(input), &cache.state(step.slots, index))
                }
                _ => self.attend_step(&layer, index, step, &layer.input.forward(input), cache),
            };
            x = self.block(&layer, index, (x, None), None, &mut |_, left| routes.take(&left), mix);
        }
        self.logits(views, &self.finish(&views.norm, x))
    }

    /// Returns true if a packed pass may compute a prompt once for many completions.
    pub(crate) fn shares_prompts(&self, longest: usize, compute: Compute) -> bool {
        let (kind, device) = compute.activations();
        fused::attends(longest, kind, device) || self.config.flashes(kind, device)
    }

    /// The attention that is faster for these sequences, where and as `like` is computed.
    pub(super) fn pass<'a>(&self, packed: &'a Packed, like: &Tensor) -> Pass<'a> {
        if let Some(pass) = self.flash(packed, like) {
            return pass;
        }
        let longest = packed.longest();
        if !fused::attends(longest, half::activations(like.kind(), like.device()), like.device()) {
            return self.rectangular(packed, like);
        }
        let tables = self.rope.by_layer(longest, like.device(), |tables| tables.first(longest as i64));
        self.over(packed, Attention::Fused(tables), like.device())
    }

    /// Flash attention, where that exists.
    fn flash<'a>(&self, packed: &'a Packed, like: &Tensor) -> Option<Pass<'a>> {
        let device = like.device();
        self.config.flashes(like.kind(), device).then(|| {
            let runs = FlashRuns::new(packed, device);
            let tables = self.rope.by_layer(packed.longest(), device, |tables| tables.at(&runs.positions));
            self.over(packed, Attention::Flash(tables, runs), device)
        })
    }

    fn rectangular<'a>(&self, packed: &'a Packed, like: &Tensor) -> Pass<'a> {
        let device = like.device();
        let rectangle = Rectangle::new(packed, device);
        let tables = self.rope.by_layer(packed.longest(), device, |tables| tables.first(rectangle.columns));
        let masks = ByLayer::new(self.config.windows.iter(), |window| window_mask(rectangle.columns, *window, device));
        self.over(packed, Attention::Rectangular(tables, masks, rectangle), device)
    }

    fn over<'a>(&self, packed: &'a Packed, attention: Attention, device: Device) -> Pass<'a> {
        let nets = self.config.delta.as_ref().map(|of| NetRows::new(packed, of, false, device));
        Pass { packed, attention, nets, recorded: Recorded::new(&self.config, packed, device) }
    }

    /// Layers and final norm over whole embedded sequences, for `rows` only where given.
    fn trunk(&self, views: &Views, pass: &Pass, embedded: Tensor, rows: Option<&Tensor>, keep: Keep) -> Tensor {
        let mut x = Stream::new(embedded);
        for index in 0..self.config.layers() {
            let rows = rows.filter(|_| index + 1 == self.config.layers());
            x = self.layer(&views.layer(index), index, pass, x, rows, keep);
        }
        self.finish(&views.norm, x)
    }

    /// The embeddings of tokens.
    fn embed(&self, views: &Views, tokens: &[i64]) -> Tensor {
        self.embed_by(&views.embedding, tokens)
    }

    /// The embeddings of tokens, by the matrix `embedding`.
    pub(super) fn embed_by(&self, embedding: &Tensor, tokens: &[i64]) -> Tensor {
        self.embed_rows(embedding, &upload(tokens, embedding.device()))
    }

    pub(super) fn embed_rows(&self, embedding: &Tensor, tokens: &Tensor) -> Tensor {
        let kind = half::activations(embedding.kind(), embedding.device());
        let pad = self.config.pad_token_id.map_or(-1, i64::from);
        scaled(Tensor::embedding(embedding, tokens, pad, false, false).to_kind(kind), self.embedding_factor(kind))
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

    /// Norms the last layer's output: input of [`Decoder::logits`].
    pub(super) fn finish(&self, norm: &Tensor, x: Stream) -> Tensor {
        let (_, normed) = self.normed_stream(x, Some(norm));
        let divisor = self.config.logits_scaling;
        if self.config.scores || divisor == 1.0 { normed } else { normed / divisor }
    }
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

/// What threads read that compute parts of one step.
struct Shared<'a> {
    decoder: &'a Decoder,
    views: &'a Views,
    cache: &'a KvCache,
}

// SAFETY: libtorch's tensors may be read by several threads. A step writes to the pages and states of these slots alone, at
// positions that no other slot shares. The decoder's rotations, which change as they grow, are `begin_step`'s.
unsafe impl Sync for Shared<'_> {}

impl Shared<'_> {
    /// All of it: a closure would capture the parts that it names.
    fn all(&self) -> &Self {
        self
    }
}
