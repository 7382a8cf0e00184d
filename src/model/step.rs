//! Attention of one decoding step: a token in each of adjacent slots of a cache.

use tch::{Device, Kind, Tensor};

use super::block::{Scores, capped, parts};
use super::family::QkNorm;
use super::fused::{self, gpu::Projected, gpu::Slots};
use super::kv_cache::SlotRange;
use super::pages::PAGE;
use super::rope::{ByLayer, Tables};
use super::views::Layer;
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
    /// By our kernel, on a GPU in 16 bits.
    Kernel(Slots, ByLayer<Tables>),
    /// By products over the longest sequence, with masks: zero where a position is seen, minus infinity
    /// elsewhere.
    Products(Read, ByLayer<Option<Tensor>>),
}

/// What a step of products writes and reads.
struct Read {
    /// Rows of the cache that get the new keys and values.
    written: Tensor,
    /// Each row's cosines and sines.
    tables: ByLayer<Tables>,
    /// Rows of the cache of all slots up to the longest sequence, and their number a slot. After the rows of a
    /// shorter one comes row 0, which no sequence writes.
    rows: Tensor,
    longest: i64,
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
        cache: &mut KvCache,
    ) -> (Step, Tensor) {
        let (kind, device) = views.activations();
        let slots = SlotRange { first: first as i64, len: tokens.len() as i64 };
        let longest = positions.iter().max().map_or(0, |position| position + 1);
        (first..).zip(positions).for_each(|(slot, position)| cache.pages.reserve(slot, position + 1));
        let at: Vec<i64> = positions.iter().map(|&position| position as i64).collect();
        if device == Device::Cpu && kind == Kind::Float {
            let tables = self.rope.by_layer(longest, device, Tables::all);
            return (Step { slots, way: Way::Fused(at, tables) }, Tensor::from_slice(tokens));
        }
        let written = (first..).zip(positions).map(|(slot, &position)| cache.pages.row(slot, position));
        let table = cache.pages.table(first..first + tokens.len());
        let numbers: Vec<i64> = tokens.iter().chain(&at).copied().chain(written).chain(table.iter().copied()).collect();
        let numbers = upload(&numbers, device);
        let [tokens, positions, written] = [0, 1, 2].map(|part| numbers.narrow(0, part * slots.len, slots.len));
        let table = numbers.narrow(0, 3 * slots.len, table.len() as i64).view([slots.len, -1]);
        let longest = longest as i64;
        let way = if self.config.attends_slots(kind, device) {
            // As many positions as the cache has, which a recorded step needs.
            let tables = self.rope.by_layer(cache.positions(), device, Tables::all);
            Way::Kernel(Slots { positions, table, page: PAGE as i64, longest }, tables)
        } else {
            let tables = self.rope.by_layer(longest as usize, device, |tables| tables.at(&positions));
            let masks = ByLayer::new(self.config.windows.iter(), |window| step_mask(&at, &positions, longest, *window));
            let rows = table.unsqueeze(2) * PAGE as i64 + Tensor::arange(PAGE as i64, (Kind::Int64, device));
            let rows = rows.view([slots.len, -1]).narrow(1, 0, longest);
            // Rows after a slot's own hold what another sequence left, which may not be finite. Row 0, which no sequence
            // writes, is zero.
            let beyond = Tensor::arange(longest, (Kind::Int64, device)).unsqueeze(0).greater_tensor(&positions.unsqueeze(1));
            let rows = rows.masked_fill(&beyond, 0).reshape([-1]);
            Way::Products(Read { written, tables, rows, longest }, masks)
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

    /// [`Decoder::decode`] for so many slots from 0 on, with `numbers` on the device: tokens, positions, which are -1
    /// for a slot that is not in use, and pages, which the slots must have. Nothing of it depends on the host. The
    /// tables of positions must cover the cache already.
    pub(crate) fn decode_recorded(&self, views: &Views, slots: usize, numbers: &Tensor, cache: &mut KvCache) -> Tensor {
        let slots = SlotRange { first: 0, len: slots as i64 };
        let [tokens, positions] = [0, 1].map(|part| numbers.narrow(0, part * slots.len, slots.len));
        let table = numbers.narrow(0, 2 * slots.len, numbers.size()[0] - 2 * slots.len).view([slots.len, -1]);
        let at = Slots { positions, table, page: PAGE as i64, longest: cache.positions() as i64 };
        let tables = self.rope.by_layer(cache.positions(), numbers.device(), Tables::all);
        let mut routes = cache.route_log();
        // Of a slot that is not in use, the first row of the page that no slot has.
        let rows = routes.is_of_all().then(|| {
            let positions = at.positions.clamp_min(0);
            let page = at.table.gather(1, &positions.divide_scalar_mode(PAGE as i64, "floor").unsqueeze(1), false);
            page.squeeze_dim(1) * PAGE as i64 + positions.remainder(PAGE as i64)
        });
        let step = Step { slots, way: Way::Kernel(at, tables) };
        let logits = self.decode_step(views, &step, &tokens, cache, &mut routes);
        if let Some(rows) = rows {
            cache.write_routes_of_step(routes, &rows);
        }
        logits
    }

    /// Writes a layer's new keys and values, and attends over all positions up to them: fused projections
    /// `[slots, …]` → `[slots, heads · dim]`.
    pub(super) fn attend_step(&self, layer: &Layer, index: usize, step: &Step, projected: &Tensor, cache: &KvCache) -> Tensor {
        let (config, window) = (&self.config, self.config.windows[index]);
        match &step.way {
            Way::Fused(positions, tables) => self.by_gates(projected, |qkv| {
                let (Tables { cos, sin }, qkv) = (tables.get(index), self.normed_heads(layer, qkv));
                let slots = step.slots.first as usize..(step.slots.first + step.slots.len) as usize;
                let (rows, places) = (cache.keys_values(index), (cache.paged(slots), None, positions.as_slice()));
                fused::attend(&qkv, (cos, sin), rows, places, config.fused_heads(), window, layer.sinks())
            }),
            Way::Kernel(at, tables) => {
                let Tables { cos, sin } = tables.get(index);
                let attend = |of: Projected| {
                    let (rows, heads) = (cache.keys_values(index), config.fused_heads());
                    fused::gpu::attend(&of, (cos, sin), rows, at, heads, (window, layer.sinks()))
                };
                let gated = config.family.definition().gates_attention;
                if self.leaves_heads_to_kernels() {
                    let norms = layer.qk_norm().map(|(q, k)| [q, k].map(|weight| self.norm_by(weight)));
                    return attend(Projected { qkv: projected, gated, rotated: config.rotated_columns(), norms });
                }
                self.by_gates(projected, |qkv| {
                    let qkv = &self.normed_heads(layer, qkv);
                    attend(Projected { qkv, gated: false, rotated: config.head_dim, norms: None })
                })
            }
            Way::Products(read, masks) => {
                self.by_gates(projected, |qkv| self.attend_by_products(layer, index, step.slots.len, (read, masks), qkv, cache))
            }
        }
    }

    fn attend_by_products(
        &self,
        layer: &Layer,
        index: usize,
        count: i64,
        (read, masks): (&Read, &ByLayer<Option<Tensor>>),
        qkv: &Tensor,
        cache: &KvCache,
    ) -> Tensor {
        let (config, Read { written, tables, rows, longest }) = (&self.config, read);
        let (qk, v) = self.heads(layer, qkv, &[count], tables.get(index));
        let [q, k] = parts(&qk, 1, [config.heads as i64, config.kv_heads as i64]);
        cache.write(index, written, &Tensor::stack(&[k, v], 1));
        let seen = cache.keys_values(index).index_select(0, rows);
        let slots = seen.view([count, *longest, 2, config.kv_heads as i64, config.head_dim as i64]);
        products(&q, &slots, masks.get(index).as_ref(), &config.scores_of(layer))
    }

    /// Returns true if our kernel norms and orders queries and keys as the family does.
    fn leaves_heads_to_kernels(&self) -> bool {
        self.config.family.definition().qk_norm != QkNorm::Tokens && self.config.qkv_bound.is_none()
    }
}

/// `q` `[slots, heads, dim]` over keys and values `[slots, positions, 2, key heads, dim]`.
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
