//! Samples of a session's weights.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use parking_lot::Mutex;
use rollflow_tinker::message::{SampleRequest, SampleResponse, Sequence, Stop, StopReason};
use tokio::sync::Notify;

use super::operation::Answer;
use super::trained::is_name;
use super::{Loaded, Tinker};
use crate::engine::{FinishReason, SamplingParams};
use crate::serve::control::read_adapter;
use crate::serve::reply::Refusal;
use crate::serve::shared::Ask;
use crate::serve::worker::{AdapterName, End};

/// Samples whose answers are kept.
const KEPT: usize = 4096;

/// Session of the base model.
pub(super) const BASE: &str = "base";

/// Samples that are asked for, and then there.
#[derive(Default)]
pub(super) struct SampleFuture {
    answer: Mutex<Option<Arc<Answer>>>,
    answered: Notify,
}

impl SampleFuture {
    /// The samples, if they are there within `limit`.
    pub async fn answer(&self, limit: Duration) -> Option<Arc<Answer>> {
        let answered = self.answered.notified();
        tokio::pin!(answered);
        answered.as_mut().enable();
        if self.answer.lock().is_none() {
            tokio::time::timeout(limit, answered).await.ok();
        }
        self.answer.lock().clone()
    }
}

/// A request for samples of a session, which is not unloaded meanwhile.
struct Active(Arc<Mutex<Loaded>>, Option<Arc<str>>);

impl Active {
    fn new(loaded: &Arc<Mutex<Loaded>>, session: Option<&Arc<str>>) -> Self {
        if let Some(session) = session {
            *loaded.lock().active.entry(session.clone()).or_default() += 1;
        }
        Active(loaded.clone(), session.cloned())
    }
}

impl Drop for Active {
    fn drop(&mut self) {
        let Some(session) = &self.1 else { return };
        let mut loaded = self.0.lock();
        let Some(count) = loaded.active.get_mut(session) else { return };
        *count -= 1;
        if *count == 0 {
            loaded.active.remove(session);
        }
    }
}

impl Tinker {
    /// Name of the session of the weights at a path.
    pub fn session_of(path: &str) -> Option<String> {
        let (id, rest) = path.strip_prefix("tinker://")?.split_once('/')?;
        let name = rest.strip_prefix("sampler_weights/").unwrap_or(rest);
        (is_name(id) && is_name(name)).then(|| format!("{id}.{name}"))
    }

    /// The adapter of a session, loaded if it is on disk.
    pub async fn adapter(&self, session: &str) -> Result<AdapterName, Refusal> {
        if session == BASE {
            return Ok(None);
        }
        let shared = &self.shared;
        if let Some(name) = shared.adapter(Some(session)).filter(|name| name.is_some()) {
            return Ok(name);
        }
        let folder = self.ground.samplers.join(session);
        if !is_name(session) || !folder.is_dir() {
            return Err(Refusal::new(404, format!("there is no sampling session {:?}", super::short(session))));
        }
        let _order = shared.changing.lock().await;
        let weights = read_adapter(shared, &folder).await?;
        let name: Arc<str> = session.into();
        for reply in super::load(shared, &self.loaded, &name, weights, &folder) {
            reply.await.map_err(|_| shared.gone())?;
        }
        Ok(Some(name))
    }

