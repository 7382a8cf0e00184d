//! Interfaces of an engine that is not in this process.

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use tokio::sync::mpsc::Sender;

use super::sync::Carry;
use super::transfer::TensorSource;
use super::{Fault, RemoteError};
use crate::data::{RouteShape, Routes, TopK, TopTokens};
use crate::engine::{FinishReason, SamplingParams};
use crate::settings::declare::choices;

/// One attempt to generate, or to continue, one sample.
#[derive(Clone, Debug, PartialEq)]
pub struct Attempt {
    /// Ordinal of the prompt.
    pub ordinal: u64,
    /// Index of the sample in its group.
    pub index: u32,
    /// Number of the attempt among those of its fleet, of all samples.
    pub number: u32,
    /// Random number of the fleet. Several fleets may send requests to one engine.
    pub fleet: u32,
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
    /// Sizes of the experts of all tokens but the last, if they are wanted.
    pub routes: Option<RouteShape>,
    /// If true, tokens are trained on: their log-probabilities must be those of the distribution that they
    /// were drawn from. If false, an engine may return others.
    pub log_probs: bool,
}

impl Attempt {
    /// Request id, which no other attempt has: SGLang rejects a second request with an id, and aborts
    /// what has the id of an answer two seconds after its end. All ids have the same length, because SGLang
    /// aborts every request whose id starts with the given one.
    pub fn id(&self) -> String {
        format!("p{:020}-s{:05}-a{:010}-f{:08x}", self.ordinal, self.index, self.number, self.fleet)
    }

    /// Number of tokens that may follow.
    pub fn rest(&self) -> usize {
        self.params.max_new_tokens.saturating_sub(self.answered)
    }
}

/// End of an attempt, after all its tokens.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Ending {
    /// Reason for the end; `None` after an abort, for new weights or by the caller. The sample may
    /// then continue elsewhere.
    pub finish: Option<FinishReason>,
    /// Weights of the new tokens, if the engine reports them: a label, and the tokens that were
    /// sampled with it, counted from the attempt's first new token.
    pub spans: Option<Vec<(String, Range<usize>)>>,
    /// Experts of the attempt's tokens and of those before, if they were wanted.
    pub routes: Option<Routes>,
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
    /// If true, LongRoPE's factors for long sequences rotate all sequences of a `context` beyond that of
    /// pre-training.
    pub rotates_by_context: bool,
    /// If true, the engine reports which weights sampled which token.
    pub spans: bool,
    /// If true, weights can be loaded.
    pub weights: bool,
    /// If true, checksums of the weights are available.
    pub checksums: bool,
    /// If true, adapters can be loaded.
    pub adapters: bool,
    /// If true, answers come with the experts of their tokens.
    pub routes: bool,
    /// If true, log-probabilities are those from before penalties, temperature and truncation.
    pub raw_log_probs: bool,
    /// Ways of weights to the engine out of the trainer's memory.
    pub transfers: Vec<Carry>,
    /// If true, the engine can free the memory of its GPU and take it again.
    pub sleeps: bool,
    /// Missing capabilities, with the setting that enables each.
    pub lacks: Vec<String>,
}

/// Engine that generates tokens. Required are [`InferenceEngine::generate`] and a name:
///
/// ```
/// use std::sync::Arc;
/// use rollflow::engine::remote::{Attempt, Ending, InferenceEngine, RemoteError, async_trait};
/// use rollflow::engine::remote::{Fleet, FleetConfig, FleetHandle};
/// use rollflow::engine::{FinishReason, TokenEngine};
/// use rollflow::prelude::*;
/// use rollflow::rollout::complete;
/// use tokio::sync::mpsc::Sender;
///
/// struct Sevens;
///
/// #[async_trait]
/// impl InferenceEngine for Sevens {
///     fn name(&self) -> String {
///         "sevens".into()
///     }
///
///     async fn generate(
///         &self,
///         attempt: &Attempt,
///         tokens: &Sender<Vec<(u32, f32)>>,
///     ) -> Result<Ending, RemoteError> {
///         for _ in 0..attempt.rest() {
///             tokens.send(vec![(11, 0.0)]).await.ok();
///         }
///         Ok(Ending { finish: Some(FinishReason::Length), ..Ending::default() })
///     }
/// }
///
/// let tokenizer = Arc::new(Tokenizer::characters("0123456789", 16)?);
/// let engines = FleetHandle::new(vec![Arc::new(Sevens)]);
/// let mut fleet = Fleet::new(&engines, FleetConfig::default(), &tokenizer, 8, 0);
/// let params = SamplingParams { max_new_tokens: 3, ..SamplingParams::default() };
/// fleet.set_weights(0, &());
/// let groups = complete(&mut fleet, &tokenizer, vec![Prompt::from("1")], 2, &params)?;
/// assert_eq!(groups[0].samples[1].response, "777");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// Methods run on the threads for HTTP ([`Tasks`](crate::net::Tasks)): work that computes or blocks
/// belongs on another thread, such as that of `tokio::task::spawn_blocking`.
#[async_trait]
pub trait InferenceEngine: Send + Sync + 'static {
    /// Name in errors, logs and metrics: kind and address.
    fn name(&self) -> String;

    /// Address, such as `http://host:port`; `None` for an engine without one, which reads the
    /// trainer's files.
    fn address(&self) -> Option<&str> {
        None
    }

    /// Generates the rest of a sample: sends its tokens, then returns how it ended. Each token comes
    /// with its behaviour log-probability, under the distribution that it was drawn from. Tokens
    /// sent before an error are kept. A slow receiver slows the engine's connection. Dropping the
    /// future must stop the engine's work on the sample.
    async fn generate(&self, attempt: &Attempt, tokens: &Sender<Vec<(u32, f32)>>) -> Result<Ending, RemoteError>;

    /// Reports the engine's capabilities.
    async fn probe(&self) -> Result<Capabilities, RemoteError> {
        Ok(Capabilities::default())
    }

    /// Checks within `limit` that the engine accepts work.
    async fn healthy(&self, _limit: Duration) -> Result<(), RemoteError> {
        Ok(())
    }

    /// Returns the log-probability of each token but the first, under the engine's own weights or
    /// this adapter. A weight sync verifies weights with it.
    async fn score(&self, _tokens: &[u32], _adapter: Option<&str>) -> Result<Vec<f32>, RemoteError> {
        Err(RemoteError::new(self.name(), Fault::Unsupported("scoring given tokens")))
    }

    /// The same, and the likeliest tokens in their places, from position 1 on.
    async fn score_top(&self, _tokens: &[u32], _top: TopK) -> Result<(Vec<f32>, TopTokens), RemoteError> {
        Err(RemoteError::new(self.name(), Fault::Unsupported("the likeliest tokens in the places of given ones")))
    }

    /// Weight control; `None` for an engine whose weights are fixed.
    fn weights(&self) -> Option<&dyn WeightControl> {
        None
    }
}

