//! Generation for a hand-written loop: a [`Generator`] on separate threads, whose groups are awaited.

use std::collections::HashMap;
use std::sync::Arc;
use std::thread::JoinHandle;

use parking_lot::Mutex;
use tokio::sync::{mpsc, oneshot};

use super::Generator;
use crate::data::{Group, Prompt};
use crate::engine::TokenEngine;
use crate::flow::{AsyncIo, AsyncStage, Control, Flow, RunError, StageError, Until, from_iter};

/// Error of [`RunningGenerator::generate_batch`].
#[derive(Debug, thiserror::Error)]
pub enum GenerateError {
    /// Two prompts in flight have the same ordinal, which keys their randomness (law N2) and identifies
    /// their group.
    #[error(
        "two prompts in flight have the ordinal {ordinal}: take prompts from a `DataBuffer`, which numbers them, or set `Prompt::ordinal`"
    )]
    SameOrdinal {
        /// The ordinal.
        ordinal: u64,
    },
    /// The generator failed, now or in an earlier call.
    #[error("the generator failed: {0}")]
    Failed(Arc<RunError>),
    /// The generator ended without an error.
    #[error("the generator ended")]
    Ended,
}

/// Generator that runs until it is dropped, made by [`Generator::start`].
///
/// It generates under the newest weights of its edge. Dropping it stops all samples in flight and joins
/// its threads.
pub struct RunningGenerator {
    prompts: mpsc::Sender<Prompt>,
    calls: Arc<Mutex<Calls>>,
    control: Control,
    thread: Option<JoinHandle<()>>,
}

/// Prompts of all calls.
#[derive(Default)]
struct Calls {
    /// Receivers of the requested groups, by ordinal. The ordinal of a prompt that the generator has is
    /// taken until its group ends, even if the call is dropped.
    requested: HashMap<u64, oneshot::Sender<Group>>,
    /// Set when the generator has ended, with its failure.
    ended: Option<Option<Arc<RunError>>>,
}

impl<E: TokenEngine> Generator<E> {
    /// Starts the generator on separate threads, without a graph.
    ///
    /// Errors: settings that a graph would reject, or no thread to run on.
    pub fn start(self) -> Result<RunningGenerator, RunError> {
        let calls = Arc::new(Mutex::new(Calls::default()));
        let (prompts, requests) = mpsc::channel(1);
        let mut flow = Flow::new("generate");
        let start = flow.source("start", from_iter([()]));
        let requested = flow.stage("prompts", start, Requests { requests, calls: Arc::clone(&calls) });
        let groups = flow.stage("generate", requested, self);
        let delivers = Arc::clone(&calls);
        flow.sink("deliver", groups, move |group: Group| {
            if let Some(reply) = delivers.lock().requested.remove(&group.id()) {
                // A dropped call has no receiver.
                drop(reply.send(group));
            }
        });
        flow.check()?;
        let (control, ends) = (flow.handle(), Arc::clone(&calls));
        let run = move || {
            let failure = flow.run(Until::finished()).err().map(Arc::new);
            *ends.lock() = Calls { ended: Some(failure), ..Calls::default() };
        };
        let thread = std::thread::Builder::new().name("generate".into()).spawn(run).map_err(RunError::Start)?;
        Ok(RunningGenerator { prompts, calls, control, thread: Some(thread) })
    }
}

impl RunningGenerator {
    /// Samples a group of rollouts for each prompt, and returns the groups in the order of `prompts`.
    ///
    /// Calls may overlap and then share the engine's slots. The seed, the weights and a prompt's ordinal
    /// determine its completions (law N2).
    ///
    /// Cancel-safe: a dropped call submits no further prompts, and its groups are discarded when they end.
    pub async fn generate_batch(&self, prompts: &[Prompt]) -> Result<Vec<Group>, GenerateError> {
        let (mut unsent, mut replies) = (Unsent { prompts: &[], calls: &self.calls }, Vec::with_capacity(prompts.len()));
        for (at, prompt) in prompts.iter().enumerate() {
            let (reply, group) = oneshot::channel();
            let mut calls = self.calls.lock();
            calls.check()?;
            if calls.requested.contains_key(&prompt.ordinal) {
                return Err(GenerateError::SameOrdinal { ordinal: prompt.ordinal });
            }
            calls.requested.insert(prompt.ordinal, reply);
            unsent.prompts = &prompts[..=at];
            replies.push(group);
        }
        while let Some((prompt, rest)) = unsent.prompts.split_first()
            && self.prompts.send(prompt.clone()).await.is_ok()
        {
            unsent.prompts = rest;
        }
        let mut groups = Vec::with_capacity(prompts.len());
        for group in replies {
            match group.await {
                Ok(group) => groups.push(group),
                Err(_) => return Err(self.calls.lock().check().err().unwrap_or(GenerateError::Ended)),
            }
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
    /// Returns the reason if the generator has ended.
    fn check(&self) -> Result<(), GenerateError> {
        match &self.ended {
            None => Ok(()),
            Some(failure) => Err(failure.clone().map_or(GenerateError::Ended, GenerateError::Failed)),
        }
    }
}

/// Prompts of a call that are not sent yet. Dropping it frees their ordinals.
struct Unsent<'a> {
    prompts: &'a [Prompt],
    calls: &'a Mutex<Calls>,
}

impl Drop for Unsent<'_> {
    fn drop(&mut self) {
        let mut calls = self.calls.lock();
        self.prompts.iter().for_each(|prompt| drop(calls.requested.remove(&prompt.ordinal)));
    }
}

/// Stage that passes on the prompts of calls.
struct Requests {
    requests: mpsc::Receiver<Prompt>,
    calls: Arc<Mutex<Calls>>,
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
            // The receiver of a dropped call is closed.
            let is_wanted = |calls: &Calls| calls.requested.get(&prompt.ordinal).is_some_and(|reply| !reply.is_closed());
            if is_wanted(&self.calls.lock()) {
                io.send(prompt).await?;
            } else {
                self.calls.lock().requested.remove(&prompt.ordinal);
            }
        }
    }
}
