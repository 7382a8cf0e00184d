//! Pages of a KV cache: where it holds the tokens of each slot (Kwon et al., 2023: PagedAttention).
//!
//! Short sequences take few pages. Sequences that begin alike share the whole pages of their beginning,
//! which are not written again, and each has the page that it writes to itself. Pages of sequences that
//! have ended are remembered until their memory is needed.

use std::ops::Range;

use super::prefix_tree::PrefixTree;
pub(crate) use super::prefix_tree::shared;

/// Tokens of a page.
pub(crate) const PAGE: usize = 32;

/// Tokens that two sequences must share before the beginning of one serves the other.
pub(crate) const FEWEST_SHARED: usize = 8;

/// Pages of slots and of what is remembered.
pub(crate) struct Pages {
    /// Number of slots that hold each page. Page 0 is of none: free slots of a recorded step write there.
    holders: Vec<u32>,
    /// Whether each page is remembered.
    remembered: Vec<bool>,
    tree: PrefixTree,
    free: Vec<u32>,
    /// Remembered pages that no slot holds.
    idle: usize,
    /// Pages of each slot, `[slots, width]`, the slot's own first.
    table: Vec<i64>,
    width: usize,
    /// Number of each slot's pages.
    held: Vec<usize>,
}

/// Tokens to copy from one page to another.
pub(super) struct Copied {
    pub from: u32,
    pub to: u32,
    pub tokens: usize,
}

impl Pages {
    pub fn new(slots: usize) -> Self {
        Pages {
            holders: vec![0],
            remembered: vec![false],
            tree: PrefixTree::default(),
            free: Vec::new(),
            idle: 0,
            table: Vec::new(),
            width: 0,
            held: vec![0; slots],
        }
    }

    /// Number of slots.
    pub fn slots(&self) -> usize {
        self.held.len()
    }

    /// Number of pages, with the one that none has.
    pub fn len(&self) -> usize {
        self.holders.len()
    }

    /// Pages that a slot may hold.
    pub fn width(&self) -> usize {
        self.width
    }

    /// Grows to `pages` pages, and `width` of them a slot.
    pub fn grow(&mut self, pages: usize, width: usize) {
        self.free.extend((self.len() as u32..pages as u32).rev());
        self.holders.resize(pages.max(self.len()), 0);
        self.remembered.resize(self.len(), false);
        let mut table = vec![0; self.held.len() * width];
        for (slot, &held) in self.held.iter().enumerate() {
            table[slot * width..][..held].copy_from_slice(&self.table[slot * self.width..][..held]);
        }
        (self.table, self.width) = (table, width);
    }

    /// Pages that are free or only remembered.
    pub fn available(&self) -> usize {
        self.free.len() + self.idle
    }

    /// Pages that a slot lacks for so many tokens.
    pub fn lacking(&self, slot: usize, tokens: usize) -> usize {
        tokens.div_ceil(PAGE).saturating_sub(self.held[slot])
    }

    /// Gives a slot what it lacks for so many tokens. Requires that it is available.
    pub fn reserve(&mut self, slot: usize, tokens: usize) {
        assert!(tokens <= self.width * PAGE && self.lacking(slot, tokens) <= self.available(), "pages for a slot's tokens");
        for _ in 0..self.lacking(slot, tokens) {
            let page = self.take();
            self.push(slot, page);
        }
    }

    /// Frees a slot.
    pub fn release(&mut self, slot: usize) {
        if self.held[slot] == 0 {
            return;
        }
        for page in self.of(slot) {
            self.leave(page);
        }
        self.held[slot] = 0;
        self.table[slot * self.width..][..self.width].fill(0);
    }

    /// Moves a slot's pages to another slot.
    pub fn move_slot(&mut self, from: usize, to: usize) {
        self.release(to);
        self.table.copy_within(from * self.width..(from + 1) * self.width, to * self.width);
        self.table[from * self.width..][..self.width].fill(0);
        (self.held[to], self.held[from]) = (self.held[from], 0);
    }

