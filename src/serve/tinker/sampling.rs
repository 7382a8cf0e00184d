//! Samples of a session's weights.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use parking_lot::Mutex;
use rollflow_tinker::message::{SampleRequest, SampleResponse, Sequence, Stop, StopReason, TopRow};
use tokio::sync::Notify;
use tokio::task::AbortHandle;

use super::operation::Answer;
use super::trained::is_name;
use super::{Loaded, Tinker};
use crate::engine::{FinishReason, SamplingParams};
use crate::serve::control::read_session;
use crate::serve::reply::Refusal;
use crate::serve::shared::Ask;
use crate::serve::ticket::Completion;
use crate::serve::worker::{AdapterName, End, TextScores};

/// Samples whose answers are kept.
const KEPT: usize = 4096;

/// Session of the base model.
pub(super) const BASE: &str = "base";

/// Samples that are asked for, and then there.
#[derive(Default)]
pub(super) struct SampleFuture {
    answer: Mutex<Option<Arc<Answer>>>,
    answered: Notify,
    task: Mutex<Option<AbortHandle>>,
}

impl SampleFuture {
    /// Sets the answer, unless there is one.
    fn end(&self, answer: Answer) {
        self.answer.lock().get_or_insert_with(|| Arc::new(answer));
        self.answered.notify_waiters();
    }

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

fn sequence(completion: &Completion) -> Sequence {
    Sequence {
        stop_reason: match completion.end {
            Some(End::Finished(FinishReason::Stop)) => StopReason::Stop,
            _ => StopReason::Length,
        },
        tokens: completion.tokens.iter().map(|token| i64::from(*token)).collect(),
        logprobs: Some(completion.log_probs.clone()),
        topk_logprobs: None,
    }
}

/// The likeliest tokens at a position of a text.
fn likeliest(found: &TextScores, position: usize) -> TopRow {
    let (ids, log_probs) = found.top.at(position)?;
    Some(ids.iter().map(|id| i64::from(*id)).zip(log_probs.iter().copied()).collect())
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

    /// The weights of a session, loaded if they are on disk.
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
        let weights = read_session(shared, &folder).await?;
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
        let prompt = request.prompt.tokens();
        let prompt =
            prompt.map_err(|kind| Refusal::bad(format!("a piece of the prompt is of kind {kind:?}; only text is understood")))?;
        let prompt: Option<Vec<u32>> = prompt.into_iter().map(|token| u32::try_from(token).ok()).collect();
        let prompt: Arc<[u32]> = prompt.ok_or_else(|| Refusal::bad("the prompt has a token that is no token"))?.into();
        let params = self.params(&request, prompt.len())?;
        let samples = u32::try_from(request.num_samples).map_err(|_| Refusal::bad("num_samples is too large"))?;
        let seed = request.sampling_params.seed;
        let ask =
            Ask { rid: None, prompts: vec![prompt.clone()], samples, params, seed, adapter: adapter.clone(), routes: false };
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
        let (top, top_sampled) = (request.topk_prompt_logprobs, request.topk_sample_logprobs);
        let (tinker, scores) = (self.clone(), request.prompt_logprobs.unwrap_or(false) || top > 0);
        let done = future.clone();
        let task = tokio::spawn(async move {
            let _active = active;
            let sampled = async {
                let (mut prompt_logprobs, mut topk_prompt_logprobs) = (None, None);
                if scores {
                    let found = tinker.shared.score_top(&prompt, &adapter, top).await?;
                    prompt_logprobs = Some(std::iter::once(None).chain(found.log_probs.iter().copied().map(Some)).collect());
                    topk_prompt_logprobs = (top > 0).then(|| (0..prompt.len()).map(|at| likeliest(&found, at)).collect());
                }
                ticket.finish().await?;
                let mut sequences: Vec<Sequence> = ticket.completions.iter().map(sequence).collect();
                if top_sampled > 0 {
                    for (sequence, completion) in sequences.iter_mut().zip(&ticket.completions) {
                        let whole = [&prompt[..], &completion.tokens].concat();
                        let found = tinker.shared.score_top(&whole, &adapter, top_sampled).await?;
                        sequence.topk_logprobs = Some((prompt.len()..whole.len()).map(|at| likeliest(&found, at)).collect());
                    }
                }
                Ok::<_, Refusal>(SampleResponse { sequences, prompt_logprobs, topk_prompt_logprobs })
            };
            let answer = sampled.await.map_or_else(|refusal| Answer::failed(refusal.message()), Answer::Samples);
            done.end(answer);
        });
        *future.task.lock() = Some(task.abort_handle());
        Ok(number)
    }

    /// Number of the samples that a request's id names.
    pub fn sample_number(&self, request: &str) -> Option<u64> {
        let (instance, number) = request.strip_prefix("sample-")?.rsplit_once(':')?;
        (instance == self.shared.instance).then(|| number.parse().ok()).flatten()
    }

    /// Ends the sampling of an answer, if it is not there yet.
    pub fn cancel(&self, number: u64) {
        let Some(future) = self.samples.lock().get(&number).cloned() else { return };
        let task = future.task.lock().take();
        if let Some(task) = task {
            task.abort();
            future.end(Answer::refused("the client cancelled it"));
        }
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
