//! Attention of one decoding step: a token in each of adjacent slots of a cache.

use tch::{Device, Kind, Tensor};

use super::block::{Scores, capped, parts};
use super::family::QkNorm;
use super::fused::{self, Runs};
use super::kv_cache::SlotRange;
use super::rope::{ByLayer, Tables};
use super::views::{Layer, Mixer};
use super::{Decoder, KvCache, Views, upload, wide};

/// Data that all layers of one decoding step share.
pub(super) struct Step {
    pub slots: SlotRange,
    way: Way,
}

/// How a step's attention is computed.
enum Way {
    /// Fused, on a CPU in f32: positions, and all cosines and sines.
    Fused(Vec<i64>, ByLayer<Tables>),
    /// By our kernel, on a GPU in 16 bits: positions, the longest sequence, and all cosines and sines.
    Kernel(Tensor, i64, ByLayer<Tables>),
    /// By libtorch's flash attention, on a GPU in 16 bits.
    Flash(Written, Flash),
    /// By products over the longest sequence, with masks: zero where a position is seen, minus infinity
    /// elsewhere.
    Products(Written, i64, ByLayer<Option<Tensor>>),
}

/// What a step writes.
struct Written {
    /// Rows of the cache.
    rows: Tensor,
    /// Each row's cosines and sines.
    tables: ByLayer<Tables>,
}

/// The sequences as flash attention takes them.
struct Flash {
    queries: Runs,
    keys: Runs,
    /// Positions of each that count.
    used: Tensor,
}

impl Decoder {
    /// Prepares a step in which slot `first + i` receives `tokens[i]` at `positions[i]`. Returns the tokens on
    /// the device, too, so that all of the step goes there at a time.
    pub(super) fn begin_step(
        &self,
        views: &Views,
        first: usize,
        tokens: &[i64],
        positions: &[usize],
        cache: &KvCache,
    ) -> (Step, Tensor) {
        let (kind, device) = views.activations();
        let slots = SlotRange { first: first as i64, len: tokens.len() as i64 };
        let longest = positions.iter().max().map_or(0, |position| position + 1);
        let at: Vec<i64> = positions.iter().map(|&position| position as i64).collect();
        if device == Device::Cpu && kind == Kind::Float {
            let tables = self.rope.by_layer(longest, device, Tables::all);
            return (Step { slots, way: Way::Fused(at, tables) }, Tensor::from_slice(tokens));
        }
        if self.config.attends_slots(kind, device) {
            let numbers = upload(&[tokens, &at].concat(), device).view([2, -1]);
            // As many positions as the cache has, which a recorded step needs.
            let tables = self.rope.by_layer(cache.positions(), device, Tables::all);
            return (Step { slots, way: Way::Kernel(numbers.get(1), longest as i64, tables) }, numbers.get(0));
        }
        let length = cache.positions() as i64;
        let rows = (slots.first..).zip(&at).map(|(slot, at)| slot * length + at);
        let numbers: Vec<i64> = tokens.iter().chain(&at).copied().chain(rows).collect();
        let numbers = upload(&numbers, device).view([3, -1]);
        let [tokens, at_device, rows] = [0, 1, 2].map(|part| numbers.get(part));
        let tables = self.rope.by_layer(longest, device, |tables| tables.at(&at_device));
        let written = Written { rows, tables };
        let way = if self.config.flashes(kind, device) {
            let ends = Tensor::arange(slots.len + 1, (Kind::Int, device));
            let keys = Runs { ends: &ends * length, longest: length };
            Way::Flash(written, Flash { queries: Runs { ends, longest: 1 }, keys, used: (at_device + 1).to_kind(Kind::Int) })
        } else {
            let masks = ByLayer::new(self.config.windows.iter(), |window| step_mask(&at, &at_device, longest as i64, *window));
            Way::Products(written, longest as i64, masks)
        };
        (Step { slots, way }, tokens)
    }

    /// Returns true if a step under these weights is [`Decoder::decode_recorded`]'s.
    pub(crate) fn records_steps(&self, views: &Views) -> bool {
        let (kind, device) = views.activations();
        // A mixture's tokens are counted on the host unless its products are grouped.
        views.groups_experts() && self.config.attends_slots(kind, device)
    }

    /// Returns true if a step may be computed again. A delta net has a state, which the step has changed.
    pub(crate) fn repeats_steps(&self) -> bool {
        self.config.delta.is_none()
    }

    /// [`Decoder::decode`] for slots from 0 on, with tokens and positions on the device, `[2, slots]`: nothing of
    /// it depends on the host. The tables of positions must cover the cache already.
    pub(crate) fn decode_recorded(&self, views: &Views, tokens: &Tensor, cache: &mut KvCache) -> Tensor {
        let (slots, longest) = (SlotRange { first: 0, len: tokens.size()[1] }, cache.positions());
        let tables = self.rope.by_layer(longest, tokens.device(), Tables::all);
        let step = Step { slots, way: Way::Kernel(tokens.get(1), longest as i64, tables) };
        let mut routes = cache.route_log();
        let logits = self.decode_step(views, &step, &tokens.get(0), cache, &mut routes);
        cache.write_routes_of_step(routes, &tokens.get(1));
        logits
    }

