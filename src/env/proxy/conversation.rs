//! The conversation of an agent, and whether its next request extends it.

use super::protocol::{ModelRequest, ModelTurn};
use crate::data::ChatMessage;
use crate::env::{Step, TEXT, ToolSpec};

/// Last request of an agent, and the response of the model.
#[derive(Default)]
pub struct Conversation {
    last: ModelRequest,
    response: Option<ModelTurn>,
    /// If true, the agent received it.
    arrived: bool,
}

impl Conversation {
    pub fn tools(&self) -> &[ToolSpec] {
        &self.last.tools
    }

    /// Starts a conversation with this request.
    pub fn begin(&mut self, request: &ModelRequest) -> Vec<ChatMessage> {
        (self.last, self.response) = (request.clone(), None);
        let mut messages = request.messages.clone();
        if request.text {
            messages.iter_mut().for_each(|message| message.role = TEXT.to_owned());
        }
        messages
    }

    /// Records the response of the model, and whether the agent received it.
    pub fn respond(&mut self, response: ModelTurn, arrived: bool) {
        (self.response, self.arrived) = (Some(response), arrived);
    }

    /// Returns the response to the same request, if it did not reach the agent.
    pub fn lost(&self, request: &ModelRequest) -> Option<ModelTurn> {
        let same = request.messages == self.last.messages && self.is_like(request);
        self.response.clone().filter(|_| same && !self.arrived)
    }

    /// Compares the next request with the conversation, and records it. The step holds the messages
    /// that extend the conversation, or all of one that restarts.
    pub fn follow(&mut self, request: &ModelRequest) -> Step {
        let known = self.last.messages.len();
        let extension = request.messages.strip_prefix(&self.last.messages[..]).and_then(<[_]>::split_first);
        match (extension, &self.response) {
            (Some((turn, new)), Some(response))
                if !new.is_empty() && !request.text && self.is_like(request) && response.message() == *turn =>
            {
                let messages = new.to_vec();
                self.last.messages.extend_from_slice(&request.messages[known..]);
                Step { messages, ..Step::default() }
            }
            _ => Step { messages: self.begin(request), restarts: true, ..Step::default() },
        }
    }

    fn is_like(&self, request: &ModelRequest) -> bool {
        request.tools == self.last.tools && request.text == self.last.text
    }
}
