//! Decoding steps as CUDA graphs, one for each number of slots.
//!
//! A small model's step is hundreds of kernels of a few microseconds, which a host cannot start as fast. A step of
//! the same slots, weights and cache is recorded once and replayed with new tokens. Slots are rounded up by at most an
//! eighth; those beyond the sequences in flight are free, and get a token that is not read.

use std::rc::Rc;

use tch::{Device, Tensor};

use super::draw;
use crate::model::graph::{Graph, GraphPool};
use crate::model::{Decoder, KvCache, Views, upload};

/// Steps of the same slots before they are recorded: as long as that is, recording does not pay.
const EAGER_STEPS: usize = 2;

/// Recorded steps under weights `W`.
pub(super) struct StepGraphs<W> {
    /// `None` where graphs are not used.
    pool: Option<GraphPool>,
    device: Device,
    /// What all graphs were recorded for: the weights, and the cache's tokens per slot.
    of: Option<(Rc<W>, usize)>,
    steps: Vec<Recorded>,
}

struct Recorded {
    slots: usize,
    /// Steps of so many slots so far.
    seen: usize,
    graph: Option<(Graph, Buffers)>,
}

/// Inputs and results of a step.
struct Buffers {
    /// Tokens, then positions: `[2, slots]`.
    tokens: Tensor,
    /// `[slots, 5]`, as the kernel `draw` takes them.
    settings: Tensor,
    /// `[slots, 2]`, as the kernel gives them.
    drawn: Tensor,
}

/// Slots of a graph for so many sequences.
fn rounded(sequences: usize, most: usize) -> usize {
    let step = if sequences <= 8 { sequences.next_power_of_two() } else { (sequences.next_power_of_two() / 16).max(8) };
    sequences.next_multiple_of(step).min(most)
}

impl<W> StepGraphs<W> {
    pub fn new(device: Device) -> Self {
        let pool = if device == Device::Cpu { None } else { GraphPool::new() };
        StepGraphs { pool, device, of: None, steps: Vec::new() }
    }

    /// Returns true if this device and libtorch record steps.
    pub fn are_used(&self) -> bool {
        self.pool.is_some()
    }

    /// One token for slots 0, 1, … by a recorded graph: tokens and log-probabilities on the device, which is still at
    /// work. `None` if there is none for this step, which then is to be computed otherwise.
    pub fn step(
        &mut self,
        decoder: &Decoder,
        (weights, views): (&Rc<W>, &Views),
        (tokens, positions, mut settings): (&[i64], &[usize], Vec<f64>),
        (cache, most): (&mut KvCache, usize),
    ) -> Option<Tensor> {
        let pool = self.pool.as_ref()?;
        if !decoder.records_steps(views) {
            return None;
        }
        let slots = rounded(tokens.len(), most);
        if !self.of.as_ref().is_some_and(|(known, length)| Rc::ptr_eq(known, weights) && *length == cache.positions()) {
            self.steps.clear();
            self.of = Some((weights.clone(), cache.positions()));
        }
        let at = self.steps.iter().position(|recorded| recorded.slots == slots).unwrap_or_else(|| {
            self.steps.push(Recorded { slots, seen: 0, graph: None });
            self.steps.len() - 1
        });
        let recorded = &mut self.steps[at];
        recorded.seen += 1;
        if recorded.seen <= EAGER_STEPS {
            return None;
        }
        let padding = slots - tokens.len();
        settings.extend(std::iter::repeat_n([1.0, 0.0, 0.0, 1.0, 0.0], padding).flatten());
        let padded =
            |numbers: &mut dyn Iterator<Item = i64>| numbers.chain(std::iter::repeat_n(0, padding)).collect::<Vec<i64>>();
        let mut inputs = padded(&mut tokens.iter().copied());
        inputs.extend(padded(&mut positions.iter().map(|&position| position as i64)));
        let inputs = upload(&inputs, self.device).view([2, -1]);
        let settings = draw::upload_settings(&settings, self.device);
        if recorded.graph.is_none() {
            let (tokens, settings) = (inputs.copy(), settings.copy());
            let work = || draw::by_kernel(&decoder.decode_recorded(views, &tokens, cache), &settings);
            match Graph::record(pool, work) {
                Ok((graph, drawn)) => recorded.graph = Some((graph, Buffers { tokens, settings, drawn })),
                Err(why) => {
                    tracing::warn!("decoding steps are not recorded as CUDA graphs, which costs speed: {why}");
                    self.pool = None;
                    return None;
                }
            }
        }
        let (graph, buffers) = recorded.graph.as_mut()?;
        buffers.tokens.copy_(&inputs);
        buffers.settings.copy_(&settings);
        graph.replay();
        Some(buffers.drawn.shallow_clone())
    }

    /// Forgets all graphs, whose weights or cache go.
    pub fn forget(&mut self) {
        self.steps.clear();
        self.of = None;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slots_are_rounded_up_by_an_eighth_at_most() {
        for sequences in 1..2000 {
            let slots = rounded(sequences, 5000);
            assert!(slots >= sequences && (slots - sequences) * 8 <= sequences.max(64), "{sequences}: {slots}");
        }
        assert_eq!((rounded(1000, 1024), rounded(1000, 1001), rounded(3, 64)), (1024, 1001, 4));
    }
}
