//! Decoding steps as CUDA graphs, one for each number of slots.
//!
//! A small model's step is hundreds of kernels of a few microseconds, which a host cannot start as fast. A
//! step of the same slots, cache and places of weights is recorded once and replayed with new tokens. New
//! weights often take the place of older ones, whose steps then serve them. Slots are rounded up by at most
//! an eighth; those beyond the sequences in flight are free, and get a token that is not read.

use std::rc::{Rc, Weak};

use tch::{Device, Kind, Tensor};

use super::draw;
use super::sequence::ServedWeights;
use crate::model::graph::{Graph, GraphPool};
use crate::model::stream::give_back_memory;
use crate::model::{Decoder, KvCache, Views, fused, gpu_memory, logits_chunk, upload};

/// Steps of the same slots before they are recorded: what libtorch prepares for their shapes is not part of
/// a recording.
const EAGER_STEPS: usize = 1;

/// Places of weights whose steps are kept: the trainer publishes into about as many, in turn.
const PLACES: usize = 4;

/// Recorded steps.
pub(super) struct StepGraphs {
    /// `None` where graphs are not used.
    pool: Option<GraphPool>,
    device: Device,
    /// Pages of the cache, and of a slot.
    pages: [usize; 2],
    /// The newest weights last.
    all: Vec<OfWeights>,
}

/// Steps of one place.
struct OfWeights {
    weights: Weak<ServedWeights>,
    place: Option<usize>,
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
    /// Tokens, positions, and pages of each slot: `[(2 + width) · slots]`.
    numbers: Tensor,
    /// `[slots, 5]`, as the kernel `draw` takes them.
    settings: Tensor,
    /// `[slots, 2]`, as the kernel gives them.
    drawn: Tensor,
}

/// Input of a step for slots 0, 1, …
#[derive(Default)]
pub(super) struct StepInput {
    /// Tokens that the host knows; any for others.
    pub tokens: Vec<i64>,
    pub positions: Vec<i64>,
    /// As the kernel `draw` takes them.
    pub settings: Vec<f64>,
    /// For tokens that the host does not know yet, their rows of the step before.
    pub drawn: Vec<Option<usize>>,
}

impl StepInput {
    fn pad(&mut self, slots: usize) {
        let padding = slots - self.tokens.len();
        self.settings.extend(std::iter::repeat_n([1.0, 0.0, 0.0, 1.0, 0.0], padding).flatten());
        self.tokens.resize(slots, 0);
        // Of slots that are not in use.
        self.positions.resize(slots, -1);
        self.drawn.resize(slots, None);
    }

    /// Tokens, positions and pages on the device. `before`: tokens and log-probabilities of the step before,
    /// which may still be at work.
    fn on_device(&self, table: &[i64], before: Option<&Tensor>, device: Device) -> Tensor {
        let known = [self.tokens.as_slice(), &self.positions, table].concat();
        let Some(before) = before else { return upload(&known, device) };
        let (slots, len) = (self.tokens.len(), known.len() as i64);
        let source = |(slot, row): (usize, &Option<usize>)| row.map_or(slot, |row| slots + row) as i64;
        let sources: Vec<i64> = self.drawn.iter().enumerate().map(source).collect();
        let numbers = upload(&[known, sources].concat(), device);
        let (tokens, sources) = (numbers.narrow(0, 0, slots as i64), numbers.narrow(0, len, slots as i64));
        // Tokens are exact in f64.
        let all = Tensor::cat(&[tokens.to_kind(Kind::Double), before.select(1, 0)], 0);
        tokens.shallow_clone().copy_(&all.index_select(0, &sources));
        numbers.narrow(0, 0, len)
    }
}

/// Slots of a graph for so many sequences.
fn rounded(sequences: usize, most: usize) -> usize {
    let step = if sequences <= 8 { sequences.next_power_of_two() } else { (sequences.next_power_of_two() / 16).max(8) };
    sequences.next_multiple_of(step).min(most)
}

impl StepGraphs {
    pub fn new(device: Device) -> Self {
        StepGraphs { pool: GraphPool::new(device), device, pages: [0; 2], all: Vec::new() }
    }

