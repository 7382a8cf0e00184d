//! Tokens that a sample begins with, in the cache of an engine: those of its prompt, less what is
//! remembered of another sequence, and what is remembered of it when it ends.

use std::borrow::{Borrow, Cow};
use std::ops::Range;
use std::rc::Rc;

use tch::{Device, Tensor};

use super::LocalEngine;
use super::sequence::ServedWeights;
use crate::data::packing::{cut_evenly, cut_rectangles};
use crate::engine::EngineError;
use crate::engine::slots::Admission;
use crate::model::{FEWEST_SHARED, MOST_GATHERED, PAGE, PREFILL_CELLS, Packed, Suffix, shared, upload};

/// Tokens to compute before a sample's next token is drawn.
struct NewTokens<'a> {
    tokens: Cow<'a, [u32]>,
    /// So many of them are in the first of the slots already, or in that of another, which is computed first.
    known: usize,
    first: Option<usize>,
    slots: Vec<usize>,
}

/// Number of tokens of a sequence that another's keys and values serve. The last is computed again, for the
/// logits after it.
fn usable(known: &[u32], tokens: &[u32]) -> usize {
    shared(known, tokens).min(tokens.len().saturating_sub(1))
}

/// Lets sequences of which nothing is known begin as another of them does, so that a system prompt of all is
/// computed once.
fn share_beginnings(new: &mut [NewTokens]) {
    let mut rows: Vec<usize> = (0..new.len()).filter(|row| new[*row].known == 0).collect();
    rows.sort_by(|a, b| new[*a].tokens.cmp(&new[*b].tokens));
    let mut first = None;
    for (at, &row) in rows.iter().enumerate() {
        let shared = |other: Option<usize>| other.map_or(0, |other| usable(&new[other].tokens, &new[row].tokens));
        let (known, with_next) = (shared(first), shared(rows.get(at + 1).copied()));
        // One that shares far more with those after it is computed for them.
        if known < FEWEST_SHARED || with_next >= 2 * known {
            first = Some(row);
        } else {
            (new[row].known, new[row].first) = (known, first);
        }
    }
}

/// Cuts sequences, each with the number of its new tokens and of all, into runs that are computed together.
/// New tokens are within rectangles of [`PREFILL_CELLS`], and all tokens of a run are at most `gathered`. A
/// longer sequence is a run by itself.
fn cut_suffixes(lengths: &[[usize; 2]], gathered: usize) -> Vec<Range<usize>> {
    let [rests, wholes] = [0usize, 1].map(|of| lengths.iter().map(|lengths| lengths[of]).collect::<Vec<_>>());
    let runs = cut_rectangles(&rests, PREFILL_CELLS).into_iter().flat_map(|part| {
        let runs = cut_evenly(&wholes[part.clone()], &vec![0.0; part.len()], gathered, 0);
        runs.into_iter().map(move |run| part.start + run.start..part.start + run.end)
    });
    runs.collect()
}

impl LocalEngine {
    /// Computes the tokens of admitted samples of the same weights, equal prompts once and what is
    /// remembered not at all, and draws their next tokens.
    pub(super) fn begin(&mut self, weights: &Rc<ServedWeights>, admitted: &[Admission]) -> Result<(), EngineError> {
        let shelf_slot = self.slots.len();
        // Rows of logits: that of the shelf, those of new tokens.
        let (mut groups, mut logits, mut rows) = (admitted, Vec::new(), Vec::new());
        if let (Some(shelf), Some(first)) = (self.shelf.take(), groups.first()) {
            self.cache.share(shelf_slot, &first.slots, first.request.request.tokens.len());
            logits.push(shelf);
            rows.push(0);
            groups = &groups[1..];
        }
        let mut new: Vec<NewTokens> = Vec::new();
        for group in groups {
            let tokens = group.request.tokens();
            let row = new.iter().position(|of| of.tokens == tokens).unwrap_or(new.len());
            if row == new.len() {
                new.push(NewTokens { tokens, known: 0, first: None, slots: Vec::new() });
            }
            new[row].slots.extend(&group.slots);
            rows.push((logits.len() + row) as i64);
        }
        let begun = if self.remembers() { self.recall(weights, &mut new) } else { 0 };
        if !new.is_empty() {
            self.slots.load.add(0, new.iter().map(|of| of.tokens.len() - of.known).sum::<usize>() + begun);
            self.slots.load.reused += new.iter().map(|of| of.known).sum::<usize>().saturating_sub(begun);
            logits.push(self.read_new(weights, &new));
        }
        if self.remembers() {
            new.iter().for_each(|of| self.cache.remember(of.slots[0], weights.id, &of.tokens, false));
        }
        let logits = Tensor::cat(&logits, 0);
        if let (Some(row), Some(last)) = (rows.last(), admitted.last().filter(|group| group.more)) {
            let (is_there, has_room) = (groups.is_empty(), self.cache.pages.available() > 0);
            if !is_there && has_room {
                self.cache.share(last.slots[0], &[shelf_slot], last.request.request.tokens.len());
            }
            self.shelf = (is_there || has_room).then(|| logits.narrow(0, *row, 1));
        }
        if self.shelf.is_none() {
            // Prompts that are admitted later in this step need its pages.
            self.cache.pages.release(shelf_slot);
        }
        let rows = admitted.iter().zip(rows).flat_map(|(group, row)| vec![row; group.slots.len()]);
        let (rows, slots): (Vec<i64>, Vec<usize>) =
            rows.zip(admitted.iter().flat_map(|group| group.slots.iter().copied())).unzip();
        let rows = upload(&rows, logits.device());
        self.take_tokens(&slots, &logits.index_select(0, &rows))
    }

