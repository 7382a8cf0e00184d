//! End of a completion: end-of-text and stop tokens, stop strings, the length limit. Its text while it grows.

use super::{FinishReason, SamplingParams};
use crate::data::{Answer, DataError, Tokenizer};

/// Incremental decoder: a token costs the same however long the completion is.
#[derive(Debug, Default)]
pub struct TextStream {
    /// Text so far, without incomplete characters.
    pub text: String,
    /// Tokens from here to `read` are decoded again with every new one, because text may depend on
    /// neighbours.
    context: usize,
    /// Number of tokens decoded into `text`.
    read: usize,
}

impl TextStream {
    /// Decodes `tokens`, which only grow, by one token more. Returns true if there is new text.
    pub fn read<E>(&mut self, tokens: &[u32], decode: impl Fn(&[u32]) -> Result<String, E>) -> Result<bool, E> {
        let before = decode(&tokens[self.context..self.read])?;
        let after = decode(&tokens[self.context..])?;
        // A trailing replacement character is an incomplete character.
        let new = after.get(before.len()..).filter(|new| !new.is_empty() && !new.ends_with(char::REPLACEMENT_CHARACTER));
        let Some(new) = new else { return Ok(false) };
        self.text += new;
        (self.context, self.read) = (self.read, tokens.len());
        Ok(true)
    }
}

/// Returns the beginning of `text` that no further token changes: without incomplete characters and
/// possible beginnings of stop strings. The text ends before the first stop string.
pub fn certain_text<'t>(text: &'t str, stops: &[String], ended: bool) -> &'t str {
    if let Some(end) = stops.iter().filter_map(|stop| text.find(stop.as_str())).min() {
        return &text[..end];
    }
    if ended {
        return text;
    }
    let whole = text.trim_end_matches(char::REPLACEMENT_CHARACTER);
    let begun = |stop: &String| {
        let ends = stop.char_indices().map(|(at, _)| at).rev();
        ends.filter(|&at| whole.ends_with(&stop[..at])).max().unwrap_or(0)
    };
    &whole[..whole.len() - stops.iter().map(begun).max().unwrap_or(0)]
}

/// Search of new text for stop strings.
#[derive(Debug, Default)]
pub struct StopWatch {
    stream: TextStream,
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
            let known = self.stream.text.len();
            let grew = self.stream.read(&tokens[..end], |tokens| tokenizer.decode(tokens))?;
            let text = &self.stream.text;
            let from = |stop: &String| text.floor_char_boundary(known.saturating_sub(stop.len()));
            found = grew && stop.iter().any(|stop| text[from(stop)..].contains(stop.as_str()));
        }
        Ok(found)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_may_become_a_stop_string_or_another_character_is_held_back() {
        let stops = ["</end>".to_owned(), "\n\n".to_owned()];
        assert_eq!(certain_text("one</e", &stops, false), "one");
        assert_eq!(certain_text("one</e", &stops, true), "one</e");
        assert_eq!(certain_text("one</en\n", &stops, false), "one</en");
        assert_eq!(certain_text("one</end> two", &stops, false), "one");
        assert_eq!(certain_text("a\u{fffd}", &stops, false), "a");
        assert_eq!(certain_text("a\u{fffd}", &[], true), "a\u{fffd}");
    }

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
