//! Keys and values of sequences in flight, in slots.

use std::ops::Range;

use tch::{Device, Kind, Tensor};

use super::fused::Paged;
use super::gated_delta::DeltaState;
use super::kept_states::KeptStates;
use super::packed::Rectangle;
use super::pages::{Copied, PAGE, Pages};
use super::route_cache::RouteCache;
use super::{Compute, ModelConfig, Packed, fused, upload};

/// Keys and values of sequences in flight. One tensor per layer, `[rows, 2, key heads, dim]`: of each token
/// the keys, then the values. Written in place. [`Pages`] says which rows are a slot's.
///
/// Active sequences occupy adjacent slots, so that a step reads plain slices of tables and states.
pub struct KvCache {
    layers: Vec<Held>,
    /// Experts of the tokens, if they are recorded.
    pub(super) routes: Option<RouteCache>,
    pub(crate) pages: Pages,
    /// States that are remembered, which lie after those of the slots.
    kept: KeptStates,
    /// Sequences of the greatest length that fit, and tokens, which may be less.
    sequences: usize,
    most_tokens: Option<usize>,
    device: Device,
}

/// What a layer holds of the sequences.
enum Held {
    KeysValues(Tensor),
    /// One state a slot, and those that are remembered.
    Delta(DeltaState),
}

/// Rows of a layer's keys and values, and the cells that go there.
pub(super) struct Places {
    rows: Tensor,
    /// All cells in order if `None`.
    cells: Option<Tensor>,
}

/// Adjacent slots.
#[derive(Clone, Copy)]
pub(super) struct SlotRange {
    pub first: i64,
    pub len: i64,
}

impl SlotRange {
    fn of(self, slots: &Tensor) -> Tensor {
        slots.narrow(0, self.first, self.len)
    }
}

impl KvCache {
    pub(super) fn new(config: &ModelConfig, slots: usize, positions: usize, compute: Compute) -> Self {
        let shape = [PAGE, 2, config.kv_heads, config.head_dim].map(|size| size as i64);
        let held = |layer| match config.delta_of(layer) {
            None => Held::KeysValues(Tensor::zeros(shape, compute.activations())),
            Some(of) => {
                let sizes = [slots, of.value_heads, of.key_dim, of.value_dim].map(|size| size as i64);
                let conv = [slots, of.mixed(), of.kernel - 1].map(|size| size as i64);
                Held::Delta(DeltaState {
                    conv: Tensor::zeros(conv, compute.activations()),
                    heads: Tensor::zeros(sizes, (Kind::Float, compute.device)),
                })
            }
        };
        let layers = (0..config.layers()).map(held).collect();
        let mut cache = KvCache {
            layers,
            routes: None,
            pages: Pages::new(slots),
            kept: KeptStates::new(0),
            sequences: slots,
            most_tokens: None,
            device: compute.device,
        };
        cache.grow(positions);
        cache
    }

    /// Holds the experts of each token, too, if the model has any. Before the first token.
    pub(crate) fn recording_routes(self, config: &ModelConfig) -> Self {
        KvCache { routes: RouteCache::new(config, self.pages.len() * PAGE, self.device), ..self }
    }

    /// Has room for so many sequences of the greatest length, but for `most_tokens` tokens at most. Those that
    /// are more than the slots are remembered. Before the first token.
    pub(crate) fn with_room(mut self, sequences: usize, most_tokens: Option<usize>) -> Self {
        let more = sequences.saturating_sub(self.pages.slots());
        for layer in &mut self.layers {
            if let Held::Delta(DeltaState { conv, heads }) = layer {
                *conv = conv.constant_pad_nd([0, 0, 0, 0, 0, more as i64]);
                *heads = heads.constant_pad_nd([0, 0, 0, 0, 0, 0, 0, more as i64]);
            }
        }
        KvCache { sequences, most_tokens, kept: KeptStates::new(more), ..self }
    }

    /// Greatest number of tokens of a slot.
    pub(crate) fn positions(&self) -> usize {
        self.pages.width() * PAGE
    }

