//! Continuous batching: every step computes one token for every sample in flight.
//!
//! All work happens on the caller's thread, in [`TokenEngine::step`]. A prompt is computed once for
//! all samples of its group. A finished sample's slot takes the next sample in the same step.
//! Weights change between two tokens; [`OnNewWeights`] decides what happens to samples in flight
//! (law V5). Interrupted samples, of this process or another, continue from their tokens.
//!
//! Cache memory: 2 · layers · slots · key heads · longest sequence · head width · 4 bytes (2 in
//! bf16 and f16).

use std::borrow::{Borrow, Cow};
use std::collections::BTreeMap;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Instant;

use tch::Tensor;

use super::draw::{Choices, choices, draw, settings};
use super::graphs::StepGraphs;
use super::prompts::Prompts;
use super::sequence::{Sequence, SequenceState, ServedWeights, rows};
use crate::data::packing::cut_rectangles;
use crate::data::{Answer, SampledToken, Tokenizer, Version};
use crate::engine::slots::{Admission, Slots};
use crate::engine::{EngineError, Finished, Load, OnNewWeights, Request, TokenEngine};
use crate::model::stream::{Entered, Event, Stream};
use crate::model::{Compute, Decoder, FrozenWeights, KvCache, PREFILL_CELLS, Packed, Weights, upload};

/// Engine that generates with weights in this process.
pub struct LocalEngine {
    decoder: Decoder,
    compute: Compute,
    /// Of all work on tensors of the engine.
    stream: Stream,
    tokenizer: Arc<Tokenizer>,
    run_seed: u64,
    on_new_weights: OnNewWeights,
    /// Newest weights. Samples that began under older ones hold theirs.
    weights: Option<Rc<ServedWeights>>,
    /// Weights with an adapter, by the adapter's name. No sample names one that is not here.
    adapters: BTreeMap<Arc<str>, Rc<ServedWeights>>,
    slots: Slots<SequenceState>,
    /// KV cache with one more slot than there are sequences: the shelf, for the prompt of a group
    /// that was admitted in part.
    cache: KvCache,
    /// Recorded decoding steps.
    graphs: StepGraphs<ServedWeights>,
    /// Logits after the prompt on the shelf, which is the prompt of the first waiting samples.
    shelf: Option<Tensor>,
    /// Prompts of earlier requests, in slots after the shelf.
    prompts: Prompts<ServedWeights>,
}

impl LocalEngine {
    /// Creates an engine for up to `slots` samples at a time, without weights. It must stay on this
    /// thread.
    pub fn new(decoder: Decoder, tokenizer: Arc<Tokenizer>, slots: usize, run_seed: u64) -> Self {
        let slots = Slots::new(slots);
        let compute = Compute::default();
        let cache = decoder.cache(slots.len() + 1, 0, compute);
        LocalEngine {
            decoder,
            compute,
            stream: Stream::new(compute.device),
            graphs: StepGraphs::new(compute.device),
            tokenizer,
            run_seed,
            on_new_weights: OnNewWeights::default(),
            weights: None,
            adapters: BTreeMap::new(),
            prompts: Prompts::new(slots.len() + 1, 0),
            slots,
            cache,
            shelf: None,
        }
    }

    /// Sets device and format, before the first request. Default: f32 on the CPU.
    pub fn computing(mut self, compute: Compute) -> Self {
        self.compute = compute;
        self.stream = Stream::new(compute.device);
        self.graphs = StepGraphs::new(compute.device);
        self.cache = self.empty_cache();
        self
    }

    fn empty_cache(&self) -> KvCache {
        let _stream = self.stream.enter();
        self.decoder.cache(self.slots.len() + 1 + self.prompts.len(), 0, self.compute)
    }

    /// Remembers up to `prompts` prompts for later requests, before the first. Each takes the cache
    /// memory of a slot. Default: 0, because a group's prompt is computed once anyway.
    pub(crate) fn remembering(mut self, prompts: usize) -> Self {
        self.prompts = Prompts::new(self.slots.len() + 1, prompts);
        self.cache = self.empty_cache();
        self
    }

