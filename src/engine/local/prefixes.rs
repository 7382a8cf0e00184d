//! Sequences that an engine remembers: their keys and values in slots of its KV cache, so that a later
//! request that begins alike, as the next turn of a conversation does, computes only what is new.

use std::rc::Rc;

use tch::Tensor;

/// Tokens that two sequences must share before the beginning of one serves the other.
pub(super) const FEWEST_SHARED: usize = 8;

/// Remembered sequences under weights `W`, the least recently used first.
pub(super) struct Prefixes<W> {
    /// First slot of the cache for them.
    first: usize,
    most: usize,
    /// True if the beginning of a sequence serves others, false if only all of it does.
    divides: bool,
    all: Vec<Known<W>>,
}

struct Known<W> {
    tokens: Vec<u32>,
    weights: Rc<W>,
    slot: usize,
    /// Logits after the sequence, `[1, vocabulary]`, if they are known.
    logits: Option<Tensor>,
}

/// What is remembered of a sequence.
pub(super) enum Found {
    /// All of it, with the logits after it.
    Whole(usize, Tensor),
    /// So many of its first tokens, not all.
    Beginning(usize, usize),
}

/// Number of tokens that two sequences share at their beginning.
pub(super) fn shared(a: &[u32], b: &[u32]) -> usize {
    a.iter().zip(b).take_while(|(a, b)| a == b).count()
}

/// Number of tokens of a sequence that another's keys and values serve. The last is computed again, for the
/// logits after it.
pub(super) fn usable(known: &[u32], tokens: &[u32]) -> usize {
    shared(known, tokens).min(tokens.len().saturating_sub(1))
}

impl<W> Prefixes<W> {
    /// Room for `most` sequences, in slots from `first` on. `divides`: whether a beginning can be used
    /// without the rest.
    pub fn new(first: usize, most: usize, divides: bool) -> Self {
        Prefixes { first, most, divides, all: Vec::new() }
    }

    /// Number of slots.
    pub fn len(&self) -> usize {
        self.most
    }

    /// Returns true if ended sequences are worth remembering.
    pub fn keeps_ended(&self) -> bool {
        self.most > 0 && self.divides
    }

    /// Finds the sequence that shares most with `tokens`, which becomes the most recently used. Cost: the
    /// tokens that all remembered sequences share with it.
    pub fn find(&mut self, weights: &Rc<W>, tokens: &[u32]) -> Option<Found> {
        let of_weights = self.all.iter().enumerate().filter(|(_, known)| Rc::ptr_eq(&known.weights, weights));
        let by_length = of_weights.map(|(at, known)| {
            let shared = shared(&known.tokens, tokens);
            (shared, shared == known.tokens.len() && shared == tokens.len() && known.logits.is_some(), at)
        });
        let (_, is_whole, at) = by_length.max()?;
        let usable = usable(&self.all[at].tokens, tokens);
        if !is_whole && (!self.divides || usable < FEWEST_SHARED) {
            return None;
        }
        let known = self.all.remove(at);
        let (slot, logits) = (known.slot, known.logits.as_ref().map(Tensor::shallow_clone));
        self.all.push(known);
        Some(logits.filter(|_| is_whole).map_or(Found::Beginning(slot, usable), |logits| Found::Whole(slot, logits)))
    }

    /// Frees up to `count` slots: unused ones, and those of the least recently used sequences.
    pub fn free(&mut self, count: usize) -> Vec<usize> {
        let count = count.min(self.most);
        let used = |slot: &usize| self.all.iter().any(|known| known.slot == *slot);
        let mut free: Vec<usize> = (self.first..self.first + self.most).filter(|slot| !used(slot)).take(count).collect();
        let lacking = count - free.len();
        free.extend(self.all.drain(..lacking).map(|known| known.slot));
        free
    }

    /// Remembers a sequence in a slot that was freed for it, with the logits after it if they are known.
    pub fn remember(&mut self, weights: &Rc<W>, tokens: Vec<u32>, slot: usize, logits: Option<Tensor>) {
        self.all.push(Known { tokens, weights: weights.clone(), slot, logits });
    }

