//! `rollflow serve`: a model as an HTTP server.

use std::net::TcpListener;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use clap::Args;
use rollflow::flow::Interrupts;
use rollflow::observe::Console;
use rollflow::serve::{ModelServer, ServeConfig, TinkerSettings};
use rollflow::util::secrets::masked;
use rollflow::weights::{Store, check_address};

use super::dashboard::serve_page;
use super::listening::{TokenArgs, address};
use super::policies::{Computing, model_folder};
use super::{out, refused};
use crate::page::Powers;

/// Time between two looks at signals and at the engine.
const LOOK: Duration = Duration::from_millis(50);

/// Serve a model to trainers and other clients over HTTP, until Ctrl-C.
///
/// The server has SGLang's routes for generation, weights and adapters, and OpenAI's routes for
/// completions and chats. A run uses it with engine.kind = "rollflow" and its address in engine.urls.
#[derive(Args)]
#[command(after_help = "\
Examples:\n\
\x20 rollflow serve models/qwen2.5-0.5b-instruct\n\
\x20 rollflow serve runs/mine --listen 0.0.0.0:30000 --token-file token.txt --device cuda")]
pub struct Serve {
    /// A Hugging Face folder, a hub id, or a run, whose newest checkpoint is served.
    model: PathBuf,
    /// Address to listen at; port 0 takes a free port.
    #[arg(long, value_name = "HOST:PORT", default_value = "127.0.0.1:30000")]
    listen: String,
    #[command(flatten)]
    token: TokenArgs,
    /// Allow an address that other hosts can reach without a token: they, and web pages in their
    /// browsers, can then replace the weights and read folders of weights.
    #[arg(long)]
    without_token: bool,
    /// Name of the model in requests; by default that of its folder.
    #[arg(long)]
    name: Option<String>,
    /// Largest number of completions that are computed together.
    #[arg(long, value_name = "N", default_value_t = 32)]
    slots: usize,
    /// Largest number of completions that wait for a slot; further requests get status 429.
    #[arg(long, value_name = "N", default_value_t = 1024)]
    max_queue: usize,
    /// Room for prompts and completions of earlier requests, which are remembered, so that of a prompt that
    /// begins alike, as the next turn of a chat does, only the rest is computed; each takes the cache memory of
    /// a slot. 0 remembers none.
    #[arg(long, value_name = "N", default_value_t = 16, alias = "prompt-cache")]
    prefix_cache: usize,
    /// Most tokens of the cache of keys and values: by default what all slots take at their longest, or as many
    /// as the memory next to the weights has room for. Where it is full, the youngest completion waits, and
    /// continues later.
    #[arg(long, value_name = "TOKENS")]
    cache_tokens: Option<usize>,
    /// Longest draft of a completion's next tokens, taken from its own text and checked in one pass,
    /// as generate.draft_tokens; 0 drafts none.
    #[arg(long, value_name = "N", default_value_t = 0)]
    draft_tokens: usize,
    /// CPU threads of the engine, as generate.threads: by default one for a small model, and for larger
    /// ones up to all of the machine's.
    #[arg(long, value_name = "N")]
    threads: Option<usize>,
    /// Longest prompt and completion together, in tokens; by default the model's limit.
    #[arg(long, value_name = "TOKENS")]
    context_length: Option<usize>,
    /// Folder for weights that clients send: room for two versions. They are removed at the end. By
    /// default the system's folder for temporary files.
    #[arg(long, value_name = "DIR")]
    uploads: Option<PathBuf>,
    /// Store of a run, as in the recipe's store.url, or its address on a web server that lists its
    /// folders (http://host/run). POST /update_weights_from_disk may name it instead
    /// of a folder; the version is pulled to a folder in --uploads and verified by its checksums.
    #[arg(long, value_name = "URL")]
    store: Option<String>,
    /// PEM file of certificate authorities that the store is trusted by, in addition to the system's.
    #[arg(long, value_name = "FILE", requires = "store")]
    ca_file: Option<PathBuf>,
    /// Serve the Tinker API, too: clients train adapters over the model, and sample them.
    #[arg(long)]
    tinker: bool,
    /// Folder for models, weights and sampling sessions of the Tinker API. A server that starts on it
    /// again has them.
    #[arg(long, value_name = "DIR", default_value = "tinker-state", requires = "tinker")]
    state: PathBuf,
    /// Most models of the Tinker API at a time.
    #[arg(long, value_name = "N", default_value_t = 8, requires = "tinker")]
    max_models: usize,
    /// Address of a live page for a browser, with the models of the Tinker API as runs; port 0 takes a free
    /// port. It asks for the server's token.
    #[arg(long, value_name = "HOST:PORT", requires = "tinker")]
    page: Option<String>,
    /// Seed of requests without one.
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// Seconds that requests in progress have to end after Ctrl-C or SIGTERM.
    #[arg(long, value_name = "SECONDS", default_value_t = 30.0)]
    drain_timeout: f64,
    #[command(flatten)]
    computing: Computing,
}

