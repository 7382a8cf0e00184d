//! SGLang's `POST /generate`.

use std::sync::Arc;
use std::time::Instant;

use axum::body::Bytes;
use axum::extract::State;
use serde::Deserialize;
use serde_json::{Value, json};

use super::reply::{self, Refusal, Reply};
use super::sampling::{OneOrMany, Sampling};
use super::shared::{Ask, Shared, unknown};
use super::ticket::{TextStyle, Ticket};
use super::worker::End;
use crate::engine::FinishReason;
use crate::engine::remote::wire_routes;
use crate::env::protocol;

/// SGLang's default length of a completion, in tokens.
const MAX_NEW_TOKENS: usize = 128;

/// Most likeliest tokens per position of a reply.
pub(super) const MOST_TOP: u64 = 1024;

#[derive(Deserialize)]
struct Request {
    text: Option<OneOrMany<String>>,
    input_ids: Option<OneOrMany<Tokens>>,
    #[serde(default)]
    sampling_params: Sampling,
    #[serde(default)]
    return_logprob: Option<bool>,
    logprob_start_len: Option<i64>,
    top_logprobs_num: Option<u64>,
    #[serde(default)]
    return_text_in_logprobs: Option<bool>,
    #[serde(default)]
    stream: Option<bool>,
    /// If true, events of a stream hold new tokens only.
    #[serde(default)]
    incremental_streaming_output: Option<bool>,
    #[serde(default)]
    return_routed_experts: Option<bool>,
    rid: Option<OneOrMany<String>>,
    lora_path: Option<OneOrMany<Option<String>>>,
}

/// Token ids; as an element, so that a list of ids is one prompt.
#[derive(Clone, Debug, Deserialize)]
#[serde(transparent)]
struct Tokens(Vec<u32>);

/// What the events of a request repeat.
struct Form {
    id: OneOrMany<String>,
    log_probs: bool,
    texts: bool,
    incremental: bool,
    style: TextStyle,
    /// If true, the response is a list: of several prompts or completions.
    many: bool,
    /// `input_token_logprobs` of each prompt, if requested.
    inputs: Option<Vec<Value>>,
    /// `input_top_logprobs` of each prompt, if requested.
    tops: Option<Vec<Vec<Value>>>,
    asked: Instant,
}

/// Answers a request.
pub(super) async fn generate(State(shared): State<Arc<Shared>>, body: Bytes) -> Reply {
    let request: Request = reply::read(&body)?;
    let sampling = &request.sampling_params;
    sampling.check(true)?;
    let top = request.top_logprobs_num.unwrap_or(0);
    if top > 0 && request.logprob_start_len.is_none() {
        return Err(Refusal::bad(
            "`top_logprobs_num` gives the likeliest tokens in the places of the prompt's: set `logprob_start_len`; of sampled tokens only \
             their own log-probabilities are available",
        ));
    }
    if top > MOST_TOP {
        return Err(Refusal::bad(format!("`top_logprobs_num` is {top}; it may be at most {MOST_TOP}")));
    }
    let (prompts, many) = match (request.input_ids, request.text) {
        (Some(ids), None) => {
            let (ids, many) = ids.list();
            (ids.into_iter().map(|Tokens(ids)| ids.into()).collect::<Vec<Arc<[u32]>>>(), many)
        }
        (None, Some(text)) => {
            let (texts, many) = text.list();
            (shared.encode(texts, true).await?, many)
        }
        _ => return Err(Refusal::bad("give either `text` or `input_ids`")),
    };
    let adapters = request.lora_path.map(|path| path.list().0).unwrap_or_default();
    let name = adapters.first().cloned().flatten();
    if adapters.iter().any(|other| *other != name) {
        return Err(Refusal::bad("`lora_path` differs among the prompts of one request; send a request for each adapter"));
    }
    let adapter = shared.adapter(name.as_deref()).ok_or_else(|| unknown(400, name.as_deref().unwrap_or_default()))?;
    let samples = sampling.n.unwrap_or(1);
    let rid = request.rid;
    if let Some(OneOrMany::Many(rids)) = &rid
        && rids.len() != prompts.len()
    {
        return Err(Refusal::bad(format!("`rid` lists {} names for {} prompts", rids.len(), prompts.len())));
    }
    let (log_probs, texts) = (request.return_logprob.unwrap_or(false), request.return_text_in_logprobs.unwrap_or(false));
    let routes = request.return_routed_experts.unwrap_or(false);
    if routes && shared.model.experts.is_none() {
        return Err(Refusal::bad("`return_routed_experts` is for a mixture of experts, which this model is not"));
    }
    let mut form = Form {
        id: rid.clone().unwrap_or_else(|| OneOrMany::One(protocol::unique())),
        log_probs,
        texts,
        incremental: request.incremental_streaming_output.unwrap_or(false),
        style: sampling.style(),
        many: many || samples > 1,
        inputs: None,
        tops: None,
        asked: Instant::now(),
    };
    let from = request.logprob_start_len.and_then(|from| usize::try_from(from).ok()).filter(|_| log_probs);
    let (mut params, seed) = (sampling.params(MAX_NEW_TOKENS), sampling.seed());
    if from.is_some() {
        params.max_new_tokens = shared.new_tokens(params.max_new_tokens, &prompts);
    }
    let ask = Ask { rid, prompts: prompts.clone(), samples, params, seed, adapter: adapter.clone(), routes };
    let mut ticket = shared.submit(ask)?;
    if let Some(from) = from {
        let (mut inputs, mut tops) = (Vec::new(), Vec::new());
        for prompt in &prompts {
            let found = shared.score_top(prompt, &adapter, top as usize).await?;
            let scores: Vec<Option<f32>> = std::iter::once(None).chain(found.log_probs.into_iter().map(Some)).collect();
            let from = from.min(prompt.len());
            inputs.push(columns(&shared, &prompt[from..], &scores[from..], texts)?);
            let likeliest = |position: usize| match found.top.at(position) {
                None => Ok(Value::Null),
                Some((ids, log_probs)) => columns(&shared, ids, &log_probs.iter().copied().map(Some).collect::<Vec<_>>(), texts),
            };
            tops.push((from..prompt.len()).map(likeliest).collect::<Result<Vec<_>, _>>()?);
        }
        form.inputs = Some(inputs);
        form.tops = (top > 0).then_some(tops);
    }
    if request.stream.unwrap_or(false) {
        return Ok(reply::stream(ticket, move |ticket, news| {
            let mut events = String::new();
            for &choice in news.unwrap_or_default() {
                ticket.check(choice)?;
                events += &protocol::event(&event(ticket, choice, &form, form.incremental)?);
            }
            Ok(events)
        }));
    }
    ticket.finish().await?;
    let choices = 0..ticket.completions.len();
    let mut all = choices.map(|choice| event(&mut ticket, choice, &form, false)).collect::<Result<Vec<_>, _>>()?;
    Ok(reply::page(&if form.many { Value::Array(all) } else { all.pop().unwrap_or_default() }))
}