    /// Finds what is remembered of new sequences, and what they begin with alike. Returns how many tokens were
    /// computed for that.
    fn recall(&mut self, weights: &ServedWeights, new: &mut [NewTokens]) -> usize {
        let has_states = self.cache.has_states();
        let begun = if has_states { self.read_beginnings(weights, new) } else { 0 };
        for NewTokens { tokens, known, slots, .. } in &mut *new {
            *known = self.cache.recall(slots[0], weights.id, tokens);
        }
        if !has_states {
            share_beginnings(new);
        }
        begun
    }

    /// Reads whole pages that several sequences begin with, new or remembered ones, and remembers the states
    /// after them: those after all of a sequence serve none that goes another way. Returns how many tokens that
    /// were.
    fn read_beginnings(&mut self, weights: &ServedWeights, new: &mut [NewTokens]) -> usize {
        share_beginnings(new);
        let whole = |tokens: usize| tokens / PAGE * PAGE;
        let mut beginnings: Vec<NewTokens> = Vec::new();
        for (row, NewTokens { tokens, slots, .. }) in new.iter().enumerate().filter(|(_, of)| of.first.is_none()) {
            let with_others = new.iter().filter(|of| of.first == Some(row)).map(|of| of.known).min().unwrap_or(0);
            // The last token is computed again, for the logits after it.
            let remembered = self.cache.pages.known(weights.id, tokens);
            let len = whole(with_others.max(remembered).min(tokens.len().saturating_sub(1)));
            let is_due = len > 0 && beginnings.len() < self.remembered;
            if is_due && self.cache.recall(slots[0], weights.id, tokens) < len {
                let known = self.cache.recall(slots[0], weights.id, &tokens[..len + 1]);
                let tokens = Cow::Owned(tokens[..len].to_vec());
                beginnings.push(NewTokens { tokens, known, first: None, slots: slots[..1].to_vec() });
            }
        }
        new.iter_mut().for_each(|of| (of.known, of.first) = (0, None));
        beginnings.retain(|of| of.known < of.tokens.len());
        if !beginnings.is_empty() {
            let _logits = self.read_new(weights, &beginnings);
        }
        for NewTokens { tokens, slots, .. } in &beginnings {
            self.cache.remember(slots[0], weights.id, tokens, false);
        }
        beginnings.iter().map(|of| of.tokens.len() - of.known).sum()
    }

    /// Remembers the sequence in a slot, which has ended, for what continues it.
    pub(super) fn keep_ended(&mut self, slot: usize) {
        let Some(sequence) = self.slots.get(slot).filter(|sequence| sequence.state.keys_are_of_weights) else { return };
        let (weights, tokens) = (sequence.state.weights.id, sequence.computed_tokens());
        if self.remembers() && self.served().any(|served| served.id == weights) {
            self.cache.remember(slot, weights, &tokens, true);
        }
    }

