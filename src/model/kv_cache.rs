//! Keys and values of sequences in flight, in slots.

use tch::{Device, Kind, Tensor};

use super::gated_delta::DeltaState;
use super::rope::ByLayer;
use super::{Compute, ModelConfig, capped, wide};

/// Keys and values of sequences in flight. One tensor per layer, `[2, slots · key heads,
/// positions, dim]`: keys, then values. Written in place.
///
/// Active sequences occupy adjacent slots, so that a step reads a plain slice. Moving one is
/// cheaper than gathering all in each step.
pub struct KvCache {
    layers: Vec<Held>,
    slots: usize,
    positions: usize,
    kv_heads: usize,
    dim: usize,
    scale: f64,
    cap: Option<f64>,
}

/// What a layer holds of the sequences.
enum Held {
    KeysValues(Tensor),
    /// One state a slot.
    Delta(DeltaState),
}

impl Held {
    fn keys_values(&self) -> &Tensor {
        match self {
            Held::KeysValues(tensor) => tensor,
            Held::Delta(_) => unreachable!("a delta net has no keys and values"),
        }
    }
}

/// Data that all layers of one decoding step share.
pub(super) struct Step {
    /// Rows of `[2 · slots · key heads · positions, dim]` that the step writes, keys then values.
    rows: Tensor,
    /// The slot of its first sequence.
    first: i64,
    /// Number of sequences.
    slots: i64,
    /// Longest sequence, the new token included.
    longest: i64,
    /// Zero where a position is seen, minus infinity elsewhere.
    masks: ByLayer<Option<Tensor>>,
}

impl KvCache {
    pub(super) fn new(config: &ModelConfig, slots: usize, positions: usize, compute: Compute) -> Self {
        let shape = [2, slots * config.kv_heads, positions, config.head_dim].map(|size| size as i64);
        let held = |layer| match config.delta_of(layer) {
            None => Held::KeysValues(Tensor::zeros(shape, compute.options())),
            Some(of) => {
                let sizes = [slots, of.value_heads, of.key_dim, of.value_dim].map(|size| size as i64);
                let conv = [slots, of.mixed(), of.kernel - 1].map(|size| size as i64);
                Held::Delta(DeltaState {
                    conv: Tensor::zeros(conv, compute.options()),
                    heads: Tensor::zeros(sizes, (Kind::Float, compute.device)),
                })
            }
        };
        let layers = (0..config.layers()).map(held).collect();
        let (kv_heads, dim, scale) = (config.kv_heads, config.head_dim, config.attention_scale());
        KvCache { layers, slots, positions, kv_heads, dim, scale, cap: config.attention_cap }
    }

    /// Grows to `positions` tokens per slot and keeps the contents.
    pub fn grow(&mut self, positions: usize) {
        if positions <= self.positions {
            return;
        }
        for layer in &mut self.layers {
            if let Held::KeysValues(layer) = layer {
                *layer = layer.constant_pad_nd([0, 0, 0, (positions - self.positions) as i64]);
            }
        }
        self.positions = positions;
    }

    /// Copies the first `len` positions of slot `from`, which has no more, to each slot of `to`.
    pub fn copy_slot(&mut self, from: usize, to: &[usize], len: usize) {
        for layer in &self.layers {
            let copy = |slots: &Tensor, dim: i64| {
                let source = slots.select(dim, from as i64);
                to.iter().for_each(|&to| slots.select(dim, to as i64).copy_(&source));
            };
            match layer {
                Held::KeysValues(layer) => copy(&self.by_slot(layer).narrow(3, 0, len as i64), 1),
                Held::Delta(state) => [&state.conv, &state.heads].into_iter().for_each(|part| copy(part, 0)),
            }
        }
    }

    /// `[2, slots, key heads, positions, dim]`.
    fn by_slot(&self, layer: &Tensor) -> Tensor {
        layer.view([2, self.slots as i64, self.kv_heads as i64, self.positions as i64, self.dim as i64])
    }

    /// Writes whole sequences: keys and values are `[sequences, longest, key heads, dim]` each.
    /// Sequence `i` goes into every slot of `slots[i]`. Padding of shorter sequences is overwritten
    /// before it is read.
    pub(super) fn fill(&mut self, layer: usize, slots: &[Vec<usize>], keys: &Tensor, values: &Tensor) {
        let [targets, sources] = places_of(slots, keys.device());
        let places = self.by_slot(self.layers[layer].keys_values()).narrow(3, 0, keys.size()[1]);
        for (half, new) in [(0, keys), (1, values)] {
            let _written = places.select(0, half).index_copy_(0, &targets, &new.transpose(1, 2).index_select(0, &sources));
        }
    }

    /// Writes the states after whole sequences: sequence `i` into every slot of `slots[i]`.
    pub(super) fn fill_state(&mut self, layer: usize, slots: &[Vec<usize>], after: &DeltaState) {
        let Held::Delta(state) = &self.layers[layer] else { unreachable!("attention has no state") };
        let [targets, sources] = places_of(slots, after.heads.device());
        for (to, from) in [(&state.conv, &after.conv), (&state.heads, &after.heads)] {
            let _written = to.shallow_clone().index_copy_(0, &targets, &from.index_select(0, &sources));
        }
    }