    /// Forgets the prompts of earlier requests.
    pub(crate) fn forget(&mut self) {
        self.prompts.forget(|_| false);
    }

    /// Forgets prompts under weights that no new request uses, and recorded steps.
    fn forget_old(&mut self) {
        self.graphs.forget();
        let (weights, adapters) = (&self.weights, &self.adapters);
        self.prompts.forget(|known| weights.iter().chain(adapters.values()).any(|served| Rc::ptr_eq(served, known)));
    }

    /// Sets the policy for samples in flight when weights change.
    pub fn on_new_weights(mut self, on_new_weights: OnNewWeights) -> Self {
        self.change_on_new_weights(on_new_weights);
        self
    }

    /// Sets the policy for the next change of weights.
    pub(crate) fn change_on_new_weights(&mut self, on_new_weights: OnNewWeights) {
        self.on_new_weights = on_new_weights;
    }

    /// Serves requests that name this adapter with `weights`, which hold it; samples in flight keep
    /// what they have. `None` removes the adapter and its samples, and returns their ordinals and
    /// indices: none may continue without it.
    pub(crate) fn set_adapter(&mut self, name: &Arc<str>, version: Version, weights: Option<&Weights>) -> Vec<(u64, u32)> {
        let _guard = tch::no_grad_guard();
        let _stream = self.enter_with(weights);
        self.shelf = None;
        let Some(weights) = weights else {
            self.adapters.remove(name);
            self.forget_old();
            return self.slots.remove(|request| request.adapter.as_ref() == Some(name));
        };
        let served = ServedWeights { version, views: self.decoder.views_of(&weights.on(self.compute)) };
        self.adapters.insert(name.clone(), Rc::new(served));
        self.forget_old();
        Vec::new()
    }

    /// Removes a request's samples, in flight or waiting.
    pub(crate) fn cancel(&mut self, ordinal: u64) {
        self.slots.remove(|request| request.ordinal == ordinal);
        // The prompt on the shelf may no longer be the next one.
        self.shelf = None;
    }

    /// Queues all samples in flight again. They continue from their tokens, which are computed again.
    pub(crate) fn retract(&mut self) {
        self.slots.interrupt();
        self.shelf = None;
    }

    /// Uses these weights from the next token on. Weights that are on the engine's device in its
    /// format are read in place, not copied: do not write to them while they are in use.
    pub fn set_weights(&mut self, version: Version, weights: &Weights) {
        let _stream = self.enter_with(Some(weights));
        self.serve(version, weights);
    }

    /// Enters the engine's stream, which waits for the caller's work on `weights`.
    fn enter_with(&self, weights: Option<&Weights>) -> Entered {
        let written = weights.map(|weights| Event::now(weights.flat.device()));
        let entered = self.stream.enter();
        written.into_iter().for_each(|written| written.before(weights.into_iter().flat_map(Weights::tensors)));
        entered
    }

    /// [`LocalEngine::set_weights`] in the engine's stream.
    fn serve(&mut self, version: Version, weights: &Weights) {
        let _guard = tch::no_grad_guard();
        let served = Rc::new(ServedWeights { version, views: self.decoder.views_of(&weights.on(self.compute)) });
        self.weights = Some(served.clone());
        self.forget_old();
        // The rest of that group must not start from logits of the old weights.
        self.shelf = None;
        match self.on_new_weights {
            OnNewWeights::Swap => self.move_to(&served),
            OnNewWeights::Recompute => {
                self.move_to(&served);
                self.recompute(&served);
            }
            OnNewWeights::Finish => self.slots.divide(),
            OnNewWeights::Abort => self.slots.interrupt(),
        }
    }

    /// Tokenizer whose end-of-text tokens end a completion.
    pub fn tokenizer(&self) -> &Arc<Tokenizer> {
        &self.tokenizer
    }

