//! Samples of one prompt as one question: the server reads it once, and does once for all of them whatever it does for a question.
//!
//! Those that begin together are told so ([`Attempt::together`]); the last that arrives sends the question for all. Whoever is given up leaves the others
//! alone; when all are, the connection closes.

use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::oneshot;
use tokio::time::timeout;

use super::server::{Listener, StreamDelta};
use super::{Attempt, End, Ending, Fault, RemoteError, Tokens};

/// How long those that are missing are waited for. They are begun at the same time, so that none is, unless it was given up at once.
const MISSING: Duration = Duration::from_millis(50);

/// Attempts that wait for others at the same prompt.
#[derive(Clone, Debug, Default)]
pub(super) struct GroupRequests {
    waiting: Arc<Mutex<Vec<GroupRequest>>>,
}

/// What a member hears in the end; `None` where it is to ask by itself.
type Ended = Option<Result<Ending, RemoteError>>;

/// Attempts at one prompt, answered by one stream.
#[derive(Debug, Default)]
pub(super) struct GroupRequest {
    members: Vec<Member>,
}

#[derive(Debug)]
struct Member {
    attempt: Attempt,
    tokens: Tokens,
    /// Whether it was told any.
    begun: bool,
    /// Taken when it has ended.
    ended: Option<oneshot::Sender<Ended>>,
}

impl GroupRequests {
    /// Joins the others at this prompt, and is answered with them: `ask` is called by one of them, for the whole group. `None` where nobody else came, or
    /// the server would not answer a group.
    pub(super) async fn join<F>(&self, attempt: &Attempt, tokens: &Tokens, ask: impl FnOnce(GroupRequest) -> F) -> Ended
    where
        F: Future<Output = ()> + Send + 'static,
    {
        let (sender, mut ended) = oneshot::channel();
        let member = Member { attempt: attempt.clone(), tokens: tokens.clone(), begun: false, ended: Some(sender) };
        let group = match self.enter(member) {
            Some(group) => Some(group),
            None => match timeout(MISSING, &mut ended).await {
                Ok(ended) => return ended.unwrap_or(None),
                Err(_) => self.take(attempt),
            },
        };
        if let Some(mut group) = group {
            group.members.retain(|member| !member.tokens.is_closed());
            if group.members.len() < 2 {
                return None;
            }
            group.members.sort_by_key(|member| member.attempt.index);
            tokio::spawn(ask(group));
        }
        ended.await.unwrap_or(None)
    }

    /// The whole group, if this is the last of it.
    fn enter(&self, member: Member) -> Option<GroupRequest> {
        let mut waiting = self.waiting.lock();
        waiting.retain(|group| !group.members.iter().all(|member| member.tokens.is_closed()));
        let whole = member.attempt.together as usize;
        let at = waiting.iter().position(|group| group.is_at(&member.attempt)).unwrap_or_else(|| {
            waiting.push(GroupRequest::default());
            waiting.len() - 1
        });
        waiting[at].members.push(member);
        (waiting[at].members.len() >= whole).then(|| waiting.swap_remove(at))
    }

    /// Those that wait with this one; nobody where they have gone already.
    fn take(&self, attempt: &Attempt) -> Option<GroupRequest> {
        let mut waiting = self.waiting.lock();
        let at = waiting.iter().position(|group| group.members.iter().any(|member| member.attempt == *attempt))?;
        Some(waiting.swap_remove(at))
    }
}

impl GroupRequest {
    /// Whether this attempt can be one of it: it differs in its place in the group and its randomness alone.
    fn is_at(&self, attempt: &Attempt) -> bool {
        self.members.first().is_some_and(|Member { attempt: first, .. }| {
            let of = |attempt: &Attempt| Attempt { index: 0, seed: 0, ..attempt.clone() };
            first.ordinal == attempt.ordinal && of(first) == of(attempt)
        })
    }

    /// The first of it, whose question is asked so many times.
    pub(super) fn first(&self) -> (&Attempt, usize) {
        (&self.members[0].attempt, self.members.len())
    }

    /// Returns when nobody is left who wants anything.
    pub(super) async fn deserted(channels: Vec<Tokens>) {
        for tokens in channels {
            tokens.closed().await;
        }
    }

    /// Where its members are told.
    pub(super) fn channels(&self) -> Vec<Tokens> {
        self.members.iter().map(|member| member.tokens.clone()).collect()
    }

    /// Ends those that have not ended. An error is one, however many shared it: one of them tells it, and the others go on elsewhere from what they have.
    /// Where the server would not answer a group, each asks by itself; what has begun can't from its beginning.
    pub(super) fn end(mut self, result: Result<(), RemoteError>, name: &str) {
        let broke = || RemoteError::new(name, Fault::Broke { why: "the answer to a group ended without all of it".into() });
        let error = result.err().unwrap_or_else(broke);
        let mut told = false;
        for member in &mut self.members {
            let ending = match (&error.fault, told) {
                (Fault::Refused { .. }, _) if !member.begun => None,
                (Fault::Busy { .. }, _) => Some(Err(error.clone())),
                (Fault::Refused { .. }, _) | (_, true) => Some(Ok(Ending { end: End::Aborted, spans: None })),
                (_, false) => Some(Err(error.clone())),
            };
            if let Some(ended) = member.ended.take() {
                told |= ended.send(ending).is_ok();
            }
        }
    }
}

impl Drop for GroupRequest {
    /// Whoever still waits goes on elsewhere.
    fn drop(&mut self) {
        for ended in self.members.iter_mut().filter_map(|member| member.ended.take()) {
            let _wanted = ended.send(Some(Ok(Ending { end: End::Aborted, spans: None })));
        }
    }
}

impl Listener for GroupRequest {
    async fn hear(&mut self, StreamDelta { choice, chunk, ending, .. }: StreamDelta) -> Result<bool, String> {
        let count = self.members.len();
        let member = self.members.get_mut(choice).ok_or_else(|| format!("answer {choice} of {count}"))?;
        if member.ended.is_none() && !chunk.tokens.is_empty() {
            return Err(format!("a token of answer {choice}, which has ended"));
        }
        if !chunk.tokens.is_empty() {
            member.begun = true;
            // Whoever is gone does without.
            let _wanted = member.tokens.send(chunk).await;
        }
        if let Some(ending) = ending
            && let Some(ended) = member.ended.take()
        {
            let _wanted = ended.send(Some(Ok(ending)));
        }
        Ok(true)
    }

    fn is_done(&self) -> bool {
        self.members.iter().all(|member| member.ended.is_none())
    }
}
