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
use std::rc::Rc;
use std::sync::Arc;
use std::time::Instant;

use tch::Tensor;

use super::draw::draw;
use super::sequence::{Sequence, SequenceState, ServedWeights};
use crate::data::packing::cut_rectangles;
use crate::data::{Answer, SampledToken, Status, Tokenizer, Version};
use crate::engine::scheduler::{Admission, Move};
use crate::engine::slots::Slots;
use crate::engine::waiting::Waiting;
use crate::engine::{EngineError, Finished, Load, OnNewWeights, Request, TokenEngine};
use crate::model::{Compute, Decoder, FrozenWeights, KvCache, PREFILL_CELLS, Packed, Weights};

/// Engine that generates with weights in this process.
pub struct LocalEngine {
    decoder: Decoder,
    compute: Compute,
    tokenizer: Arc<Tokenizer>,
    run_seed: u64,
    on_new_weights: OnNewWeights,
    /// Newest weights. Samples that began under older ones hold theirs.
    weights: Option<Rc<ServedWeights>>,
    slots: Slots<SequenceState>,
    /// KV cache with one more slot than there are sequences: the shelf, for the prompt of a group
    /// that was admitted in part.
    cache: KvCache,
    /// Logits after the prompt on the shelf, which is the prompt of the first waiting samples.
    shelf: Option<Tensor>,
    finished: Vec<Finished>,
    /// Tokens of the newest step.
    sampled: Vec<SampledToken>,
    /// Work of the newest step.
    load: Load,
}

impl LocalEngine {
    /// Creates an engine for up to `slots` samples at a time, without weights. It must stay on this
    /// thread.
    pub fn new(decoder: Decoder, tokenizer: Arc<Tokenizer>, slots: usize, run_seed: u64) -> Self {
        let slots = Slots::new(slots);
        let compute = Compute::default();
        let cache = KvCache::new(decoder.config(), slots.len() + 1, 0, compute);
        LocalEngine {
            decoder,
            compute,
            tokenizer,
            run_seed,
            on_new_weights: OnNewWeights::default(),
            weights: None,
            slots,
            cache,
            shelf: None,
            finished: Vec::new(),
            sampled: Vec::new(),
            load: Load::default(),
        }
    }

    /// Sets device and format, before the first step. Default: f32 on the CPU.
    pub fn computing(mut self, compute: Compute) -> Self {
        self.cache = KvCache::new(self.decoder.config(), self.slots.len() + 1, 0, compute);
        self.compute = compute;
        self
    }

    /// Sets the policy for samples in flight when weights change.
    pub fn on_new_weights(mut self, on_new_weights: OnNewWeights) -> Self {
        self.on_new_weights = on_new_weights;
        self
    }

    /// Uses these weights from the next token on. Weights that are on the engine's device in its
    /// format are read in place, not copied: do not write to them while they are in use.
    pub fn set_weights(&mut self, version: Version, weights: &Weights) {
        let _guard = tch::no_grad_guard();
        let served = Rc::new(ServedWeights { version, views: self.decoder.views_of(&weights.on(self.compute)) });
        self.weights = Some(served.clone());
        // The rest of that group must not start from logits of the old weights.
        self.shelf = None;
        match self.on_new_weights {
            OnNewWeights::Swap => self.move_to(&served),
            OnNewWeights::Recompute => {
                self.move_to(&served);
                self.recompute(&served);
            }
            OnNewWeights::Finish => self.slots.scheduler.divide(),
            OnNewWeights::Abort => self.slots.interrupt(),
        }
    }

    /// Tokenizer whose end-of-text tokens end a completion.
    pub fn tokenizer(&self) -> &Arc<Tokenizer> {
        &self.tokenizer
    }

    /// Steps until all requests are finished. Returns completions in the order in which they end.
    pub fn run(&mut self) -> Result<Vec<Finished>, EngineError> {
        let mut all = Vec::new();
        while !self.is_idle() {
            all.extend(self.step()?);
        }
        Ok(all)
    }

    /// Computes the tokens of admitted samples, each prompt once, and draws their next tokens.
    fn begin(&mut self, admitted: Vec<Admission<Waiting>>) -> Result<(), EngineError> {
        let Some(weights) = self.weights.clone() else { return Err(EngineError::NoWeights) };
        let longest = admitted.iter().map(|group| group.request.longest()).max();
        self.cache.grow(longest.unwrap_or(0).next_multiple_of(32).min(self.decoder.config().max_positions));
        let shelf_slot = self.slots.len();
        let mut groups = admitted.as_slice();
        let mut logits = Vec::new();
        if let (Some(shelf), Some(first)) = (self.shelf.take(), groups.first()) {
            self.cache.copy_slot(shelf_slot, &first.slots, first.request.request.tokens.len());
            if first.more {
                self.shelf = Some(shelf.shallow_clone());
            }
            logits.push(shelf);
            groups = &groups[1..];
        }
        if !groups.is_empty() {
            let tokens: Vec<Cow<[u32]>> = groups.iter().map(|group| group.request.tokens()).collect();
            let shelf = |group: &Admission<_>| group.more.then_some(shelf_slot);
            let slots: Vec<Vec<usize>> =
                groups.iter().map(|group| group.slots.iter().copied().chain(shelf(group)).collect()).collect();
            self.load.add(0, tokens.iter().map(|tokens| tokens.len()).sum());
            let new = self.read(&weights, &tokens, &slots);
            if groups.last().is_some_and(|group| group.more) {
                self.shelf = Some(new.narrow(0, -1, 1));
            }
            logits.push(new);
        }
        let mut slots = Vec::new();
        let mut rows = Vec::new();
        for (row, group) in admitted.iter().enumerate() {
            for (index, &slot) in group.samples.clone().zip(&group.slots) {
                self.slots.put(slot, Sequence::begin(&group.request, index, &weights, &self.tokenizer)?);
                slots.push(slot);
                rows.push(row as i64);
            }
        }
        let logits = Tensor::cat(&logits, 0);
        let rows = Tensor::from_slice(&rows).to_device(logits.device());
        self.take_tokens(&slots, &logits.index_select(0, &rows))
    }