    /// Starts to sample, and returns the number of the answer.
    pub async fn sample(self: &Arc<Self>, request: SampleRequest) -> Result<u64, Refusal> {
        let adapter = match (&request.sampling_session_id, &request.model_path) {
            (Some(session), _) => self.adapter(session).await?,
            (None, Some(path)) => {
                let session = Tinker::session_of(path).ok_or_else(|| Refusal::bad("model_path is no path of this server"))?;
                self.adapter(&session).await?
            }
            (None, None) => None,
        };
        if request.topk_sample_logprobs > 0 {
            return Err(Refusal::bad("of a sampled token its own log-probability is available, not the likeliest tokens"));
        }
        let prompt = request.prompt.tokens();
        let prompt =
            prompt.map_err(|kind| Refusal::bad(format!("a piece of the prompt is of kind {kind:?}; only text is understood")))?;
        let prompt: Option<Vec<u32>> = prompt.into_iter().map(|token| u32::try_from(token).ok()).collect();
        let prompt: Arc<[u32]> = prompt.ok_or_else(|| Refusal::bad("the prompt has a token that is no token"))?.into();
        let params = self.params(&request, prompt.len())?;
        let samples = u32::try_from(request.num_samples).map_err(|_| Refusal::bad("num_samples is too large"))?;
        let seed = request.sampling_params.seed;
        let ask = Ask { rid: None, prompts: vec![prompt.clone()], samples, params, seed, adapter: adapter.clone() };
        let active = Active::new(&self.loaded, adapter.as_ref());
        // Before it counts as active it may have been unloaded.
        if let Some(name) = &adapter {
            self.adapter(name).await?;
        }
        let mut ticket = self.shared.submit(ask)?;
        let future = Arc::new(SampleFuture::default());
        let number = self.next_sample.fetch_add(1, Ordering::Relaxed);
        {
            let mut all = self.samples.lock();
            all.insert(number, future.clone());
            while all.len() > KEPT {
                all.pop_first();
            }
        }
        let top = request.topk_prompt_logprobs;
        let (tinker, scores) = (self.clone(), request.prompt_logprobs.unwrap_or(false) || top > 0);
        tokio::spawn(async move {
            let _active = active;
            let sampled = async {
                let (mut prompt_logprobs, mut topk_prompt_logprobs) = (None, None);
                if scores {
                    let found = tinker.shared.score_top(&prompt, &adapter, top).await?;
                    prompt_logprobs = Some(std::iter::once(None).chain(found.log_probs.into_iter().map(Some)).collect());
                    let likeliest = |position| {
                        let (ids, log_probs) = found.top.at(position)?;
                        Some(ids.iter().map(|id| i64::from(*id)).zip(log_probs.iter().copied()).collect())
                    };
                    topk_prompt_logprobs = (top > 0).then(|| (0..prompt.len()).map(likeliest).collect());
                }
                ticket.finish().await?;
                let sequence = |completion: &crate::serve::ticket::Completion| Sequence {
                    stop_reason: match completion.end {
                        Some(End::Finished(FinishReason::Stop)) => StopReason::Stop,
                        _ => StopReason::Length,
                    },
                    tokens: completion.tokens.iter().map(|token| i64::from(*token)).collect(),
                    logprobs: Some(completion.log_probs.clone()),
                };
                Ok::<_, Refusal>(SampleResponse {
                    sequences: ticket.completions.iter().map(sequence).collect(),
                    prompt_logprobs,
                    topk_prompt_logprobs,
                })
            };
            let answer = sampled.await.map_or_else(|refusal| Answer::failed(refusal.message()), Answer::Samples);
            *future.answer.lock() = Some(Arc::new(answer));
            future.answered.notify_waiters();
        });
        Ok(number)
    }

    fn params(&self, request: &SampleRequest, prompt: usize) -> Result<SamplingParams, Refusal> {
        let of = &request.sampling_params;
        let (mut stop_token_ids, mut stop) = (Vec::new(), Vec::new());
        match of.stop.clone() {
            None => {}
            Some(Stop::One(text)) => stop.push(text),
            Some(Stop::Strings(texts)) => stop = texts,
            Some(Stop::Tokens(tokens)) => {
                let tokens: Option<Vec<u32>> = tokens.into_iter().map(|token| u32::try_from(token).ok()).collect();
                stop_token_ids = tokens.ok_or_else(|| Refusal::bad("`stop` has a token that is no token"))?;
            }
        }
        Ok(SamplingParams {
            temperature: of.temperature.unwrap_or(1.0),
            top_p: of.top_p.unwrap_or(1.0),
            top_k: of.top_k.and_then(|k| usize::try_from(k).ok()).unwrap_or(0),
            max_new_tokens: of.max_tokens.unwrap_or_else(|| self.shared.context().saturating_sub(prompt)),
            stop_token_ids,
            stop,
            ..SamplingParams::default()
        })
    }

    /// Returns true if weights for sampling are on disk.
    pub fn has_session(&self, session: &str) -> bool {
        session == BASE || is_name(session) && Path::new(&self.ground.samplers.join(session)).is_dir()
    }
}
