//! What a rollout's agent has shown so far, and whether its next request goes on from there.

use super::protocol::{Ask, Said};
use crate::data::ChatMessage;
use crate::env::{TEXT, ToolSpec};

/// What was read and said.
#[derive(Default)]
pub struct Conversation {
    messages: Vec<ChatMessage>,
    tools: Vec<ToolSpec>,
    text: bool,
    /// What the model said to the newest request.
    said: Option<Said>,
    /// Whether the agent got it.
    arrived: bool,
}

/// What a request is to what was before it.
pub enum Follows {
    /// It goes on with these.
    Extends(Vec<ChatMessage>),
    /// It is another conversation, or the same told otherwise: all of it.
    Anew(Vec<ChatMessage>),
}

impl Conversation {
    pub fn tools(&self) -> &[ToolSpec] {
        &self.tools
    }

    /// The first request, or one that has nothing to do with those before.
    pub fn begin(&mut self, ask: &Ask) -> Vec<ChatMessage> {
        (self.messages, self.tools, self.text) = (ask.messages.clone(), ask.tools.clone(), ask.text);
        self.said = None;
        match ask.text {
            true => ask.messages.iter().map(|message| ChatMessage { role: TEXT.to_owned(), ..message.clone() }).collect(),
            false => ask.messages.clone(),
        }
    }

    /// The model said this, and perhaps the agent got it.
    pub fn told(&mut self, said: Said, arrived: bool) {
        (self.said, self.arrived) = (Some(said), arrived);
    }

    /// The answer to the same request, if it got lost on its way.
    pub fn lost(&self, ask: &Ask) -> Option<Said> {
        let same = ask.messages == self.messages && ask.tools == self.tools && ask.text == self.text;
        self.said.clone().filter(|_| same && !self.arrived)
    }

    /// The next request.
    pub fn follow(&mut self, ask: &Ask) -> Follows {
        let known = self.messages.len() + 1;
        let said = self.said.as_ref().map(Said::message);
        let extends = !self.text
            && !ask.text
            && ask.tools == self.tools
            && ask.messages.len() > known
            && ask.messages[..known - 1] == self.messages[..]
            && said.is_some_and(|said| said == ask.messages[known - 1]);
        if !extends {
            return Follows::Anew(self.begin(ask));
        }
        self.messages.clone_from(&ask.messages);
        Follows::Extends(ask.messages[known..].to_vec())
    }
}
