//! Tokens that follow what a cache holds of their sequences: the rest of a prompt whose beginning is known,
//! or several tokens of a sequence at a time.

use tch::{Device, Kind, Tensor};

use super::block::{Keep, Stream, causal, parts};
use super::fused::{self, Runs};
use super::gated_delta::DeltaState;
use super::net_rows::NetRows;
use super::rope::{ByLayer, Tables};
use super::views::{Layer, Mixer};
use super::{Decoder, KvCache, Packed, Views, upload};

/// Tokens of a sequence that follow what its slot holds.
pub(crate) struct Suffix<'a> {
    /// Slot of the cache.
    pub slot: usize,
    /// Number of the sequence's tokens whose keys and values the slot holds.
    pub from: usize,
    /// The tokens that follow, at least one.
    pub tokens: &'a [u32],
}

/// Data that all layers of one extension share.
struct Extension<'a> {
    suffixes: &'a [Suffix<'a>],
    way: Way,
    /// Rows of gated delta nets, and the slots of their states.
    nets: Option<(NetRows, Tensor)>,
}

/// How its attention is computed.
enum Way {
    /// Fused, on a CPU in f32: each row's slot and position, and all cosines and sines.
    Fused([Vec<i64>; 2], ByLayer<Tables>),
    /// By libtorch: each row's cosines and sines, rows of the cache, and the runs of flash attention where there
    /// is that, else one suffix at a time.
    Rows(ByLayer<Tables>, Rows, Option<Flash>),
}

/// Rows of the cache that are written, and those of all sequences, laid end to end.
struct Rows {
    written: Tensor,
    read: Tensor,
}

/// The suffixes and their sequences as flash attention takes them.
struct Flash {
    queries: Runs,
    keys: Runs,
}

impl Decoder {
    /// Computes tokens that follow what the cache holds, which gets their keys and values, and returns logits:
    /// `[suffixes, vocabulary]` after the last token of each, or with `all` `[tokens, vocabulary]` after every
    /// token, in order. What a slot held from its suffix on is overwritten; where a layer has a state, it must
    /// be that of exactly the tokens before. Without gradients. Requires slots that differ.
    pub(crate) fn extend(&self, views: &Views, suffixes: &[Suffix], all: bool, cache: &mut KvCache) -> Tensor {
        let _guard = tch::no_grad_guard();
        let device = views.embedding.device();
        let tokens: Vec<i64> = suffixes.iter().flat_map(|suffix| suffix.tokens.iter().map(|&token| i64::from(token))).collect();
        let extension = self.begin_extension(views, suffixes, cache);
        let ends = suffixes.iter().scan(0, |end, suffix| {
            *end += suffix.tokens.len() as i64;
            Some(*end)
        });
        let last = (!all).then(|| upload(&ends.map(|end| end - 1).collect::<Vec<_>>(), device));
        let mut routes = cache.route_log();
        let early = last.as_ref().filter(|_| !routes.is_of_all());
        let mut x = Stream::new(self.embed_rows(&views.embedding, &upload(&tokens, device)));
        for index in 0..self.config.layers() {
            let layer = views.layer(index);
            let rows = early.filter(|_| index + 1 == self.config.layers());
            let mix = |input: &Tensor, _: Keep| match (&layer.mixer, self.config.delta_of(index), &extension.nets) {
                (Mixer::Delta(weights), Some(of), Some((rows, slots))) => {
                    let before = cache.states(index, slots);
                    let keep = |after: &DeltaState| cache.fill_state(index, slots, after);
                    weights.several(of, &layer.input.forward(input), rows, Some(&before), keep)
                }
                _ => {
                    self.by_gates(&layer.input.forward(input), |qkv| self.attend_suffixes(&layer, index, &extension, qkv, cache))
                }
            };
            x = self.block(&layer, index, (x, rows), None, &mut |_, left| routes.take(&left), mix);
        }
        let hidden = self.finish(&views.norm, x);
        let late = last.as_ref().filter(|_| early.is_none());
        let places = suffixes.iter().flat_map(|suffix| (suffix.from..).take(suffix.tokens.len()).map(|at| (suffix.slot, at)));
        cache.write_routes(routes, places.enumerate().map(|(row, (slot, position))| (slot, position, row)));
        self.logits(views, &late.map_or_else(|| hidden.shallow_clone(), |rows| hidden.index_select(0, rows)))
    }

