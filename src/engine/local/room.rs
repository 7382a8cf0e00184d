//! Memory for the samples of an engine: who enters, and who waits when its cache is full.

use super::LocalEngine;
use super::sequence::{Sequence, SequenceState};
use crate::engine::slots::{Slots, Waiting};
use crate::model::{PAGE, Pages};

/// How many of so many samples may enter. Each keeps a page in reserve, as those in flight do, since one that
/// waits is computed again. One that is alone always enters.
pub(super) fn room(pages: &Pages, slots: &Slots<SequenceState>) -> impl FnMut(&Waiting, usize) -> usize + use<> {
    let reserve = |(slot, sequence): (usize, &Sequence)| {
        let longest = sequence.request.longest_of(&sequence.answer);
        pages.lacking(slot, longest).min(1)
    };
    let mut left = pages.available().saturating_sub(slots.iter_from(0).map(reserve).sum());
    let mut is_alone = slots.active() == 0;
    move |waiting, wanted| {
        let (tokens, longest) = (waiting.tokens().len(), waiting.longest().div_ceil(PAGE));
        let each = ((tokens + 1).div_ceil(PAGE) + 1).min(longest);
        // The first has all of the prompt, the others their last page of it.
        let further = each.saturating_sub(tokens / PAGE).max(1);
        let most = if left < each { usize::from(is_alone) } else { 1 + (left - each) / further };
        let most = most.min(wanted);
        left = left.saturating_sub(each + most.saturating_sub(1) * further);
        is_alone &= most == 0;
        most
    }
}

impl LocalEngine {
    /// Frees the slots of samples that are gone.
    pub(super) fn release_free(&mut self) {
        let shelf = self.slots.len();
        let mut is_free = vec![true; shelf + 1];
        self.slots.iter_from(0).for_each(|(slot, _)| is_free[slot] = false);
        is_free[shelf] = self.shelf.is_none();
        (0..=shelf).filter(|slot| is_free[*slot]).for_each(|slot| self.cache.pages.release(slot));
    }

    /// Makes room for the next token of each sample: what is remembered goes first, then the shelf, then
    /// the youngest samples, which wait and continue from their tokens.
    pub(super) fn make_room(&mut self) {
        loop {
            let pages = &self.cache.pages;
            let lacking = |(slot, sequence): (usize, &Sequence)| pages.lacking(slot, sequence.computed() + 1);
            if self.slots.iter_from(0).map(lacking).sum::<usize>() <= pages.available() {
                return;
            }
            let freed = match self.shelf.take() {
                Some(_) => Some(self.slots.len()),
                None => self.slots.interrupt_youngest().inspect(|_| self.slots.load.preempted += 1),
            };
            let Some(slot) = freed else { return };
            self.cache.pages.release(slot);
        }
    }
}