    /// Computes the tokens of admitted samples of the same weights, equal prompts once and remembered
    /// ones not at all, and draws their next tokens.
    fn begin(&mut self, weights: &Rc<ServedWeights>, admitted: &[Admission]) -> Result<(), EngineError> {
        let shelf_slot = self.slots.len();
        let (mut groups, mut logits, mut rows) = (admitted, Vec::new(), Vec::new());
        if let (Some(shelf), Some(first)) = (self.shelf.take(), groups.first()) {
            self.cache.copy_slot(shelf_slot, &first.slots, first.request.request.tokens.len());
            logits.push(shelf);
            rows.push(0);
            groups = &groups[1..];
        }
        // Rows of logits: that of the shelf, those of remembered prompts, those of new ones.
        let mut new: Vec<(Cow<[u32]>, Vec<usize>)> = Vec::new();
        let mut new_rows = Vec::new();
        for (at, group) in groups.iter().enumerate() {
            let tokens = group.request.tokens();
            let slots = group.slots.iter().copied().chain(group.more.then_some(shelf_slot));
            if let Some(known) = self.prompts.find(weights, &tokens) {
                self.cache.copy_slot(known.slot, &slots.collect::<Vec<_>>(), tokens.len());
                rows.push(logits.len() as i64);
                logits.push(known.logits.shallow_clone());
                continue;
            }
            let row = new.iter().position(|(known, _)| *known == tokens).unwrap_or(new.len());
            if row == new.len() {
                new.push((tokens, Vec::new()));
            }
            new[row].1.extend(slots);
            new_rows.push((admitted.len() - groups.len() + at, row));
        }
        let first = logits.len() as i64;
        new_rows.into_iter().for_each(|(at, row)| rows.insert(at, first + row as i64));
        if !new.is_empty() {
            let (tokens, mut slots): (Vec<_>, Vec<_>) = new.into_iter().unzip();
            // A continuation, whose tokens are joined, comes once.
            let prompts: Vec<usize> = (0..tokens.len()).filter(|row| matches!(tokens[*row], Cow::Borrowed(_))).collect();
            let kept = self.prompts.free(prompts.len());
            prompts.iter().zip(&kept).for_each(|(row, kept)| slots[*row].push(*kept));
            self.slots.load.add(0, tokens.iter().map(|tokens| tokens.len()).sum());
            let read = self.read(weights, &tokens, &slots);
            for (row, slot) in prompts.into_iter().zip(kept) {
                self.prompts.remember(weights, tokens[row].to_vec(), slot, read.narrow(0, row as i64, 1).copy());
            }
            logits.push(read);
        }
        let logits = Tensor::cat(&logits, 0);
        if let (Some(row), true) = (rows.last(), admitted.last().is_some_and(|group| group.more)) {
            self.shelf = Some(logits.narrow(0, *row, 1));
        }
        let rows = admitted.iter().zip(rows).flat_map(|(group, row)| vec![row; group.slots.len()]);
        let (rows, slots): (Vec<i64>, Vec<usize>) =
            rows.zip(admitted.iter().flat_map(|group| group.slots.iter().copied())).unzip();
        let rows = upload(&rows, logits.device());
        self.take_tokens(&slots, &logits.index_select(0, &rows))
    }

    /// Decodes one token for the slots in use, which are 0, 1, …: one pass for each version of the
    /// weights.
    fn advance(&mut self) -> Result<(), EngineError> {
        let mut first = 0;
        loop {
            let head = self.slots.iter_from(first).next().map(|(_, head)| head.state.weights.clone());
            let Some(weights) = head else { return Ok(()) };
            let alike = |(_, sequence): &(usize, &Sequence)| Rc::ptr_eq(&sequence.state.weights, &weights);
            let neighbours = self.slots.iter_from(first).take_while(alike);
            let (tokens, positions): (Vec<i64>, Vec<usize>) = neighbours.map(|(_, sequence)| sequence.newest()).unzip();
            let slots: Vec<usize> = (first..first + tokens.len()).collect();
            let choices = self.decode(&weights, &slots, &tokens, &positions);
            self.slots.load.add(slots.len(), 0);
            first += slots.len();
            self.take(&slots, choices)?;
        }
    }

