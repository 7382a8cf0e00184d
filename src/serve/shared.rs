//! What the routes share: the model's limits, the channel to the engine, the queue's bound, and the
//! served weights.

use std::collections::BTreeMap;
use std::io;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Instant;

use parking_lot::Mutex;
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, oneshot};

use super::ServeConfig;
use super::control::{Adapters, Prepared, Sums, blocking};
use super::pulls::Pulls;
use super::receive::Receiver;
use super::reply::Refusal;
use super::sampling::OneOrMany;
use super::sleep::Asleep;
use super::ticket::Ticket;
use super::uploads::Uploads;
use super::worker::{AdapterName, Command, Job, Score, TextScores};
use crate::data::{DataError, Tokenizer};
use crate::engine::SamplingParams;
use crate::env::protocol;
use crate::model::{Compute, FrozenWeights, ModelConfig};
use crate::observe::Metrics;
use crate::train::Policy;
use crate::util::untrusted;

/// Label of weights without one, as SGLang reports it.
pub(super) const UNNAMED: &str = "default";

/// Bytes of a text per token of the context, beyond which it is refused before it is encoded. The longest
/// tokens of large vocabularies are 128 blanks.
const BYTES_PER_TOKEN: usize = 128;

/// Most stop strings of a request, which are searched after each token.
const STOPS: usize = 64;

/// Most bytes of these together.
const STOP_BYTES: usize = 64 << 10;

/// Most stop tokens of a request, which are compared with each token.
const STOP_TOKENS: usize = 1024;

/// An adapter that requests may name.
#[derive(Clone)]
pub(super) struct LoadedAdapter {
    pub folder: PathBuf,
    /// The adapter over the served weights.
    pub weights: Arc<FrozenWeights>,
}

/// What the server serves now.
pub(super) struct Served {
    pub label: Arc<str>,
    pub folder: PathBuf,
    pub weights: Arc<FrozenWeights>,
    pub sums: Sums,
    pub adapters: Adapters,
    pub paused: bool,
    pub asleep: Asleep,
}

pub(super) struct Shared {
    pub config: ServeConfig,
    /// Id of this process, by which clients notice a restart.
    pub instance: String,
    pub model: ModelConfig,
    pub compute: Compute,
    pub tokenizer: Arc<Tokenizer>,
    pub metrics: Metrics,
    pub uploads: Uploads,
    pub pulls: Option<Pulls>,
    pub served: Mutex<Served>,
    /// Weights of the next update.
    pub prepared: Mutex<Option<Prepared>>,
    /// Weights that trainers broadcast.
    pub receiver: Mutex<Receiver>,
    /// Held while weights or adapters change, so that changes take effect in their order.
    pub changing: tokio::sync::Mutex<()>,
    commands: UnboundedSender<Command>,
    /// A permit for each sample that waits or is computed.
    room: Arc<Semaphore>,
    jobs: AtomicU64,
    failure: OnceLock<String>,
}

/// What a request asks of the engine.
pub(super) struct Ask {
    /// Name of the request, or one of each prompt.
    pub rid: Option<OneOrMany<String>>,
    pub prompts: Vec<Arc<[u32]>>,
    pub samples: u32,
    pub params: SamplingParams,
    pub seed: Option<u64>,
    pub adapter: AdapterName,
    /// Whether the experts of tokens are wanted.
    pub routes: bool,
}

impl Shared {
    pub fn new(policy: &Policy, config: ServeConfig, metrics: Metrics) -> io::Result<(Self, UnboundedReceiver<Command>)> {
        let (commands, receiver) = unbounded_channel();
        let (folder, weights, adapters) = (config.folder.clone(), policy.frozen(), BTreeMap::new());
        let shared = Shared {
            room: Arc::new(Semaphore::new(config.slots.max(1) + config.max_queue)),
            uploads: Uploads::new(&config.uploads, policy.config())?,
            pulls: config.store.as_ref().map(|store| Pulls::new(store, &config.uploads)).transpose()?,
            config,
            instance: protocol::unique(),
            model: policy.config().clone(),
            compute: policy.compute(),
            tokenizer: policy.tokenizer().clone(),
            metrics,
            served: Mutex::new(Served {
                label: UNNAMED.into(),
                folder,
                weights,
                sums: Sums::default(),
                adapters,
                paused: false,
                asleep: Asleep::default(),
            }),
            prepared: Mutex::default(),
            receiver: Mutex::default(),
            changing: tokio::sync::Mutex::default(),
            commands,
            jobs: AtomicU64::new(0),
            failure: OnceLock::new(),
        };
        Ok((shared, receiver))
    }

    /// Longest prompt and completion together, in tokens.
    pub fn context(&self) -> usize {
        let most = self.config.context.unwrap_or(self.model.max_positions);
        self.config.cache_tokens.map_or(most, |tokens| tokens.min(most))
    }

    /// Records why the engine ended.
    pub fn failed(&self, why: String) {
        // The first reason stays.
        drop(self.failure.set(why));
    }

    pub fn failure(&self) -> Option<String> {
        self.failure.get().cloned()
    }