    /// Swaps the pages of two slots.
    pub fn swap_slots(&mut self, one: usize, other: usize) {
        (0..self.width).for_each(|at| self.table.swap(one * self.width + at, other * self.width + at));
        self.held.swap(one, other);
    }

    /// Lets another slot begin with the first `tokens` tokens of a slot.
    pub(super) fn share(&mut self, from: usize, to: usize, tokens: usize) -> Option<Copied> {
        let pages = self.of(from);
        self.begin(to, &pages, tokens)
    }

    /// How many tokens of a sequence are remembered.
    pub fn known(&mut self, weights: u64, tokens: &[u32]) -> usize {
        self.tree.find(weights, tokens).1
    }

    /// Lets a slot begin, instead of what it has, with what is remembered of `tokens`. Returns how many tokens it
    /// then holds.
    pub(super) fn recall(&mut self, slot: usize, weights: u64, tokens: &[u32]) -> (usize, Option<Copied>) {
        self.release(slot);
        let (pages, known) = self.tree.find(weights, tokens);
        if known < FEWEST_SHARED {
            return (0, None);
        }
        let pages = &pages[..known.div_ceil(PAGE)];
        // Held first, or they could be taken for others.
        pages.iter().for_each(|&page| self.hold(page));
        let known = if self.available() > 0 { known } else { known / PAGE * PAGE };
        let copied = self.begin(slot, pages, known);
        pages.iter().for_each(|&page| self.leave(page));
        (known, copied)
    }

    /// Remembers the beginning of a slot's sequence, all of which it holds: whole pages, or with `ended` all of
    /// them, after which the slot may not be written.
    pub fn remember(&mut self, slot: usize, weights: u64, tokens: &[u32], ended: bool) {
        let len = if ended { tokens.len() } else { tokens.len() / PAGE * PAGE };
        let own = self.of(slot);
        let done = self.tree.insert(weights, &tokens[..len], &own);
        for page in done.taken {
            self.remembered[page as usize] = true;
        }
        for (at, page) in done.pages.into_iter().enumerate().filter(|(at, page)| own[*at] != *page) {
            self.hold(page);
            self.leave(own[at]);
            self.table[slot * self.width + at] = i64::from(page);
        }
        done.left.into_iter().for_each(|page| self.forget_page(page));
    }

    /// Forgets what is remembered under weights that are not `kept`.
    pub fn forget(&mut self, kept: impl Fn(u64) -> bool) {
        for page in self.tree.forget(kept) {
            self.forget_page(page);
        }
    }

    /// Pages of these slots, `[slots, width]`; 0 where a slot has none.
    pub fn table(&self, slots: Range<usize>) -> &[i64] {
        &self.table[slots.start * self.width..slots.end * self.width]
    }

    /// Row of a layer for a slot's token, of pages one after another.
    pub fn row(&self, slot: usize, position: usize) -> i64 {
        self.table[slot * self.width + position / PAGE] * PAGE as i64 + (position % PAGE) as i64
    }

    fn of(&self, slot: usize) -> Vec<u32> {
        self.table[slot * self.width..][..self.held[slot]].iter().map(|&page| page as u32).collect()
    }

    /// Gives a slot, instead of what it has, whole pages of a sequence and a new one for the rest of `tokens`.
    fn begin(&mut self, slot: usize, pages: &[u32], tokens: usize) -> Option<Copied> {
        let (whole, rest) = (&pages[..tokens / PAGE], tokens % PAGE);
        whole.iter().for_each(|&page| self.hold(page));
        self.release(slot);
        whole.iter().for_each(|&page| self.push(slot, page));
        (rest > 0).then(|| {
            let copied = Copied { from: pages[tokens / PAGE], to: self.take(), tokens: rest };
            self.push(slot, copied.to);
            copied
        })
    }

    fn push(&mut self, slot: usize, page: u32) {
        self.table[slot * self.width + self.held[slot]] = i64::from(page);
        self.held[slot] += 1;
    }