    /// Returns true if this device and libtorch record steps.
    pub fn are_used(&self) -> bool {
        self.pool.is_some()
    }

    /// One token for each slot by a recorded graph: tokens and log-probabilities on the device, which is
    /// still at work. `None` if there is none for this step, which then is to be computed otherwise.
    /// Requires [`Decoder::records_steps`].
    pub fn step(
        &mut self,
        decoder: &Decoder,
        (weights, views): (&Rc<ServedWeights>, &Views),
        (mut input, before): (StepInput, Option<&Tensor>),
        (cache, most): (&mut KvCache, usize),
    ) -> Option<Tensor> {
        let pool = self.pool.as_mut()?;
        let slots = rounded(input.tokens.len(), most);
        let pages = [cache.pages.len(), cache.pages.width()];
        if self.pages != pages {
            self.all.clear();
            self.pages = pages;
        }
        let steps = of_weights(&mut self.all, weights);
        let at = steps.iter().position(|recorded| recorded.slots == slots).unwrap_or_else(|| {
            steps.push(Recorded { slots, seen: 0, graph: None });
            steps.len() - 1
        });
        let recorded = &mut steps[at];
        if recorded.seen < EAGER_STEPS {
            // Only a step that nothing came before is computed otherwise now.
            recorded.seen += usize::from(before.is_none());
            return None;
        }
        input.pad(slots);
        let numbers = input.on_device(cache.pages.table(0..slots), before, self.device);
        let settings = draw::upload_settings(&input.settings, self.device);
        if recorded.graph.is_none() {
            let (numbers, settings) = (numbers.copy(), settings.copy());
            let mut record = || {
                let work = || fused::gpu::draw(&decoder.decode_recorded(views, slots, &numbers, cache), &settings);
                Graph::record(pool, work)
            };
            if is_nearly_full(self.device) {
                give_back_memory(self.device);
            }
            let made = record().or_else(|_| {
                give_back_memory(self.device);
                record()
            });
            match made {
                Ok((graph, drawn)) => recorded.graph = Some((graph, Buffers { numbers, settings, drawn })),
                Err(why) => {
                    tracing::warn!("decoding steps are not recorded as CUDA graphs, which costs speed: {why}");
                    self.pool = None;
                    self.all.clear();
                    return None;
                }
            }
        }
        let (graph, buffers) = recorded.graph.as_mut()?;
        buffers.numbers.copy_(&numbers);
        buffers.settings.copy_(&settings);
        graph.replay();
        // The next step writes where this one did.
        Some(buffers.drawn.copy())
    }

    /// Forgets all steps, before the cache that they read is freed.
    pub fn forget_all(&mut self) {
        self.all.clear();
    }

    /// Forgets the steps of weights that are gone, but for those whose place others may take.
    pub fn forget_gone(&mut self) {
        self.all.retain(|of| of.place.is_some() || of.weights.strong_count() > 0);
    }
}

/// The steps of these weights, which become the newest.
fn of_weights<'a>(all: &'a mut Vec<OfWeights>, weights: &Rc<ServedWeights>) -> &'a mut Vec<Recorded> {
    let place = weights.place;
    let is_of = |of: &OfWeights| match place {
        Some(_) => of.place == place,
        None => of.weights.ptr_eq(&Rc::downgrade(weights)),
    };
    let at = all.iter().position(is_of);
    let known = at.map(|at| all.remove(at));
    if all.len() >= PLACES {
        all.remove(0);
    }
    all.push(known.unwrap_or_else(|| OfWeights { weights: Rc::downgrade(weights), place, steps: Vec::new() }));
    &mut all.last_mut().expect("one was added").steps
}

/// Returns true if too little memory is left for a recording, which takes it from the driver, and for
/// others meanwhile. While a thread records, libtorch gives back no freed memory that it keeps, not even
/// for a trainer that runs out.
fn is_nearly_full(device: Device) -> bool {
    let Device::Cuda(index) = device else { return false };
    gpu_memory(index).is_some_and(|memory| memory.free < spare(memory.total, device))
}

