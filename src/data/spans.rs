//! Weight versions of tokens, run-length encoded (law D3).

use serde::{Deserialize, Serialize};

use super::Version;

/// Origins of all tokens of a sequence, in order. Neighbours of equal origin are merged, so memory
/// is O(version changes).
///
/// ```
/// use rollflow::data::Spans;
/// let mut spans = Spans::given(4);
/// spans.push(7);
/// spans.push(7);
/// spans.push(8);
/// assert_eq!(spans.len(), 7);
/// assert_eq!((spans.oldest(), spans.newest()), (Some(7), Some(8)));
/// assert_eq!(serde_json::to_string(&spans).unwrap(), "[[null,4],[7,2],[8,1]]");
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Spans(Vec<(Option<Version>, usize)>);

impl Spans {
    /// Makes spans of `len` tokens that no policy sampled.
    pub fn given(len: usize) -> Self {
        let mut spans = Spans::default();
        spans.extend(None, len);
        spans
    }

    /// One more token, sampled under `version`.
    pub fn push(&mut self, version: Version) {
        self.extend(Some(version), 1);
    }

    /// `len` more tokens of one origin.
    pub fn extend(&mut self, version: Option<Version>, len: usize) {
        match self.0.last_mut() {
            _ if len == 0 => {}
            Some((last, tokens)) if *last == version => *tokens += len,
            _ => self.0.push((version, len)),
        }
    }

    /// Keeps the first `len` tokens.
    pub fn truncate(&mut self, len: usize) {
        let mut left = len;
        self.0.retain_mut(|(_, len)| {
            *len = left.min(*len);
            left -= *len;
            *len > 0
        });
    }

    /// Tokens covered.
    pub fn len(&self) -> usize {
        self.0.iter().map(|(_, len)| len).sum()
    }

    /// Returns true if no token is covered.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Tokens that were sampled, by any version.
    pub fn generated(&self) -> usize {
        self.0.iter().filter(|(version, _)| version.is_some()).map(|(_, len)| len).sum()
    }

    /// Tokens at the end that were sampled, since the last given one.
    pub fn sampled_last(&self) -> usize {
        self.0.iter().rev().take_while(|(version, _)| version.is_some()).map(|(_, len)| len).sum()
    }

    /// Runs of tokens of one origin, in token order: the version that sampled them, `None` for given
    /// ones (prompt, tool output), and how many they are, at least one.
    pub fn iter(&self) -> impl Iterator<Item = (Option<Version>, usize)> + '_ {
        self.0.iter().copied()
    }

    /// The origin of every token, in order.
    pub fn per_token(&self) -> impl Iterator<Item = Option<Version>> + '_ {
        self.0.iter().flat_map(|(version, len)| std::iter::repeat_n(*version, *len))
    }

    /// The oldest version that sampled a token here.
    pub fn oldest(&self) -> Option<Version> {
        self.0.iter().filter_map(|(version, _)| *version).min()
    }

    /// The newest version that sampled a token here.
    pub fn newest(&self) -> Option<Version> {
        self.0.iter().filter_map(|(version, _)| *version).max()
    }
}
