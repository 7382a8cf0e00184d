//! The local engine as an HTTP server, `rollflow serve`, in the dialects of SGLang and OpenAI.
//!
//! One thread, `engine`, owns the [`LocalEngine`](crate::engine::LocalEngine): requests of all connections
//! are batched continuously. Of a prompt that begins as a remembered sequence does, only the rest is
//! computed. Requests reach it by a channel, and tokens return by a channel for each request. A request
//! that its client leaves is cancelled. Weights and adapters are read on another thread before they are
//! installed between two tokens.
//!
//! Laws: D1 and D3 (tokens in, tokens out, each with its log-probability and the label of its
//! weights), F1 (the queue is bounded; a full one is reported as status 429), V5 (a pause mode
//! decides what happens to caches and work in flight).
//!
//! docs/reference/protocols.md has the routes.

mod cache_size;
mod control;
mod generate;
mod openai;
mod pulls;
mod receive;
mod reply;
mod routes;
mod sampling;
mod shared;
mod sleep;
mod ticket;
mod tinker;
mod token;
mod uploads;
mod worker;

use std::io;
use std::net::{SocketAddr, TcpListener};
use std::path::PathBuf;
use std::sync::Arc;
use std::thread::JoinHandle;

use crate::flow::caught;
use crate::model::{FrozenWeights, ModelConfig, threads_of_engine};
use crate::net::{self, Server};
use crate::observe::Metrics;
use crate::train::Policy;
use crate::weights::Store;

pub use tinker::{TinkerModel, TinkerSettings};
pub use token::{BearerToken, authenticated};

/// Connections that requests which wait leave for control.
const CONTROL_CONNECTIONS: usize = 64;

/// Settings of a [`ModelServer`].
#[derive(Clone, Debug)]
pub struct ServeConfig {
    /// Name of the model in `/v1/models` and in requests.
    pub name: String,
    /// Folder of the model, as `/model_info` reports it.
    pub folder: PathBuf,
    /// Largest number of samples that are computed together, at least one.
    pub slots: usize,
    /// Room for prompts and completions of earlier requests, which are remembered, in slots' worth of cache
    /// memory; 0 remembers none.
    pub prefix_cache: usize,
    /// Most tokens of the cache; `None`: what all slots take at their longest, or what fits the memory that is
    /// free next to the weights.
    pub cache_tokens: Option<usize>,
    /// Longest draft of a completion's next tokens from its own text; 0 drafts none.
    pub draft_tokens: usize,
    /// Largest number of samples that wait for a slot.
    pub max_queue: usize,
    /// CPU threads of the engine, at least one; `None`: one for each four million parameters, and at most the
    /// machine's.
    pub threads: Option<usize>,
    /// Longest prompt and completion together, in tokens; `None` for the model's limit.
    pub context: Option<usize>,
    /// Seed of requests without one.
    pub seed: u64,
    /// Folder for weights that clients send; they are removed when the server ends.
    pub uploads: PathBuf,
    /// Store of a run, whose versions requests may name instead of a folder; they are pulled to a
    /// folder in `uploads`.
    pub store: Option<Store>,
    /// The Tinker API, if it is served, too.
    pub tinker: Option<TinkerSettings>,
    /// Token that every request but `GET /health` must carry; `None` to require none. Without one, a server
    /// on a loopback address answers only requests for `localhost` or an IP address.
    pub token: Option<BearerToken>,
}

impl ServeConfig {
    fn threads_of(&self, model: &ModelConfig) -> usize {
        self.threads.map_or_else(|| threads_of_engine(model), |threads| threads.max(1))
    }
}

/// Errors of [`ModelServer::start`] and of tokens.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    /// The machine gives no thread or socket.
    #[error("the server cannot start: {0}")]
    Io(#[from] io::Error),
    /// A token that cannot be used.
    #[error("the token in {from} {problem}")]
    Token {
        /// File or environment variable.
        from: String,
        /// Reason.
        problem: String,
    },
    /// A context longer than the model's.
    #[error("a context of {asked} tokens exceeds the model's {most} positions; lower it")]
    Context {
        /// Requested length, in tokens.
        asked: usize,
        /// Positions of the model.
        most: usize,
    },
}

/// A running server of one model. Dropping it cuts all connections and joins the engine's thread.
pub struct ModelServer {
    /// Dropped before the engine's thread is joined.
    server: Option<Server>,
    shared: Arc<shared::Shared>,
    engine: Option<JoinHandle<()>>,
    address: SocketAddr,
}