    /// The states of a step's sequences, to be written in place.
    pub(super) fn state(&self, step: &Step, layer: usize) -> DeltaState {
        let Held::Delta(state) = &self.layers[layer] else { unreachable!("attention has no state") };
        let of_step = |part: &Tensor| part.narrow(0, step.first, step.slots);
        DeltaState { conv: of_step(&state.conv), heads: of_step(&state.heads) }
    }

    /// Prepares a step in which slot `first + i` receives the token at `positions[i]`.
    pub(super) fn begin_step(&self, first: usize, positions: &[usize], config: &ModelConfig) -> Step {
        let device = match &self.layers[0] {
            Held::KeysValues(layer) => layer.device(),
            Held::Delta(state) => state.heads.device(),
        };
        let mut rows = Vec::with_capacity(2 * positions.len() * self.kv_heads);
        for half in 0..2 {
            for (slot, position) in (first..).zip(positions) {
                let heads = (half * self.slots + slot) * self.kv_heads..(half * self.slots + slot + 1) * self.kv_heads;
                rows.extend(heads.map(|head| (head * self.positions + position) as i64));
            }
        }
        let longest = positions.iter().max().map_or(0, |position| position + 1);
        let masks = ByLayer::new(config.windows.iter(), |window| {
            step_mask(positions, longest, *window, self.kv_heads).map(|mask| mask.to_device(device))
        });
        let rows = Tensor::from_slice(&rows).to_device(device);
        Step { rows, first: first as i64, slots: positions.len() as i64, longest: longest as i64, masks }
    }

    /// Writes a layer's new keys and values, and attends over all positions up to them. `qk` is
    /// `[slots, heads + key heads, dim]`, `v` `[slots, key heads, dim]`. Returns `[slots, heads ·
    /// dim]`.
    pub(super) fn attend(&mut self, step: &Step, layer: usize, qk: &Tensor, v: &Tensor) -> Tensor {
        let (kv_heads, dim) = (self.kv_heads as i64, self.dim as i64);
        let heads = qk.size()[1] - kv_heads;
        let new = Tensor::cat(&[qk.narrow(1, heads, kv_heads), v.shallow_clone()], 0).view([-1, dim]);
        let cache = self.layers[layer].keys_values();
        let _written = cache.view([-1, dim]).index_copy_(0, &step.rows, &new);
        // Grouped queries: the heads that share a key head are rows of one small matrix.
        let q = qk.narrow(1, 0, heads).reshape([step.slots * kv_heads, heads / kv_heads, dim]);
        let seen = cache.narrow(1, step.first * kv_heads, step.slots * kv_heads).narrow(2, 0, step.longest);
        let keys = seen.select(0, 0).transpose(1, 2);
        // f32 up to the softmax, as in the trainer's attention (law N5).
        let scores = match (step.masks.get(layer), q.kind()) {
            (mask, _) if self.cap.is_some() => {
                let scores = capped(wide::bmm(&q, &keys) * self.scale, self.cap);
                mask.as_ref().map_or_else(|| scores.shallow_clone(), |mask| &scores + mask)
            }
            (Some(mask), Kind::Float) => mask.baddbmm(&q, &keys, 1.0, self.scale),
            (Some(mask), _) => wide::bmm(&q, &keys).g_mul_scalar_(self.scale).g_add_(mask),
            (None, Kind::Float) => q.bmm(&keys) * self.scale,
            (None, _) => wide::bmm(&q, &keys).g_mul_scalar_(self.scale),
        };
        scores.softmax(-1, Kind::Float).to_kind(q.kind()).bmm(&seen.select(0, 1)).view([step.slots, heads * dim])
    }
}

/// Slots, and the sequence that each gets.
fn places_of(slots: &[Vec<usize>], device: Device) -> [Tensor; 2] {
    let places = slots.iter().enumerate().flat_map(|(at, slots)| slots.iter().map(move |&slot| (slot as i64, at as i64)));
    let (targets, sources): (Vec<i64>, Vec<i64>) = places.unzip();
    [targets, sources].map(|index| Tensor::from_slice(&index).to_device(device))
}

/// `[slots · key heads, 1, longest]`, or nothing where every position is seen by all.
fn step_mask(positions: &[usize], longest: usize, window: Option<usize>, kv_heads: usize) -> Option<Tensor> {
    let first = |position: usize| window.map_or(0, |window| (position + 1).saturating_sub(window));
    if positions.iter().all(|&position| position + 1 == longest && first(position) == 0) {
        return None;
    }
    let mut mask = Vec::with_capacity(positions.len() * kv_heads * longest);
    for &position in positions {
        let seen = first(position)..=position;
        for _ in 0..kv_heads {
            mask.extend((0..longest).map(|at| if seen.contains(&at) { 0.0 } else { f32::NEG_INFINITY }));
        }
    }
    Some(Tensor::from_slice(&mask).view([-1, 1, longest as i64]))
}
