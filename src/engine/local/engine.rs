//! Continuous batching: every step computes one token for every sample in flight.
//!
//! All work happens on the caller's thread, in [`TokenEngine::step`]. A prompt is computed once for
//! all samples of its group. A finished sample's slot takes the next sample in the same step.
//! Weights change between two tokens; [`OnNewWeights`] decides what happens to samples in flight
//! (law V5). Interrupted samples, of this process or another, continue from their tokens.
//!
//! Cache memory: 2 · layers · tokens · key heads · head width · 4 bytes (2 in bf16 and f16). Tokens are those
//! of all slots at their longest, or a limit.

use std::collections::BTreeMap;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Instant;

use tch::{Device, Tensor};

use super::ahead::Ahead;
use super::draw::{Choices, draw};
use super::graphs::StepGraphs;
use super::room::room;
use super::sequence::{Base, Sequence, SequenceState, ServedWeights, rows};
use crate::data::{Answer, SampledToken, Tokenizer, Version};
use crate::engine::slots::{Admission, Slots};
use crate::engine::{EngineError, Finished, Load, OnNewWeights, Request, TokenEngine};
use crate::model::stream::{Entered, Event, Stream};
use crate::model::{Compute, Decoder, FrozenWeights, KvCache, PAGE, StepThreads, Weights, use_threads};

