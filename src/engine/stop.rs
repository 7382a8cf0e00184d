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
    /// Number of tokens seen.
    seen: usize,
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
        if ends || (!params.stop.is_empty() && self.completes(tokenizer, turn, &params.stop)?) {
            return Ok(Some(FinishReason::Stop));
        }
        Ok((turn.len() >= params.max_new_tokens).then_some(FinishReason::Length))
    }

    /// Reads the tokens so far, which only grow. Returns true if the last one completes a stop string.
    fn completes(&mut self, tokenizer: &Tokenizer, tokens: &[u32], stop: &[String]) -> Result<bool, DataError> {
        let mut found = false;
        for end in std::mem::replace(&mut self.seen, tokens.len()) + 1..=tokens.len() {
            let before = tokenizer.decode(&tokens[self.context..self.read])?;
            let after = tokenizer.decode(&tokens[self.context..end])?;
            // A trailing replacement character is an incomplete character.
            let new = after.get(before.len()..).filter(|new| !new.is_empty() && !new.ends_with(char::REPLACEMENT_CHARACTER));
            found = new.is_some_and(|new| {
                let known = self.text.len();
                self.text += new;
                (self.context, self.read) = (self.read, end);
                let from = |stop: &String| self.text.floor_char_boundary(known.saturating_sub(stop.len()));
                stop.iter().any(|stop| self.text[from(stop)..].contains(stop.as_str()))
            });
        }
        Ok(found)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stop_string_is_seen_with_its_last_token_also_across_many() {
        let tokenizer = Tokenizer::characters("abcdeé \n", 16).unwrap();
        let cases = [("abc de", vec!["c d"], Some(5)), ("abc de", vec!["de", "b"], Some(2)), ("éé abé", vec!["bé"], Some(6))];
        for (text, stop, expected) in cases.into_iter().chain([("abcde", vec!["ed", "f"], None)]) {
            let (tokens, mut watch) = (tokenizer.encode(text).unwrap(), StopWatch::default());
            let stop: Vec<String> = stop.into_iter().map(str::to_owned).collect();
            let found = (1..=tokens.len()).find(|end| watch.completes(&tokenizer, &tokens[..*end], &stop).unwrap());
            assert_eq!(found, expected, "{stop:?} in {text:?}");
        }
    }
}