choices! {
    /// Policy for an engine's work while its weights change.
    pub enum PauseMode {
        /// the engine pauses and continues with its keys and values (vLLM `keep`, SGLang
        /// `in_place`).
        "keep" => Keep,
        /// the engine pauses and recomputes keys and values under the new weights (SGLang
        /// `retract`).
        "recompute" => Recompute,
        /// the engine aborts what is in flight, which continues as new requests.
        "abort" => Abort,
        /// the engine finishes what is in flight first and takes nothing new (vLLM `wait`).
        "finish" => Finish,
    }
}

/// Part of an engine's memory that sleep frees.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EngineMemory {
    /// Weights.
    Weights,
    /// Keys and values.
    Cache,
}

impl EngineMemory {
    /// Name in the requests of vLLM and SGLang.
    pub(super) fn tag(self) -> &'static str {
        match self {
            EngineMemory::Weights => "weights",
            EngineMemory::Cache => "kv_cache",
        }
    }
}

/// Operations of a weight sync on one engine. Labels are decimal version numbers.
#[async_trait]
pub trait WeightControl: Send + Sync {
    /// Pauses the engine; idempotent. An error names the supported modes if this one is not.
    async fn pause(&self, mode: PauseMode) -> Result<(), RemoteError>;

    /// Sends the files of a folder of weights to the engine's host, verified by checksums. Returns
    /// their folder there, which may be loaded until the upload after the next begins.
    async fn upload(&self, folder: &Path) -> Result<PathBuf, RemoteError> {
        let what = "taking weights over HTTP; set engine.carry = \"folder\"";
        Err(RemoteError::new(folder.display().to_string(), Fault::Unsupported(what)))
    }

    /// Reads a folder ahead of [`WeightControl::load`] with the same arguments, while the engine
    /// generates. Does nothing on engines that cannot.
    async fn prepare(&self, _folder: &Path, _label: &str) -> Result<(), RemoteError> {
        Ok(())
    }

    /// Loads a Hugging Face folder that the engine can read.
    async fn load(&self, folder: &Path, label: &str) -> Result<(), RemoteError>;

    /// Takes tensors out of the trainer's memory ahead of [`WeightControl::load_tensors`], while the engine
    /// generates. Does nothing on engines that cannot.
    async fn prepare_tensors(&self, _tensors: &Arc<dyn TensorSource>) -> Result<(), RemoteError> {
        Ok(())
    }

    /// Takes tensors out of the trainer's memory in the way of `carry`.
    async fn load_tensors(&self, _tensors: &Arc<dyn TensorSource>, _carry: Carry) -> Result<(), RemoteError> {
        let what = "taking tensors from the trainer's memory; set engine.carry = \"folder\"";
        Err(RemoteError::new("this engine", Fault::Unsupported(what)))
    }

    /// Loads a PEFT folder as an adapter of this name, replacing one that has it.
    async fn load_adapter(&self, _name: &str, _folder: &Path) -> Result<(), RemoteError> {
        Err(RemoteError::new("this engine", Fault::Unsupported("loading adapters")))
    }

    /// Unloads an adapter.
    async fn unload_adapter(&self, _name: &str) -> Result<(), RemoteError> {
        Ok(())
    }

    /// Names of the loaded adapters.
    async fn adapters(&self) -> Result<Vec<String>, RemoteError> {
        Ok(Vec::new())
    }

    /// Labels the served weights.
    async fn label(&self, label: &str) -> Result<(), RemoteError>;

    /// Label of the served weights; `None` before the first label.
    async fn served(&self) -> Result<Option<String>, RemoteError>;

    /// Checksums by tensor name; `None` if the engine has none.
    async fn checksums(&self) -> Result<Option<BTreeMap<String, String>>, RemoteError> {
        Ok(None)
    }

    /// Clears the cache of finished work.
    async fn flush_cache(&self) -> Result<(), RemoteError>;

    /// Frees the memory of its GPU: weights go to the host's, keys and values are dropped. For an engine that
    /// computes nothing.
    async fn sleep(&self) -> Result<(), RemoteError> {
        Err(RemoteError::new("this engine", Fault::Unsupported("sleeping; leave engine.sleep out")))
    }

    /// Takes memory again for `part` of what sleep freed; idempotent.
    async fn wake(&self, _part: EngineMemory) -> Result<(), RemoteError> {
        Ok(())
    }

    /// Resumes the engine; idempotent.
    async fn resume(&self) -> Result<(), RemoteError>;
}
