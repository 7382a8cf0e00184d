//! Requests for several samples of one prompt, which the server prefills once.
//!
//! Attempts that start together share [`Attempt::together`]. The last to arrive sends the request
//! for all. The connection closes when all attempts are cancelled.

use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::oneshot;
use tokio::time::timeout;

use super::server::{Listener, StreamDelta};
use super::{Attempt, End, Ending, Fault, RemoteError, Tokens};

/// Longest wait for the other attempts, which start at the same time.
const MISSING: Duration = Duration::from_millis(50);

/// Groups of attempts that wait for other attempts at the same prompt.
#[derive(Clone, Debug, Default)]
pub(super) struct GroupRequests {
    waiting: Arc<Mutex<Vec<GroupRequest>>>,
}

/// Result of a group's member; `None` if it must send its own request.
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
    /// If true, the member has received tokens.
    begun: bool,
    /// Taken at the member's end.
    ended: Option<oneshot::Sender<Ended>>,
}

impl GroupRequests {
    /// Joins the other attempts at this prompt; one of them calls `ask` for the whole group.
    /// Returns `None` if there is no other attempt, or if the server rejects groups.
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

    /// Adds a member. Returns the group if it is complete.
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

    /// Removes the waiting group of this attempt, if it still waits.
    fn take(&self, attempt: &Attempt) -> Option<GroupRequest> {
        let mut waiting = self.waiting.lock();
        let at = waiting.iter().position(|group| group.members.iter().any(|member| member.attempt == *attempt))?;
        Some(waiting.swap_remove(at))
    }
}

impl GroupRequest {
    /// Returns true if this attempt differs from the group's only in index and seed.
    fn is_at(&self, attempt: &Attempt) -> bool {
        self.members.first().is_some_and(|Member { attempt: first, .. }| {
            let of = |attempt: &Attempt| Attempt { index: 0, seed: 0, ..attempt.clone() };
            first.ordinal == attempt.ordinal && of(first) == of(attempt)
        })
    }

    /// First attempt, and the number of attempts.
    pub(super) fn first(&self) -> (&Attempt, usize) {
        (&self.members[0].attempt, self.members.len())
    }

    /// Waits until all receivers are gone.
    pub(super) async fn deserted(channels: Vec<Tokens>) {
        for tokens in channels {
            tokens.closed().await;
        }
    }

    /// Token channels of the members.
    pub(super) fn channels(&self) -> Vec<Tokens> {
        self.members.iter().map(|member| member.tokens.clone()).collect()
    }

    /// Ends the remaining members. One of them reports an error; the others continue elsewhere with
    /// their tokens. If the server rejects groups, members without tokens send their own requests.
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
    /// Aborts the remaining members.
    fn drop(&mut self) {
        for ended in self.members.iter_mut().filter_map(|member| member.ended.take()) {
            let _wanted = ended.send(Some(Ok(Ending { end: End::Aborted, spans: None })));
        }
    }
}

impl Listener for GroupRequest {
    async fn on_delta(&mut self, StreamDelta { choice, chunk, ending, .. }: StreamDelta) -> Result<bool, String> {
        let count = self.members.len();
        let member = self.members.get_mut(choice).ok_or_else(|| format!("answer {choice} of {count}"))?;
        if member.ended.is_none() && !chunk.tokens.is_empty() {
            return Err(format!("a token of answer {choice}, which has ended"));
        }
        if !chunk.tokens.is_empty() {
            member.begun = true;
            // A dropped receiver needs no tokens.
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
