//! Samples in flight in an engine of this process.

use std::cell::Cell;
use std::rc::Rc;

use super::drafts::Drafter;
use super::draw::Row;
use crate::data::{Tokenizer, Version};
use crate::engine::penalties::adjusted;
use crate::engine::sampling::uniform;
use crate::engine::slots::{ActiveSample, Slots};
use crate::engine::stop::StopWatch;
use crate::engine::{EngineError, FinishReason, Request};
use crate::model::{Compute, Decoder, Views, Weights};

/// Rows of the next tokens in `slots`.
pub(super) fn rows<'a>(all: &'a Slots<SequenceState>, run_seed: u64, slots: &[usize]) -> Vec<Row<'a>> {
    slots.iter().filter_map(|&slot| all.get(slot)).map(|sequence| sequence.row_after(&[], run_seed)).collect()
}

/// Base of adapters, kept while weights over it are served.
pub(super) struct Base {
    /// The weights that were given.
    given: Weights,
    /// The same on the engine's device, in its format.
    pub placed: Weights,
}

impl Base {
    pub fn new(given: Weights, compute: Compute) -> Self {
        let placed = given.on(compute);
        Base { given, placed }
    }

    /// Returns true if these adapters are over it. No base is written.
    pub fn is_of(&self, weights: &Weights) -> bool {
        self.given.flat.data_ptr() == weights.flat.data_ptr()
    }
}

/// One version of the weights, kept while a sample uses it.
pub(super) struct ServedWeights {
    /// Number of them in their engine.
    pub id: u64,
    pub version: Cell<Version>,
    pub views: Views,
    /// Base, if there is an adapter.
    pub base: Option<Rc<Base>>,
    /// Where plain weights lie: those at the same place differ by their numbers only. `None` for others.
    pub place: Option<usize>,
}

impl ServedWeights {
    /// Weights that are where `decoder` computes.
    pub fn new((id, version): (u64, Version), weights: &Weights, base: Option<Rc<Base>>, decoder: &Decoder) -> Self {
        let is_plain = weights.adapter.is_none() && !weights.is_quantised();
        let place = is_plain.then(|| weights.flat.data_ptr() as usize);
        ServedWeights { id, version: Cell::new(version), views: decoder.views_of(weights), base, place }
    }
}

/// State of a sample in flight. Random numbers and text follow from its tokens, so only tokens are
/// saved (laws C1, N2).
pub(super) struct SequenceState {
    pub weights: Rc<ServedWeights>,
    /// False if some of the sample's keys and values are of weights before.
    pub keys_are_of_weights: bool,
    watch: StopWatch,
    pub drafter: Drafter,
    /// The newest step that computed it ahead of the host, and its row there.
    pub row: (u64, usize),
}

impl SequenceState {
    pub fn new(weights: Rc<ServedWeights>) -> Self {
        SequenceState {
            weights,
            keys_are_of_weights: true,
            watch: StopWatch::default(),
            drafter: Drafter::default(),
            row: (0, 0),
        }
    }
}

impl SequenceState {
    /// Its row of a step.
    pub fn row_of(&self, step: u64) -> Option<usize> {
        (self.row.0 == step).then_some(self.row.1)
    }
}

pub(super) type Sequence = ActiveSample<SequenceState>;

impl Sequence {
    /// Newest token and its position, the input of a step.
    pub fn newest(&self) -> (i64, usize) {
        let token = self.answer.tokens.last().map_or(0, |&token| i64::from(token));
        (token, self.computed())
    }

    /// The tokens in the cache.
    pub fn computed_tokens(&self) -> Vec<u32> {
        self.request.tokens.iter().chain(&self.answer.tokens).take(self.computed()).copied().collect()
    }

    /// Returns true if it may have more than `further` tokens more.
    pub fn lasts_beyond(&self, further: usize) -> bool {
        self.answer.turn() + further < self.request.params.max_new_tokens
    }

    /// Uniform number that decides the token after so many.
    pub fn uniform_after(&self, tokens: usize, run_seed: u64) -> f64 {
        let index = self.answer.index;
        let Request { seed, ordinal, offset, .. } = *self.request;
        let (seed, ordinal) = seed.map_or((run_seed, ordinal), |seed| (seed, 0));
        // A greedy choice needs none, and a key costs more than an argmax of a small vocabulary.
        if self.request.params.greedy() { 0.0 } else { uniform(seed, ordinal, index, offset + tokens) }
    }