impl Serve {
    pub fn run(self) -> Result<()> {
        let interrupts = Interrupts::listen().context("listening for Ctrl-C")?;
        Console::default().install().context("showing events")?;
        let (listen, token) = (address("--listen", &self.listen)?, self.token.token()?);
        if token.is_none() && !listen.ip().is_loopback() && !self.without_token {
            return Err(refused(format!(
                "other hosts can reach {listen}, and could replace the weights: give --token-file or --token-env, listen at 127.0.0.1, \
                 or allow it with --without-token"
            )));
        }
        let drain = Duration::try_from_secs_f64(self.drain_timeout)
            .map_err(|error| refused(format!("--drain-timeout {}: {error}", self.drain_timeout)))?;
        // Before the model is loaded, which takes longer.
        let listener = TcpListener::bind(listen).with_context(|| {
            format!("listening at {listen}; choose another address with --listen, whose port 0 takes a free one")
        })?;
        let models = TinkerSettings::models(&self.state);
        let page = self
            .page
            .as_deref()
            .map(|page| serve_page(address("--page", page)?, &models, token.clone(), Powers::default()))
            .transpose()?;
        let store = self.store.as_ref().map(|url| {
            check_address(url).map_err(|why| refused(format!("--store {:?}: {why}", masked(url))))?;
            Ok::<_, anyhow::Error>(Store::open(url, self.ca_file.as_deref())?)
        });
        let store = store.transpose()?;
        let folder = model_folder(&self.model)?;
        let policy = self.computing.policy_by_recipe(&self.model)?;
        let named = self.model.file_name().map(|name| name.to_string_lossy().into_owned());
        let tinker = self.tinker;
        let config = ServeConfig {
            name: self.name.or(named).unwrap_or_else(|| "model".to_owned()),
            folder: std::path::absolute(&folder)?,
            slots: self.slots,
            max_queue: self.max_queue,
            prefix_cache: self.prefix_cache,
            cache_tokens: self.cache_tokens,
            draft_tokens: self.draft_tokens,
            threads: self.threads,
            context: self.context_length,
            seed: self.seed,
            uploads: self.uploads.unwrap_or_else(std::env::temp_dir),
            store,
            tinker: tinker.then_some(TinkerSettings { state: self.state, max_models: self.max_models }),
            token,
        };
        let server = ModelServer::start(&policy, listener, config).map_err(|error| refused(error.to_string()))?;
        if let Some(page) = &page {
            out::line(&format!("page: http://{}/", page.address()))?;
        }
        out::line(&format!("ready: http://{}", server.address()))?;
        serve(&server, &interrupts, drain)
    }
}

/// Serves until a signal, then until the last response has ended, a second signal or `drain`.
fn serve(server: &ModelServer, interrupts: &Interrupts, drain: Duration) -> Result<()> {
    let mut until = None;
    loop {
        if let Some(why) = server.failure() {
            bail!("the engine ended: {why}");
        }
        if interrupts.pressed() && until.is_none() {
            server.close();
            until = Some(Instant::now() + drain);
        }
        if let Some(until) = until {
            let late = Instant::now() >= until;
            if server.has_ended() || late || interrupts.pressed_again() {
                if late {
                    tracing::warn!("requests that did not end within {} s were cut (--drain-timeout)", drain.as_secs_f64());
                }
                return Ok(());
            }
        }
        std::thread::sleep(LOOK);
    }
}
