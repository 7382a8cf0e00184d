//! Keys and values of sequences in flight, in slots.

use tch::{Device, Kind, Tensor};

use super::gated_delta::DeltaState;
use super::packed::Rectangle;
use super::route_cache::RouteCache;
use super::{Compute, ModelConfig, Packed, fused, upload};

/// Keys and values of sequences in flight. One tensor per layer, `[slots, positions, 2, key heads,
/// dim]`: of each position the keys, then the values. Written in place.
///
/// Active sequences occupy adjacent slots, so that a step reads a plain slice. Moving one is
/// cheaper than gathering all in each step.
pub struct KvCache {
    layers: Vec<Held>,
    /// Experts of the tokens, if they are recorded.
    pub(super) routes: Option<RouteCache>,
    slots: usize,
    positions: usize,
    device: Device,
}

/// What a layer holds of the sequences.
enum Held {
    KeysValues(Tensor),
    /// One state a slot.
    Delta(DeltaState),
}

/// Rows of a layer's keys and values, one per slot and position, and the cells that go there.
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
        let shape = [slots, positions, 2, config.kv_heads, config.head_dim].map(|size| size as i64);
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
        KvCache { layers, routes: None, slots, positions, device: compute.device }
    }

    /// Holds the experts of each token, too, if the model has any. Before the first token.
    pub(crate) fn recording_routes(self, config: &ModelConfig) -> Self {
        KvCache { routes: RouteCache::new(config, self.slots, self.positions, self.device), ..self }
    }

    /// Tokens per slot.
    pub(crate) fn positions(&self) -> usize {
        self.positions
    }

    /// Grows to `positions` tokens per slot and keeps the contents.
    pub fn grow(&mut self, positions: usize) {
        if positions <= self.positions {
            return;
        }
        for layer in &mut self.layers {
            if let Held::KeysValues(layer) = layer {
                *layer = layer.constant_pad_nd([0, 0, 0, 0, 0, 0, 0, (positions - self.positions) as i64]);
            }
        }
        if let Some(routes) = &mut self.routes {
            routes.grow(positions - self.positions);
        }
        self.positions = positions;
    }

    /// Copies the first `len` positions of slot `from`, which has no more, to each slot of `to`.
    pub fn copy_slot(&mut self, from: usize, to: &[usize], len: usize) {
        let mut pairs = Vec::new();
        let mut copy = |slots: &Tensor| {
            pairs.extend(to.iter().map(|&to| (slots.select(0, to as i64), slots.select(0, from as i64))));
        };
        for layer in &self.layers {
            match layer {
                Held::KeysValues(layer) => copy(&layer.narrow(1, 0, len as i64)),
                Held::Delta(state) => [&state.conv, &state.heads].into_iter().for_each(&mut copy),
            }
        }
        if let Some(routes) = &self.routes {
            copy(&routes.first(len));
        }
        fused::copy_all(&pairs);
    }

    /// Places of whole sequences: sequence `i` goes into every slot of `slots[i]`, from position 0. Cells
    /// are those of the rectangle, or packed rows.
    pub(super) fn places(&self, slots: &[Vec<usize>], packed: &Packed, rectangle: Option<&Rectangle>) -> Places {
        let (mut rows, mut cells) = (Vec::new(), Vec::new());
        for ((at, start), len) in packed.starts().enumerate().zip(&packed.lens) {
            for &slot in &slots[at] {
                let row = (slot * self.positions) as i64;
                rows.extend(row..row + *len as i64);
                let cell = rectangle.map_or(start as i64, |rectangle| rectangle.cell(at, 0));
                cells.extend(cell..cell + *len as i64);
            }
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
    pub(super) fn write(&mut self, layer: usize, rows: &Tensor, keys_values: &Tensor) {
        let all = self.keys_values(layer).flatten(0, 1);
        let _written = all.flatten(1, 3).index_copy_(0, rows, &keys_values.reshape([rows.size()[0], -1]));
    }

    /// A layer's tensor.
    pub(super) fn keys_values(&self, layer: usize) -> &Tensor {
        match &self.layers[layer] {
            Held::KeysValues(tensor) => tensor,
            Held::Delta(_) => unreachable!("a delta net has no keys and values"),
        }
    }

    /// A layer's keys and values of these slots, `[slots, positions, 2, key heads, dim]`.
    pub(super) fn of_slots(&self, layer: usize, slots: SlotRange) -> Tensor {
        slots.of(self.keys_values(layer))
    }

    /// Writes the states after whole sequences: sequence `i` into every slot of `slots[i]`.
    pub(super) fn fill_state(&mut self, layer: usize, slots: &[Vec<usize>], after: &DeltaState) {
        let places = slots.iter().enumerate().flat_map(|(at, slots)| slots.iter().map(move |&slot| (slot as i64, at as i64)));
        let (targets, sources): (Vec<i64>, Vec<i64>) = places.unzip();
        let [targets, sources] = [targets, sources].map(|index| upload(&index, self.device));
        let state = self.state_of(layer);
        for (to, from) in [(&state.conv, &after.conv), (&state.heads, &after.heads)] {
            let _written = to.shallow_clone().index_copy_(0, &targets, &from.index_select(0, &sources));
        }
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