    /// A page for one slot.
    fn take(&mut self) -> u32 {
        let page = self.free.pop().or_else(|| {
            let page = self.tree.evict(|page| self.holders[page as usize] == 0)?;
            self.remembered[page as usize] = false;
            self.idle -= 1;
            Some(page)
        });
        let page = page.expect("room was made for each page");
        self.holders[page as usize] = 1;
        page
    }

    fn hold(&mut self, page: u32) {
        let holders = &mut self.holders[page as usize];
        *holders += 1;
        self.idle -= usize::from(*holders == 1 && self.remembered[page as usize]);
    }

    fn leave(&mut self, page: u32) {
        let holders = &mut self.holders[page as usize];
        *holders -= 1;
        match (*holders, self.remembered[page as usize]) {
            (0, true) => self.idle += 1,
            (0, false) => self.free.push(page),
            _ => {}
        }
    }

    fn forget_page(&mut self, page: u32) {
        self.remembered[page as usize] = false;
        if self.holders[page as usize] == 0 {
            self.idle -= 1;
            self.free.push(page);
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Pages, what is in their rows, and what should be: each slot's sequence.
    struct Cache {
        pages: Pages,
        rows: Vec<(u64, u32)>,
        slots: Vec<Option<(u64, Vec<u32>)>>,
    }

    impl Cache {
        fn new(slots: usize, pages: usize, width: usize) -> Self {
            let mut cache = Cache { pages: Pages::new(slots), rows: vec![(0, 0); pages * PAGE], slots: vec![None; slots] };
            cache.pages.grow(pages, width);
            cache
        }

        fn copy(&mut self, copied: Option<Copied>) {
            if let Some(Copied { from, to, tokens }) = copied {
                self.rows.copy_within(from as usize * PAGE..from as usize * PAGE + tokens, to as usize * PAGE);
            }
        }

        /// Writes tokens from `from` on, as a pass under these weights does.
        fn write(&mut self, slot: usize, weights: u64, tokens: &[u32], from: usize) {
            self.pages.reserve(slot, tokens.len());
            for (at, token) in tokens.iter().enumerate().skip(from) {
                self.rows[self.pages.row(slot, at) as usize] = (weights, *token);
            }
            self.slots[slot] = Some((weights, tokens.to_vec()));
        }

        /// A new sequence, less what is remembered of it.
        fn begin(&mut self, slot: usize, weights: u64, tokens: &[u32]) -> usize {
            let (known, copied) = self.pages.recall(slot, weights, &tokens[..tokens.len() - 1]);
            self.copy(copied);
            self.write(slot, weights, tokens, known);
            known
        }

        fn end(&mut self, slot: usize) {
            if let Some((weights, tokens)) = self.slots[slot].take() {
                self.pages.remember(slot, weights, &tokens, true);
            }
            self.pages.release(slot);
        }

        fn check(&self) {
            for (slot, sequence) in self.slots.iter().enumerate() {
                let Some((weights, tokens)) = sequence else { continue };
                for (at, token) in tokens.iter().enumerate() {
                    assert_eq!(self.rows[self.pages.row(slot, at) as usize], (*weights, *token), "slot {slot}, position {at}");
                }
            }
            let held: std::collections::BTreeSet<u32> = (0..self.slots.len()).flat_map(|slot| self.pages.of(slot)).collect();
            assert_eq!(held.len() + self.pages.available(), self.pages.len() - 1, "each page is held or available");
        }
    }

    fn tokens(first: u32, len: usize) -> Vec<u32> {
        (first..).take(len).collect()
    }

    #[test]
    fn v5_a_sequence_serves_what_begins_alike_under_its_own_weights_only() {
        let mut cache = Cache::new(2, 12, 4);
        let turn = tokens(0, 50);
        assert_eq!(cache.begin(0, 1, &turn), 0);
        cache.end(0);
        assert_eq!(cache.begin(1, 2, &turn), 0, "of other weights");
        assert_eq!(cache.begin(0, 1, &tokens(0, 70)), 50);
        // What follows the last token is computed again.
        assert_eq!(cache.begin(1, 1, &turn), 49);
        assert_eq!(cache.begin(1, 1, &[&turn[..40], &[99; 20]].concat()), 40);
        assert_eq!(cache.begin(1, 1, &[&turn[..FEWEST_SHARED - 1], &[99; 20]].concat()), 0);
        cache.check();
        cache.pages.forget(|weights| weights == 2);
        assert_eq!(cache.begin(1, 1, &turn), 0);
    }

    #[test]
    fn what_begins_alike_shares_whole_pages() {
        let mut cache = Cache::new(4, 9, 3);
        let prompt = tokens(0, 2 * PAGE + 3);
        cache.write(0, 1, &prompt, 0);
        for slot in 1..4 {
            let copied = cache.pages.share(0, slot, prompt.len());
            cache.copy(copied);
            cache.slots[slot] = cache.slots[0].clone();
        }
        cache.check();
        // Two pages of all, and one of each.
        assert_eq!(cache.pages.available(), 8 - 6);
        for slot in 0..4 {
            let own = [&prompt[..], &[1000 + slot as u32]].concat();
            cache.write(slot, 1, &own, prompt.len());
        }
        cache.check();
    }

    #[test]
    fn the_least_recently_used_goes_first_from_its_end_on() {
        let mut cache = Cache::new(1, 7, 6);
        for first in [0, 1000] {
            cache.begin(0, 1, &tokens(first, 3 * PAGE));
            cache.end(0);
        }
        assert_eq!(cache.begin(0, 1, &tokens(0, 2 * PAGE + 1)), 2 * PAGE);
        cache.end(0);
        // Two pages are taken: both from the end of what was used before.
        assert_eq!(cache.begin(0, 1, &tokens(5000, 2 * PAGE)), 0);
        cache.end(0);
        assert_eq!(cache.begin(0, 1, &tokens(1000, 2 * PAGE)), PAGE);
        assert_eq!(cache.begin(0, 1, &tokens(0, 2 * PAGE)), 2 * PAGE - 1);
        cache.check();
    }

    proptest! {
        /// However sequences begin, share, move and end, each slot holds its tokens by its weights.
        #[test]
        fn v5_every_slot_holds_its_own_sequence(
            pages in 9usize..30, work in prop::collection::vec((0usize..6, 0usize..3, 0usize..3, 0u32..3, 1usize..90, 1u64..3), 1..120),
        ) {
            let mut cache = Cache::new(3, pages, 3);
            for (what, slot, other, family, len, weights) in work {
                // Sequences of a family differ from others at 0, 20 or 40, and by what they said.
                let sequence: Vec<u32> = (0..len as u32).map(|at| if at < 20 * family { at } else { at + 100 * family }).collect();
                match (what, cache.slots[slot].clone()) {
                    (0, _) => {
                        cache.pages.release(slot);
                        cache.slots[slot] = None;
                        if cache.pages.available() >= len.div_ceil(PAGE) {
                            cache.begin(slot, weights, &sequence);
                        }
                    }
                    (1, Some((weights, mut own))) if own.len() < 3 * PAGE => {
                        own.push(7777 + slot as u32);
                        if cache.pages.lacking(slot, own.len()) <= cache.pages.available() {
                            cache.write(slot, weights, &own, own.len() - 1);
                        }
                    }
                    (2, Some((weights, own))) if slot != other => {
                        let shared = own.len().min(len);
                        cache.pages.release(other);
                        cache.slots[other] = None;
                        if cache.pages.available() > 0 {
                            let copied = cache.pages.share(slot, other, shared);
                            cache.copy(copied);
                            cache.slots[other] = Some((weights, own[..shared].to_vec()));
                        }
                    }
                    (3, _) => cache.end(slot),
                    (4, Some((weights, own))) => cache.pages.remember(slot, weights, &own, false),
                    (5, _) if slot != other => {
                        cache.pages.move_slot(slot, other);
                        cache.slots[other] = cache.slots[slot].take();
                    }
                    _ => cache.pages.forget(|known| known != weights || what == 0),
                }
                cache.check();
            }
        }
    }
}
