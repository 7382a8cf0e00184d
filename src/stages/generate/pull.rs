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
#[derive(Debug)]
pub struct RunningGenerator {
    prompts: mpsc::Sender<(u64, Prompt)>,
    calls: Arc<Mutex<Calls>>,
    control: Control,
    thread: Option<JoinHandle<()>>,
}

impl<E: TokenEngine> Generator<E> {
    /// Starts the generator on separate threads, without a graph.
    ///
    /// Errors: settings that a graph would reject, or no thread to run on.
    pub fn start(self) -> Result<RunningGenerator, RunError> {
        let calls = Arc::new(Mutex::new(Calls::default()));
        let (prompts, requested) = mpsc::channel(1);
        let mut flow = Flow::new("generate");
        let start = flow.source("start", from_iter([()]));
        let requested = flow.stage("prompts", start, RequestedPrompts { requested, calls: Arc::clone(&calls) });
        let groups = flow.stage("generate", requested, self);
        let delivers = Arc::clone(&calls);
        flow.sink("deliver", groups, move |group: Group| delivers.lock().deliver(group));
        flow.check()?;
        let (control, ends) = (flow.handle(), Arc::clone(&calls));
        let run = move || {
            let ended = flow.run(Until::finished());
            ends.lock().end(ended.err().map(Arc::new));
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
        if prompts.is_empty() {
            return Ok(Vec::new());
        }
        let (reply, groups) = oneshot::channel();
        let call = Call { id: self.calls.lock().open(prompts, reply)?, calls: &self.calls };
        for prompt in prompts {
            if self.prompts.send((call.id, prompt.clone())).await.is_err() {
                break;
            }
        }
        let groups = groups.await;
        drop(call);
        groups.map_err(|_| self.calls.lock().why_ended())
    }
}

impl Drop for RunningGenerator {
    fn drop(&mut self) {
        self.control.stop();
        // The thread does not panic: the flow catches panics of its stages.
        self.thread.take().into_iter().for_each(|thread| drop(thread.join()));
    }
}

/// One call of `generate_batch`, closed when its future is dropped.
struct Call<'a> {
    id: u64,
    calls: &'a Mutex<Calls>,
}

impl Drop for Call<'_> {
    fn drop(&mut self) {
        self.calls.lock().close(self.id);
    }
}

/// Calls that wait for groups.
#[derive(Debug, Default)]
struct Calls {
    opened: u64,
    open: HashMap<u64, Waiting>,
    /// Requested prompts by ordinal.
    requested: HashMap<u64, Requested>,
    ended: Option<Option<Arc<RunError>>>,
}

#[derive(Debug)]
struct Waiting {
    groups: Vec<Option<Group>>,
    reply: oneshot::Sender<Vec<Group>>,
}

/// A prompt of a call.
#[derive(Debug)]
struct Requested {
    call: u64,
    place: usize,
    /// If true, the generator has the prompt. Its ordinal is then taken until its group ends, even if
    /// the call is dropped.
    in_flight: bool,
}

impl Calls {
    fn open(&mut self, prompts: &[Prompt], reply: oneshot::Sender<Vec<Group>>) -> Result<u64, GenerateError> {
        if self.ended.is_some() {
            return Err(self.why_ended());
        }
        self.opened += 1;
        let id = self.opened;
        for (place, prompt) in prompts.iter().enumerate() {
            let ordinal = prompt.ordinal;
            if self.requested.contains_key(&ordinal) {
                self.close(id);
                return Err(GenerateError::SameOrdinal { ordinal });
            }
            self.requested.insert(ordinal, Requested { call: id, place, in_flight: false });
        }
        self.open.insert(id, Waiting { groups: prompts.iter().map(|_| None).collect(), reply });
        Ok(id)
    }

    fn close(&mut self, id: u64) {
        self.open.remove(&id);
        self.requested.retain(|_, requested| requested.call != id || requested.in_flight);
    }

    /// Marks a prompt as submitted. Returns false if its call was dropped.
    fn submit(&mut self, call: u64, prompt: &Prompt) -> bool {
        let requested = self.requested.get_mut(&prompt.ordinal).filter(|requested| requested.call == call);
        requested.map(|requested| requested.in_flight = true).is_some()
    }

    fn deliver(&mut self, group: Group) {
        let Some(requested) = self.requested.remove(&group.id()) else { return };
        let Some(call) = self.open.get_mut(&requested.call) else { return };
        call.groups[requested.place] = Some(group);
        if call.groups.iter().all(Option::is_some)
            && let Some(call) = self.open.remove(&requested.call)
        {
            // A dropped call has no receiver.
            drop(call.reply.send(call.groups.into_iter().flatten().collect()));
        }
    }

    fn end(&mut self, why: Option<Arc<RunError>>) {
        *self = Calls { ended: Some(why), ..Calls::default() };
    }

    fn why_ended(&self) -> GenerateError {
        self.ended.clone().flatten().map_or(GenerateError::Ended, GenerateError::Failed)
    }
}

/// Stage that passes on the prompts of calls.
struct RequestedPrompts {
    requested: mpsc::Receiver<(u64, Prompt)>,
    calls: Arc<Mutex<Calls>>,
}

impl AsyncStage for RequestedPrompts {
    type In = ();
    type Out = Prompt;

    async fn run(&mut self, io: &mut AsyncIo<(), Prompt>) -> Result<(), StageError> {
        loop {
            let requested = tokio::select! {
                requested = self.requested.recv() => requested,
                () = io.stopped() => None,
            };
            let Some((call, prompt)) = requested else { return Ok(()) };
            let wanted = self.calls.lock().submit(call, &prompt);
            if wanted {
                io.send(prompt).await?;
            }
        }
    }
}
