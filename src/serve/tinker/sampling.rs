//! Samples of a session's weights.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
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
use crate::serve::generate::MOST_TOP;
use crate::serve::reply::Refusal;
use crate::serve::shared::Ask;
use crate::serve::ticket::Completion;
use crate::serve::worker::{AdapterName, End, TextScores};

/// Bytes of the answers that are kept.
const KEPT: usize = 256 << 20;

/// Answers that are kept for clients that ask again.
const FETCHED: usize = 1024;

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
    /// Sets the answer, unless there is one: then returns false.
    fn end(&self, answer: Answer) -> bool {
        let mut place = self.answer.lock();
        let sets = place.is_none();
        if sets {
            *place = Some(Arc::new(answer));
            self.answered.notify_waiters();
        }
        sets
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

/// Samples by their numbers. Those that are there are kept in the room for answers; those that clients
/// have fetched go first.
#[derive(Default)]
pub(super) struct Samples {
    all: BTreeMap<u64, Arc<SampleFuture>>,
    next: u64,
    /// Bytes of each answer that is there: of those that were fetched, with `false`, and of the others.
    ended: BTreeMap<(bool, u64), usize>,
    bytes: usize,
}

impl Samples {
    fn begin(&mut self) -> (u64, Arc<SampleFuture>) {
        let (number, future) = (self.next, Arc::<SampleFuture>::default());
        self.next += 1;
        self.all.insert(number, future.clone());
        (number, future)
    }

    pub fn get(&self, number: u64) -> Option<Arc<SampleFuture>> {
        self.all.get(&number).cloned()
    }

    /// Notes that an answer is there.
    fn ended(&mut self, number: u64, bytes: usize) {
        self.ended.insert((true, number), bytes);
        self.bytes += bytes;
        self.prune();
    }

    /// Notes that a client has an answer.
    pub fn fetched(&mut self, number: u64) {
        if let Some(bytes) = self.ended.remove(&(true, number)) {
            self.ended.insert((false, number), bytes);
            self.prune();
        }
    }

    fn prune(&mut self) {
        while self.bytes > KEPT && self.ended.len() > 1 || self.ended.range(..(true, 0)).count() > FETCHED {
            let Some(((_, number), bytes)) = self.ended.pop_first() else { return };
            self.bytes -= bytes;
            self.all.remove(&number);
        }
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

/// Refuses unsupported parameters.
fn check(request: &SampleRequest) -> Result<(), Refusal> {
    let tops = [("topk_prompt_logprobs", request.topk_prompt_logprobs), ("topk_sample_logprobs", request.topk_sample_logprobs)];
    if let Some((name, k)) = tops.into_iter().find(|(_, k)| *k as u64 > MOST_TOP) {
        return Err(Refusal::bad(format!("`{name}` is {k}; it may be at most {MOST_TOP}")));
    }
    let lacking = [
        ("target_prompt_logprobs", request.target_prompt_logprobs.is_some()),
        ("prompt_alt_tokens_k", request.prompt_alt_tokens_k > 0),
    ];
    match lacking.into_iter().find(|(_, wanted)| *wanted) {
        Some((name, _)) => Err(Refusal::bad(format!("`{name}` is not possible on this server"))),
        None => Ok(()),
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
        // Another request may have loaded it meanwhile.
        if let Some(name) = shared.adapter(Some(session)).filter(|name| name.is_some()) {
            return Ok(name);
        }
        let weights = read_session(shared, &folder).await?;
        let name: Arc<str> = session.into();
        for reply in super::load(shared, &self.loaded, &name, weights, &folder) {
            reply.await.map_err(|_| shared.gone())?;
        }
        Ok(Some(name))
    }

    /// Starts to sample, and returns the number of the answer.
    pub async fn sample(self: &Arc<Self>, request: SampleRequest) -> Result<u64, Refusal> {
        check(&request)?;
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
        let (top, top_sampled) = (request.topk_prompt_logprobs, request.topk_sample_logprobs);
        let scores = request.prompt_logprobs.unwrap_or(false) || top > 0;
        let (mut params, prompts) = (self.params(&request, prompt.len())?, vec![prompt.clone()]);
        if scores {
            params.max_new_tokens = self.shared.new_tokens(params.max_new_tokens, &prompts);
        }
        let samples = u32::try_from(request.num_samples).map_err(|_| Refusal::bad("num_samples is too large"))?;
        let seed = request.sampling_params.seed;
        let ask = Ask { rid: None, prompts, samples, params, seed, adapter: adapter.clone(), routes: false };
        let active = Active::new(&self.loaded, adapter.as_ref());
        // Before it counts as active it may have been unloaded.
        if let Some(name) = &adapter {
            self.adapter(name).await?;
        }
        let mut ticket = self.shared.submit(ask)?;
        let (number, future) = self.samples.lock().begin();
        let tinker = self.clone();
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
            tinker.end(number, &done, answer);
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
        let Some(future) = self.samples.lock().get(number) else { return };
        let task = future.task.lock().take();
        if let Some(task) = task {
            task.abort();
            self.end(number, &future, Answer::refused("the client cancelled it"));
        }
    }

    fn end(&self, number: u64, future: &SampleFuture, answer: Answer) {
        let bytes = answer.bytes();
        // Held, so that a client does not fetch the answer before it is noted.
        let mut samples = self.samples.lock();
        if future.end(answer) {
            samples.ended(number, bytes);
        }
    }

    fn params(&self, request: &SampleRequest, prompt: usize) -> Result<SamplingParams, Refusal> {
        let of = &request.sampling_params;
        let (mut stop_token_ids, mut stop) = (Vec::new(), Vec::new());
        // An empty list is read as one of tokens.
        let ignore_eos = matches!(&of.stop, Some(Stop::Tokens(tokens)) if tokens.is_empty());
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
            ignore_eos,
            ..SamplingParams::default()
        })
    }

    /// Returns true if weights for sampling are on disk.
    pub fn has_session(&self, session: &str) -> bool {
        session == BASE || is_name(session) && Path::new(&self.ground.samplers.join(session)).is_dir()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_that_were_fetched_go_first_and_none_that_is_awaited_goes() {
        let mut samples = Samples::default();
        let numbers: Vec<u64> = (0..6).map(|_| samples.begin().0).collect();
        [1, 2, 3].into_iter().for_each(|number| samples.ended(number, KEPT / 3));
        samples.fetched(2);
        samples.ended(4, KEPT / 3);
        let there =
            |samples: &Samples| numbers.iter().copied().filter(|number| samples.get(*number).is_some()).collect::<Vec<_>>();
        assert_eq!(there(&samples), [0, 1, 3, 4, 5]);
        samples.ended(5, KEPT * 2);
        assert_eq!(there(&samples), [0, 5], "the newest answer stays, whatever its length");
        for number in (0..FETCHED as u64 + 1).map(|_| samples.begin().0).collect::<Vec<_>>() {
            samples.ended(number, 0);
            samples.fetched(number);
        }
        assert_eq!((samples.get(6).is_some(), samples.get(7).is_some()), (false, true));
    }
}
