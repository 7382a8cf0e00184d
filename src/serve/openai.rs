//! OpenAI's `POST /v1/completions` and `POST /v1/chat/completions`, with vLLM's keys for tokens and
//! weight versions.

use std::collections::BTreeMap;
use std::sync::Arc;

use axum::body::Bytes;
use axum::extract::State;
use serde::Deserialize;
use serde_json::{Map, Value, json};

use super::control::blocking;
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
    /// If true (default), texts get the tokenizer's special tokens.
    add_special_tokens: Option<bool>,
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
    add_generation_prompt: Option<bool>,
    /// If true, the rendered conversation gets the tokenizer's special tokens, too.
    add_special_tokens: Option<bool>,
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
    let CompletionRequest { prompt, echo, logprobs, add_special_tokens, common } = reply::read(&body)?;
    common.sampling.check(false)?;
    if logprobs.is_some_and(|count| count > 1) {
        return Err(Refusal::bad("`logprobs` must be 0 or 1: only log-probabilities of sampled tokens are available"));
    }
    let prompts: Vec<Arc<[u32]>> = match prompt {
        Prompt::Texts(texts) => shared.encode(texts.list().0, add_special_tokens.unwrap_or(true)).await?,
        Prompt::Tokens(tokens) => vec![tokens.into()],
        Prompt::ManyTokens(all) => all.into_iter().map(Arc::from).collect(),
    };
    let adapter = adapter(&shared, common.model.as_deref())?;
    let mut form = Form::new(&shared, &common, false, logprobs.is_some(), Vec::new());
    let mut ask = ask(&common, prompts.clone(), adapter.clone(), MAX_TOKENS);
    let echo = echo.unwrap_or(false);
    if echo && form.log_probs {
        ask.params.max_new_tokens = shared.new_tokens(ask.params.max_new_tokens, &prompts);
    }
    let ticket = shared.submit(ask)?;
    if echo {
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
    let rid = common.request_id.clone().map(OneOrMany::One);
    Ask { rid, prompts, samples, params, seed: sampling.seed(), adapter, routes: false }
}