    /// Forgets sequences without logits that `tokens` continue, which do as well.
    pub fn forget_beginnings(&mut self, weights: &Rc<W>, tokens: &[u32]) {
        let is_beginning = |known: &Known<W>| Rc::ptr_eq(&known.weights, weights) && tokens.starts_with(&known.tokens);
        self.all.retain(|known| known.logits.is_some() || !is_beginning(known));
    }

    /// Forgets sequences under weights that are not `kept`, which frees the memory of those weights.
    pub fn forget(&mut self, kept: impl Fn(&Rc<W>) -> bool) {
        self.all.retain(|known| kept(&known.weights));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn beginning(prefixes: &mut Prefixes<u32>, weights: &Rc<u32>, tokens: &[u32]) -> Option<(usize, usize)> {
        match prefixes.find(weights, tokens)? {
            Found::Beginning(slot, shared) => Some((slot, shared)),
            Found::Whole(slot, _) => Some((slot, tokens.len())),
        }
    }

    #[test]
    fn v5_a_sequence_serves_what_begins_alike_under_its_own_weights_only() {
        let (weights, others) = (Rc::new(1), Rc::new(1));
        let mut prefixes = Prefixes::new(5, 2, true);
        let turn: Vec<u32> = (0..20).collect();
        let slot = prefixes.free(1)[0];
        prefixes.remember(&weights, turn.clone(), slot, None);
        let next: Vec<u32> = (0..30).collect();
        assert_eq!(beginning(&mut prefixes, &weights, &next), Some((5, 20)));
        assert_eq!(beginning(&mut prefixes, &others, &next), None);
        // Logits after the last token are not known: it is computed again.
        assert_eq!(beginning(&mut prefixes, &weights, &turn), Some((5, 19)));
        assert_eq!(beginning(&mut prefixes, &weights, &[&turn[..12], &[99]].concat()), Some((5, 12)));
        assert_eq!(beginning(&mut prefixes, &weights, &[&turn[..FEWEST_SHARED - 1], &[99]].concat()), None);
        prefixes.forget(|known| Rc::ptr_eq(known, &others));
        assert_eq!(beginning(&mut prefixes, &weights, &next), None);
    }

    #[test]
    fn the_least_recently_used_sequence_goes_first_and_a_longer_one_takes_over() {
        let weights = Rc::new(1);
        let mut prefixes = Prefixes::new(0, 2, true);
        let from = |first: u32| (first..first + 10).collect::<Vec<u32>>();
        for first in [0, 100] {
            let slot = prefixes.free(1)[0];
            prefixes.remember(&weights, from(first), slot, None);
        }
        assert!(beginning(&mut prefixes, &weights, &[&from(0)[..], &[7]].concat()).is_some());
        assert_eq!(prefixes.free(1), [1]);
        prefixes.remember(&weights, from(200), 1, None);
        assert!(beginning(&mut prefixes, &weights, &[&from(100)[..], &[7]].concat()).is_none());
        prefixes.forget_beginnings(&weights, &(200..215).collect::<Vec<_>>());
        assert_eq!(prefixes.free(1), [1], "its slot is free, and the other sequence stays");
        assert_eq!(prefixes.all.len(), 1);
    }

    #[test]
    fn a_model_of_states_takes_whole_sequences_only() {
        let weights = Rc::new(1);
        let mut prefixes = Prefixes::new(0, 1, false);
        let tokens: Vec<u32> = (0..20).collect();
        prefixes.remember(&weights, tokens.clone(), 0, Some(Tensor::zeros([1, 3], (tch::Kind::Float, tch::Device::Cpu))));
        assert!(matches!(prefixes.find(&weights, &tokens), Some(Found::Whole(0, _))));
        assert!(prefixes.find(&weights, &(0..30).collect::<Vec<_>>()).is_none() && !prefixes.keeps_ended());
    }
}