impl ModelServer {
    /// Serves `policy` on `listener`, on its device and in its format. Adapters of the policy are
    /// merged. When this returns, connections are accepted.
    ///
    /// # Errors
    /// A context beyond the model's, or a machine without threads.
    pub fn start(policy: &Policy, listener: TcpListener, config: ServeConfig) -> Result<Self, ServeError> {
        let most = policy.config().max_positions;
        if let Some(asked) = config.context.filter(|context| *context > most) {
            return Err(ServeError::Context { asked, most });
        }
        let policy = policy.merged();
        // On its device once: engine, scores and all adapters share these numbers.
        let placed = caught(|| policy.weights().on(policy.compute())).map_err(io::Error::other)?;
        let placed = policy.with_weights(Arc::new(FrozenWeights::of_own(placed)));
        let cache_tokens = config.cache_tokens.or_else(|| cache_size::cache_tokens(&placed, &config));
        // Requests that wait hold connections, and control needs some.
        let room = net::most_connections().saturating_sub(CONTROL_CONNECTIONS + config.slots.max(1));
        if config.max_queue > room {
            let asked = config.max_queue;
            tracing::warn!("{room} completions may wait instead of {asked}: raise the limit on open files (ulimit -Hn)");
        }
        let config = ServeConfig { cache_tokens, max_queue: config.max_queue.min(room), ..config };
        let metrics = Metrics::new();
        let threads = config.threads_of(policy.config());
        let ServeConfig { slots, prefix_cache, cache_tokens, draft_tokens, seed, .. } = config;
        let setup = worker::Setup { slots: slots.max(1), prefix_cache, cache_tokens, draft_tokens, seed };
        let (shared, commands) = shared::Shared::new(&placed, config, metrics.clone())?;
        let shared = Arc::new(shared);
        let tinker = shared.config.tinker.clone();
        let of_tinker = tinker.map(|settings| (settings, [policy, placed.clone()]));
        let weak = Arc::downgrade(&shared);
        let work = move || {
            crate::model::use_threads(threads);
            let ended = caught(move || {
                let worker = worker::Worker::new(&placed, setup, metrics, commands);
                // A server that sleeps has no weights on its device.
                drop(placed);
                worker.run();
            });
            if let (Err(panic), Some(shared)) = (ended, weak.upgrade()) {
                tracing::error!("the engine's thread panicked: {panic}");
                shared.failed(panic);
            }
        };
        let engine = std::thread::Builder::new().name("engine".to_owned()).spawn(work)?;
        let tinker = of_tinker.map(|(settings, policies)| tinker::Tinker::open(&shared, policies, &settings)).transpose()?;
        let loopback = listener.local_addr()?.ip().is_loopback();
        let server = Server::start(listener, routes::routes(&shared, tinker.as_ref(), loopback))?;
        let address = server.address();
        Ok(ModelServer { server: Some(server), shared, engine: Some(engine), address })
    }

    /// Address; with port 0 requested, the assigned port.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Reason for which the engine ended, if it did: then every request fails.
    pub fn failure(&self) -> Option<String> {
        self.shared.failure()
    }

    /// Accepts no more connections and requests. Responses in progress continue; those that a pause
    /// holds end with what they have, because its end may never come.
    pub fn close(&self) {
        if self.shared.served.lock().paused {
            self.shared.send(worker::Command::Abort(None));
        }
        if let Some(server) = &self.server {
            server.close();
        }
    }

    /// Returns true if the server was closed and its last response has ended.
    pub fn has_ended(&self) -> bool {
        self.server.as_ref().is_none_or(Server::has_ended)
    }
}

impl Drop for ModelServer {
    fn drop(&mut self) {
        drop(self.server.take());
        self.shared.send(worker::Command::Stop);
        if let Some(engine) = self.engine.take() {
            drop(engine.join());
        }
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use axum::body::Bytes;
    use axum::extract::State;

    use super::*;
    use crate::data::Tokenizer;
    use crate::model::{Compute, Dtype, Lora, save_adapter};

    /// Of a small server, whose files are in `state`.
    pub(crate) fn config(state: &std::path::Path) -> ServeConfig {
        ServeConfig {
            name: "tiny".to_owned(),
            folder: state.to_owned(),
            slots: 4,
            prefix_cache: 2,
            cache_tokens: None,
            draft_tokens: 0,
            max_queue: 16,
            threads: Some(1),
            context: None,
            seed: 0,
            uploads: state.to_owned(),
            store: None,
            tinker: None,
            token: None,
        }
    }

    pub(crate) fn policy() -> Policy {
        let tokenizer = Tokenizer::characters("0123456789", 16).unwrap();
        Policy::random(ModelConfig::small(&tokenizer, 16, 1), tokenizer, 3).unwrap()
    }

    /// On a processor in another format than the model's, and on a GPU or its stand-in where there is one.
    #[test]
    fn adapters_share_the_served_weights_on_their_device_and_a_server_that_sleeps_frees_these() {
        let loaded = policy();
        let gpu = Compute::cuda(0, Dtype::Bf16);
        for compute in [Compute::cpu(Dtype::Bf16)].into_iter().chain(gpu.check().is_ok().then_some(gpu)) {
            let (policy, state) = (loaded.clone().computing(compute), tempfile::tempdir().unwrap());
            let server = ModelServer::start(&policy, TcpListener::bind("127.0.0.1:0").unwrap(), config(state.path())).unwrap();
            let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
            for (name, seed) in [("a", 1), ("b", 2)] {
                let lora = Lora::new(2, 4.0, &[Lora::ALL]).unwrap();
                let adapted = policy.weights().adapted(policy.config(), lora, seed);
                let folder = state.path().join(name);
                save_adapter(&folder, adapted.adapter.as_ref().unwrap()).unwrap();
                let body = Bytes::from(serde_json::json!({"lora_name": name, "lora_path": folder}).to_string());
                assert!(runtime.block_on(control::load_lora(State(server.shared.clone()), body)).is_ok(), "{name}");
            }
            let base = {
                let served = server.shared.served.lock();
                let base = served.weights.read().flat;
                assert_eq!((base.kind(), base.device()), compute.options());
                let shares = |adapter: &shared::LoadedAdapter| adapter.weights.read().flat.data_ptr() == base.data_ptr();
                assert_eq!(served.adapters.values().filter(|adapter| shares(adapter)).count(), 2);
                Arc::downgrade(&served.weights)
            };
            assert!(runtime.block_on(sleep::release(State(server.shared.clone()), Bytes::new())).is_ok());
            assert!(base.upgrade().is_none(), "the engine's thread holds them while it sleeps");
        }
    }
}
