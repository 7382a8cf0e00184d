//! What a generator needs of an engine that is not in this process.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::mpsc;

use super::{Fault, RemoteError, WeightControl};
use crate::engine::SamplingParams;

/// Work that is waited for. Dropping it gives it up: the engine is told, or its connection closed.
pub type Pending<'a, T> = Pin<Box<dyn Future<Output = Result<T, RemoteError>> + Send + 'a>>;

/// One try to make, or to go on with, one sample.
#[derive(Clone, Debug, PartialEq)]
pub struct Attempt {
    /// The prompt's place in the stream.
    pub ordinal: u64,
    /// The sample's place in its group.
    pub index: u32,
    /// Which try of this sample, from 0.
    pub number: u32,
    /// The prompt, and what is there of the answer.
    pub tokens: Arc<[u32]>,
    /// How many of these tokens are the answer's.
    pub answered: usize,
    /// How tokens are chosen. `max_new_tokens` counts the answer's from its beginning; [`Attempt::rest`] is what remains.
    pub params: Arc<SamplingParams>,
    /// For the engine's random numbers: keyed by run, prompt, sample and position, so that no two attempts draw alike by chance.
    pub seed: u64,
    /// Keeps apart what engines remember of prompts under different weights (law V5); `None` lets them share it.
    pub cache_key: Option<String>,
    /// The adapter to answer with, by the name that it was loaded under; `None` for the engine's own weights.
    pub adapter: Option<String>,
    /// How many samples of this prompt are begun at once, this one included, all with nothing but the prompt: an engine may answer them together.
    pub together: u32,
}

impl Attempt {
    /// What the engine knows it by. As long for every prompt, so that none begins like another: SGLang aborts every request whose id begins with
    /// the one that it is told.
    pub fn id(&self) -> String {
        format!("p{:020}-s{:05}-a{:05}", self.ordinal, self.index, self.number)
    }

    /// How many tokens may still come.
    pub fn rest(&self) -> usize {
        self.params.max_new_tokens.saturating_sub(self.answered)
    }
}

/// Some tokens as they arrive.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Chunk {
    /// What was sampled.
    pub tokens: Vec<u32>,
    /// Behaviour log-probability of each: of the distribution that it was drawn from.
    pub log_probs: Vec<f32>,
}

/// Why an attempt ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// An end-of-text token, a stop token or a stop string.
    Stop,
    /// As many tokens as were asked for.
    Length,
    /// The engine was told to end it, for new weights or by its caller; it may go on elsewhere.
    Aborted,
}

/// Tokens `start..end` of an attempt and the label of the weights that sampled them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VersionSpan {
    /// As the engine calls it.
    pub label: String,
    /// The first token, counted from 0 at the attempt's first new token.
    pub start: usize,
    /// The one after the last.
    pub end: usize,
}

/// How an attempt ended, after all of its tokens were told.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ending {
    /// Why.
    pub end: End,
    /// Which weights sampled which of its new tokens, where the engine says so.
    pub spans: Option<Vec<VersionSpan>>,
}

/// Where an engine tells the tokens of one attempt. Bounded: a reader that falls behind makes the engine's connection wait.
#[derive(Clone, Debug)]
pub struct Tokens {
    to: mpsc::Sender<Chunk>,
}

impl Tokens {
    /// A channel for so many chunks.
    pub fn channel(chunks: usize) -> (Self, mpsc::Receiver<Chunk>) {
        let (to, from) = mpsc::channel(chunks.max(1));
        (Tokens { to }, from)
    }

    /// Tells some. False when nobody wants them any more.
    pub async fn send(&self, chunk: Chunk) -> bool {
        self.to.send(chunk).await.is_ok()
    }

    /// Whether nobody wants them any more.
    pub(super) fn is_closed(&self) -> bool {
        self.to.is_closed()
    }