    fn begin_extension<'a>(&self, views: &Views, suffixes: &'a [Suffix<'a>], cache: &mut KvCache) -> Extension<'a> {
        let (kind, device) = views.activations();
        let end = |suffix: &Suffix| (suffix.from + suffix.tokens.len()) as i64;
        suffixes.iter().for_each(|suffix| cache.pages.reserve(suffix.slot, end(suffix) as usize));
        let longest = suffixes.iter().map(end).max().unwrap_or(0);
        let each = suffixes.iter().flat_map(|suffix| (suffix.from as i64..end(suffix)).map(move |at| (suffix.slot as i64, at)));
        let (slots, positions): (Vec<i64>, Vec<i64>) = each.unzip();
        let nets = self.config.delta.as_ref().map(|of| {
            let slots: Vec<i64> = suffixes.iter().map(|suffix| suffix.slot as i64).collect();
            let packed = Packed::new(suffixes.iter().map(|suffix| suffix.tokens));
            (NetRows::new(&packed, of, true, device), upload(&slots, device))
        });
        if device == Device::Cpu && kind == Kind::Float {
            let tables = self.rope.by_layer(longest as usize, device, Tables::all);
            return Extension { suffixes, way: Way::Fused([slots, positions], tables), nets };
        }
        let row = |slot: i64, at: i64| cache.pages.row(slot as usize, at as usize);
        let written = slots.iter().zip(&positions).map(|(&slot, &at)| row(slot, at));
        let read = suffixes.iter().flat_map(|suffix| (0..end(suffix)).map(move |at| row(suffix.slot as i64, at)));
        let numbers = upload(&positions.iter().copied().chain(written).chain(read).collect::<Vec<_>>(), device);
        let count = positions.len() as i64;
        let tables = self.rope.by_layer(longest as usize, device, |tables| tables.at(&numbers.narrow(0, 0, count)));
        let rows =
            Rows { written: numbers.narrow(0, count, count), read: numbers.narrow(0, 2 * count, numbers.size()[0] - 2 * count) };
        let flash = self.config.flashes(kind, device).then(|| {
            let queries = Runs::of(suffixes.iter().map(|suffix| suffix.tokens.len()), device);
            Flash { queries, keys: Runs::of(suffixes.iter().map(|suffix| end(suffix) as usize), device) }
        });
        Extension { suffixes, way: Way::Rows(tables, rows, flash), nets }
    }

    /// Writes a layer's new keys and values, and attends over each sequence: fused projections `[rows, …]` →
    /// `[rows, heads · dim]`.
    fn attend_suffixes(&self, layer: &Layer, index: usize, of: &Extension, qkv: &Tensor, cache: &mut KvCache) -> Tensor {
        let (config, window, count) = (&self.config, self.config.windows[index], qkv.size()[0]);
        let (tables, rows, flash) = match &of.way {
            Way::Fused([slots, positions], tables) => {
                let (Tables { cos, sin }, qkv) = (tables.get(index), self.normed_heads(layer, qkv));
                let places = (cache.paged(0..cache.pages.slots()), Some(slots.as_slice()), positions.as_slice());
                let (rows, heads) = (cache.keys_values(index), config.fused_heads());
                return fused::attend(&qkv, (cos, sin), rows, places, heads, window, layer.sinks());
            }
            Way::Rows(tables, rows, flash) => (tables, rows, flash),
        };
        let (qk, v) = self.heads(layer, qkv, &[count], tables.get(index));
        let [q, k] = parts(&qk, 1, [config.heads as i64, config.kv_heads as i64]);
        cache.write(index, &rows.written, &Tensor::stack(&[k, v], 1));
        let (seen, scores) = (cache.keys_values(index).index_select(0, &rows.read), config.scores_of(layer));
        if let Some(Flash { queries, keys }) = flash {
            let window = window.filter(|&window| (window as i64) < keys.longest);
            let of = [&q, &seen.select(1, 0), &seen.select(1, 1)];
            return fused::flash(of, (queries, keys), scores.scale, window, layer.sinks()).reshape([count, -1]);
        }
        let (mut row, mut first) = (0, 0);
        let outputs = of.suffixes.iter().map(|suffix| {
            let (from, len) = (suffix.from as i64, suffix.tokens.len() as i64);
            let (own, seen) = (q.narrow(0, row, len).unsqueeze(0), seen.narrow(0, first, from + len).unsqueeze(0));
            (row, first) = (row + len, first + from + len);
            let mask = suffix_mask(from, len, window, q.device());
            causal([&own, &seen.select(2, 0), &seen.select(2, 1)], Some(&mask), &scores)
        });
        Tensor::cat(&outputs.collect::<Vec<_>>(), 0)
    }
}

/// What `len` tokens from position `from` on see, `[len, from + len]`.
fn suffix_mask(from: i64, len: i64, window: Option<usize>, device: Device) -> Tensor {
    let seen = Tensor::ones([len, from + len], (Kind::Bool, device)).tril(from);
    window.map_or_else(|| seen.shallow_clone(), |window| seen.triu(from + 1 - window as i64))
}
