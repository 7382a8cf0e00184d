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
use crate::model::{ModelConfig, threads_of_engine};
use crate::net::Server;
use crate::observe::Metrics;
use crate::train::Policy;
use crate::weights::Store;
pub use tinker::{TinkerModel, TinkerSettings};
pub use token::{BearerToken, authenticated};

/// Settings of a [`ModelServer`].
#[derive(Clone, Debug)]
pub struct ServeConfig {
    /// Name of the model in `/v1/models` and in requests.
    pub name: String,
    /// Folder of the model, as `/model_info` reports it.
    pub folder: PathBuf,
    /// Largest number of samples that are computed together, at least one.
    pub slots: usize,
    /// Room for prompts and completions of earlier requests, which are remembered, in slots' worth of cache memory;
    /// 0 remembers none.
    pub prefix_cache: usize,
    /// Most tokens of the cache; `None`: what all slots take at their longest.
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
    /// Token that every request but `GET /health` must carry; `None` to require none.
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
        let metrics = Metrics::new();
        let threads = config.threads_of(policy.config());
        let ServeConfig { slots, prefix_cache, cache_tokens, draft_tokens, seed, .. } = config;
        let setup = worker::Setup { slots: slots.max(1), prefix_cache, cache_tokens, draft_tokens, seed };
        let (shared, commands) = shared::Shared::new(&policy, config, metrics.clone())?;
        let shared = Arc::new(shared);
        let (weak, own) = (Arc::downgrade(&shared), policy.clone());
        let work = move || {
            crate::model::use_threads(threads);
            let ended = caught(|| worker::Worker::new(&policy, setup, metrics, commands).run());
            if let (Err(panic), Some(shared)) = (ended, weak.upgrade()) {
                tracing::error!("the engine's thread panicked: {panic}");
                shared.failed(panic);
            }
        };
        let engine = std::thread::Builder::new().name("engine".to_owned()).spawn(work)?;
        let tinker = shared.config.tinker.clone();
        let tinker = tinker.map(|settings| tinker::Tinker::open(&shared, &own, &settings)).transpose()?;
        let server = Server::start(listener, routes::routes(&shared, tinker.as_ref()))?;
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