    /// One token for each of `slots`, recorded or not.
    fn decode(&mut self, weights: &Rc<ServedWeights>, slots: &[usize], tokens: &[i64], positions: &[usize]) -> Choices {
        // A graph's further slots must be free.
        if slots.len() == self.slots.active() && self.graphs.are_used() {
            let settings = settings(&rows(&self.slots, self.run_seed, slots));
            let (cache, given) = ((&mut self.cache, self.slots.len()), (tokens, positions, settings));
            if let Some(drawn) = self.graphs.step(&self.decoder, (weights, &weights.views), given, cache) {
                // The device is at work meanwhile.
                self.slots.iter_mut().for_each(|sequence| sequence.compute_ahead(self.run_seed));
                return choices(&drawn.narrow(0, 0, slots.len() as i64));
            }
        }
        let rows = rows(&self.slots, self.run_seed, slots);
        draw(&self.decoder.decode(&weights.views, slots[0], tokens, positions, &mut self.cache), &rows)
    }

    /// Draws a token for each of `slots` from its row of logits, and ends the samples that it
    /// completes.
    fn take_tokens(&mut self, slots: &[usize], logits: &Tensor) -> Result<(), EngineError> {
        self.take(slots, draw(logits, &rows(&self.slots, self.run_seed, slots)))
    }

    /// Appends a token to the sample in each of `slots`.
    fn take(&mut self, slots: &[usize], choices: Choices) -> Result<(), EngineError> {
        for (&slot, choice) in slots.iter().zip(choices) {
            let Some(sequence) = self.slots.get_mut(slot) else { continue };
            let (ordinal, index, version) = (sequence.request.ordinal, sequence.answer.index, sequence.state.weights.version);
            let Some((token, log_prob)) = choice else {
                return Err(EngineError::NonFinite { ordinal, index, position: sequence.answer.tokens.len(), version });
            };
            let finish = sequence.take(token, log_prob, &self.tokenizer)?;
            self.slots.report(slot, version, finish);
        }
        Ok(())
    }

    fn move_to(&mut self, weights: &Rc<ServedWeights>) {
        let own = self.slots.iter_mut().filter(|sequence| sequence.request.adapter.is_none());
        own.for_each(|sequence| sequence.state.weights = weights.clone());
    }

    /// Recomputes the cache of all samples in flight, except their newest token, which the next
    /// step reads.
    fn recompute(&mut self, weights: &ServedWeights) {
        let (slots, tokens): (Vec<Vec<usize>>, Vec<Vec<u32>>) = self
            .slots
            .iter_from(0)
            .filter(|(_, sequence)| sequence.request.adapter.is_none())
            .map(|(slot, sequence)| {
                let tokens = sequence.request.tokens.iter().chain(&sequence.answer.tokens).take(sequence.computed());
                (vec![slot], tokens.copied().collect())
            })
            .unzip();
        if !slots.is_empty() {
            let _logits = self.read(weights, &tokens, &slots);
        }
    }

    /// Prefills whole sequences into their slots, a bounded number of tokens at a time. Returns the
    /// logits after each.
    fn read<T: Borrow<[u32]>>(&mut self, weights: &ServedWeights, tokens: &[T], slots: &[Vec<usize>]) -> Tensor {
        let lengths: Vec<usize> = tokens.iter().map(|tokens| tokens.borrow().len()).collect();
        let parts = cut_rectangles(&lengths, PREFILL_CELLS).into_iter().map(|part| {
            let packed = Packed::new(tokens[part.clone()].iter().map(Borrow::borrow));
            self.decoder.prefill(&weights.views, &packed, &mut self.cache, &slots[part])
        });
        let mut logits: Vec<Tensor> = parts.collect();
        if logits.len() == 1 { logits.swap_remove(0) } else { Tensor::cat(&logits, 0) }
    }
}

