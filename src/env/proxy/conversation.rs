//! The conversation of an agent, and whether its next request extends it.

use super::protocol::{ModelRequest, ModelTurn};
use crate::data::ChatMessage;
use crate::env::{TEXT, ToolSpec};

/// Messages of an agent and the last response of the model.
#[derive(Default)]
pub struct Conversation {
    messages: Vec<ChatMessage>,
    tools: Vec<ToolSpec>,
    text: bool,
    /// Response of the model to the last request.
    response: Option<ModelTurn>,
    /// If true, the agent received it.
    arrived: bool,
}

/// Relation of a request to the conversation so far.
pub enum Follows {
    /// The request extends it by these messages.
    Extends(Vec<ChatMessage>),
    /// The request starts another conversation: all of its messages.
    Restarts(Vec<ChatMessage>),
}

impl Conversation {
    pub fn tools(&self) -> &[ToolSpec] {
        &self.tools
    }

    /// Starts a conversation with this request.
    pub fn begin(&mut self, ask: &ModelRequest) -> Vec<ChatMessage> {
        (self.messages, self.tools, self.text) = (ask.messages.clone(), ask.tools.clone(), ask.text);
        self.response = None;
        match ask.text {
            true => ask.messages.iter().map(|message| ChatMessage { role: TEXT.to_owned(), ..message.clone() }).collect(),
            false => ask.messages.clone(),
        }
    }

    /// Records the response of the model, and whether the agent received it.
    pub fn respond(&mut self, response: ModelTurn, arrived: bool) {
        (self.response, self.arrived) = (Some(response), arrived);
    }

    /// Returns the response to the same request, if it did not reach the agent.
    pub fn lost(&self, ask: &ModelRequest) -> Option<ModelTurn> {
        let same = ask.messages == self.messages && ask.tools == self.tools && ask.text == self.text;
        self.response.clone().filter(|_| same && !self.arrived)
    }

    /// Compares the next request with the conversation, and records it.
    pub fn follow(&mut self, ask: &ModelRequest) -> Follows {
        let known = self.messages.len() + 1;
        let response = self.response.as_ref().map(ModelTurn::message);
        let extends = !self.text
            && !ask.text
            && ask.tools == self.tools
            && ask.messages.len() > known
            && ask.messages[..known - 1] == self.messages[..]
            && response.is_some_and(|response| response == ask.messages[known - 1]);
        if !extends {
            return Follows::Restarts(self.begin(ask));
        }
        self.messages.clone_from(&ask.messages);
        Follows::Extends(ask.messages[known..].to_vec())
    }
}
