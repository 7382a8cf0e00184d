//! Watching for stop strings while tokens arrive.

use crate::data::{Tokenizer, TokenizerError};

/// Decodes a growing answer piece by piece, at a cost that doesn't grow with its length, and looks for stop strings in what is new.
#[derive(Debug, Default)]
pub struct StopWatch {
    text: String,
    /// Tokens from here to `read` are decoded again with every new one, for a token's text may depend on its neighbours.
    context: usize,
    /// Tokens before this are in `text`.
    read: usize,
}

impl StopWatch {
    /// Takes the answer so far, which only ever grows. Returns where in the text the earliest of `stop` begins, once one is there.
    pub fn feed(&mut self, tokenizer: &Tokenizer, tokens: &[u32], stop: &[String]) -> Result<Option<usize>, TokenizerError> {
        let before = tokenizer.decode(&tokens[self.context..self.read])?;
        let after = tokenizer.decode(&tokens[self.context..])?;
        // A replacement character at the end is half of a character whose rest is still to come.
        if after.len() <= before.len() || after.ends_with('\u{FFFD}') {
            return Ok(None);
        }
        let Some(new) = after.get(before.len()..) else { return Ok(None) };
        let known = self.text.len();
        self.text += new;
        (self.context, self.read) = (self.read, tokens.len());
        let found = stop.iter().filter_map(|stop| {
            let mut from = known.saturating_sub(stop.len());
            while !self.text.is_char_boundary(from) {
                from -= 1;
            }
            self.text[from..].find(stop.as_str()).map(|at| from + at)
        });
        Ok(found.min())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn first_stop(text: &str, stop: &[&str]) -> Option<(usize, usize)> {
        let tokenizer = Tokenizer::characters("abcdeé \n", 16).unwrap();
        let stop: Vec<String> = stop.iter().map(|stop| stop.to_string()).collect();
        let tokens = tokenizer.encode(text).unwrap();
        let mut watch = StopWatch::default();
        (1..=tokens.len()).find_map(|len| watch.feed(&tokenizer, &tokens[..len], &stop).unwrap().map(|at| (len, at)))
    }

    #[test]
    fn a_stop_string_is_seen_with_its_last_token_also_across_many() {
        assert_eq!(first_stop("abc de", &["c d"]), Some((5, 2)));
        assert_eq!(first_stop("abc de", &["de", "b"]), Some((2, 1)));
        assert_eq!(first_stop("éé abé", &["bé"]), Some((6, 6)));
        assert_eq!(first_stop("abcde", &["ed", "f"]), None);
    }
}
