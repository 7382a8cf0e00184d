//! States of gated delta nets that are remembered: what a sequence left after its prompt, or when it ended.

/// Where copies of states lie, and after which tokens they are.
///
/// A state is one of all tokens before it, so that it serves only sequences that begin with exactly these.
/// The least recently used is replaced. Cost of a look: a comparison of tokens with each that is kept.
pub(super) struct KeptStates {
    entries: Vec<Entry>,
    most: usize,
    looks: u64,
}

struct Entry {
    /// The weights that computed it; none once they are forgotten.
    weights: Option<u64>,
    tokens: Box<[u32]>,
    used: u64,
}

impl KeptStates {
    /// With room for so many.
    pub fn new(most: usize) -> Self {
        KeptStates { entries: Vec::new(), most, looks: 0 }
    }

    /// The state after most of the first `known` of `tokens`, and after how many of them it is.
    pub fn find(&mut self, weights: u64, tokens: &[u32], known: usize) -> Option<(usize, usize)> {
        self.looks += 1;
        let serves =
            |entry: &Entry| entry.weights == Some(weights) && entry.tokens.len() <= known && tokens.starts_with(&entry.tokens);
        let all = self.entries.iter_mut().enumerate().filter(|(_, entry)| serves(entry));
        let (at, entry) = all.max_by_key(|(_, entry)| entry.tokens.len())?;
        entry.used = self.looks;
        Some((at, entry.tokens.len()))
    }

    /// Where to copy the state after `tokens`; `None` if it is there, or if there is no room for any.
    pub fn place(&mut self, weights: u64, tokens: &[u32]) -> Option<usize> {
        self.looks += 1;
        let entry = Entry { weights: Some(weights), tokens: tokens.into(), used: self.looks };
        let same = |of: &&mut Entry| of.weights == entry.weights && of.tokens == entry.tokens;
        if let Some(there) = self.entries.iter_mut().find(same) {
            there.used = entry.used;
            return None;
        }
        if self.entries.len() < self.most {
            self.entries.push(entry);
            return Some(self.entries.len() - 1);
        }
        let oldest = (0..self.most).min_by_key(|at| (self.entries[*at].weights.is_some(), self.entries[*at].used))?;
        self.entries[oldest] = entry;
        Some(oldest)
    }

    /// Forgets those of weights that are not `kept`.
    pub fn forget(&mut self, kept: impl Fn(u64) -> bool) {
        for entry in &mut self.entries {
            entry.weights = entry.weights.filter(|weights| kept(*weights));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn v5_a_state_serves_what_begins_with_all_of_its_tokens_under_its_weights() {
        let mut kept = KeptStates::new(3);
        assert_eq!([kept.place(1, &[1, 2]), kept.place(1, &[1, 2, 3]), kept.place(2, &[1])], [Some(0), Some(1), Some(2)]);
        assert_eq!(kept.place(1, &[1, 2]), None, "it is there");
        assert_eq!(kept.find(1, &[1, 2, 3, 4], 4), Some((1, 3)));
        assert_eq!(kept.find(1, &[1, 2, 3, 4], 2), Some((0, 2)), "of what pages hold");
        assert_eq!(kept.find(1, &[1, 3], 2), None);
        assert_eq!(kept.find(2, &[1, 2, 3], 3), Some((2, 1)));
        kept.forget(|weights| weights == 1);
        assert_eq!(kept.find(2, &[1, 2, 3], 3), None);
        assert_eq!(kept.place(1, &[7]), Some(2), "what is forgotten goes first");
        assert_eq!(kept.place(1, &[8]), Some(1), "then the least recently used");
        assert_eq!(KeptStates::new(0).place(1, &[1]), None);
    }
}
