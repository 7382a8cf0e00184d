//! Sampling from a server of the Tinker API.
//!
//! Each version of the weights is a sampling session. A completion that has begun ends in its
//! session, and its tokens have that version; there is no swap in the middle.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use rollflow_tinker::message::{ModelInput, SampleRequest, SampleResponse, SamplingParams, Stop, StopReason};
use rollflow_tinker::{Connection, TinkerError};
use tokio::sync::mpsc::Sender;

use super::service::TinkerService;
use super::teacher::nonsense;
use crate::engine::FinishReason;
use crate::engine::remote::{
    Attempt, Capabilities, Ending, Fault, InferenceEngine, PauseMode, RemoteError, WeightControl, async_trait,
};

/// Engine of a server's sampling sessions.
pub struct TinkerEngine {
    connection: Arc<Connection>,
    base_model: String,
    context: Option<usize>,
    /// Tokens that end a completion.
    ends: Vec<u32>,
    /// Label and session of the newest weights.
    serving: Mutex<Option<(String, String)>>,
    requests: AtomicU64,
}

impl TinkerEngine {
    /// An engine whose completions end at the tokens `ends`, in addition to those of a request.
    pub fn new(service: &TinkerService, ends: impl IntoIterator<Item = u32>) -> Self {
        TinkerEngine {
            connection: service.connection().clone(),
            base_model: service.base_model().to_owned(),
            context: service.context(),
            ends: ends.into_iter().collect(),
            serving: Mutex::new(None),
            requests: AtomicU64::new(0),
        }
    }

    fn ends(&self, attempt: &Attempt) -> Vec<u32> {
        let own = if attempt.params.ignore_eos { &[][..] } else { &self.ends[..] };
        own.iter().chain(&attempt.params.stop_token_ids).copied().collect()
    }

    fn refuse<T>(&self, begins: String, advice: &str) -> Result<T, RemoteError> {
        let (what, advice) = ("the request".to_owned(), advice.to_owned());
        Err(RemoteError::new(self.name(), Fault::Refused { what, status: 400, begins, advice }))
    }

    fn question(&self, attempt: &Attempt, session: &str) -> Result<SampleRequest, RemoteError> {
        let params = &attempt.params;
        let (there, rest) = (attempt.tokens.len(), attempt.rest());
        if self.context.is_some_and(|context| there + rest > context) {
            let begins = format!("{there} tokens and up to {rest} more don't fit its context of {}", self.context.unwrap_or(0));
            return self.refuse(begins, "shorten the prompt or generate.max_new_tokens");
        }
        if !params.keeps_log_probs() {
            let begins =
                format!("it reports log-probabilities from before penalties, temperature {} and truncation", params.temperature);
            return self.refuse(begins, "sample at temperature 1 without penalties, top_p, top_k and min_p");
        }
        let tokens: Vec<i64> = self.ends(attempt).into_iter().map(i64::from).collect();
        // Tokens are looked for in the answer where there are strings. An empty list stops at nothing.
        let stop = if params.stop.is_empty() { Stop::Tokens(tokens) } else { Stop::Strings(params.stop.clone()) };
        Ok(SampleRequest {
            num_samples: 1,
            prompt: ModelInput::text(attempt.tokens.iter().map(|token| i64::from(*token)).collect()),
            sampling_params: SamplingParams {
                max_tokens: Some(rest),
                seed: Some(attempt.seed & 0x7fff_ffff),
                stop: Some(stop),
                temperature: Some(params.temperature),
                ..SamplingParams::default()
            },
            sampling_session_id: Some(session.to_owned()),
            seq_id: Some(self.requests.fetch_add(1, Ordering::Relaxed) + 1),
            kind: "sample".to_owned(),
            ..SampleRequest::default()
        })
    }

