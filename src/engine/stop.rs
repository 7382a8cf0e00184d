//! End of a completion: end-of-text and stop tokens, stop strings, the length limit. Its text while it grows.

use super::{FinishReason, SamplingParams};
use crate::data::{Answer, DataError, Tokenizer};

/// Incremental decoder: a token costs the same however long the completion is.
#[derive(Debug, Default)]
pub struct TextStream {
    /// Text so far, without incomplete characters.
    pub text: String,
    /// Text after it, up to an incomplete character, that is read again with the next token.
    begun: String,
    /// Tokens from here to `read` are decoded again with every new one, because text may depend on
    /// neighbours.
    context: usize,
    /// Number of tokens decoded into `text`.
    read: usize,
}

impl TextStream {
    /// Decodes `tokens`, which only grow, by one token more. Returns true if there is new text.
    pub fn read<E>(&mut self, tokens: &[u32], decode: impl Fn(&[u32]) -> Result<String, E>) -> Result<bool, E> {
        let known = decode(&tokens[self.context..self.read])?.len();
        let all = decode(&tokens[self.context..])?;
        // A trailing replacement character is an incomplete character, which the last three tokens have at most.
        let is_whole = !all.ends_with(char::REPLACEMENT_CHARACTER);
        let end = if is_whole { tokens.len() } else { tokens.len().saturating_sub(3).max(self.read) };
        let certain = if is_whole { all.clone() } else { decode(&tokens[self.context..end])? };
        let new = certain.get(known..).filter(|new| !new.is_empty() && all.starts_with(&certain));
        let rest = all.get(new.map_or(known, |_| certain.len())..).unwrap_or_default();
        self.begun = rest.trim_end_matches(char::REPLACEMENT_CHARACTER).to_owned();
        let Some(new) = new else {
            // Invalid bytes may change the text of those before them, which then are no context.
            if all.get(known..).is_none() && tokens.len() > self.read + 3 {
                self.context = self.read;
            }
            return Ok(false);
        };
        self.text += new;
        (self.context, self.read) = (self.read, end);
        Ok(true)
    }
}

/// Returns the beginning of `text` that no further token changes: without incomplete characters and
/// possible beginnings of stop strings. The text ends before the first stop string.
pub fn certain_text<'t>(text: &'t str, stops: &[String], ended: bool) -> &'t str {
    if let Some(end) = first_stop(text, stops) {
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

fn first_stop(text: &str, stops: &[String]) -> Option<usize> {
    stops.iter().filter_map(|stop| text.find(stop.as_str())).min()
}

/// Text of a completion before its stop string, if it has one. The stop string may contain special tokens,
/// which the text leaves out if `skip_special` is true.
#[cfg(feature = "torch")]
pub fn text_before_stop(
    tokens: &[u32],
    stops: &[String],
    tokenizer: &Tokenizer,
    skip_special: bool,
) -> Result<String, DataError> {
    let mut all = tokenizer.decode_all(tokens)?;
    let end = first_stop(&all, stops);
    all.truncate(end.unwrap_or(all.len()));
    if !skip_special {
        return Ok(all);
    }
    for last in (0..tokens.len()).rev().filter(|_| end.is_some()) {
        let before = tokenizer.decode_all(&tokens[..last])?;
        if let Some(rest) = all.strip_prefix(&before) {
            // The stop string begins in this token.
            let rest = if tokenizer.is_special(tokens[last]) { "" } else { rest };
            return Ok(tokenizer.decode(&tokens[..last])? + rest);
        }
    }
    tokenizer.decode(tokens)
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
            // A stop string may be a special token. The token that completes it may begin another character.
            self.stream.read(&tokens[..end], |tokens| tokenizer.decode_all(tokens))?;
            let TextStream { text, begun, .. } = &self.stream;
            let from = |stop: &String| text.floor_char_boundary(known.saturating_sub(stop.len()));
            found = stop.iter().any(|stop| [&text[from(stop)..], begun].concat().contains(stop.as_str()));
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

    /// A token is a byte.
    fn bytes(tokens: &[u32]) -> Result<String, std::convert::Infallible> {
        Ok(String::from_utf8_lossy(&tokens.iter().map(|token| *token as u8).collect::<Vec<_>>()).into_owned())
    }

    #[test]
    fn a_stop_string_is_seen_with_its_last_token_also_if_that_begins_another_character() {
        // Bytes as byte-level tokenizers write them: \u{c3}\u{a9} is "é".
        let vocabulary = serde_json::json!({"a": 0, "b": 1, "c\u{c3}": 2, "\u{a9}": 3});
        let decoder =
            serde_json::json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": false, "use_regex": false});
        let tokenizer = serde_json::json!({
            "version": "1.0", "truncation": null, "padding": null, "added_tokens": [], "normalizer": null, "pre_tokenizer": null,
            "post_processor": null, "decoder": decoder,
            "model": {"type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
                "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "vocab": vocabulary, "merges": []},
        });
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("tokenizer.json"), tokenizer.to_string()).unwrap();
        let (tokenizer, mut watch) = (Tokenizer::from_dir(folder.path()).unwrap(), StopWatch::default());
        let tokens = [0, 1, 2, 3];
        assert_eq!(tokenizer.decode(&tokens).unwrap(), "abcé");
        let found = (1..=4).find(|end| watch.completes(&tokenizer, &tokens[..*end], &["bc".to_owned()]).unwrap());
        assert_eq!(found, Some(3));
    }

    #[test]
    fn bytes_that_are_no_text_are_decoded_few_at_a_time() {
        let tokens: Vec<u32> = "aé".bytes().chain([0x80; 200]).chain("é😀".bytes()).map(u32::from).collect();
        let (mut stream, most) = (TextStream::default(), std::cell::Cell::new(0));
        for end in 1..=tokens.len() {
            let decode = |tokens: &[u32]| {
                most.set(most.get().max(tokens.len()));
                bytes(tokens)
            };
            stream.read(&tokens[..end], decode).unwrap();
        }
        assert_eq!(stream.text, bytes(&tokens).unwrap());
        assert!(most.get() <= 12, "{} tokens at a time", most.get());
    }
}