/// A completion so far, or its part since the last event.
fn event(ticket: &mut Ticket, choice: usize, form: &Form, incremental: bool) -> Result<Value, Refusal> {
    let (shared, params) = (ticket.shared.clone(), ticket.params.clone());
    let (prompt, samples) = (ticket.prompt(choice).len(), ticket.samples as usize);
    let completion = &mut ticket.completions[choice];
    let text = completion.text(&params, &shared.tokenizer, form.style).map_err(|error| Refusal::new(500, error.to_string()))?;
    let (from, from_text) = if incremental { (completion.sent, completion.sent_text.min(text.len())) } else { (0, 0) };
    (completion.sent, completion.sent_text) = (completion.tokens.len(), text.len());
    let finish = match &completion.end {
        None => Value::Null,
        Some(End::Finished(FinishReason::Stop)) => {
            json!({"type": "stop", "matched": completion.matched(&params, &shared.tokenizer)})
        }
        Some(End::Finished(FinishReason::Length)) => json!({"type": "length", "length": completion.tokens.len()}),
        Some(End::Aborted) => json!({"type": "abort", "message": "aborted by a request or a pause"}),
        Some(End::Failed(why)) => json!({"type": "abort", "message": why, "status_code": 500}),
    };
    let label = completion.spans.last().map_or_else(|| shared.served.lock().label.clone(), |(label, _)| label.clone());
    let mut meta = json!({
        "id": form.id.of(choice / samples), "finish_reason": finish, "prompt_tokens": prompt, "completion_tokens": completion.tokens.len(),
        "cached_tokens": 0, "weight_version": &*label, "weight_versions": completion.weight_versions(),
    });
    if form.log_probs {
        let scores: Vec<Option<f32>> = completion.log_probs[from..].iter().copied().map(Some).collect();
        meta["output_token_logprobs"] = columns(&shared, &completion.tokens[from..], &scores, form.texts)?;
        meta["output_token_logprobs_length"] = (completion.tokens.len() - from).into();
    }
    if let Some(routes) = &completion.routes {
        meta["routed_experts"] = wire_routes::write(routes).into();
    }
    if let Some(inputs) = &form.inputs {
        meta["input_token_logprobs"] = inputs[choice / samples].clone();
    }
    if let Some(tops) = &form.tops {
        meta["input_top_logprobs"] = tops[choice / samples].clone().into();
    }
    if completion.end.is_some() {
        meta["e2e_latency"] = form.asked.elapsed().as_secs_f64().into();
    }
    let mut event = json!({ "text": text[from_text..], "output_ids": completion.tokens[from..], "meta_info": meta });
    if form.many {
        event["index"] = choice.into();
    }
    Ok(event)
}

/// Log-probabilities as `[log-probability, token, text]`.
fn columns(shared: &Shared, tokens: &[u32], scores: &[Option<f32>], texts: bool) -> Result<Value, Refusal> {
    let column = |(token, score): (&u32, &Option<f32>)| {
        let text = if texts { Some(shared.tokenizer.decode_all(&[*token])?) } else { None };
        Ok(json!([score, token, text]))
    };
    let columns = tokens.iter().zip(scores).map(column).collect::<Result<_, crate::data::DataError>>();
    columns.map_err(|error| Refusal::new(500, error.to_string()))
}
