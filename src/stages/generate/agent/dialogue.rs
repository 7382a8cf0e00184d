//! A conversation as the model reads it, turn by turn, without ever re-tokenising what was sampled (law D1).
//!
//! What a turn adds is rendered by the model's own template and cut off behind the turn: the sampled tokens stay, and only what follows them is
//! tokenised. A template that writes earlier turns differently once more follows (that leaves out what was thought, say) rewrites what the
//! model has read: then no cut is right, and the whole text begins a new sample.

use serde_json::Value;

use crate::data::chat::{ChatError, ChatInput};
use crate::data::{ChatMessage, Tokenizer};
use crate::env::{TEXT, ToolSpec};

/// In the place of what was said, to find where it ends; a character that no text should hold.
const MARK: &str = "\u{fdd0}";

/// A conversation of which a model has read all.
#[derive(Clone, Debug)]
pub struct Dialogue {
    messages: Vec<ChatMessage>,
    tools: Vec<Value>,
    /// What its tokens stand for, up to where the model is to go on.
    text: String,
}

/// What the model reads before its next turn.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Next {
    /// These tokens, after all that it has read and said.
    Extends(Vec<u32>),
    /// These tokens, in the place of all that it has read and said.
    Rewritten(Vec<u32>),
}

impl Dialogue {
    /// A conversation, and its tokens up to where the model is to begin.
    pub fn begin(messages: Vec<ChatMessage>, tools: &[ToolSpec], tokenizer: &Tokenizer) -> Result<(Self, Vec<u32>), ChatError> {
        let tools: Vec<Value> = tools.iter().map(ToolSpec::to_json).collect();
        if let [only] = messages.as_slice()
            && only.role == TEXT
        {
            let tokens = tokenizer.encode(&only.content)?;
            return Ok((Dialogue { text: only.content.clone(), messages, tools }, tokens));
        }
        let text = tokenizer.chat()?.render(&ChatInput::prompt(&messages).tools(&tools))?;
        let tokens = tokenizer.encode_bare(&text)?;
        Ok((Dialogue { messages, tools, text }, tokens))
    }

    /// The turns so far.
    pub fn messages(&self) -> &[ChatMessage] {
        &self.messages
    }

    /// The model said this.
    pub fn said(&mut self, text: String) {
        self.messages.push(ChatMessage::new("assistant", text));
    }

    /// What follows the model's newest turn, of which `turn` is what was sampled.
    pub fn answered(&mut self, turn: &[u32], answer: Vec<ChatMessage>, tokenizer: &Tokenizer) -> Result<Next, ChatError> {
        let said = self.messages.len() - 1;
        self.messages.extend(answer);
        let render = |messages: &[ChatMessage]| {
            let input = ChatInput { messages, tools: &self.tools, add_generation_prompt: true, continue_final_message: false };
            tokenizer.chat()?.render(&input)
        };
        let text = render(&self.messages)?;
        let mut marked = self.messages.clone();
        marked[said].content = MARK.to_owned();
        let marked = render(&marked)?;
        let before = std::mem::replace(&mut self.text, text);
        let tail = marked.strip_prefix(&before).and_then(|rest| rest.strip_prefix(MARK));
        // Blanks around what was said may be trimmed by the template; they were sampled, and stay.
        let kept = |tail: &&str| {
            let between = self.text.strip_prefix(&before).and_then(|rest| rest.strip_suffix(tail));
            between.is_some_and(|between| between.trim() == self.messages[said].content.trim())
        };
        let Some(tail) = tail.filter(kept) else { return Ok(Next::Rewritten(tokenizer.encode_bare(&self.text)?)) };
        // The mark that ends a turn was sampled, unless the turn was ended otherwise.
        let end = match turn.last() {
            Some(&last) if tokenizer.is_special(last) => tokenizer.decode_all(&[last])?,
            _ => String::new(),
        };
        Ok(Next::Extends(tokenizer.encode_bare(tail.strip_prefix(&end).unwrap_or(tail))?))
    }
}

/// What a turn's tokens say, the mark at their end left out.
pub fn text_of(turn: &[u32], tokenizer: &Tokenizer) -> Result<String, ChatError> {
    let words = match turn.split_last() {
        Some((last, words)) if tokenizer.is_special(*last) => words,
        _ => turn,
    };
    Ok(tokenizer.decode_all(words)?)
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
    fn d1_what_follows_a_turn_is_what_the_template_writes_behind_it() {
        let tokenizer = Tokenizer::characters(LETTERS, 64).unwrap();
        let (mut dialogue, prompt) = dialogue(&tokenizer);
        assert_eq!(all(&tokenizer, &prompt), "user: hi\nassistant: ");
        let turn = tokenizer.completion("ok ").unwrap();
        dialogue.said(text_of(&turn, &tokenizer).unwrap());
        let next = dialogue.answered(&turn, vec![ChatMessage::new("tool", "3")], &tokenizer).unwrap();
        let Next::Extends(tokens) = next else { panic!("{next:?}") };
        assert_eq!(all(&tokenizer, &tokens), "\ntool: 3\nassistant: ", "the end of the turn was sampled");
        let cut = tokenizer.encode_bare("and so on").unwrap();
        dialogue.said(text_of(&cut, &tokenizer).unwrap());
        let next = dialogue.answered(&cut, vec![ChatMessage::new("user", "go")], &tokenizer).unwrap();
        let Next::Extends(tokens) = next else { panic!("{next:?}") };
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
        dialogue.said(text_of(&thought, &tokenizer).unwrap());
        let next = dialogue.answered(&thought, vec![ChatMessage::new("user", "go")], &tokenizer).unwrap();
        let Next::Rewritten(tokens) = next else { panic!("{next:?}") };
        assert_eq!(all(&tokenizer, &tokens), "user: hi\nassistant: yes\nuser: go\nassistant: ");
        let plain = tokenizer.completion("no").unwrap();
        dialogue.said("no".into());
        assert!(matches!(dialogue.answered(&plain, vec![ChatMessage::new("user", "go")], &tokenizer), Ok(Next::Extends(_))));
    }
}
