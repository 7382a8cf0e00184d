//! Prompts that an engine remembers: their keys and values in slots of its KV cache, and the logits
//! after them, so that a later request with the same prompt and the same weights computes nothing.

use std::rc::Rc;

use tch::Tensor;

/// Remembered prompts under weights `W`, the least recently used first.
pub(super) struct Prompts<W> {
    /// First slot of the cache for them.
    first: usize,
    most: usize,
    all: Vec<Known<W>>,
}

pub(super) struct Known<W> {
    pub tokens: Vec<u32>,
    weights: Rc<W>,
    pub slot: usize,
    /// Logits after the prompt, `[1, vocabulary]`.
    pub logits: Tensor,
}

impl<W> Prompts<W> {
    /// Room for `most` prompts, in slots from `first` on.
    pub fn new(first: usize, most: usize) -> Self {
        Prompts { first, most, all: Vec::new() }
    }

    /// Number of slots.
    pub fn len(&self) -> usize {
        self.most
    }

    /// Finds a prompt, which becomes the most recently used.
    pub fn find(&mut self, weights: &Rc<W>, tokens: &[u32]) -> Option<&Known<W>> {
        let at = self.all.iter().position(|known| Rc::ptr_eq(&known.weights, weights) && known.tokens == tokens)?;
        let known = self.all.remove(at);
        self.all.push(known);
        self.all.last()
    }

    /// Frees up to `count` slots: unused ones, and those of the least recently used prompts.
    pub fn free(&mut self, count: usize) -> Vec<usize> {
        let count = count.min(self.most);
        let used = |slot: &usize| self.all.iter().any(|known| known.slot == *slot);
        let mut free: Vec<usize> = (self.first..self.first + self.most).filter(|slot| !used(slot)).take(count).collect();
        let lacking = count - free.len();
        free.extend(self.all.drain(..lacking).map(|known| known.slot));
        free
    }

    /// Remembers a prompt in a slot that was freed for it.
    pub fn remember(&mut self, weights: &Rc<W>, tokens: Vec<u32>, slot: usize, logits: Tensor) {
        self.all.push(Known { tokens, weights: weights.clone(), slot, logits });
    }

    /// Forgets prompts under weights that are not `kept`, which frees the memory of those weights.
    pub fn forget(&mut self, kept: impl Fn(&Rc<W>) -> bool) {
        self.all.retain(|known| kept(&known.weights));
    }
}