    /// Sends a command. If the engine has ended, its reply never comes.
    pub fn send(&self, command: Command) {
        drop(self.commands.send(command));
    }

    /// Sends a command and waits for its reply.
    pub async fn call<T>(&self, command: impl FnOnce(oneshot::Sender<T>) -> Command) -> Result<T, Refusal> {
        let (reply, done) = oneshot::channel();
        self.send(command(reply));
        done.await.map_err(|_| self.gone())
    }

    /// Error of a request that the engine did not finish.
    pub fn gone(&self) -> Refusal {
        let why = self.failure().unwrap_or_else(|| "the server is stopping".to_owned());
        Refusal::new(503, format!("the engine has ended: {why}"))
    }

    /// Finds an adapter. `None` and the model's own name are the model without one.
    pub fn adapter(&self, name: Option<&str>) -> Option<AdapterName> {
        match name.filter(|name| *name != self.config.name) {
            None => Some(None),
            Some(name) => self.served.lock().adapters.get_key_value(name).map(|(name, _)| Some(name.clone())),
        }
    }

    /// Checks a prompt and `new` more tokens against vocabulary and context.
    pub fn check(&self, prompt: &[u32], new: usize) -> Result<(), Refusal> {
        if prompt.is_empty() {
            return Err(Refusal::bad("the prompt is empty; it needs at least one token"));
        }
        let vocabulary = self.model.vocab_size;
        if let Some(token) = prompt.iter().find(|token| **token as usize >= vocabulary) {
            return Err(Refusal::bad(format!("token {token} is beyond the model's vocabulary of {vocabulary}")));
        }
        let (there, context) = (prompt.len(), self.context());
        match there.checked_add(new).is_some_and(|all| all <= context) {
            true => Ok(()),
            false => Err(Refusal::bad(format!(
                "{there} tokens and up to {new} more exceed the context of {context} tokens; shorten the prompt or the completion"
            ))),
        }
    }

    /// Most new tokens of a request for `asked` ones that also asks for the scores of `prompts`: 0 if these
    /// fill the context, so that they are scored though there is no room.
    pub fn new_tokens(&self, asked: usize, prompts: &[Arc<[u32]>]) -> usize {
        let full = prompts.iter().all(|prompt| prompt.len() == self.context());
        if full { 0 } else { asked }
    }

    /// Tokens of texts. They are encoded on another thread, so that other requests are answered meanwhile.
    pub async fn encode(&self, texts: Vec<String>, special_tokens: bool) -> Result<Vec<Arc<[u32]>>, Refusal> {
        self.check_count(texts.len())?;
        let context = self.context();
        if let Some(text) = texts.iter().find(|text| text.len() > context.saturating_mul(BYTES_PER_TOKEN)) {
            let bytes = text.len();
            let why = format!("a text of {bytes} bytes exceeds the context of {context} tokens; shorten the prompt");
            return Err(Refusal::bad(why));
        }
        let tokenizer = self.tokenizer.clone();
        let encode = move |text: &String| match special_tokens {
            true => tokenizer.encode(text),
            false => tokenizer.encode_bare(text),
        };
        let encoded =
            move || texts.iter().map(|text| encode(text).map(Arc::from)).collect::<Result<Vec<Arc<[u32]>>, DataError>>();
        blocking(move || encoded().map_err(|error| error.to_string())).await
    }

    /// Checks a number of completions against the room for all, and returns it.
    fn check_count(&self, samples: usize) -> Result<u32, Refusal> {
        let most = self.most_samples();
        u32::try_from(samples).ok().filter(|_| samples <= most).ok_or_else(|| {
            Refusal::bad(format!("the request asks for {samples} completions; this server takes {most} at most (--max-queue)"))
        })
    }

    /// Most completions that are computed or wait.
    fn most_samples(&self) -> usize {
        self.config.slots.max(1) + self.config.max_queue
    }

    fn admit(&self, samples: usize) -> Result<OwnedSemaphorePermit, Refusal> {
        let count = self.check_count(samples)?;
        self.room.clone().try_acquire_many_owned(count).map_err(|_| {
            let most = self.most_samples();
            Refusal::new(429, format!("the queue is full: {most} completions are computed or wait; retry later"))
        })
    }