    /// Recomputes the cache of all samples in flight, except their newest token, which the next
    /// step reads.
    pub(super) fn recompute(&mut self, weights: &ServedWeights) {
        let (slots, tokens): (Vec<usize>, Vec<Vec<u32>>) = self
            .slots
            .iter_from(0)
            .filter(|(_, sequence)| sequence.request.adapter.is_none())
            .map(|(slot, sequence)| (slot, sequence.computed_tokens()))
            .unzip();
        if !slots.is_empty() {
            let _logits = self.read(weights, &tokens, &slots);
        }
    }

    /// Computes sequences, or the rest of those whose beginning is in the first of their slots, into all of
    /// their slots. Returns the logits after each.
    fn read_new(&mut self, weights: &ServedWeights, new: &[NewTokens]) -> Tensor {
        let (begun, whole): (Vec<usize>, Vec<usize>) = (0..new.len()).partition(|row| new[*row].known > 0);
        let mut logits = Vec::new();
        if !whole.is_empty() {
            let tokens: Vec<&[u32]> = whole.iter().map(|row| &*new[*row].tokens).collect();
            let slots: Vec<usize> = whole.iter().map(|row| new[*row].slots[0]).collect();
            logits.push(self.read(weights, &tokens, &slots));
        }
        for of in begun.iter().map(|row| &new[*row]) {
            of.first.iter().for_each(|first| self.cache.share(new[*first].slots[0], &of.slots[..1], of.known));
        }
        let lengths = |of: &NewTokens| [of.tokens.len() - of.known, of.tokens.len()];
        let lengths: Vec<[usize; 2]> = begun.iter().map(|row| lengths(&new[*row])).collect();
        // On a processor attention reads pages in place.
        let gathered = if self.compute.device == Device::Cpu { usize::MAX } else { MOST_GATHERED };
        for part in cut_suffixes(&lengths, gathered) {
            let suffix = |row: &usize| {
                let NewTokens { tokens, known, slots, .. } = &new[*row];
                Suffix { slot: slots[0], from: *known, tokens: &tokens[*known..] }
            };
            let suffixes: Vec<Suffix> = begun[part].iter().map(suffix).collect();
            logits.push(self.decoder.extend(&weights.views, &suffixes, false, &mut self.cache));
        }
        for NewTokens { tokens, slots, .. } in new {
            self.cache.share(slots[0], &slots[1..], tokens.len());
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
    fn read<T: Borrow<[u32]>>(&mut self, weights: &ServedWeights, tokens: &[T], slots: &[usize]) -> Tensor {
        let lengths: Vec<usize> = tokens.iter().map(|tokens| tokens.borrow().len()).collect();
        let parts = cut_rectangles(&lengths, PREFILL_CELLS).into_iter().map(|part| {
            let packed = Packed::new(tokens[part.clone()].iter().map(Borrow::borrow));
            self.decoder.prefill(&weights.views, &packed, &mut self.cache, &slots[part])
        });
        let mut logits: Vec<Tensor> = parts.collect();
        if logits.len() == 1 { logits.swap_remove(0) } else { Tensor::cat(&logits, 0) }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn ends_of_long_sequences_are_computed_few_at_a_time_and_a_longer_one_alone() {
        let shared = vec![[10, 30_010]; 256];
        let runs = cut_suffixes(&shared, MOST_GATHERED);
        assert!(runs.len() == 128 && runs.iter().all(|run| run.len() == 2), "{runs:?}");
        assert_eq!(cut_suffixes(&shared, usize::MAX).len(), 1);
        assert_eq!(cut_suffixes(&[[5, 9], [5, 200_000], [5, 9], [5, 9]], MOST_GATHERED), vec![0..1, 1..2, 2..4]);
    }

    proptest! {
        #[test]
        fn runs_are_in_order_and_within_both_bounds_or_of_one_sequence(
            lengths in prop::collection::vec((1usize..20_000, 0usize..60_000), 0..60),
        ) {
            let lengths: Vec<[usize; 2]> = lengths.into_iter().map(|(rest, known)| [rest, known + rest]).collect();
            let mut next = 0;
            for run in cut_suffixes(&lengths, MOST_GATHERED) {
                prop_assert!(run.start == next && run.end > next, "{:?}", run);
                next = run.end;
                let longest = lengths[run.clone()].iter().map(|[rest, _]| *rest).max().unwrap_or(0);
                let gathered: usize = lengths[run.clone()].iter().map(|[_, whole]| *whole).sum();
                prop_assert!(run.len() == 1 || (run.len() * longest <= PREFILL_CELLS && gathered <= MOST_GATHERED));
            }
            prop_assert_eq!(next, lengths.len());
        }
    }
}
