//! End of a completion: end-of-text and stop tokens, stop strings, the length limit.

use super::{FinishReason, SamplingParams};
use crate::data::{Answer, DataError, Tokenizer};

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
    fed: usize,
}

impl StopWatch {
    /// Reason for the end if the newest token of the answer's turn is the last. An end token takes
    /// precedence over the length limit. With stop strings, the turn must only grow.
    pub fn ends(
        &mut self,
        answer: &Answer,
        params: &SamplingParams,
        tokenizer: &Tokenizer,
    ) -> Result<Option<FinishReason>, DataError> {
        let turn = &answer.tokens[answer.tokens.len() - answer.turn()..];
        let Some(last) = turn.last() else { return Ok(None) };
        let ends = (!params.ignore_eos && tokenizer.eos_token_ids().contains(last)) || params.stop_token_ids.contains(last);
        if ends || (!params.stop.is_empty() && self.feed(tokenizer, turn, &params.stop)?.is_some()) {
            return Ok(Some(FinishReason::Stop));
        }
        Ok((turn.len() >= params.max_new_tokens).then_some(FinishReason::Length))
    }

    /// Reads the tokens so far, which only grow. Returns the position in the text of the earliest of
    /// `stop` that the last token completes, if any.
    fn feed(&mut self, tokenizer: &Tokenizer, tokens: &[u32], stop: &[String]) -> Result<Option<usize>, DataError> {
        let mut found = None;
        while self.fed < tokens.len() {
            self.fed += 1;
            found = self.feed_one(tokenizer, &tokens[..self.fed], stop)?;
        }
        Ok(found)
    }

    fn feed_one(&mut self, tokenizer: &Tokenizer, tokens: &[u32], stop: &[String]) -> Result<Option<usize>, DataError> {
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
