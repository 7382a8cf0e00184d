//! A conversation as the model reads it, without tokenising sampled tokens again (law D1).
//!
//! The model's template renders each response after a turn. Sampled tokens are kept, and only the
//! text after them is tokenised. Some templates render earlier turns differently once another
//! follows, for example without their reasoning: then the whole text begins a new part.

use serde_json::Value;

use crate::data::{ChatMessage, DataError, Tokenizer};
use crate::env::{TEXT, ToolSpec};

/// Placeholder of the newest turn, to find its end; a noncharacter that no text should hold.
const MARK: &str = "\u{fdd0}";

/// Conversation that a model has read.
#[derive(Clone, Debug)]
pub struct Dialogue {
    messages: Vec<ChatMessage>,
    tools: Vec<Value>,
    /// Text of its tokens, up to the model's next turn.
    text: String,
}

impl Dialogue {
    /// Conversation, and its tokens up to the model's first turn.
    pub fn begin(messages: Vec<ChatMessage>, tools: &[ToolSpec], tokenizer: &Tokenizer) -> Result<(Self, Vec<u32>), DataError> {
        let tools: Vec<Value> = tools.iter().map(ToolSpec::to_json).collect();
        if let [only] = messages.as_slice()
            && only.role == TEXT
        {
            let tokens = tokenizer.encode(&only.content)?;
            return Ok((Dialogue { text: only.content.clone(), messages, tools }, tokens));
        }
        let text = tokenizer.chat()?.render_prompt(&messages, &tools)?;
        let tokens = tokenizer.encode_bare(&text)?;
        Ok((Dialogue { messages, tools, text }, tokens))
    }

    /// Messages so far.
    pub fn messages(&self) -> &[ChatMessage] {
        &self.messages
    }

    /// Appends a turn of the model.
    pub fn push_turn(&mut self, text: String) {
        self.messages.push(ChatMessage::new("assistant", text));
    }

    /// Appends a response to the model's newest turn, whose sampled tokens are `turn`. Returns the
    /// tokens that the model reads next, and true if they replace the present context.
    pub fn respond(
        &mut self,
        turn: &[u32],
        response: Vec<ChatMessage>,
        tokenizer: &Tokenizer,
    ) -> Result<(Vec<u32>, bool), DataError> {
        let newest = self.messages.len() - 1;
        self.messages.extend(response);
        let render = |messages: &[ChatMessage]| tokenizer.chat()?.render(messages, &self.tools, true);
        let text = render(&self.messages)?;
        let mut marked = self.messages.clone();
        marked[newest].content = MARK.to_owned();
        let marked = render(&marked)?;
        let before = std::mem::replace(&mut self.text, text);
        let tail = marked.strip_prefix(&before).and_then(|rest| rest.strip_prefix(MARK));
        // The template may trim blanks around the turn. They were sampled, and are kept.
        let kept = |tail: &&str| {
            let between = self.text.strip_prefix(&before).and_then(|rest| rest.strip_suffix(tail));
            between.is_some_and(|between| between.trim() == self.messages[newest].content.trim())
        };
        let Some(tail) = tail.filter(kept) else { return Ok((tokenizer.encode_bare(&self.text)?, true)) };
        // The end-of-turn token was sampled, unless a limit cut the turn off.
        let end = match turn.last() {
            Some(&last) if tokenizer.is_special(last) => tokenizer.decode_all(&[last])?,
            _ => String::new(),
        };
        Ok((tokenizer.encode_bare(tail.strip_prefix(&end).unwrap_or(tail))?, false))
    }
}

/// Text of a turn's tokens, without a special token at the end.
pub fn text_of(turn: &[u32], tokenizer: &Tokenizer) -> Result<String, DataError> {
    let words = match turn.split_last() {
        Some((last, words)) if tokenizer.is_special(*last) => words,
        _ => turn,
    };
    tokenizer.decode_all(words)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::chat::ChatTemplate;

    const LETTERS: &str = "abcdefghijklmnopqrstuvwxyz :\n+=<>/.!123";

    fn dialogue(tokenizer: &Tokenizer) -> (Dialogue, Vec<u32>) {
        Dialogue::begin(vec![ChatMessage::new("user", "hi")], &[], tokenizer).unwrap()
    }

    fn all(tokenizer: &Tokenizer, tokens: &[u32]) -> String {
        tokenizer.decode_all(tokens).unwrap()
    }

    #[test]
    fn d1_what_follows_a_turn_is_what_the_template_writes_after_it() {
        let tokenizer = Tokenizer::characters(LETTERS, 64).unwrap();
        let (mut dialogue, prompt) = dialogue(&tokenizer);
        assert_eq!(all(&tokenizer, &prompt), "user: hi\nassistant: ");
        let turn = tokenizer.completion("ok ").unwrap();
        dialogue.push_turn(text_of(&turn, &tokenizer).unwrap());
        let (tokens, rewritten) = dialogue.respond(&turn, vec![ChatMessage::new("tool", "3")], &tokenizer).unwrap();
        assert!(!rewritten);
        assert_eq!(all(&tokenizer, &tokens), "\ntool: 3\nassistant: ", "the end of the turn was sampled");
        let cut = tokenizer.encode_bare("and so on").unwrap();
        dialogue.push_turn(text_of(&cut, &tokenizer).unwrap());
        let (tokens, rewritten) = dialogue.respond(&cut, vec![ChatMessage::new("user", "go")], &tokenizer).unwrap();
        assert!(!rewritten);
        assert_eq!(all(&tokenizer, &tokens), "<eos>\nuser: go\nassistant: ", "a turn that was cut off is closed");
        assert_eq!(dialogue.messages().len(), 5);
    }

    #[test]
    fn r248_a_template_that_rewrites_what_was_read_begins_a_new_sample() {
        let source = "{% for m in messages %}{{ m.role }}: {% if loop.last or m.role != 'assistant' %}{{ m.content }}\
                      {% else %}{{ m.content.split('>')[-1] }}{% endif %}{{ '\\n' }}{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}";
        let tokenizer = Tokenizer::characters(LETTERS, 64).unwrap().with_chat(ChatTemplate::new(source).unwrap());
        let (mut dialogue, _) = dialogue(&tokenizer);
        let thought = tokenizer.completion("<hm>yes").unwrap();
        dialogue.push_turn(text_of(&thought, &tokenizer).unwrap());
        let (tokens, rewritten) = dialogue.respond(&thought, vec![ChatMessage::new("user", "go")], &tokenizer).unwrap();
        assert!(rewritten);
        assert_eq!(all(&tokenizer, &tokens), "user: hi\nassistant: yes\nuser: go\nassistant: ");
        let plain = tokenizer.completion("no").unwrap();
        dialogue.push_turn("no".into());
        let (_, rewritten) = dialogue.respond(&plain, vec![ChatMessage::new("user", "go")], &tokenizer).unwrap();
        assert!(!rewritten);
    }
}
