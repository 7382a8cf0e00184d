//! Generation for a hand-written loop: a [`Generator`] on separate threads, whose groups are awaited.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::thread::JoinHandle;

use parking_lot::Mutex;
use tokio::sync::{Notify, mpsc, oneshot};

use super::Generator;
use crate::data::{Group, Prompt};
use crate::engine::{EngineError, TokenEngine};
use crate::flow::{AsyncIo, AsyncStage, Control, Flow, RunError, StageError, Until, from_iter};

/// Generator that runs until it is dropped, made by [`Generator::start`].
///
/// It generates under the newest weights of its edge. Dropping it stops all samples in flight and joins
/// its threads.
pub struct RunningGenerator {
    prompts: mpsc::Sender<Prompt>,
    calls: Arc<Calls>,
    control: Control,
    thread: Option<JoinHandle<()>>,
}

/// Prompts of all calls.
#[derive(Default)]
struct Calls {
    state: Mutex<State>,
    /// Notified when a group has ended, and when the generator has.
    freed: Notify,
}

#[derive(Default)]
struct State {
    /// Receivers of the requested groups, by ordinal. The ordinal of a prompt that the generator has is
    /// taken until its group ends, even if the call is dropped.
    requested: HashMap<u64, oneshot::Sender<Group>>,
    /// Set when the generator has ended, with the reason.
    ended: Option<String>,
}

impl<E: TokenEngine> Generator<E> {
    /// Starts the generator on separate threads, without a graph. It takes no signals: see
    /// [`Flow::ignore_signals`].
    ///
    /// Errors: settings that a graph would reject, or no thread to run on.
    pub fn start(self) -> Result<RunningGenerator, RunError> {
        let calls = Arc::new(Calls::default());
        let (prompts, requests) = mpsc::channel(1);
        let mut flow = Flow::new("generate");
        // They are for the program that calls, which may train meanwhile.
        flow.ignore_signals();
        let start = flow.source("start", from_iter([()]));
        let requested = flow.stage("prompts", start, Requests { requests, calls: calls.clone() });
        let groups = flow.stage("generate", requested, self);
        let (delivers, ends) = (calls.clone(), calls.clone());
        flow.sink("deliver", groups, move |group: Group| {
            if let Some(reply) = delivers.free(group.id()) {
                // A dropped call has no receiver.
                drop(reply.send(group));
            }
        });
        flow.check()?;
        let control = flow.handle();
        let run = move || {
            let ended = flow.run(Until::finished()).map_or_else(|error| format!("failed: {error}"), |_| "ended".to_owned());
            *ends.state.lock() = State { ended: Some(ended), ..State::default() };
            ends.freed.notify_waiters();
        };
        let thread = std::thread::Builder::new().name("generate".into()).spawn(run).map_err(RunError::Start)?;
        Ok(RunningGenerator { prompts, calls, control, thread: Some(thread) })
    }
}

impl RunningGenerator {
    /// Samples a group of rollouts for each prompt, and returns the groups in the order of `prompts`.
    ///
    /// Calls may overlap and then share the engine's slots. The seed, the weights and a prompt's ordinal
    /// determine its completions (law N2), so prompts in flight must differ in their ordinals.
    ///
    /// Cancel-safe: a dropped call submits no further prompts, and its groups are discarded when they end.
    /// A later call with their ordinals waits until then.
    pub async fn generate_batch(&self, prompts: &[Prompt]) -> Result<Vec<Group>, EngineError> {
        let (mut unsent, mut replies) = (Unsent { prompts: VecDeque::new(), calls: &self.calls }, Vec::new());
        for prompt in prompts {
            replies.push(self.calls.request(prompt.ordinal).await?);
            unsent.prompts.push_back(prompt);
        }
        while let Some(prompt) = unsent.prompts.front()
            && self.prompts.send(Prompt::clone(prompt)).await.is_ok()
        {
            unsent.prompts.pop_front();
        }
        let mut groups = Vec::with_capacity(prompts.len());
        for reply in replies {
            let ended = || self.calls.state.lock().ended.clone().unwrap_or_default();
            groups.push(reply.await.map_err(|_| EngineError::Generator(ended()))?);
        }
        Ok(groups)
    }
}

impl Drop for RunningGenerator {
    fn drop(&mut self) {
        self.control.stop();
        // The thread does not panic: the flow catches panics of its stages.
        self.thread.take().into_iter().for_each(|thread| drop(thread.join()));
    }
}

impl Calls {
    /// Takes an ordinal and returns the receiver of its group. Waits as long as a dropped call has the
    /// ordinal.
    async fn request(&self, ordinal: u64) -> Result<oneshot::Receiver<Group>, EngineError> {
        loop {
            // Before the look at the state, so that nothing is missed in between.
            let freed = self.freed.notified();
            if let Some(group) = self.try_request(ordinal)? {
                return Ok(group);
            }
            freed.await;
        }
    }

    fn try_request(&self, ordinal: u64) -> Result<Option<oneshot::Receiver<Group>>, EngineError> {
        let mut state = self.state.lock();
        if let Some(reason) = &state.ended {
            return Err(EngineError::Generator(reason.clone()));
        }
        match state.requested.get(&ordinal) {
            Some(reply) if reply.is_closed() => Ok(None),
            Some(_) => Err(EngineError::same_ordinal(ordinal)),
            None => {
                let (reply, group) = oneshot::channel();
                state.requested.insert(ordinal, reply);
                Ok(Some(group))
            }
        }
    }

    fn free(&self, ordinal: u64) -> Option<oneshot::Sender<Group>> {
        let reply = self.state.lock().requested.remove(&ordinal);
        self.freed.notify_waiters();
        reply
    }
}

/// Prompts of a call that are not sent yet. Dropping it frees their ordinals.
struct Unsent<'a> {
    prompts: VecDeque<&'a Prompt>,
    calls: &'a Calls,
}

impl Drop for Unsent<'_> {
    fn drop(&mut self) {
        self.prompts.iter().for_each(|prompt| drop(self.calls.free(prompt.ordinal)));
    }
}

struct Requests {
    requests: mpsc::Receiver<Prompt>,
    calls: Arc<Calls>,
}

impl AsyncStage for Requests {
    type In = ();
    type Out = Prompt;

    async fn run(&mut self, io: &mut AsyncIo<(), Prompt>) -> Result<(), StageError> {
        loop {
            let request = tokio::select! {
                request = self.requests.recv() => request,
                () = io.stopped() => None,
            };
            let Some(prompt) = request else { return Ok(()) };
            // The receiver of a dropped call is closed, and no later call takes its ordinal meanwhile.
            let is_dropped = self.calls.state.lock().requested.get(&prompt.ordinal).is_none_or(oneshot::Sender::is_closed);
            if is_dropped {
                self.calls.free(prompt.ordinal);
            } else {
                io.send(prompt).await?;
            }
        }
    }
}