    /// The row of the token after its own and those of a draft.
    pub fn row_after(&self, drafted: &[u32], run_seed: u64) -> Row<'_> {
        let (params, said) = (&*self.request.params, &self.answer.tokens);
        let uniform = self.uniform_after(said.len() + drafted.len(), run_seed);
        Row { params, uniform, adjusted: adjusted(params, &self.request.tokens, said.iter().chain(drafted)) }
    }

    /// A draft of the next tokens, of at most `most`, and so many that a token after them has room.
    pub fn draft(&mut self, most: usize) -> Vec<u32> {
        let left = self.request.params.max_new_tokens.saturating_sub(self.answer.turn());
        self.state.drafter.draft(&self.request.tokens, &self.answer.tokens, most.min(left.saturating_sub(1)))
    }

    /// Appends a token. Returns how that ended the sample, if so.
    pub fn take(&mut self, token: u32, log_prob: f32, tokenizer: &Tokenizer) -> Result<Option<FinishReason>, EngineError> {
        self.answer.push(token, log_prob, self.state.weights.version.get());
        Ok(self.state.watch.ends(&self.answer, &self.request.params, tokenizer)?)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::engine::{LocalEngine, SamplingParams, TokenEngine};
    use crate::model::{Dtype, Lora, ModelConfig};

    #[test]
    fn samples_of_adapters_that_are_asked_in_turn_take_one_pass_for_each_adapter() {
        let tokenizer = Arc::new(Tokenizer::characters("0123456789", 16).unwrap());
        let config = ModelConfig::small(&tokenizer, 16, 1);
        let base = Weights::random(&config, 3);
        let answers = |slots| {
            let mut engine = LocalEngine::new(Decoder::new(&config, base.layout.clone()), tokenizer.clone(), slots, 7);
            engine.set_weights(1, &base);
            for (name, number) in [("a", 0.1), ("b", 0.4)] {
                let adapted = base.adapted(&config, Lora::new(2, 4.0, &[Lora::ALL]).unwrap(), 1);
                let _filled = adapted.adapter.as_ref().unwrap().flat.shallow_clone().fill_(number);
                engine.set_adapter(&name.into(), 1, Some(&adapted));
            }
            for ordinal in 0..8 {
                let params = SamplingParams { max_new_tokens: 4 + ordinal as usize, ignore_eos: true, ..Default::default() };
                let request = Request::new(ordinal, [4, 5, 6 + ordinal as u32], 1, Arc::new(params));
                let adapter = Some(["a", "b"][ordinal as usize % 2].into());
                engine.submit(Request { adapter, ..request }).unwrap();
            }
            let (mut answers, mut most) = (engine.step().unwrap(), 0);
            while !engine.is_idle() {
                answers.extend(engine.step().unwrap());
                most = most.max(engine.load().passes);
            }
            answers.sort_by_key(|answer| answer.ordinal);
            (answers.into_iter().map(|answer| answer.tokens).collect::<Vec<_>>(), most)
        };
        let (expected, _) = answers(1);
        assert_eq!(answers(8), (expected, 2));
    }

    /// On a processor, and on a GPU or its stand-in where there is one.
    #[test]
    fn adapters_over_one_base_share_its_copy_on_the_engines_device() {
        let tokenizer = Arc::new(Tokenizer::characters("0123456789", 16).unwrap());
        let config = ModelConfig::small(&tokenizer, 16, 1);
        let base = Weights::random(&config, 3);
        let gpu = Compute::cuda(0, Dtype::Bf16);
        for compute in [Compute::cpu(Dtype::Bf16)].into_iter().chain(gpu.check().is_ok().then_some(gpu)) {
            let decoder = Decoder::new(&config, base.layout.clone());
            let mut engine = LocalEngine::new(decoder, tokenizer.clone(), 2, 7).computing(compute);
            engine.set_weights(1, &base);
            // The last one replaces the first.
            for (name, seed) in [("a", 1), ("b", 2), ("a", 3)] {
                let adapted = base.adapted(&config, Lora::new(2, 4.0, &[Lora::ALL]).unwrap(), seed);
                engine.set_adapter(&name.into(), seed, Some(&adapted));
            }
            let bases: Vec<_> = engine.served().filter_map(|served| served.base.clone()).collect();
            assert!(bases.len() == 2 && Rc::ptr_eq(&bases[0], &bases[1]), "{compute:?}");
            let flat = &bases[0].placed.flat;
            assert_eq!((flat.kind(), flat.device()), compute.options());
        }
    }
}
