//! A model of a Tinker server that scores given tokens: a teacher or a reference policy.

use std::sync::atomic::{AtomicU64, Ordering};

use rollflow_tinker::message::{ModelInput, SampleRequest, SampleResponse, SamplingParams};
use rollflow_tinker::{Connection, Patience, TinkerError};
use serde_json::json;
use tokio::sync::OnceCell;
use tokio::sync::mpsc::Sender;

use super::engine::fault;
use super::service::offered;
use crate::data::{TopK, TopTokens};
use crate::engine::remote::{Attempt, Ending, Fault, InferenceEngine, RemoteError, async_trait};
use crate::net::Endpoint;
use crate::util::secrets::masked;

/// A base model or saved sampling weights on a server. It scores, and generates nothing.
pub struct TinkerTeacher {
    endpoint: Endpoint,
    key: Option<String>,
    model: Option<String>,
    patience: Patience,
    /// Connection and sampling session, from the first request on.
    opened: OnceCell<(Connection, String)>,
    requests: AtomicU64,
}

impl TinkerTeacher {
    /// A teacher that opens its session with the first request. `model` is the server's name of a base
    /// model, by default the first that it lists, or a path of sampling weights (`tinker://…`).
    pub fn new(endpoint: Endpoint, key: Option<String>, model: Option<String>, patience: Patience) -> Self {
        TinkerTeacher { endpoint, key, model, patience, opened: OnceCell::new(), requests: AtomicU64::new(0) }
    }

    async fn open(&self) -> Result<(Connection, String), TinkerError> {
        let connection = Connection::open(self.endpoint.clone(), self.key.as_deref(), self.patience).await?;
        let (key, model) = match self.model.as_deref().filter(|model| model.starts_with("tinker://")) {
            Some(path) => ("model_path", path.to_owned()),
            None => ("base_model", offered(&connection, self.model.as_deref()).await?.0),
        };
        let mut body = json!({
            "session_id": connection.session(), "sampling_session_seq_id": 0, "type": "create_sampling_session",
        });
        body[key] = model.into();
        let answer = connection.call("create_sampling_session", &body).await?;
        let session = connection.text(&answer, "sampling_session_id", "create_sampling_session")?;
        Ok((connection, session))
    }

    async fn sampled(&self, tokens: &[u32], k: usize) -> Result<SampleResponse, RemoteError> {
        let opened = self.opened.get_or_try_init(|| self.open()).await;
        let (connection, session) = opened.map_err(|error| fault(&self.name(), error))?;
        sampled(connection, Scored::Session(session), self.requests.fetch_add(1, Ordering::Relaxed) + 1, tokens, k).await
    }
}

/// Weights that score.
pub(super) enum Scored<'a> {
    /// Weights of a sampling session, by its id.
    Session(&'a str),
    /// Saved sampling weights.
    Path(&'a str),
}

/// Log-probabilities of all tokens but the first, by these weights.
pub(super) async fn log_probs(connection: &Connection, of: Scored<'_>, tokens: &[u32]) -> Result<Vec<f32>, RemoteError> {
    listed(connection.name(), &sampled(connection, of, 1, tokens, 0).await?, tokens.len())
}

async fn sampled(
    connection: &Connection,
    of: Scored<'_>,
    seq_id: u64,
    tokens: &[u32],
    k: usize,
) -> Result<SampleResponse, RemoteError> {
    let (session, path) = match of {
        Scored::Session(session) => (Some(session.to_owned()), None),
        Scored::Path(path) => (None, Some(path.to_owned())),
    };
    let question = SampleRequest {
        num_samples: 1,
        prompt: ModelInput::text(tokens.iter().map(|token| i64::from(*token)).collect()),
        sampling_params: SamplingParams { max_tokens: Some(1), temperature: Some(1.0), ..SamplingParams::default() },
        seq_id: session.is_some().then_some(seq_id),
        sampling_session_id: session,
        model_path: path,
        prompt_logprobs: Some(true),
        topk_prompt_logprobs: k,
        kind: "sample".to_owned(),
        ..SampleRequest::default()
    };
    connection.sample("asample", &question).await.map_err(|error| fault(connection.name(), error))
}

/// The error of an answer to `asample` that is not as expected.
pub(super) fn nonsense(server: &str, why: &str) -> RemoteError {
    RemoteError::new(server, Fault::Nonsense { what: "asample".to_owned(), why: why.to_owned(), begins: String::new() })
}

/// Log-probabilities of all tokens but the first. A server lists the first without one, or not at all.
fn listed(server: &str, samples: &SampleResponse, tokens: usize) -> Result<Vec<f32>, RemoteError> {
    let listed = samples.prompt_logprobs.as_deref().unwrap_or_default();
    let from = (listed.len() + 1).checked_sub(tokens);
    let scores = from.and_then(|from| listed[from..].iter().copied().collect::<Option<Vec<f32>>>());
    scores.ok_or_else(|| nonsense(server, "no log-probability for each token of the prompt"))
}

#[async_trait]
impl InferenceEngine for TinkerTeacher {
    fn name(&self) -> String {
        format!("Tinker server {}", masked(&self.endpoint.url))
    }

    async fn generate(&self, _: &Attempt, _: &Sender<Vec<(u32, f32)>>) -> Result<Ending, RemoteError> {
        Err(RemoteError::new(self.name(), Fault::Unsupported("generating: it is a teacher")))
    }

    async fn score(&self, tokens: &[u32], _: Option<&str>) -> Result<Vec<f32>, RemoteError> {
        listed(&self.name(), &self.sampled(tokens, 0).await?, tokens.len())
    }

    async fn score_top(&self, tokens: &[u32], of: TopK) -> Result<(Vec<f32>, TopTokens), RemoteError> {
        let samples = self.sampled(tokens, of.k).await?;
        let (scores, mut top) = (listed(&self.name(), &samples, tokens.len())?, TopTokens::new(1, tokens.len(), of.k));
        let rows = samples.topk_prompt_logprobs.as_deref().unwrap_or_default();
        for position in 1..tokens.len() {
            let row = rows.get(position).and_then(Option::as_deref).unwrap_or_default();
            let of_row = row.iter().filter_map(|(token, score)| Some((u32::try_from(*token).ok()?, *score)));
            let set = top.set_all(position, of_row, of.below);
            set.ok_or_else(|| nonsense(&self.name(), "too few of the likeliest tokens of a position"))?;
        }
        Ok((scores, top))
    }
}