    /// Tokens of the only sample, and why it ended.
    fn read(&self, attempt: &Attempt, samples: SampleResponse) -> Result<(Vec<(u32, f32)>, FinishReason), RemoteError> {
        let sequence = samples.sequences.into_iter().next().ok_or_else(|| nonsense(&self.name(), "no sample"))?;
        let scores = sequence.logprobs.filter(|scores| scores.len() == sequence.tokens.len());
        let scores = scores.ok_or_else(|| nonsense(&self.name(), "another number of log-probabilities than tokens"))?;
        let pairs = sequence.tokens.iter().zip(scores).map(|(token, score)| Some((u32::try_from(*token).ok()?, score)));
        let mut pairs: Vec<(u32, f32)> =
            pairs.collect::<Option<_>>().ok_or_else(|| nonsense(&self.name(), "a negative token"))?;
        let ends = self.ends(attempt);
        let end = pairs.iter().position(|(token, _)| ends.contains(token));
        if let Some(end) = end {
            pairs.truncate(end + 1);
        }
        let stopped = end.is_some() || sequence.stop_reason == StopReason::Stop;
        Ok((pairs, if stopped { FinishReason::Stop } else { FinishReason::Length }))
    }

    fn fault(&self, error: TinkerError) -> RemoteError {
        fault(self.connection.name(), error)
    }
}

/// An error of sampling, of the server `name`.
pub(super) fn fault(name: &str, error: TinkerError) -> RemoteError {
    match error {
        TinkerError::Remote(error) => error,
        // Asked again, it may be answered.
        TinkerError::Forgotten { .. } | TinkerError::Late { .. } => RemoteError::new(name, Fault::Broke(error.to_string())),
        other => {
            let (what, advice) = ("asample".to_owned(), "look into the server's log".to_owned());
            RemoteError::new(name, Fault::Refused { what, status: 400, begins: other.to_string(), advice })
        }
    }
}

#[async_trait]
impl InferenceEngine for TinkerEngine {
    fn name(&self) -> String {
        self.connection.name().to_owned()
    }

    async fn generate(&self, attempt: &Attempt, tokens: &Sender<Vec<(u32, f32)>>) -> Result<Ending, RemoteError> {
        let serving = self.serving.lock().clone();
        let Some((label, session)) = serving else {
            return Err(RemoteError::new(self.name(), Fault::Busy { status: 503, retry_after: None }));
        };
        let question = self.question(attempt, &session)?;
        let samples = self.connection.sample("asample", &question).await.map_err(|error| self.fault(error))?;
        let (pairs, finish) = self.read(attempt, samples)?;
        let spans = vec![(label, 0..pairs.len())];
        tokens.send(pairs).await.ok();
        Ok(Ending { finish: Some(finish), spans: Some(spans), routes: None })
    }

    async fn probe(&self) -> Result<Capabilities, RemoteError> {
        Ok(Capabilities {
            server: "Tinker server".to_owned(),
            model: self.base_model.clone(),
            context: self.context,
            spans: true,
            weights: true,
            ..Capabilities::default()
        })
    }

    async fn healthy(&self, limit: Duration) -> Result<(), RemoteError> {
        match tokio::time::timeout(limit, self.connection.get("healthz")).await {
            Ok(Ok(_)) => Ok(()),
            Ok(Err(error)) => Err(self.fault(error)),
            Err(_) => {
                let (what, seconds) = ("a health check".to_owned(), limit.as_secs_f64());
                Err(RemoteError::new(self.name(), Fault::Late { what, seconds }))
            }
        }
    }

    fn weights(&self) -> Option<&dyn WeightControl> {
        Some(self)
    }
}

/// Weights are sessions, which are there before they are loaded: nothing pauses.
#[async_trait]
impl WeightControl for TinkerEngine {
    async fn pause(&self, _: PauseMode) -> Result<(), RemoteError> {
        Ok(())
    }

    /// Serves the session whose name is `folder`.
    async fn load(&self, folder: &Path, label: &str) -> Result<(), RemoteError> {
        *self.serving.lock() = Some((label.to_owned(), folder.to_string_lossy().into_owned()));
        Ok(())
    }

    async fn label(&self, _: &str) -> Result<(), RemoteError> {
        Ok(())
    }

    async fn served(&self) -> Result<Option<String>, RemoteError> {
        Ok(self.serving.lock().as_ref().map(|(label, _)| label.clone()))
    }

    async fn flush_cache(&self) -> Result<(), RemoteError> {
        Ok(())
    }

    async fn resume(&self) -> Result<(), RemoteError> {
        Ok(())
    }
}
