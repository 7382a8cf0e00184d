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
use super::prefixes::{Found, Prefixes};
use super::sequence::{Sequence, SequenceState, ServedWeights, rows};
use crate::data::packing::cut_rectangles;
use crate::data::{Answer, SampledToken, Tokenizer, Version};
use crate::engine::slots::{Admission, Slots};
use crate::engine::{EngineError, Finished, Load, OnNewWeights, Request, TokenEngine};
use crate::model::stream::{Entered, Event, Stream};
use crate::model::{Compute, Decoder, FrozenWeights, KvCache, PREFILL_CELLS, Packed, Suffix, Weights, upload};

/// Rows of a step up to which it has drafts. More rows cost in proportion to their number, and most drafts fail.
const DRAFTING_ROWS: usize = 32;

/// Tokens to compute before a sample's next token is drawn.
struct NewTokens<'a> {
    tokens: Cow<'a, [u32]>,
    /// So many of them are in the first of the slots already.
    known: usize,
    slots: Vec<usize>,
    /// Whether others may ask for the same.
    is_prompt: bool,
}

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
    /// Sequences of earlier requests, in slots after the shelf.
    prefixes: Prefixes<ServedWeights>,
    /// Longest draft of a sample.
    draft_tokens: usize,
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
            prefixes: Prefixes::new(slots.len() + 1, 0, false),
            slots,
            cache,
            shelf: None,
            draft_tokens: 0,
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
        self.decoder.cache(self.slots.len() + 1 + self.prefixes.len(), 0, self.compute)
    }

    /// Remembers up to `sequences` prompts and ended sequences for later requests, before the first: of
    /// what begins alike, only the rest is computed. Each takes the cache memory of a slot. Default: 0,
    /// because a group's prompt is computed once anyway.
    pub fn remembering(mut self, sequences: usize) -> Self {
        self.prefixes = Prefixes::new(self.slots.len() + 1, sequences, self.decoder.extends());
        self.cache = self.empty_cache();
        self
    }

    /// Drafts up to `tokens` tokens of a sample from what it said before, and checks them in one pass, while
    /// that has fewer than 32 rows. The samples are those without drafts, up to rounding. Default: 0,
    /// none. A model with gated delta nets gets none: its states cannot step back.
    pub fn drafting(mut self, tokens: usize) -> Self {
        self.draft_tokens = if self.decoder.extends() { tokens } else { 0 };
        self
    }

    /// Forgets the sequences of earlier requests.
    pub(crate) fn forget(&mut self) {
        self.prefixes.forget(|_| false);
    }

    /// Forgets sequences under weights that no new request uses, and recorded steps.
    fn forget_old(&mut self) {
        self.graphs.forget();
        let served: Vec<_> = self.served().cloned().collect();
        self.prefixes.forget(|known| served.iter().any(|served| Rc::ptr_eq(served, known)));
    }

    /// Weights that new requests use.
    fn served(&self) -> impl Iterator<Item = &Rc<ServedWeights>> {
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

    /// Computes the tokens of admitted samples of the same weights, equal prompts once and what is
    /// remembered not at all, and draws their next tokens.
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
        let mut new: Vec<NewTokens> = Vec::new();
        let mut new_rows = Vec::new();
        for (at, group) in groups.iter().enumerate() {
            let tokens = group.request.tokens();
            let slots = group.slots.iter().copied().chain(group.more.then_some(shelf_slot));
            let row = new.iter().position(|of| of.tokens == tokens).unwrap_or(new.len());
            if row == new.len() {
                let known = match self.prefixes.find(weights, &tokens) {
                    Some(Found::Whole(slot, after)) => {
                        self.cache.copy_slot(slot, &slots.collect::<Vec<_>>(), tokens.len());
                        self.slots.load.reused += tokens.len();
                        rows.push(logits.len() as i64);
                        logits.push(after);
                        continue;
                    }
                    Some(Found::Beginning(slot, known)) => {
                        // Now, before its slot may be given to another sequence.
                        self.cache.copy_slot(slot, &group.slots[..1], known);
                        known
                    }
                    None => 0,
                };
                // A continuation or a later turn comes once.
                let is_prompt = matches!(tokens, Cow::Borrowed(_)) && group.request.request.offset == 0;
                new.push(NewTokens { tokens, known, slots: Vec::new(), is_prompt });
            }
            new[row].slots.extend(slots);
            new_rows.push((admitted.len() - groups.len() + at, row));
        }
        let first = logits.len() as i64;
        new_rows.into_iter().for_each(|(at, row)| rows.insert(at, first + row as i64));
        if !new.is_empty() {
            let prompts: Vec<usize> = (0..new.len()).filter(|row| new[*row].is_prompt).collect();
            let kept = self.prefixes.free(prompts.len());
            prompts.iter().zip(&kept).for_each(|(row, kept)| new[*row].slots.push(*kept));
            self.slots.load.add(0, new.iter().map(|of| of.tokens.len() - of.known).sum());
            self.slots.load.reused += new.iter().map(|of| of.known).sum::<usize>();
            let read = self.read_new(weights, &new);
            for (row, slot) in prompts.into_iter().zip(kept) {
                let after = read.narrow(0, row as i64, 1).copy();
                self.prefixes.remember(weights, new[row].tokens.to_vec(), slot, Some(after));
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

    /// Drafts for these slots, if there is any.
    fn drafts(&mut self, slots: &[usize]) -> Option<Vec<Vec<u32>>> {
        let mut room = DRAFTING_ROWS.saturating_sub(slots.len());
        if self.draft_tokens == 0 || room == 0 {
            return None;
        }
        let mut draft = |&slot: &usize| {
            let draft = self.slots.get_mut(slot).map(|sequence| sequence.draft(self.draft_tokens.min(room))).unwrap_or_default();
            room -= draft.len();
            draft
        };
        let drafts: Vec<Vec<u32>> = slots.iter().map(&mut draft).collect();
        drafts.iter().any(|draft| !draft.is_empty()).then_some(drafts)
    }

    /// Computes the newest token of each of `slots` and its draft, and draws tokens while they are the draft's, and
    /// one more.
    fn check_drafts(&mut self, weights: &ServedWeights, slots: &[usize], drafts: &[Vec<u32>]) -> Result<(), EngineError> {
        let sequences = || slots.iter().filter_map(|&slot| self.slots.get(slot));
        let inputs: Vec<(usize, Vec<u32>)> = sequences()
            .zip(drafts)
            .map(|(sequence, draft)| {
                let (newest, from) = sequence.newest();
                (from, [&[newest as u32], draft.as_slice()].concat())
            })
            .collect();
        let suffixes: Vec<Suffix> =
            slots.iter().zip(&inputs).map(|(&slot, (from, tokens))| Suffix { slot, from: *from, tokens }).collect();
        let logits = self.decoder.extend(&weights.views, &suffixes, true, &mut self.cache);
        let rows = sequences().zip(drafts).flat_map(|(sequence, draft)| {
            let begun = sequence.answer.tokens.len();
            (begun..=begun + draft.len()).map(|tokens| (&*sequence.request.params, sequence.uniform_after(tokens, self.run_seed)))
        });
        let mut choices = draw(&logits, &rows.collect::<Vec<_>>()).into_iter();
        self.slots.load.add(inputs.iter().map(|(_, tokens)| tokens.len()).sum(), 0);
        for (&slot, draft) in slots.iter().zip(drafts) {
            let choices: Vec<_> = choices.by_ref().take(draft.len() + 1).collect();
            let mut kept = 0;
            for (at, choice) in choices.into_iter().enumerate() {
                self.take(&[slot], vec![choice])?;
                let is_drafted = draft.get(at).is_some_and(|drafted| choice.is_some_and(|(token, _)| token == *drafted));
                kept += usize::from(is_drafted);
                if !is_drafted || self.slots.get(slot).is_none() {
                    break;
                }
            }
            if let Some(sequence) = self.slots.get_mut(slot).filter(|_| !draft.is_empty()) {
                sequence.state.drafter.learn(kept);
            }
            self.slots.load.drafted += draft.len();
            self.slots.load.kept += kept;
        }
        Ok(())
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
            if finish.is_some() && self.prefixes.keeps_ended() {
                self.keep_ended(slot);
            }
            self.slots.report(slot, version, finish);
        }
        Ok(())
    }

    /// Remembers the sequence in a slot, which has ended, for what continues it.
    fn keep_ended(&mut self, slot: usize) {
        let Some(sequence) = self.slots.get(slot).filter(|sequence| sequence.state.keys_are_of_weights) else { return };
        let (weights, tokens) = (sequence.state.weights.clone(), sequence.computed_tokens());
        if !self.served().any(|served| Rc::ptr_eq(served, &weights)) {
            return;
        }
        self.prefixes.forget_beginnings(&weights, &tokens);
        for kept in self.prefixes.free(1) {
            self.cache.copy_slot(slot, &[kept], tokens.len());
            self.prefixes.remember(&weights, tokens.clone(), kept, None);
        }
    }

    /// `recomputed`: whether the keys of samples in flight are computed again.
    fn move_to(&mut self, weights: &Rc<ServedWeights>, recomputed: bool) {
        for sequence in self.slots.iter_mut().filter(|sequence| sequence.request.adapter.is_none()) {
            sequence.state.weights = weights.clone();
            sequence.state.keys_are_of_weights = recomputed;
        }
    }

    /// Recomputes the cache of all samples in flight, except their newest token, which the next
    /// step reads.
    fn recompute(&mut self, weights: &ServedWeights) {
        let (slots, tokens): (Vec<Vec<usize>>, Vec<Vec<u32>>) = self
            .slots
            .iter_from(0)
            .filter(|(_, sequence)| sequence.request.adapter.is_none())
            .map(|(slot, sequence)| (vec![slot], sequence.computed_tokens()))
            .unzip();
        if !slots.is_empty() {
            let _logits = self.read(weights, &tokens, &slots);
        }
    }

    /// Computes sequences, or the rest of those whose beginning is in the first of their slots, into all of their
    /// slots. Returns the logits after each.
    fn read_new(&mut self, weights: &ServedWeights, new: &[NewTokens]) -> Tensor {
        let (begun, whole): (Vec<usize>, Vec<usize>) = (0..new.len()).partition(|row| new[*row].known > 0);
        let mut logits = Vec::new();
        if !whole.is_empty() {
            let tokens: Vec<&[u32]> = whole.iter().map(|row| &*new[*row].tokens).collect();
            let slots: Vec<Vec<usize>> = whole.iter().map(|row| new[*row].slots.clone()).collect();
            logits.push(self.read(weights, &tokens, &slots));
        }
        let rests: Vec<usize> = begun.iter().map(|row| new[*row].tokens.len() - new[*row].known).collect();
        for part in cut_rectangles(&rests, PREFILL_CELLS) {
            let suffix = |row: &usize| {
                let NewTokens { tokens, known, slots, .. } = &new[*row];
                Suffix { slot: slots[0], from: *known, tokens: &tokens[*known..] }
            };
            let suffixes: Vec<Suffix> = begun[part].iter().map(suffix).collect();
            logits.push(self.decoder.extend(&weights.views, &suffixes, false, &mut self.cache));
        }
        for NewTokens { tokens, slots, .. } in begun.iter().map(|row| &new[*row]) {
            self.cache.copy_slot(slots[0], &slots[1..], tokens.len());
        }
        if begun.is_empty() {
            return Tensor::cat(&logits, 0);
        }
        let mut places = vec![0i64; new.len()];
        whole.iter().chain(&begun).zip(0..).for_each(|(row, place)| places[*row] = place);
        let logits = Tensor::cat(&logits, 0);
        logits.index_select(0, &upload(&places, logits.device()))
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