impl TokenEngine for LocalEngine {
    type Weights = FrozenWeights;

    fn submit(&mut self, request: Request) -> Result<(), EngineError> {
        let _guard = tch::no_grad_guard();
        let _stream = self.stream.enter();
        let config = self.decoder.config();
        request.check(config.vocab_size)?;
        let (ordinal, needed) = (request.ordinal, request.longest());
        let refuse = |problem: String| Err(EngineError::Prompt { ordinal, problem });
        if let Some(name) = request.adapter.as_ref().filter(|name| !self.adapters.contains_key(*name)) {
            return refuse(format!("the adapter {name:?} is not loaded"));
        }
        if let Some(token) = request.tokens.iter().find(|token| **token as usize >= config.vocab_size) {
            return refuse(format!("token {token} is beyond the model's vocabulary of {}", config.vocab_size));
        }
        if needed > config.max_positions {
            let (new, most) = (request.params.max_new_tokens, config.max_positions);
            let prompt = needed - new;
            return refuse(format!(
                "{prompt} tokens and max_new_tokens {new} exceed the model's {most} positions; shorten one of them"
            ));
        }
        self.cache.grow(needed.next_multiple_of(32).min(config.max_positions));
        self.slots.submit(request);
        Ok(())
    }

    fn set_weights(&mut self, version: Version, weights: &FrozenWeights) {
        let _stream = self.stream.enter();
        self.serve(version, &weights.read());
    }

    fn restart_expired(&mut self, expired: &dyn Fn(u64, &Answer) -> bool) -> Vec<(u64, u32)> {
        let restarted = self.slots.restart_expired(expired);
        if !restarted.is_empty() {
            // The prompt on the shelf may no longer be the next one.
            self.shelf = None;
        }
        restarted
    }

    fn version(&self) -> Option<Version> {
        self.weights.as_ref().map(|weights| weights.version)
    }

    fn is_idle(&self) -> bool {
        self.slots.is_idle()
    }

    fn free_slots(&self) -> usize {
        self.slots.free()
    }

    fn active(&self) -> usize {
        self.slots.active()
    }

    fn limit_slots(&mut self, limit: usize) {
        self.slots.limit_to(limit);
    }

    fn step(&mut self) -> Result<Vec<Finished>, EngineError> {
        let _guard = tch::no_grad_guard();
        let _stream = self.stream.enter();
        let started = Instant::now();
        let cache = &mut self.cache;
        self.slots.start_step(|from, to, sequence| cache.copy_slot(from, &[to], sequence.computed()));
        let Some(weights) = self.weights.clone() else {
            return if self.is_idle() { Ok(Vec::new()) } else { Err(EngineError::NoWeights) };
        };
        loop {
            let adapters = &self.adapters;
            let of = |request: &Request| {
                let adapter = request.adapter.as_ref().and_then(|name| adapters.get(name));
                SequenceState::new(adapter.unwrap_or(&weights).clone())
            };
            let admitted = self.slots.admit(of);
            if admitted.is_empty() {
                break;
            }
            let first = |group: &Admission| self.slots.get(group.slots[0]).map(|sequence| sequence.state.weights.clone());
            let weights: Vec<_> = admitted.iter().filter_map(first).collect();
            let mut groups = admitted.as_slice();
            for alike in weights.chunk_by(Rc::ptr_eq) {
                let (these, rest) = groups.split_at(alike.len());
                self.begin(&alike[0], these)?;
                groups = rest;
            }
        }
        let cache = &mut self.cache;
        self.slots.compact(|from, to, sequence| cache.copy_slot(from, &[to], sequence.computed()));
        self.advance()?;
        self.slots.load.time = started.elapsed();
        Ok(std::mem::take(&mut self.slots.finished))
    }

    fn sampled(&self) -> &[SampledToken] {
        &self.slots.sampled
    }

    fn load(&self) -> Load {
        self.slots.load
    }
}
