//! Detection of stop strings during generation.

use crate::data::{Tokenizer, TokenizerError};

/// Incremental decoder that searches new text for stop strings, at a cost independent of the
/// completion's length.
#[derive(Debug, Default)]
pub struct StopWatch {
    text: String,
    /// Tokens from here to `read` are decoded again with every new one, because text may depend on
    /// neighbours.
    context: usize,
    /// Number of tokens decoded into `text`.
    read: usize,
}

impl StopWatch {
    /// Reads the completion so far, which only grows. Returns the position in the text of the
    /// earliest of `stop`, if found.
    pub fn feed(&mut self, tokenizer: &Tokenizer, tokens: &[u32], stop: &[String]) -> Result<Option<usize>, TokenizerError> {
        let before = tokenizer.decode(&tokens[self.context..self.read])?;
        let after = tokenizer.decode(&tokens[self.context..])?;
        // A trailing replacement character is an incomplete character.
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