/// Answers a request for the next turn of a conversation.
pub(super) async fn chat(State(shared): State<Arc<Shared>>, body: Bytes) -> Reply {
    let whole: Map<String, Value> = reply::read(&body)?;
    let ChatRequest { logprobs, top_logprobs, tool_choice, add_generation_prompt, add_special_tokens, common } =
        reply::read(&body)?;
    common.sampling.check(false)?;
    if top_logprobs.unwrap_or(0) > 0 {
        return Err(Refusal::bad("`top_logprobs` must be 0: only log-probabilities of sampled tokens are available"));
    }
    if add_generation_prompt == Some(false) {
        return Err(Refusal::bad("`add_generation_prompt` must be true: the completion is the assistant's next turn"));
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
    let tokenizer = shared.tokenizer.clone();
    let render = move || tokenizer.chat().and_then(|template| template.render_prompt(&messages, &shown));
    let text = blocking(move || render().map_err(|error| error.to_string())).await?;
    let prompts = shared.encode(vec![text], add_special_tokens.unwrap_or(false)).await?;
    let adapter = adapter(&shared, common.model.as_deref())?;
    let room = shared.context().saturating_sub(prompts[0].len()).max(1);
    let form = Form::new(&shared, &common, true, logprobs.unwrap_or(false), tools);
    let ticket = shared.submit(ask(&common, prompts, adapter, room))?;
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
                let prompt = Some(&**ticket.prompt(at)).filter(|_| first);
                let mut page = page(&form, json!([part]), prompt);
                if form.usage {
                    page["usage"] = Value::Null;
                }
                events += &protocol::event(&page);
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
    let mut page = page(&form, choices.into(), Some(ticket.prompt(0)));
    page["usage"] = ticket.usage();
    Ok(reply::page(&page))
}

/// A page or an event with these choices. As in vLLM, a chat's response has the prompt's tokens, and not its
/// choices.
fn page(form: &Form, choices: Value, prompt: Option<&[u32]>) -> Value {
    let mut page = form.head.clone();
    page["choices"] = choices;
    if let Some(prompt) = prompt.filter(|_| form.chat && form.token_ids) {
        page["prompt_token_ids"] = prompt.into();
    }
    page
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
    let prompt = ticket.prompt(at).clone();
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
        let sizes = (completion.tokens.len(), prompt.len());
        let turn = if ended { turn(form, &text, sizes, finish == Some("length")) } else { ModelTurn::default() };
        let calls = turn.called();
        let mut message = if part.first || part.whole { json!({ "role": "assistant" }) } else { json!({}) };
        if calls.is_empty() {
            message["content"] = new.into();
            choice["finish_reason"] = finish.into();
        } else {
            message["content"] = Some(turn.content.as_str()).filter(|text| !text.is_empty()).into();
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
        choice["token_ids"] = json!(completion.tokens[from..]);
        if part.first && !form.chat {
            choice["prompt_token_ids"] = json!(prompt[..]);
        }
    }
    Ok(choice)
}

/// The whole turn: its text, or the calls that it makes and the text before them.
fn turn(form: &Form, text: &str, (sampled, read): (usize, usize), truncated: bool) -> ModelTurn {
    let calls = if form.tools.is_empty() { Vec::new() } else { extract_tool_calls(text, &ToolFormat::Hermes, &form.tools) };
    let action = Action { text: text.to_owned(), calls: Vec::new(), malformed: 0, read, sampled };
    let mut turn = ModelTurn { truncated, ..ModelTurn::of(&action, calls) };
    if !turn.calls.is_empty() {
        turn.content = text.split("<tool_call>").next().unwrap_or_default().trim_end().to_owned();
    }
    turn
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

#[cfg(test)]
mod tests {
    use axum::body::to_bytes;
    use tokio::runtime::Builder;

    use super::super::tests::config;
    use super::super::worker::{Command, Piece};
    use super::*;
    use crate::data::Tokenizer;
    use crate::model::ModelConfig;
    use crate::observe::Metrics;
    use crate::train::Policy;

    const SAID: &str = "<think>hm</think>I'll look.\n<tool_call>{\"name\": \"look\", \"arguments\": {}}</tool_call>";

    /// The test is the engine's thread, and samples this text.
    #[test]
    fn text_before_a_tool_call_stays_and_calls_without_their_form_are_refused() {
        let mut letters: Vec<char> = SAID.chars().collect();
        letters.sort_unstable();
        letters.dedup();
        let tokenizer = Tokenizer::characters(&letters.into_iter().collect::<String>(), 64).unwrap();
        let policy = Policy::random(ModelConfig::small(&tokenizer, 16, 1), tokenizer, 3).unwrap();
        let state = tempfile::tempdir().unwrap();
        let (shared, mut commands) = Shared::new(&policy, config(state.path()), Metrics::new()).unwrap();
        let shared = Arc::new(shared);
        let runtime = Builder::new_current_thread().build().unwrap();
        let mut body = json!({
            "messages": [{"role": "user", "content": "look"}],
            "tools": [{"type": "function", "function": {"name": "look", "parameters": {}}}],
        });
        let mut answered = |body: &Value| {
            let asked = runtime.spawn(chat(State(shared.clone()), body.to_string().into()));
            runtime.block_on(async {
                let Some(Command::Generate(job)) = commands.recv().await else { panic!("no other command") };
                for token in shared.tokenizer.encode_bare(SAID).unwrap() {
                    job.pieces.send(Piece::Token { choice: 0, token, log_prob: 0.0, label: "a".into() }).ok();
                }
                let end = End::Finished(FinishReason::Stop);
                job.pieces.send(Piece::End { choice: 0, end, routes: None }).ok();
                let body = asked.await.unwrap().unwrap().into_body();
                String::from_utf8(to_bytes(body, usize::MAX).await.unwrap().to_vec()).unwrap()
            })
        };
        let page: Value = serde_json::from_str(&answered(&body)).unwrap();
        let (message, finish) = (&page["choices"][0]["message"], &page["choices"][0]["finish_reason"]);
        assert_eq!((&message["content"], finish), (&json!("<think>hm</think>I'll look."), &json!("tool_calls")));
        assert_eq!(message["tool_calls"][0]["function"]["name"], "look");

        body["stream"] = true.into();
        let events = answered(&body);
        let events = events.lines().filter_map(|line| serde_json::from_str::<Value>(line.strip_prefix("data: ")?).ok());
        let deltas: Vec<Value> = events.map(|event| event["choices"][0]["delta"].clone()).collect();
        let text: String = deltas.iter().filter_map(|delta| delta["content"].as_str()).collect();
        assert_eq!(
            (json!(text), deltas.last().map(|delta| &delta["tool_calls"][0]["function"]["name"])),
            (message["content"].clone(), Some(&json!("look")))
        );

        for calls in [json!(["x"]), json!([{"function": "look"}]), json!({"function": {}})] {
            body["messages"] = json!([{"role": "assistant", "content": "", "tool_calls": calls}]);
            let refused = runtime.block_on(chat(State(shared.clone()), body.to_string().into())).unwrap_err();
            assert!(refused.message().contains("tool_calls"), "{calls}: {}", refused.message());
        }
    }
}