    /// Writes a layer's new keys and values, and attends over all positions up to them: fused projections
    /// `[slots, …]` → `[slots, heads · dim]`.
    pub(super) fn attend_step(&self, layer: &Layer, index: usize, step: &Step, qkv: &Tensor, cache: &mut KvCache) -> Tensor {
        let (config, window) = (&self.config, self.config.windows[index]);
        let written = match &step.way {
            Way::Fused(positions, tables) => {
                let (Tables { cos, sin }, qkv) = (tables.get(index), self.normed_heads(layer, qkv));
                let slots = cache.of_slots(index, step.slots);
                return fused::attend(&qkv, (cos, sin), &slots, (None, positions), config.fused_heads(), window, layer.sinks());
            }
            Way::Kernel(positions, longest, tables) => {
                let Tables { cos, sin } = tables.get(index);
                let slots = cache.of_slots(index, step.slots);
                let norms = self.norms_of_heads(layer);
                let qkv = if norms.is_some() { qkv.shallow_clone() } else { self.normed_heads(layer, qkv) };
                let heads = config.fused_heads();
                return fused::gpu::attend(&qkv, (cos, sin), &slots, positions, *longest, heads, norms, window);
            }
            Way::Flash(written, _) | Way::Products(written, ..) => written,
        };
        let (qk, v) = self.heads(layer, qkv, &[step.slots.len], written.tables.get(index));
        let [q, k] = parts(&qk, 1, [config.heads as i64, config.kv_heads as i64]);
        cache.write(index, &written.rows, &Tensor::stack(&[k, v], 1));
        let slots = cache.of_slots(index, step.slots);
        match &step.way {
            Way::Flash(_, Flash { queries, keys, used }) => {
                let all = slots.flatten(0, 1);
                let (keys_of, values) = (all.select(1, 0), all.select(1, 1));
                let window = window.filter(|&window| (window as i64) < keys.longest);
                let scale = config.attention_scale();
                let out = fused::flash([&q, &keys_of, &values], (queries, keys), Some(used), false, scale, window);
                out.reshape([step.slots.len, -1])
            }
            Way::Products(_, longest, masks) => {
                let mask = masks.get(index).as_ref();
                products(&q, &slots.narrow(1, 0, *longest), mask, &config.scores_of(layer))
            }
            Way::Fused(..) | Way::Kernel(..) => unreachable!("returned above"),
        }
    }
}

impl Decoder {
    /// Norms of single query and key heads, and their epsilon, where our kernel may apply them.
    fn norms_of_heads<'a>(&self, layer: &'a Layer) -> Option<(&'a Tensor, &'a Tensor, f64)> {
        let definition = self.config.family.definition();
        let plain = definition.qk_norm == QkNorm::Heads && !definition.norms_add_one;
        let whole = self.config.rotated_columns() == self.config.head_dim;
        match &layer.mixer {
            Mixer::Attention { qk_norm: Some((q, k)), .. } if plain && whole => Some((q, k, self.config.rms_norm_eps)),
            _ => None,
        }
    }
}

/// `q` `[slots, heads, dim]` over the cache `[slots, positions, 2, key heads, dim]`.
fn products(q: &Tensor, slots: &Tensor, mask: Option<&Tensor>, by: &Scores) -> Tensor {
    let (count, heads, dim, kv_heads) = (q.size()[0], q.size()[1], q.size()[2], slots.size()[3]);
    // Grouped queries: the heads that share a key head are rows of one small matrix.
    let (of, each) = (count * kv_heads, heads / kv_heads);
    let keys = slots.select(2, 0).permute([0, 2, 3, 1]).reshape([of, dim, -1]);
    let values = slots.select(2, 1).permute([0, 2, 1, 3]).reshape([of, -1, dim]);
    // f32 up to the softmax, as in the trainer's attention (law N5).
    let scores = capped(wide::bmm(&q.reshape([of, each, dim]), &keys) * by.scale, by.cap);
    let scores = match mask {
        Some(mask) => (scores.view([count, kv_heads, each, -1]) + mask).view([of, each, -1]),
        None => scores,
    };
    let by_key_head =
        |sinks: &Tensor| sinks.view([1, kv_heads, each, 1]).expand([count, kv_heads, each, 1], false).reshape([of, each, 1]);
    Scores::probabilities(&scores, by.sinks.map(by_key_head)).to_kind(q.kind()).bmm(&values).view([count, heads * dim])
}

/// `[slots, 1, 1, longest]`, or nothing where every position is seen by all.
fn step_mask(positions: &[i64], on_device: &Tensor, longest: i64, window: Option<usize>) -> Option<Tensor> {
    let window = window.map_or(longest, |window| window as i64);
    if positions.iter().all(|&position| position + 1 == longest) && window >= longest {
        return None;
    }
    let (at, each) = (on_device.unsqueeze(1), Tensor::arange(longest, (Kind::Int64, on_device.device())).unsqueeze(0));
    let hidden = each.greater_tensor(&at).logical_or(&each.less_equal_tensor(&(&at - window)));
    let mask = Tensor::zeros([positions.len() as i64, longest], (Kind::Float, on_device.device()));
    Some(mask.masked_fill(&hidden, f64::NEG_INFINITY).view([positions.len() as i64, 1, 1, longest]))
}