/// Engine that generates with weights in this process.
pub struct LocalEngine {
    pub(super) decoder: Decoder,
    pub(super) compute: Compute,
    /// Of all work on tensors of the engine.
    stream: Stream,
    tokenizer: Arc<Tokenizer>,
    pub(super) run_seed: u64,
    on_new_weights: OnNewWeights,
    /// Newest weights. Samples that began under older ones hold theirs.
    weights: Option<Rc<ServedWeights>>,
    /// Weights so far, which numbers them.
    given: u64,
    /// Weights with an adapter, by the adapter's name. No sample names one that is not here.
    adapters: BTreeMap<Arc<str>, Rc<ServedWeights>>,
    pub(super) slots: Slots<SequenceState>,
    /// KV cache with one more slot than there are sequences: the shelf, for the prompt of a group
    /// that was admitted in part.
    pub(super) cache: KvCache,
    /// Recorded decoding steps.
    pub(super) graphs: StepGraphs,
    /// Logits after the prompt on the shelf, which is the prompt of the first waiting samples.
    pub(super) shelf: Option<Tensor>,
    /// A step at work whose tokens are not taken yet.
    pub(super) ahead: Option<Ahead>,
    /// Recorded steps so far, which numbers them.
    pub(super) steps: u64,
    /// Of results, while the engine's stream is at work on the next step.
    pub(super) downloads: Stream,
    /// Room in the cache for sequences of earlier requests; 0 if none are remembered.
    pub(super) remembered: usize,
    /// Most tokens of the cache, if it is limited.
    cache_tokens: Option<usize>,
    /// Longest draft of a sample.
    pub(super) draft_tokens: usize,
    /// Whether completions have the experts of their tokens.
    routes: bool,
    /// Of a decoding step on a processor.
    threads: StepThreads,
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
            ahead: None,
            steps: 0,
            downloads: Stream::new(compute.device),
            tokenizer,
            run_seed,
            on_new_weights: OnNewWeights::default(),
            weights: None,
            given: 0,
            adapters: BTreeMap::new(),
            remembered: 0,
            cache_tokens: None,
            slots,
            cache,
            shelf: None,
            draft_tokens: 0,
            routes: false,
            threads: StepThreads::default(),
        }
    }

    /// Sets how many threads compute, on the thread that will call the engine and after
    /// [`computing`](LocalEngine::computing); default: those of the calling thread's operations. On a processor
    /// a model whose operations are too small for all of them has the samples of a step divided among them, on
    /// which no token depends.
    pub fn threads(mut self, threads: usize) -> Self {
        match self.compute.device {
            Device::Cpu => self.threads = StepThreads::new(self.decoder.config(), threads),
            _ => use_threads(threads),
        }
        self
    }

    /// Sets device and format, before the first request. Default: f32 on the CPU.
    pub fn computing(mut self, compute: Compute) -> Self {
        self.compute = compute;
        self.stream = Stream::new(compute.device);
        self.downloads = Stream::new(compute.device);
        self.graphs = StepGraphs::new(compute.device);
        self.cache = self.empty_cache();
        self
    }

    fn empty_cache(&self) -> KvCache {
        let _stream = self.stream.enter();
        let slots = self.slots.len() + 1;
        let cache = self.decoder.cache(slots, 0, self.compute).with_room(slots + self.remembered, self.cache_tokens);
        if self.routes { cache.recording_routes(self.decoder.config()) } else { cache }
    }

    /// Gives completions the experts of their tokens ([`Routes`](crate::data::Routes)), before the first request.
    /// A model without experts has none.
    pub fn recording_routes(mut self, routes: bool) -> Self {
        self.routes = routes;
        self.cache = self.empty_cache();
        self
    }

    /// Remembers prompts and ended sequences for later requests, as long as their memory is not needed: of what
    /// begins alike, only the rest is computed. Gives the cache room for so many sequences more than there are
    /// slots. Before the first request. Default: 0, which remembers none, because a group's prompt is computed
    /// once anyway. A model with gated delta nets remembers their states after so many prompts, ended sequences
    /// and pages that several begin with.
    pub fn remembering(mut self, sequences: usize) -> Self {
        self.remembered = sequences;
        self.cache = self.empty_cache();
        self
    }

    /// Limits the cache to so many tokens of all sequences together, before the first request; default: what all
    /// slots take at their longest. Where it is full, the youngest sample waits, and continues from its tokens
    /// later, under the newest weights then, also with [`OnNewWeights::Finish`].
    pub fn cache_tokens(mut self, tokens: Option<usize>) -> Self {
        self.cache_tokens = tokens;
        self.cache = self.empty_cache();
        self
    }

    /// Returns true if sequences are remembered.
    pub(super) fn remembers(&self) -> bool {
        self.remembered > 0
    }

    /// Drafts up to `tokens` tokens of a sample from what it said before, and checks them in one pass of at
    /// most 16 rows. The samples are those without drafts, up to rounding. Default: 0, none. A GPU, whose
    /// recorded steps are faster, has none, nor has a model with gated delta nets, whose states cannot step
    /// back.
    pub fn drafting(mut self, tokens: usize) -> Self {
        self.draft_tokens = if self.decoder.repeats_steps() { tokens } else { 0 };
        self
    }

    /// Forgets the sequences of earlier requests.
    pub(crate) fn forget(&mut self) {
        self.cache.forget(|_| false);
    }

    /// Forgets sequences under weights that no new request uses, and recorded steps.
    fn forget_old(&mut self) {
        self.graphs.forget_gone();
        let served: Vec<u64> = self.served().map(|served| served.id).collect();
        self.cache.forget(|known| served.contains(&known));
    }

    /// Weights that new requests use.
    pub(super) fn served(&self) -> impl Iterator<Item = &Rc<ServedWeights>> {
        self.weights.iter().chain(self.adapters.values())
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
        let served = self.number(version, weights);
        self.adapters.insert(name.clone(), served);
        self.forget_old();
        Vec::new()
    }

    /// Queues all samples in flight again. They continue from their tokens, which are computed again.
    pub(crate) fn retract(&mut self) {
        self.slots.interrupt();
        self.shelf = None;
    }

    /// Frees the memory of weights, keys and values. Without samples; it needs weights again before the next.
    pub(crate) fn rest(&mut self) {
        let _stream = self.stream.enter();
        (self.weights, self.shelf, self.ahead) = (None, None, None);
        self.adapters.clear();
        self.graphs.forget_all();
        self.forget_old();
        self.cache = self.empty_cache();
    }

    /// Uses these weights from the next token on. Weights that are on the engine's device in its
    /// format are read in place, not copied: do not write to them while they are in use.
    pub fn set_weights(&mut self, version: Version, weights: &Weights) {
        let _stream = self.enter_with(Some(weights));
        self.serve(version, weights);
    }

    /// Gives the weights that new requests use another version.
    pub(crate) fn rename(&mut self, version: Version) {
        self.served().for_each(|served| served.version.set(version));
    }

    /// Enters the engine's stream, which waits for the caller's work on `weights`.
    fn enter_with(&self, weights: Option<&Weights>) -> Entered {
        let written = weights.map(|weights| Event::now(weights.flat.device()));
        let entered = self.stream.enter();
        written.into_iter().for_each(|written| written.before(weights.into_iter().flat_map(Weights::tensors)));
        entered
    }

    fn number(&mut self, version: Version, weights: &Weights) -> Rc<ServedWeights> {
        self.given += 1;
        let base = weights.adapter.as_ref().map(|_| self.base_of(weights));
        let placed = match (&base, &weights.adapter) {
            (Some(base), Some(adapter)) => base.placed.under(adapter.with(adapter.flat.shallow_clone())),
            _ => weights.share(),
        };
        Rc::new(ServedWeights::new((self.given, version), &placed.on(self.compute), base, &self.decoder))
    }

    /// The base of adapters. All that are served over it share its copy on the engine's device.
    fn base_of(&self, weights: &Weights) -> Rc<Base> {
        let known = self.served().filter_map(|served| served.base.clone()).find(|base| base.is_of(weights));
        known.unwrap_or_else(|| Rc::new(Base::new(weights.without_adapter(), self.compute)))
    }

    /// [`LocalEngine::set_weights`] in the engine's stream.
    fn serve(&mut self, version: Version, weights: &Weights) {
        let _guard = tch::no_grad_guard();
        let served = self.number(version, weights);
        self.weights = Some(served.clone());
        self.ahead = None;
        self.forget_old();
        // The rest of that group must not start from logits of the old weights.
        self.shelf = None;
        match self.on_new_weights {
            OnNewWeights::Swap => self.move_to(&served, false),
            OnNewWeights::Recompute => {
                self.move_to(&served, true);
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

    /// Decodes one token for the slots in use, which are 0, 1, …: one pass for each version of the
    /// weights.
    fn advance(&mut self) -> Result<(), EngineError> {
        if let Some(step) = self.at_work() {
            return self.take_drawn(step);
        }
        let mut first = 0;
        loop {
            let head = self.slots.iter_from(first).next().map(|(_, head)| head.state.weights.clone());
            let Some(weights) = head else { return Ok(()) };
            let alike = |(_, sequence): &(usize, &Sequence)| Rc::ptr_eq(&sequence.state.weights, &weights);
            let neighbours = self.slots.iter_from(first).take_while(alike);
            let (tokens, positions): (Vec<i64>, Vec<usize>) = neighbours.map(|(_, sequence)| sequence.newest()).unzip();
            let slots: Vec<usize> = (first..first + tokens.len()).collect();
            if let Some(drafts) = self.drafts(&slots) {
                self.check_drafts(&weights, &slots, &drafts)?;
                first += slots.len();
                continue;
            }
            let choices = self.decode(&weights, &slots, &tokens, &positions);
            self.slots.load.add(slots.len(), 0);
            first += slots.len();
            self.take(&slots, choices)?;
        }
    }

    /// One token for each of `slots`.
    fn decode(&mut self, weights: &Rc<ServedWeights>, slots: &[usize], tokens: &[i64], positions: &[usize]) -> Choices {
        let rows = rows(&self.slots, self.run_seed, slots);
        draw(&self.decoder.decode_by(&self.threads, &weights.views, slots[0], (tokens, positions), &mut self.cache), &rows)
    }

    /// Draws a token for each of `slots` from its row of logits, and ends the samples that it
    /// completes.
    pub(super) fn take_tokens(&mut self, slots: &[usize], logits: &Tensor) -> Result<(), EngineError> {
        self.take(slots, draw(logits, &rows(&self.slots, self.run_seed, slots)))
    }

    /// Appends a token to the sample in each of `slots`.
    pub(super) fn take(&mut self, slots: &[usize], choices: Choices) -> Result<(), EngineError> {
        for (&slot, choice) in slots.iter().zip(choices) {
            let Some(sequence) = self.slots.get_mut(slot) else { continue };
            let (ordinal, index, version) =
                (sequence.request.ordinal, sequence.answer.index, sequence.state.weights.version.get());
            let Some((token, log_prob)) = choice else {
                return Err(EngineError::NonFinite { ordinal, index, position: sequence.answer.tokens.len(), version });
            };
            let finish = sequence.take(token, log_prob, &self.tokenizer)?;
            if finish.is_some() && sequence.request.routes {
                let computed = sequence.computed();
                sequence.answer.routes = self.cache.routes_of(slot, computed);
            }
            if finish.is_some() {
                self.keep_ended(slot);
                self.cache.pages.release(slot);
            }
            self.slots.report(slot, version, finish);
        }
        Ok(())
    }

    /// `recomputed`: whether the keys of samples in flight are computed again.
    fn move_to(&mut self, weights: &Rc<ServedWeights>, recomputed: bool) {
        for sequence in self.slots.iter_mut().filter(|sequence| sequence.request.adapter.is_none()) {
            sequence.state.weights = weights.clone();
            sequence.state.keys_are_of_weights = recomputed;
        }
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
            return Err(EngineError::TooLong { ordinal, tokens: needed - new, new, most });
        }
        if let Some(most) = self.cache_tokens.filter(|most| needed.div_ceil(PAGE) > most.div_ceil(PAGE)) {
            return refuse(format!("{needed} tokens do not fit a cache of {most}; raise generate.cache_tokens"));
        }
        self.cache.grow(needed);
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

    fn cancel(&mut self, ordinal: u64) {
        self.slots.cancel(ordinal);
        // The prompt on the shelf may no longer be the next one.
        self.shelf = None;
    }

    fn version(&self) -> Option<Version> {
        self.weights.as_ref().map(|weights| weights.version.get())
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
        self.release_free();
        let cache = &mut self.cache;
        self.slots.start_step(|from, to, _| cache.move_slot(from, to));
        let Some(weights) = self.weights.clone() else {
            return if self.is_idle() { Ok(Vec::new()) } else { Err(EngineError::NoWeights) };
        };
        loop {
            let adapters = &self.adapters;
            let of = |request: &Request| {
                let adapter = request.adapter.as_ref().and_then(|name| adapters.get(name));
                SequenceState::new(adapter.unwrap_or(&weights).clone())
            };
            let admitted = self.slots.admit(of, room(&self.cache.pages, &self.slots));
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
        self.make_room();
        let cache = &mut self.cache;
        self.slots.compact(|from, to, _| cache.move_slot(from, to));
        // Each of the weights takes one pass.
        self.slots.order_by(|sequence| sequence.state.weights.id, |one, other| cache.swap_slots(one, other));
        self.advance()?;
        if self.is_idle() {
            self.threads.rest();
        }
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