    /// Decodes one token for the slots in use, which are 0, 1, …: one pass for each version of the
    /// weights.
    fn advance(&mut self) -> Result<(), EngineError> {
        let active = self.slots.scheduler.active();
        let mut first = 0;
        while let Some(weights) = (first < active).then(|| self.slots.get(first)).flatten().map(|head| head.state.weights.clone())
        {
            let alike = |sequence: &&Sequence| Rc::ptr_eq(&sequence.state.weights, &weights);
            let neighbours = (first..active).filter_map(|slot| self.slots.get(slot)).take_while(alike);
            let (tokens, positions): (Vec<i64>, Vec<usize>) = neighbours.map(Sequence::newest).unzip();
            let logits = self.decoder.decode(&weights.views, first, &tokens, &positions, &mut self.cache);
            let slots: Vec<usize> = (first..first + tokens.len()).collect();
            self.load.add(slots.len(), 0);
            first += slots.len();
            self.take_tokens(&slots, &logits)?;
        }
        Ok(())
    }

    /// Draws a token for each of `slots` from its row of logits, and ends the samples that it
    /// completes.
    fn take_tokens(&mut self, slots: &[usize], logits: &Tensor) -> Result<(), EngineError> {
        let sequences = || slots.iter().filter_map(|&slot| self.slots.get(slot));
        let rows: Vec<_> = sequences().map(|sequence| (&*sequence.request.params, sequence.uniform(self.run_seed))).collect();
        let choices = draw(logits, &rows);
        for (&slot, choice) in slots.iter().zip(choices) {
            let Some(sequence) = self.slots.get_mut(slot) else { continue };
            let (ordinal, index, version) = (sequence.request.ordinal, sequence.answer.index, sequence.state.weights.version);
            let Some(choice) = choice else {
                return Err(EngineError::NonFinite { ordinal, index, position: sequence.answer.tokens.len(), version });
            };
            let finish = sequence.take(choice, &self.tokenizer)?;
            let status = finish.map_or(Status::Pending, Status::from);
            self.sampled.push(SampledToken { ordinal, index, token: choice.token, log_prob: choice.log_prob, version, status });
            if let Some(finish) = finish {
                self.finished.extend(self.slots.finish(slot).map(|sequence| sequence.finished(finish)));
            }
        }
        Ok(())
    }

    /// Moves samples and their part of the cache to other slots.
    fn apply(&mut self, moves: Vec<Move>) {
        let cache = &mut self.cache;
        self.slots.apply(moves, |Move { from, to }, sequence| cache.copy_slot(from, &[to], sequence.computed()));
    }

    /// Continues all samples in flight with these weights.
    fn move_to(&mut self, weights: &Rc<ServedWeights>) {
        self.slots.iter_mut().for_each(|sequence| sequence.state.weights = weights.clone());
    }

    /// Recomputes the cache of all samples in flight, except their newest token, which the next
    /// step reads.
    fn recompute(&mut self, weights: &ServedWeights) {
        let (slots, tokens): (Vec<Vec<usize>>, Vec<Vec<u32>>) = self
            .slots
            .iter()
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
        request.params.check()?;
        let config = self.decoder.config();
        let (ordinal, needed) = (request.ordinal, request.longest());
        let refuse = |problem: String| Err(EngineError::Prompt { ordinal, problem });
        if request.tokens.is_empty() {
            return refuse("it has no token; a model needs at least one to continue".into());
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
        request.check_answers(config.vocab_size)?;
        self.finished.extend(self.slots.scheduler.take_in(request));
        Ok(())
    }

    fn set_weights(&mut self, version: Version, weights: &FrozenWeights) {
        LocalEngine::set_weights(self, version, &weights.read());
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
        self.slots.is_idle() && self.finished.is_empty()
    }

    fn free_slots(&self) -> usize {
        self.slots.scheduler.free()
    }

    fn active(&self) -> usize {
        self.slots.scheduler.active()
    }

    fn limit_slots(&mut self, limit: usize) {
        self.slots.scheduler.limit_to(limit);
    }

    fn step(&mut self) -> Result<Vec<Finished>, EngineError> {
        let _guard = tch::no_grad_guard();
        let started = Instant::now();
        self.sampled.clear();
        self.load = Load::default();
        if self.weights.is_none() && !self.is_idle() {
            return Err(EngineError::NoWeights);
        }
        let moves = self.slots.scheduler.close_ranks();
        self.apply(moves);
        loop {
            let admitted = self.slots.scheduler.admit();
            if admitted.is_empty() {
                break;
            }
            self.begin(admitted)?;
        }
        let moves = self.slots.scheduler.compact();
        self.apply(moves);
        self.advance()?;
        self.load.time = started.elapsed();
        Ok(std::mem::take(&mut self.finished))
    }

    fn sampled(&self) -> &[SampledToken] {
        &self.sampled
    }

    fn load(&self) -> Load {
        self.load
    }
}
