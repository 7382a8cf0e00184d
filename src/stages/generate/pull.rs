//! Generation that a hand-written loop asks for: a [`Generator`] on threads of its own, and groups by `await`.

use std::collections::HashMap;
use std::sync::Arc;
use std::thread::JoinHandle;

use parking_lot::Mutex;
use tokio::sync::{mpsc, oneshot};

use super::Generator;
use crate::data::{Group, Prompt};
use crate::engine::TokenEngine;
use crate::flow::{AsyncIo, AsyncStage, Control, Flow, RunError, StageError, Until, from_iter};

/// Why a batch was not generated.
#[derive(Debug, thiserror::Error)]
pub enum GenerateError {
    /// Two prompts in flight have one ordinal. It keys their randomness (law N2) and names their group.
    #[error(
        "two prompts in flight have the ordinal {ordinal}: take prompts from a `DataBuffer`, which numbers them, or set `Prompt::ordinal`"
    )]
    SameOrdinal {
        /// Which.
        ordinal: u64,
    },
    /// The generator failed, now or in an earlier call.
    #[error("the generator failed: {0}")]
    Failed(Arc<RunError>),
    /// The generator ended without an error.
    #[error("the generator ended")]
    Ended,
}

/// A generator that runs until it is dropped. [`Generator::start`] makes it.
///
/// It generates with the newest weights of its edge. Dropping it stops the generation of what is in flight and joins its threads.
#[derive(Debug)]
pub struct RunningGenerator {
    prompts: mpsc::Sender<(u64, Prompt)>,
    calls: Arc<Mutex<Calls>>,
    control: Control,
    thread: Option<JoinHandle<()>>,
}

impl<E: TokenEngine> Generator<E> {
    /// Starts the generator on threads of its own, without a graph: [`RunningGenerator::generate_batch`] asks it.
    ///
    /// Errors: settings that a graph would refuse, or a machine without threads.
    pub fn start(self) -> Result<RunningGenerator, RunError> {
        let calls = Arc::new(Mutex::new(Calls::default()));
        let (prompts, asked) = mpsc::channel(1);
        let mut flow = Flow::new("generate");
        let start = flow.source("start", from_iter([()]));
        let asked = flow.stage("prompts", start, AskedPrompts { asked, calls: Arc::clone(&calls) });
        let groups = flow.stage("generate", asked, self);
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
    /// Samples a group of completions for each prompt and returns the groups in the order of `prompts`, when the last completion has ended.
    ///
    /// Calls may overlap: their completions share the engine's slots. A prompt's completions depend on the seed, the weights and the
    /// prompt's ordinal (law N2). So the same ordinal asked again under the same weights gives the same completions.
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
        // It ends without a panic of its own: the flow catches those of its stages.
        self.thread.take().into_iter().for_each(|thread| drop(thread.join()));
    }
}

/// One call of `generate_batch`, which its future's end closes.
struct Call<'a> {
    id: u64,
    calls: &'a Mutex<Calls>,
}

impl Drop for Call<'_> {
    fn drop(&mut self) {
        self.calls.lock().close(self.id);
    }
}

/// The calls that wait for groups.
#[derive(Debug, Default)]
struct Calls {
    opened: u64,
    open: HashMap<u64, Waiting>,
    /// By ordinal.
    asked: HashMap<u64, Asked>,
    ended: Option<Option<Arc<RunError>>>,
}

#[derive(Debug)]
struct Waiting {
    groups: Vec<Option<Group>>,
    reply: oneshot::Sender<Vec<Group>>,
}

/// A prompt that a call asked for.
#[derive(Debug)]
struct Asked {
    call: u64,
    place: usize,
    /// Whether the generator has it. Then its ordinal is taken until its group ends, even if the call is dropped.
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
            if self.asked.contains_key(&ordinal) {
                self.close(id);
                return Err(GenerateError::SameOrdinal { ordinal });
            }
            self.asked.insert(ordinal, Asked { call: id, place, in_flight: false });
        }
        self.open.insert(id, Waiting { groups: prompts.iter().map(|_| None).collect(), reply });
        Ok(id)
    }

    fn close(&mut self, id: u64) {
        self.open.remove(&id);
        self.asked.retain(|_, asked| asked.call != id || asked.in_flight);
    }

    /// Marks a prompt as submitted. False if its call was dropped.
    fn submit(&mut self, call: u64, prompt: &Prompt) -> bool {
        let asked = self.asked.get_mut(&prompt.ordinal).filter(|asked| asked.call == call);
        asked.map(|asked| asked.in_flight = true).is_some()
    }

    fn deliver(&mut self, group: Group) {
        let Some(asked) = self.asked.remove(&group.id()) else { return };
        let Some(call) = self.open.get_mut(&asked.call) else { return };
        call.groups[asked.place] = Some(group);
        if call.groups.iter().all(Option::is_some)
            && let Some(call) = self.open.remove(&asked.call)
        {
            // A call that was dropped in between has no receiver.
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

/// Passes on the prompts that calls ask for.
struct AskedPrompts {
    asked: mpsc::Receiver<(u64, Prompt)>,
    calls: Arc<Mutex<Calls>>,
}

impl AsyncStage for AskedPrompts {
    type In = ();
    type Out = Prompt;

    async fn run(&mut self, io: &mut AsyncIo<(), Prompt>) -> Result<(), StageError> {
        loop {
            let asked = tokio::select! {
                asked = self.asked.recv() => asked,
                () = io.stopped() => None,
            };
            let Some((call, prompt)) = asked else { return Ok(()) };
            let wanted = self.calls.lock().submit(call, &prompt);
            if wanted {
                io.send(prompt).await?;
            }
        }
    }
}
