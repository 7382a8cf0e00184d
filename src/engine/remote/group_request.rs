//! Requests for several samples of one prompt, which the server prefills once.
//!
//! Attempts that start together share [`Attempt::together`]. The last to arrive sends the request
//! for all. The connection closes when all attempts are cancelled.

use std::time::Duration;

use futures_util::future::join_all;
use parking_lot::Mutex;
use tokio::sync::mpsc::Sender;
use tokio::sync::oneshot;
use tokio::time::timeout;

use super::openai::Event;
use super::server::{Deltas, EventError, StreamDelta};
use super::{Attempt, Ending, Fault, RemoteError};

type Tokens = Sender<Vec<(u32, f32)>>;

/// Longest wait for the other attempts, which start at the same time.
const MISSING: Duration = Duration::from_millis(50);

/// Groups of attempts that wait for other attempts at the same prompt.
#[derive(Debug, Default)]
pub(super) struct GroupRequests {
    waiting: Mutex<Vec<GroupRequest>>,
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
                Ok(ended) => return ended.unwrap_or(Some(Ok(ABORTED))),
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
        ended.await.unwrap_or(Some(Ok(ABORTED)))
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
    /// Returns true if this attempt differs from the group's only in index, number and seed.
    fn is_at(&self, attempt: &Attempt) -> bool {
        self.members.first().is_some_and(|Member { attempt: first, .. }| {
            let of = |attempt: &Attempt| Attempt { index: 0, number: 0, seed: 0, ..attempt.clone() };
            first.ordinal == attempt.ordinal && of(first) == of(attempt)
        })
    }

    pub(super) fn first(&self) -> (&Attempt, usize) {
        (&self.members[0].attempt, self.members.len())
    }

    /// Reads the answer to all, from the server `name`, to its end, or until all receivers are gone.
    pub(super) async fn read<R>(mut self, deltas: impl Future<Output = Result<Deltas<R>, RemoteError>>, name: &str)
    where
        R: FnMut(Event) -> Result<StreamDelta, EventError>,
    {
        let channels: Vec<Tokens> = self.members.iter().map(|member| member.tokens.clone()).collect();
        let read = async {
            let error = match deltas.await {
                Ok(mut deltas) => self.pass_on(&mut deltas).await.err(),
                Err(error) => Some(error),
            };
            let broke = || Fault::Broke("the answer to a group ended without all of it".into());
            error.unwrap_or_else(|| RemoteError::new(name, broke()))
        };
        tokio::select! {
            error = read => self.end(&error),
            // Closing the connection stops the server.
            _ = join_all(channels.iter().map(Sender::closed)) => {}
        }
    }

    /// Sends each member its tokens and its end.
    async fn pass_on<R>(&mut self, deltas: &mut Deltas<R>) -> Result<(), RemoteError>
    where
        R: FnMut(Event) -> Result<StreamDelta, EventError>,
    {
        while let Some(StreamDelta { choice, chunk, ending, .. }) =
            deltas.next(self.members.iter().all(|member| member.ended.is_none())).await?
        {
            let count = self.members.len();
            let Some(member) = self.members.get_mut(choice) else {
                return Err(deltas.nonsense(format!("answer {choice} of {count}")));
            };
            if member.ended.is_none() && !chunk.is_empty() {
                return Err(deltas.nonsense(format!("a token of answer {choice}, which has ended")));
            }
            if !chunk.is_empty() {
                member.begun = true;
                // A dropped receiver needs no tokens.
                member.tokens.send(chunk).await.ok();
            }
            if let Some(ending) = ending
                && let Some(ended) = member.ended.take()
            {
                ended.send(Some(Ok(ending))).ok();
            }
        }
        Ok(())
    }

    /// Ends the remaining members. One of them reports the error; the others continue elsewhere with
    /// their tokens. If the server rejects groups, members without tokens send their own requests.
    fn end(&mut self, error: &RemoteError) {
        let mut told = false;
        for member in &mut self.members {
            let ending = match (&error.fault, told) {
                (Fault::Refused { .. }, _) if !member.begun => None,
                (Fault::Busy { .. }, _) => Some(Err(error.clone())),
                (Fault::Refused { .. }, _) | (_, true) => Some(Ok(ABORTED)),
                (_, false) => Some(Err(error.clone())),
            };
            if let Some(ended) = member.ended.take() {
                told |= ended.send(ending).is_ok();
            }
        }
    }
}

/// End of a member of a group that is dropped.
const ABORTED: Ending = Ending { finish: None, spans: None, routes: None };
