//! Drafts of a sample's next tokens: what followed the last time that it said the same few tokens (prompt
//! lookup decoding, Saxena, 2023).
//!
//! The engine computes all of a draft in one pass, and keeps as much of it as is what it draws anyway: each
//! token is a function of the logits before it and of its uniform number, so that samples are those without
//! drafts (law N2).

use super::LocalEngine;
use super::draw::draw;
use super::sequence::ServedWeights;
use crate::engine::EngineError;
use crate::model::Suffix;

/// Rows of a step with drafts, at most. On two cores up to 16 saved time with every length of draft; from
/// 20 on a step took up to 1.3 times as long as without (`benches/reuse.rs`). A GPU's recorded step is
/// faster than one with drafts of any length.
const DRAFTING_ROWS: usize = 16;

/// Lengths of the sequences of tokens that are looked for, the longest first.
const LOOKED_FOR: [usize; 2] = [3, 2];
/// A sample's tokens that are searched, the newest.
const SEARCHED: usize = 4096;
/// Steps without a draft after many that failed, at most.
const LONGEST_PAUSE: u32 = 64;

/// Decides when to draft for a sample: seldom where drafts fail.
#[derive(Default)]
pub(super) struct Drafter {
    /// Drafts in a row of which nothing was kept.
    failures: u32,
    /// Steps until the next draft.
    pause: u32,
}

impl Drafter {
    /// A draft of at most `most` tokens, which may be empty.
    pub fn draft(&mut self, prompt: &[u32], answer: &[u32], most: usize) -> Vec<u32> {
        if most == 0 {
            return Vec::new();
        }
        if self.pause > 0 {
            self.pause -= 1;
            return Vec::new();
        }
        let tokens: Vec<u32> =
            prompt.iter().chain(answer).skip((prompt.len() + answer.len()).saturating_sub(SEARCHED)).copied().collect();
        LOOKED_FOR.into_iter().find_map(|len| continuation(&tokens, len, most)).unwrap_or_default()
    }

    /// Notes how much of a draft was kept.
    pub fn learn(&mut self, kept: usize) {
        self.failures = if kept > 0 { 0 } else { self.failures + 1 };
        self.pause = if self.failures < 2 { 0 } else { (1u32 << self.failures.min(16)).min(LONGEST_PAUSE) };
    }
}

/// What followed the newest earlier occurrence of the last `len` tokens, and again from there where that is
/// too little.
fn continuation(tokens: &[u32], len: usize, most: usize) -> Option<Vec<u32>> {
    let (before, last) = tokens.split_at(tokens.len().checked_sub(len)?);
    let at = (0..before.len()).rev().find(|&at| tokens[at..at + len] == *last)?;
    Some(tokens[at + len..].iter().cycle().take(most).copied().collect())
}

impl LocalEngine {
    /// Drafts for these slots, if there is any.
    pub(super) fn drafts(&mut self, slots: &[usize]) -> Option<Vec<Vec<u32>>> {
        let mut room = DRAFTING_ROWS.saturating_sub(slots.len());
        if self.draft_tokens == 0 || room == 0 || self.graphs.are_used() {
            return None;
        }
        let mut draft = |&slot: &usize| {
            let draft = self.slots.get_mut(slot).map(|sequence| sequence.draft(self.draft_tokens.min(room))).unwrap_or_default();
            room -= draft.len();
            draft
        };
        let drafts: Vec<Vec<u32>> = slots.iter().map(&mut draft).collect();
        let pages = &self.cache.pages;
        let lacking = |(&slot, draft): (&usize, &Vec<u32>)| {
            self.slots.get(slot).map_or(0, |sequence| pages.lacking(slot, sequence.computed() + 1 + draft.len()))
        };
        // Slots of other weights, which are computed after these, have room for their next tokens.
        let later = self.slots.iter_from(slots.last().map_or(0, |last| last + 1));
        let promised: usize = later.map(|(slot, sequence)| pages.lacking(slot, sequence.computed() + 1)).sum();
        let fits = slots.iter().zip(&drafts).map(lacking).sum::<usize>() + promised <= pages.available();
        (fits && drafts.iter().any(|draft| !draft.is_empty())).then_some(drafts)
    }

    /// Computes the newest token of each of `slots` and its draft, and draws tokens while they are the
    /// draft's, and one more.
    pub(super) fn check_drafts(
        &mut self,
        weights: &ServedWeights,
        slots: &[usize],
        drafts: &[Vec<u32>],
    ) -> Result<(), EngineError> {
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
        let rows = sequences()
            .zip(drafts)
            .flat_map(|(sequence, draft)| (0..=draft.len()).map(|drafted| sequence.row_after(&draft[..drafted], self.run_seed)));
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
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_draft_is_what_followed_the_newest_occurrence_of_the_longest_match() {
        let draft = |prompt: &[u32], answer: &[u32]| Drafter::default().draft(prompt, answer, 3);
        assert_eq!(draft(&[1, 2, 3, 4, 5, 6, 7], &[9, 1, 2, 3]), [4, 5, 6]);
        assert_eq!(draft(&[1, 2, 3, 4, 8, 2, 3, 5], &[1, 2, 3]), [4, 8, 2], "three tokens beat two");
        assert_eq!(draft(&[2, 3, 4, 2, 3, 5], &[2, 3]), [5, 2, 3], "the newest");
        assert_eq!(draft(&[7, 7, 8], &[7, 7]), [8, 7, 7], "up to the sample's end, and again");
        assert_eq!(draft(&[7, 7, 7], &[7]), [7, 7, 7]);
        assert!(draft(&[1, 2, 3], &[4, 5]).is_empty() && draft(&[], &[1]).is_empty());
    }

    #[test]
    fn drafts_that_fail_are_tried_seldom() {
        let mut drafter = Drafter::default();
        let mut tried = 0;
        for _ in 0..1000 {
            if !drafter.draft(&[1, 2, 3, 1, 2], &[], 2).is_empty() {
                tried += 1;
                drafter.learn(0);
            }
        }
        assert!((15..30).contains(&tried), "{tried}");
        drafter.learn(1);
        assert_eq!(drafter.draft(&[1, 2, 3, 1, 2], &[], 2), [3, 1], "after one that succeeds");
    }
}