    /// Grows to at least `positions` tokens a slot and keeps the contents.
    pub fn grow(&mut self, positions: usize) {
        if positions <= self.positions() {
            return;
        }
        let width = positions.div_ceil(PAGE);
        let most = self.most_tokens.map_or(usize::MAX, |tokens| tokens.div_ceil(PAGE));
        let (before, pages) = (self.pages.len(), (self.sequences * width).min(most) + 1);
        self.pages.grow(pages, width);
        let more = ((self.pages.len() - before) * PAGE) as i64;
        for layer in &mut self.layers {
            if let Held::KeysValues(layer) = layer {
                *layer = layer.constant_pad_nd([0, 0, 0, 0, 0, 0, 0, more]);
            }
        }
        if let Some(routes) = &mut self.routes {
            routes.grow(more);
        }
    }

    /// Moves a sequence to another slot.
    pub(crate) fn move_slot(&mut self, from: usize, to: usize) {
        self.pages.move_slot(from, to);
        self.copy_states(from, &[to]);
    }

    /// Swaps the sequences of two slots.
    pub(crate) fn swap_slots(&mut self, one: usize, other: usize) {
        self.pages.swap_slots(one, other);
        for state in self.layers.iter().filter_map(|layer| if let Held::Delta(state) = layer { Some(state) } else { None }) {
            for all in [&state.conv, &state.heads] {
                let [mut one, mut other] = [one, other].map(|slot| all.select(0, slot as i64));
                let kept = one.copy();
                one.copy_(&other);
                other.copy_(&kept);
            }
        }
    }

    /// Lets each slot of `to` begin with the first `tokens` tokens of slot `from`, which has no more where a
    /// layer has a state.
    pub fn share(&mut self, from: usize, to: &[usize], tokens: usize) {
        let copied: Vec<Copied> = to.iter().filter_map(|&to| self.pages.share(from, to, tokens)).collect();
        self.copy(&copied);
        self.copy_states(from, to);
    }

    /// Lets a slot begin with what is remembered of `tokens` under these weights, but for the last of them, and
    /// returns how many tokens that is.
    pub(crate) fn recall(&mut self, slot: usize, weights: u64, tokens: &[u32]) -> usize {
        let (known, state) = match self.has_states() {
            false => (tokens.len().saturating_sub(1), None),
            true => {
                let known = self.pages.known(weights, tokens);
                let state = self.kept.find(weights, tokens, known.min(tokens.len().saturating_sub(1)));
                state.map_or((0, None), |(at, len)| (len, Some(at)))
            }
        };
        let (found, copied) = self.pages.recall(slot, weights, &tokens[..known]);
        if state.is_some() && found < known {
            self.pages.release(slot);
            return 0;
        }
        self.copy(copied.as_slice());
        state.iter().for_each(|at| self.copy_states(self.pages.slots() + at, &[slot]));
        found
    }

    /// Remembers the sequence of a slot, all of which it holds, or with `ended` exactly these tokens.
    pub(crate) fn remember(&mut self, slot: usize, weights: u64, tokens: &[u32], ended: bool) {
        self.pages.remember(slot, weights, tokens, ended);
        if self.has_states()
            && let Some(at) = self.kept.place(weights, tokens)
        {
            self.copy_states(slot, &[self.pages.slots() + at]);
        }
    }

    /// Forgets what is remembered under weights that are not `kept`.
    pub(crate) fn forget(&mut self, kept: impl Fn(u64) -> bool) {
        self.pages.forget(&kept);
        self.kept.forget(kept);
    }

    /// Returns true if layers have one state a sequence.
    pub(crate) fn has_states(&self) -> bool {
        self.layers.iter().any(|layer| matches!(layer, Held::Delta(_)))
    }

    /// Copies what pages begin with.
    fn copy(&self, copied: &[Copied]) {
        let routes = self.routes.as_ref().map(RouteCache::rows);
        let layers = self.layers.iter().filter_map(|layer| match layer {
            Held::KeysValues(layer) => Some(layer),
            Held::Delta(_) => None,
        });
        let pairs: Vec<_> = layers
            .chain(routes)
            .flat_map(|rows| {
                copied.iter().map(|Copied { from, to, tokens }| {
                    let of = |page: u32| rows.narrow(0, i64::from(page) * PAGE as i64, *tokens as i64);
                    (of(*to), of(*from))
                })
            })
            .collect();
        fused::copy_all(&pairs);
    }