    /// Returns when nobody wants them any more.
    pub(super) async fn closed(&self) {
        self.to.closed().await;
    }
}

/// What an engine can, found out by asking it.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Capabilities {
    /// What it calls itself, with its version.
    pub server: String,
    /// The model that it serves.
    pub model: String,
    /// Longest prompt and answer together, where it says so.
    pub context: Option<usize>,
    /// Tokens come as they are made.
    pub streams: bool,
    /// It says which weights sampled which token.
    pub spans: bool,
    /// It keeps what it remembers of prompts apart by a key.
    pub cache_keys: bool,
    /// It can be given weights.
    pub weights: bool,
    /// It can compute checksums of its weights.
    pub checksums: bool,
    /// It can be given adapters.
    pub adapters: bool,
    /// What it lacks, and how one gets it.
    pub lacks: Vec<String>,
}

/// Makes tokens. Only [`InferenceEngine::generate`] must be written, and a name:
///
/// ```
/// use std::sync::Arc;
/// use rollflow::engine::remote::{Attempt, Chunk, End, Ending, Fleet, FleetConfig, FleetHandle, InferenceEngine, Pending, Tokens};
/// use rollflow::prelude::*;
///
/// struct Sevens;
///
/// impl InferenceEngine for Sevens {
///     fn name(&self) -> String {
///         "sevens".into()
///     }
///
///     fn generate<'a>(&'a self, attempt: &'a Attempt, tokens: &'a Tokens) -> Pending<'a, Ending> {
///         Box::pin(async move {
///             for _ in 0..attempt.rest() {
///                 tokens.send(Chunk { tokens: vec![11], log_probs: vec![0.0] }).await;
///             }
///             Ok(Ending { end: End::Length, spans: None })
///         })
///     }
/// }
///
/// let tokenizer = Arc::new(Tokenizer::characters("0123456789", 16)?);
/// let engines = FleetHandle::new(vec![Arc::new(Sevens)]);
/// let mut fleet = Fleet::new(&engines, FleetConfig::default(), &tokenizer, 8, 0);
/// let params = SamplingParams { max_new_tokens: 3, ..SamplingParams::default() };
/// let groups = fleet.answer(vec![Prompt::from("1")], 2, &params)?;
/// assert_eq!(groups[0].samples[1].response, "777");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// Its methods run on the few threads that all HTTP of the process shares ([`Tasks`](crate::net::Tasks)): work that computes or blocks belongs on a
/// thread of its own, as `tokio::task::spawn_blocking` gives one.
pub trait InferenceEngine: Send + Sync + 'static {
    /// What it is called in errors, logs and metrics: its kind and where it is.
    fn name(&self) -> String;

    /// Makes the rest of a sample: tells tokens as they come, then how it ended. What was told stays told when it fails. Cancel-safe: where it is
    /// dropped, the engine stops working on it, soon if not at once.
    fn generate<'a>(&'a self, attempt: &'a Attempt, tokens: &'a Tokens) -> Pending<'a, Ending>;

    /// What it can. An engine that can't be asked is taken at its least.
    fn probe(&self) -> Pending<'_, Capabilities> {
        Box::pin(async { Ok(Capabilities::default()) })
    }

    /// Whether it would take work, within this time.
    fn healthy(&self, limit: Duration) -> Pending<'_, ()> {
        let _ = limit;
        Box::pin(async { Ok(()) })
    }

    /// How likely it finds given tokens, under its own weights or this adapter: what a probe looks at.
    fn score<'a>(&'a self, tokens: &'a [u32], adapter: Option<&'a str>) -> Pending<'a, Vec<f32>> {
        let _ = (tokens, adapter);
        Box::pin(async { Err(RemoteError::new(self.name(), Fault::Unsupported { what: "scoring given tokens" })) })
    }

    /// How it is given weights; `None` for one that serves what it serves.
    fn weights(&self) -> Option<&dyn WeightControl> {
        None
    }
}
