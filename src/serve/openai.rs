//! OpenAI's `POST /v1/completions` and `POST /v1/chat/completions`, with vLLM's keys for tokens and
//! weight versions.

use std::collections::BTreeMap;
use std::sync::Arc;

use axum::body::Bytes;
use axum::extract::State;
use serde::Deserialize;
use serde_json::{Map, Value, json};

use super::reply::{self, Refusal, Reply};
use super::sampling::{OneOrMany, Sampling};
use super::shared::{Ask, Shared};
use super::ticket::{TextStyle, Ticket};
use super::worker::{AdapterName, End};
use crate::data::DataError;
use crate::engine::FinishReason;
use crate::env::protocol::{self, ModelTurn};
use crate::env::{Action, ToolFormat, ToolSpec, extract_tool_calls};
use crate::util::untrusted;

/// OpenAI's default length of a completion without a chat, in tokens.
const MAX_TOKENS: usize = 16;

/// Keys of both routes, except the sampling parameters.
#[derive(Default, Deserialize)]
#[serde(default)]
struct Common {
    model: Option<String>,
    stream: Option<bool>,
    stream_options: Option<StreamOptions>,
    return_token_ids: Option<bool>,
    return_tokens_as_token_ids: Option<bool>,
    return_weight_versions: Option<bool>,
    request_id: Option<String>,
    #[serde(flatten)]
    sampling: Sampling,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct StreamOptions {
    include_usage: bool,
}

#[derive(Deserialize)]
struct CompletionRequest {
    prompt: Prompt,
    #[serde(default)]
    echo: Option<bool>,
    logprobs: Option<u64>,
    #[serde(flatten)]
    common: Common,
}

/// A text, the tokens of one, or a list of either.
#[derive(Deserialize)]
#[serde(untagged)]
enum Prompt {
    Texts(OneOrMany<String>),
    Tokens(Vec<u32>),
    ManyTokens(Vec<Vec<u32>>),
}

#[derive(Deserialize)]
struct ChatRequest {
    #[serde(default)]
    logprobs: Option<bool>,
    top_logprobs: Option<u64>,
    tool_choice: Option<Value>,
    #[serde(flatten)]
    common: Common,
}

/// What the choices of a response repeat.
struct Form {
    head: Value,
    chat: bool,
    log_probs: bool,
    token_ids: bool,
    tokens_as_ids: bool,
    versions: bool,
    usage: bool,
    style: TextStyle,
    tools: Vec<ToolSpec>,
    /// Each prompt with its log-probabilities, if the response repeats prompts.
    echo: Option<Vec<Echo>>,
}

struct Echo {
    text: String,
    tokens: Vec<u32>,
    log_probs: Vec<Option<f32>>,
}

fn internal(error: DataError) -> Refusal {
    Refusal::new(500, error.to_string())
}

fn adapter(shared: &Shared, model: Option<&str>) -> Result<AdapterName, Refusal> {
    shared.adapter(model).ok_or_else(|| {
        let name = untrusted::line_of(model.unwrap_or_default(), 100);
        Refusal::new(404, format!("the model {name} is neither {:?} nor a loaded LoRA adapter", shared.config.name))
    })
}

impl Form {
    fn new(shared: &Shared, common: &Common, chat: bool, log_probs: bool, tools: Vec<ToolSpec>) -> Self {
        let stream = common.stream.unwrap_or(false);
        let (id, object) = match (chat, stream) {
            (false, _) => ("cmpl", "text_completion"),
            (true, false) => ("chatcmpl", "chat.completion"),
            (true, true) => ("chatcmpl", "chat.completion.chunk"),
        };
        let mut head = protocol::head(id, object, common.model.as_deref().unwrap_or(&shared.config.name), json!([]));
        if let Some(id) = &common.request_id {
            head["id"] = id.as_str().into();
        }
        Form {
            head,
            chat,
            log_probs,
            token_ids: common.return_token_ids.unwrap_or(false),
            tokens_as_ids: common.return_tokens_as_token_ids.unwrap_or(false),
            versions: common.return_weight_versions.unwrap_or(false),
            usage: common.stream_options.as_ref().is_some_and(|options| options.include_usage),
            style: common.sampling.style(),
            tools,
            echo: None,
        }
    }
}

/// Answers a request to continue texts.
pub(super) async fn completions(State(shared): State<Arc<Shared>>, body: Bytes) -> Reply {
    let CompletionRequest { prompt, echo, logprobs, common } = reply::read(&body)?;
    common.sampling.check(false)?;
    if logprobs.is_some_and(|count| count > 1) {
        return Err(Refusal::bad("`logprobs` must be 0 or 1: only log-probabilities of sampled tokens are available"));
    }
    let encode = |text: String| shared.tokenizer.encode(&text).map(Arc::from);
    let prompts: Vec<Arc<[u32]>> = match prompt {
        Prompt::Texts(texts) => texts.list().0.into_iter().map(encode).collect::<Result<_, _>>().map_err(internal)?,
        Prompt::Tokens(tokens) => vec![tokens.into()],
        Prompt::ManyTokens(all) => all.into_iter().map(Arc::from).collect(),
    };
    let adapter = adapter(&shared, common.model.as_deref())?;
    let mut form = Form::new(&shared, &common, false, logprobs.is_some(), Vec::new());
    let ask = ask(&common, prompts.clone(), adapter.clone(), MAX_TOKENS);
    let ticket = shared.submit(ask)?;
    if echo.unwrap_or(false) {
        let mut echoes = Vec::new();
        for prompt in &prompts {
            let scores = if form.log_probs { shared.score(prompt, &adapter).await? } else { vec![0.0; prompt.len() - 1] };
            let log_probs = std::iter::once(None).chain(scores.into_iter().map(Some)).collect();
            let text =
                if form.style.skip_special { shared.tokenizer.decode(prompt) } else { shared.tokenizer.decode_all(prompt) };
            echoes.push(Echo { text: text.map_err(internal)?, tokens: prompt.to_vec(), log_probs });
        }
        form.echo = Some(echoes);
    }
    respond(ticket, form, common.stream.unwrap_or(false)).await
}

fn ask(common: &Common, prompts: Vec<Arc<[u32]>>, adapter: AdapterName, max_tokens: usize) -> Ask {
    let sampling = &common.sampling;
    let (params, samples) = (sampling.params(max_tokens), sampling.n.unwrap_or(1));
    Ask { rid: common.request_id.clone(), prompts, samples, params, seed: sampling.seed(), adapter, routes: false }
}

/// Answers a request for the next turn of a conversation.
pub(super) async fn chat(State(shared): State<Arc<Shared>>, body: Bytes) -> Reply {
    let whole: Map<String, Value> = reply::read(&body)?;
    let ChatRequest { logprobs, top_logprobs, tool_choice, common } = reply::read(&body)?;
    common.sampling.check(false)?;
    if top_logprobs.unwrap_or(0) > 0 {
        return Err(Refusal::bad("`top_logprobs` must be 0: only log-probabilities of sampled tokens are available"));
    }
    let (messages, mut tools) = protocol::chat(&whole).map_err(Refusal::bad)?;
    match tool_choice.as_ref().and_then(Value::as_str) {
        Some("none") => tools.clear(),
        None if tool_choice.as_ref().is_some_and(|choice| !choice.is_null()) => {
            return Err(Refusal::bad("`tool_choice` must be \"auto\" or \"none\": a call cannot be forced"));
        }
        Some("required") => return Err(Refusal::bad("`tool_choice` must be \"auto\" or \"none\": a call cannot be forced")),
        _ => {}
    }
    let shown: Vec<Value> = tools.iter().map(|tool| json!({ "type": "function", "function": tool })).collect();
    let template = shared.tokenizer.chat().map_err(|error| Refusal::bad(error.to_string()))?;
    let prompt = template.render_prompt(&messages, &shown).and_then(|text| shared.tokenizer.encode_bare(&text));
    let prompt: Arc<[u32]> = prompt.map_err(|error| Refusal::bad(error.to_string()))?.into();
    let adapter = adapter(&shared, common.model.as_deref())?;
    let room = shared.context().saturating_sub(prompt.len()).max(1);
    let form = Form::new(&shared, &common, true, logprobs.unwrap_or(false), tools);
    let ticket = shared.submit(ask(&common, vec![prompt], adapter, room))?;
    respond(ticket, form, common.stream.unwrap_or(false)).await
}

async fn respond(mut ticket: Ticket, form: Form, stream: bool) -> Reply {
    if stream {
        let mut begun = BTreeMap::new();
        return Ok(reply::stream(ticket, move |ticket, news| {
            let mut events = String::new();
            for &at in news.unwrap_or_default() {
                ticket.check(at)?;
                let first = begun.insert(at, ()).is_none();
                let part = choice(ticket, at, &form, Part { first, whole: false })?;
                events += &event(&form, json!([part]));
            }
            if news.is_none() && form.usage {
                let mut page = form.head.clone();
                page["usage"] = ticket.usage();
                events += &protocol::event(&page);
            }
            Ok(events)
        }));
    }
    ticket.finish().await?;
    let part = Part { first: true, whole: true };
    let choices = (0..ticket.completions.len()).map(|at| choice(&mut ticket, at, &form, part)).collect::<Result<Vec<_>, _>>()?;
    let mut page = form.head.clone();
    (page["choices"], page["usage"]) = (choices.into(), ticket.usage());
    Ok(reply::page(&page))
}

fn event(form: &Form, choices: Value) -> String {
    let mut page = form.head.clone();
    page["choices"] = choices;
    if form.usage {
        page["usage"] = Value::Null;
    }
    protocol::event(&page)
}

/// Part of a completion that a choice shows.
#[derive(Clone, Copy)]
struct Part {
    /// If true, the choice is the completion's first.
    first: bool,
    /// If true, it is a page's choice and holds the whole.
    whole: bool,
}

/// A choice of a page, or of an event: what is new since the last.
fn choice(ticket: &mut Ticket, at: usize, form: &Form, part: Part) -> Result<Value, Refusal> {
    let (shared, params, samples) = (ticket.shared.clone(), ticket.params.clone(), ticket.samples as usize);
    let read = ticket.prompt(at).len();
    let completion = &mut ticket.completions[at];
    let text = completion.text(&params, &shared.tokenizer, form.style).map_err(internal)?;
    let (from, from_text) = (completion.sent, completion.sent_text.min(text.len()));
    let ended = completion.end.is_some();
    // Only the end shows whether a turn is text or a call.
    let held = !form.tools.is_empty() && !ended;
    (completion.sent, completion.sent_text) = (completion.tokens.len(), if held { 0 } else { text.len() });
    let mut new = if held { "" } else { &text[from_text..] }.to_owned();
    let (mut tokens, mut scores) = (completion.tokens[from..].to_vec(), Vec::new());
    scores.extend(completion.log_probs[from..].iter().copied().map(Some));
    let echo = form.echo.as_ref().filter(|_| part.first).map(|echoes| &echoes[at / samples]);
    if let Some(echo) = echo {
        new.insert_str(0, &echo.text);
        tokens.splice(0..0, echo.tokens.iter().copied());
        scores.splice(0..0, echo.log_probs.iter().copied());
    }
    let finish = completion.end.as_ref().map(|end| match end {
        End::Finished(FinishReason::Stop) => "stop",
        End::Finished(FinishReason::Length) => "length",
        End::Aborted | End::Failed(_) => "abort",
    });
    let mut choice = json!({ "index": at });
    if form.chat {
        let turn =
            if ended { turn(form, &text, completion.tokens.len(), read, finish == Some("length")) } else { ModelTurn::default() };
        let calls = turn.called();
        let mut message = if part.first || part.whole { json!({ "role": "assistant" }) } else { json!({}) };
        if calls.is_empty() {
            message["content"] = new.into();
            choice["finish_reason"] = finish.into();
        } else {
            message["content"] = Value::Null;
            message["tool_calls"] = calls.into();
            choice["finish_reason"] = turn.finish().into();
        }
        choice[if part.whole { "message" } else { "delta" }] = message;
    } else {
        choice["text"] = new.into();
        choice["finish_reason"] = finish.into();
    }
    choice["stop_reason"] = completion.matched(&params, &shared.tokenizer);
    if form.versions && ended {
        choice["weight_versions"] = completion.weight_versions();
    }
    choice["logprobs"] = if form.log_probs { log_probs(&shared, form, &tokens, &scores).map_err(internal)? } else { Value::Null };
    if form.token_ids {
        choice["token_ids"] = tokens.into();
    }
    Ok(choice)
}

/// The whole turn: text, or the calls that it makes.
fn turn(form: &Form, text: &str, sampled: usize, read: usize, truncated: bool) -> ModelTurn {
    let calls = if form.tools.is_empty() { Vec::new() } else { extract_tool_calls(text, &ToolFormat::Hermes, &form.tools) };
    let action = Action { text: text.to_owned(), calls: Vec::new(), malformed: 0, read, sampled };
    ModelTurn { truncated, ..ModelTurn::of(&action, calls) }
}

fn log_probs(shared: &Shared, form: &Form, tokens: &[u32], scores: &[Option<f32>]) -> Result<Value, DataError> {
    let spell = |token: &u32| match form.tokens_as_ids {
        true => Ok(format!("token_id:{token}")),
        false => shared.tokenizer.decode_all(&[*token]),
    };
    let texts = tokens.iter().map(spell).collect::<Result<Vec<_>, _>>()?;
    if !form.chat {
        let offsets = texts.iter().scan(0, |end, text| Some(std::mem::replace(end, *end + text.chars().count())));
        let offsets: Vec<usize> = offsets.collect();
        return Ok(json!({ "tokens": texts, "token_logprobs": scores, "text_offset": offsets, "top_logprobs": null }));
    }
    let entry = |(text, score): (&String, &Option<f32>)| json!({ "token": text, "logprob": score, "bytes": text.as_bytes(), "top_logprobs": [] });
    Ok(json!({ "content": texts.iter().zip(scores).map(entry).collect::<Vec<_>>() }))
}
