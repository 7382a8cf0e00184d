//! Interfaces of an engine that is not in this process.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::mpsc;

use super::{Fault, RemoteError, WeightControl};
use crate::engine::SamplingParams;

/// Future of an engine's work. Dropping it cancels the work.
pub type Pending<'a, T> = Pin<Box<dyn Future<Output = Result<T, RemoteError>> + Send + 'a>>;

/// One attempt to generate, or to continue, one sample.
#[derive(Clone, Debug, PartialEq)]
pub struct Attempt {
    /// Ordinal of the prompt.
    pub ordinal: u64,
    /// Index of the sample in its group.
    pub index: u32,
    /// Number of the attempt, from 0.
    pub number: u32,
    /// Tokens of the prompt and of the partial completion.
    pub tokens: Arc<[u32]>,
    /// Number of these tokens that belong to the completion.
    pub answered: usize,
    /// Sampling parameters. `max_new_tokens` includes the partial completion; [`Attempt::rest`] is
    /// what remains.
    pub params: Arc<SamplingParams>,
    /// Seed of the engine's random numbers, keyed by run, prompt, sample and position.
    pub seed: u64,
    /// Key that separates prefix caches of different weights (law V5); `None` shares them.
    pub cache_key: Option<String>,
    /// Adapter to generate with, by name; `None` for the engine's own weights.
    pub adapter: Option<String>,
    /// Number of samples of this prompt that start together, including this one. An engine may
    /// generate them with one request.
    pub together: u32,
}

impl Attempt {
    /// Request id. All ids have the same length, because SGLang aborts every request whose id
    /// starts with the given one.
    pub fn id(&self) -> String {
        format!("p{:020}-s{:05}-a{:05}", self.ordinal, self.index, self.number)
    }

    /// Number of tokens that may follow.
    pub fn rest(&self) -> usize {
        self.params.max_new_tokens.saturating_sub(self.answered)
    }
}

/// New tokens of an attempt.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Chunk {
    /// Token ids.
    pub tokens: Vec<u32>,
    /// Behaviour log-probability of each token, under the distribution that it was drawn from.
    pub log_probs: Vec<f32>,
}

/// Reason for the end of an attempt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// End-of-text token, stop token or stop string.
    Stop,
    /// Length limit.
    Length,
    /// Abort, for new weights or by the caller. The sample may continue elsewhere.
    Aborted,
}

/// Tokens `start..end` of an attempt with the label of their weights.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VersionSpan {
    /// Label of the weights.
    pub label: String,
    /// First token, counted from the attempt's first new token.
    pub start: usize,
    /// End of the span, exclusive.
    pub end: usize,
}

/// End of an attempt, after all its tokens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ending {
    /// Reason for the end.
    pub end: End,
    /// Weights of the new tokens, if the engine reports them.
    pub spans: Option<Vec<VersionSpan>>,
}

/// Bounded channel for the tokens of one attempt. A slow reader slows the engine's connection.
#[derive(Clone, Debug)]
pub struct Tokens {
    to: mpsc::Sender<Chunk>,
}

impl Tokens {
    /// Creates a channel with room for `chunks` chunks.
    pub fn channel(chunks: usize) -> (Self, mpsc::Receiver<Chunk>) {
        let (to, from) = mpsc::channel(chunks.max(1));
        (Tokens { to }, from)
    }

    /// Sends new tokens. Returns false if the receiver is gone.
    pub async fn send(&self, chunk: Chunk) -> bool {
        self.to.send(chunk).await.is_ok()
    }

    /// Returns true if the receiver is gone.
    pub(super) fn is_closed(&self) -> bool {
        self.to.is_closed()
    }

    /// Waits until the receiver is gone.
    pub(super) async fn closed(&self) {
        self.to.closed().await;
    }
}

/// Capabilities of an engine, as it reports them.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Capabilities {
    /// Name and version of the server.
    pub server: String,
    /// Name of the served model.
    pub model: String,
    /// Longest prompt and completion together, if reported.
    pub context: Option<usize>,
    /// If true, tokens are streamed.
    pub streams: bool,
    /// If true, the engine reports which weights sampled which token.
    pub spans: bool,
    /// If true, prefix caches can be separated by a key.
    pub cache_keys: bool,
    /// If true, weights can be loaded.
    pub weights: bool,
    /// If true, checksums of the weights are available.
    pub checksums: bool,
    /// If true, adapters can be loaded.
    pub adapters: bool,
    /// Missing capabilities, with the setting that enables each.
    pub lacks: Vec<String>,
}

/// Engine that generates tokens. Required are [`InferenceEngine::generate`] and a name:
///
/// ```
/// use std::sync::Arc;
/// use rollflow::engine::remote::{Attempt, Chunk, End, Ending, Fleet, FleetConfig, FleetHandle, InferenceEngine, Pending, Synced, Tokens};
/// use rollflow::engine::TokenEngine;
/// use rollflow::prelude::*;
/// use rollflow::rollout::complete;
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
/// fleet.set_weights(0, &Synced { version: 0 });
/// let groups = complete(&mut fleet, &tokenizer, vec![Prompt::from("1")], 2, &params)?;
/// assert_eq!(groups[0].samples[1].response, "777");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// Methods run on the threads for HTTP ([`Tasks`](crate::net::Tasks)): work that computes or blocks
/// belongs on another thread, such as that of `tokio::task::spawn_blocking`.
pub trait InferenceEngine: Send + Sync + 'static {
    /// Name in errors, logs and metrics: kind and address.
    fn name(&self) -> String;

    /// Generates the rest of a sample: sends its tokens, then returns how it ended. Tokens sent
    /// before an error are kept. Dropping the future must stop the engine's work on the sample.
    fn generate<'a>(&'a self, attempt: &'a Attempt, tokens: &'a Tokens) -> Pending<'a, Ending>;

    /// Reports the engine's capabilities.
    fn probe(&self) -> Pending<'_, Capabilities> {
        Box::pin(async { Ok(Capabilities::default()) })
    }

    /// Checks within `limit` that the engine accepts work.
    fn healthy(&self, limit: Duration) -> Pending<'_, ()> {
        let _ = limit;
        Box::pin(async { Ok(()) })
    }

    /// Returns the log-probability of each token but the first, under the engine's own weights or
    /// this adapter. A weight sync verifies weights with it.
    fn score<'a>(&'a self, tokens: &'a [u32], adapter: Option<&'a str>) -> Pending<'a, Vec<f32>> {
        let _ = (tokens, adapter);
        Box::pin(async { Err(RemoteError::new(self.name(), Fault::Unsupported { what: "scoring given tokens" })) })
    }

    /// Weight control; `None` for an engine whose weights are fixed.
    fn weights(&self) -> Option<&dyn WeightControl> {
        None
    }
}