/// Bytes to leave of a GPU's `total`: four of a trainer's chunks of logits in f32, but at most an eighth,
/// and at least a thirty-second.
fn spare(total: u64, device: Device) -> u64 {
    let chunks = 4 * 4 * logits_chunk(device) as u64;
    chunks.clamp(total / 32, total / 8)
}

#[cfg(test)]
mod tests {
    use std::path::Path;
    use std::sync::Arc;

    use super::*;
    use crate::data::Tokenizer;
    use crate::engine::{LocalEngine, Request, SamplingParams, TokenEngine};
    use crate::model::{Compute, Dtype, Weights, load_hf};

    #[test]
    fn slots_are_rounded_up_by_an_eighth_at_most() {
        for sequences in 1..2000 {
            let slots = rounded(sequences, 5000);
            assert!(slots >= sequences && (slots - sequences) * 8 <= sequences.max(64), "{sequences}: {slots}");
        }
        assert_eq!((rounded(1000, 1024), rounded(1000, 1001), rounded(3, 64)), (1024, 1001, 4));
    }

    #[test]
    fn memory_for_a_trainer_is_spared_and_of_a_small_gpu_no_more_than_an_eighth() {
        let of = |gib: u64| spare(gib << 30, Device::Cuda(0)) as f64 / f64::from(1 << 30);
        assert_eq!([8, 16, 24, 80, 192].map(of), [1.0, 2.0, 3.0, 4.0, 6.0]);
    }

    /// An engine and its weights, where there is a GPU or its stand-in.
    fn engine_on_a_gpu() -> Option<(LocalEngine, Weights)> {
        let compute = Compute::cuda(0, Dtype::Bf16);
        if compute.check().is_err() {
            eprintln!("skipped: no GPU");
            return None;
        }
        let folder = Path::new("tests/golden/models/qwen2_tied");
        let (model, weights) = load_hf(folder).unwrap();
        let (weights, tokenizer) = (weights.on(compute), Arc::new(Tokenizer::from_dir(folder).unwrap()));
        let decoder = Decoder::new(&model, weights.layout.clone());
        Some((LocalEngine::new(decoder, tokenizer, 4, 7).computing(compute), weights))
    }

    fn recorded(engine: &LocalEngine) -> bool {
        engine.graphs.all.iter().any(|of| of.steps.iter().any(|step| step.graph.is_some()))
    }

    /// Weights and a cache of the same sizes come after the rest.
    #[test]
    fn no_step_that_was_recorded_before_a_rest_is_replayed_after_it() {
        let Some((mut engine, weights)) = engine_on_a_gpu() else { return };
        let params = Arc::new(SamplingParams { max_new_tokens: 12, ignore_eos: true, ..Default::default() });
        let answers = |engine: &mut LocalEngine| {
            engine.set_weights(1, &weights);
            engine.submit(Request::new(0, [5u32, 8, 33], 3, params.clone())).unwrap();
            let mut answers = engine.run().unwrap();
            answers.sort_by_key(|answer| answer.index);
            answers.into_iter().map(|answer| answer.tokens.clone()).collect::<Vec<_>>()
        };
        let before = answers(&mut engine);
        assert!(recorded(&engine), "steps of these weights are recorded");
        engine.rest();
        assert!(!recorded(&engine), "their cache is gone");
        assert_eq!(answers(&mut engine), before);
        assert!(recorded(&engine), "steps are recorded again");
    }

    /// The attention of a long cache is divided, and what joins its parts is loaded before the recording.
    #[test]
    fn steps_of_a_cache_that_is_long_from_the_first_one_on_are_recorded() {
        let Some((mut engine, weights)) = engine_on_a_gpu() else { return };
        let params = Arc::new(SamplingParams { max_new_tokens: 160, ignore_eos: true, ..Default::default() });
        engine.set_weights(1, &weights);
        engine.submit(Request::new(0, [5u32, 8, 33], 3, params)).unwrap();
        (0..4).for_each(|_| drop(engine.step().unwrap()));
        assert!(recorded(&engine));
    }
}