    /// Starts a request. Without new tokens, its completions have ended already.
    pub fn submit(self: &Arc<Self>, ask: Ask) -> Result<Ticket, Refusal> {
        let Ask { rid, prompts, samples, params, seed, adapter, routes } = ask;
        if prompts.is_empty() || samples == 0 {
            return Err(Refusal::bad("the request asks for no completion: a prompt is missing, or `n` is 0"));
        }
        for prompt in &prompts {
            self.check(prompt, params.max_new_tokens)?;
        }
        let (stops, bytes) = (params.stop.len(), params.stop.iter().map(String::len).sum::<usize>());
        if stops > STOPS || bytes > STOP_BYTES {
            let most = format!("at most {STOPS} are possible, with {STOP_BYTES} bytes together");
            return Err(Refusal::bad(format!("`stop` has {stops} strings with {bytes} bytes; {most}")));
        }
        let stops = params.stop_token_ids.len();
        if stops > STOP_TOKENS {
            return Err(Refusal::bad(format!("`stop_token_ids` has {stops} tokens; at most {STOP_TOKENS} are possible")));
        }
        let count = prompts.len() * samples as usize;
        let none = params.max_new_tokens == 0;
        SamplingParams { max_new_tokens: params.max_new_tokens.max(1), ..params.clone() }
            .check_for(self.model.vocab_size)
            .map_err(|error| Refusal::bad(error.to_string()))?;
        self.served.lock().asleep.check()?;
        let permit = self.admit(count)?;
        let (id, (pieces, news)) = (self.jobs.fetch_add(1, Ordering::Relaxed), unbounded_channel());
        let params = Arc::new(params);
        let ticket = Ticket::new(self.clone(), id, news, permit, prompts.clone(), samples, params.clone());
        if !none {
            let asked = Instant::now();
            self.send(Command::Generate(Job { id, rid, prompts, samples, params, seed, adapter, routes, asked, pieces }));
        }
        Ok(ticket)
    }

    /// Log-probability of each token but the first. The caller holds a ticket, whose room it uses.
    pub async fn score(&self, tokens: &[u32], adapter: &AdapterName) -> Result<Vec<f32>, Refusal> {
        Ok(self.score_top(tokens, adapter, 0).await?.log_probs)
    }

    /// The same, and the `k` likeliest tokens in their places.
    pub async fn score_top(&self, tokens: &[u32], adapter: &AdapterName, k: usize) -> Result<TextScores, Refusal> {
        self.check(tokens, 0)?;
        if tokens.len() == 1 {
            return Ok(TextScores::default());
        }
        self.served.lock().asleep.check()?;
        let (tokens, adapter) = (tokens.to_vec(), adapter.clone());
        self.call(|reply| Command::Score(Score { tokens, adapter, k, reply })).await?.map_err(Refusal::bad)
    }
}

/// Error of a request that names an unknown adapter or model.
pub(super) fn unknown(status: u16, name: &str) -> Refusal {
    let name = untrusted::line_of(name, 100);
    Refusal::new(status, format!("the LoRA adapter {name} is not loaded; load it with /load_lora_adapter"))
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt;
    use tokio::runtime::Builder;
    use tokio::task::spawn_blocking;

    use super::super::tests::{config, policy};
    use super::*;

    fn shared(state: &std::path::Path) -> Arc<Shared> {
        Arc::new(Shared::new(&policy(), config(state), Metrics::new()).unwrap().0)
    }

    #[test]
    fn texts_are_encoded_on_another_thread_than_requests_are_answered_on() {
        let state = tempfile::tempdir().unwrap();
        let shared = shared(state.path());
        let runtime = Builder::new_current_thread().max_blocking_threads(1).build().unwrap();
        runtime.block_on(async {
            // The only other thread is busy.
            let (release, held) = std::sync::mpsc::channel::<()>();
            let busy = spawn_blocking(move || held.recv().is_err());
            let mut encoded = Box::pin(shared.encode(vec!["12".to_owned(), "3".to_owned()], false));
            assert!(encoded.as_mut().now_or_never().is_none());
            drop(release);
            assert!(busy.await.unwrap());
            let expected: [&[u32]; 2] = [&[5, 6], &[7]];
            assert_eq!(encoded.await.unwrap(), expected.map(Arc::<[u32]>::from));
        });
    }

    #[test]
    fn a_text_that_no_tokens_of_the_context_can_hold_is_refused_before_it_is_encoded() {
        let state = tempfile::tempdir().unwrap();
        let shared = shared(state.path());
        let most = shared.context() * BYTES_PER_TOKEN;
        let refused = |texts: Vec<String>| shared.encode(texts, false).now_or_never().unwrap().unwrap_err();
        let long = refused(vec!["1".to_owned(), "2".repeat(most + 1)]);
        assert!(long.message().contains(&format!("a text of {} bytes exceeds the context", most + 1)), "{long:?}");
        let many = refused(vec![String::new(); shared.most_samples() + 1]);
        assert!(many.message().contains("--max-queue"), "{many:?}");
    }

    #[test]
    fn more_stop_strings_than_can_be_searched_after_each_token_are_refused() {
        let state = tempfile::tempdir().unwrap();
        let shared = shared(state.path());
        let refused = |stop: Vec<String>| {
            let params = SamplingParams { stop, ..SamplingParams::default() };
            let prompts = vec![[5].into()];
            let ask = Ask { rid: None, prompts, samples: 1, params, seed: None, adapter: None, routes: false };
            shared.submit(ask).err().map(|refusal| refusal.message().to_owned())
        };
        assert_eq!(refused(vec!["1".to_owned(); STOPS]), None);
        for (stop, which) in [(vec!["1".to_owned(); STOPS + 1], "65 strings"), (vec!["1".repeat(STOP_BYTES + 1)], "65537 bytes")]
        {
            let why = refused(stop).unwrap();
            assert!(why.contains("`stop`") && why.contains(which) && why.contains("at most 64"), "{why}");
        }
    }
}