    fn copy_states(&self, from: usize, to: &[usize]) {
        let states = self.layers.iter().filter_map(|layer| match layer {
            Held::Delta(state) => Some([&state.conv, &state.heads]),
            Held::KeysValues(_) => None,
        });
        let of = |slots: &Tensor, slot: usize| slots.select(0, slot as i64);
        let pairs: Vec<_> = states.flatten().flat_map(|all| to.iter().map(|&to| (of(all, to), of(all, from)))).collect();
        fused::copy_all(&pairs);
    }

    /// Places of whole sequences: sequence `i` goes into `slots[i]`, from position 0. Cells are those of the
    /// rectangle, or packed rows.
    pub(super) fn places(&mut self, slots: &[usize], packed: &Packed, rectangle: Option<&Rectangle>) -> Places {
        let (mut rows, mut cells) = (Vec::new(), Vec::new());
        for ((at, start), len) in packed.starts().enumerate().zip(&packed.lens) {
            self.pages.reserve(slots[at], *len);
            rows.extend((0..*len).map(|position| self.pages.row(slots[at], position)));
            let cell = rectangle.map_or(start as i64, |rectangle| rectangle.cell(at, 0));
            cells.extend(cell..cell + *len as i64);
        }
        let all = rectangle.map_or(packed.len() as i64, |rectangle| rectangle.rows * rectangle.columns);
        let in_order = cells.iter().copied().eq(0..all);
        let cells = (!in_order).then(|| upload(&cells, self.device));
        Places { rows: upload(&rows, self.device), cells }
    }

    /// Writes whole sequences' keys and values, `[cells, key heads, dim]` each.
    pub(super) fn fill(&mut self, layer: usize, places: &Places, keys: &Tensor, values: &Tensor) {
        let both = Tensor::stack(&[keys, values], 1);
        let chosen = places.cells.as_ref().map_or_else(|| both.shallow_clone(), |cells| both.index_select(0, cells));
        self.write(layer, &places.rows, &chosen);
    }

    /// Writes keys and values `[rows, 2, key heads, dim]` to these rows of a layer.
    pub(super) fn write(&self, layer: usize, rows: &Tensor, keys_values: &Tensor) {
        let all = self.keys_values(layer).flatten(1, 3);
        let _written = all.shallow_clone().index_copy_(0, rows, &keys_values.reshape([rows.size()[0], -1]));
    }

    /// A layer's tensor.
    pub(super) fn keys_values(&self, layer: usize) -> &Tensor {
        match &self.layers[layer] {
            Held::KeysValues(tensor) => tensor,
            Held::Delta(_) => unreachable!("a delta net has no keys and values"),
        }
    }

    /// Pages of these slots, on the host.
    pub(super) fn paged(&self, slots: Range<usize>) -> Paged<'_> {
        Paged { table: self.pages.table(slots), width: self.pages.width(), page: PAGE }
    }

    /// Writes the states after sequences: sequence `i` into `slots[i]`.
    pub(super) fn fill_state(&mut self, layer: usize, slots: &Tensor, after: &DeltaState) {
        let state = self.state_of(layer);
        for (to, from) in [(&state.conv, &after.conv), (&state.heads, &after.heads)] {
            let _written = to.shallow_clone().index_copy_(0, slots, from);
        }
    }

    /// The states of these slots.
    pub(super) fn states(&self, layer: usize, slots: &Tensor) -> DeltaState {
        let DeltaState { conv, heads } = self.state_of(layer);
        DeltaState { conv: conv.index_select(0, slots), heads: heads.index_select(0, slots) }
    }

    fn state_of(&self, layer: usize) -> &DeltaState {
        match &self.layers[layer] {
            Held::Delta(state) => state,
            Held::KeysValues(_) => unreachable!("attention has no state"),
        }
    }

    /// The states of these slots, to be written in place.
    pub(super) fn state(&self, slots: SlotRange, layer: usize) -> DeltaState {
        let state = self.state_of(layer);
        DeltaState { conv: slots.of(&state.conv), heads: slots.of(&state.heads) }
    }
}
