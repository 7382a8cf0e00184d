//! Routes of the live page. The page itself holds no data; everything under `/api` asks for the token.
//!
//! | route | answer |
//! | --- | --- |
//! | `/` | the page |
//! | `/api/runs` | a row per run |
//! | `/api/runs/NAME` | the contents of a run's page, as `report.html` embeds them, without samples |
//! | `/api/runs/NAME/samples?…` | samples that fit, a page of them (`samples/search.rs`) |
//! | `/api/runs/NAME/samples/STEP-GROUP-INDEX` | the group of a sample, with texts; `-PART` follows for a part of a rollout |
//! | `/api/runs/NAME/samples/STEP-GROUP-INDEX/tokens?from=N` | tokens of a sample with their numbers |
//! | `/api/runs/NAME/events` | server-sent events |
//! | `/api/differences?run=NAME&run=NAME` | recipe keys that differ |
//! | `/api/runs/NAME/change` | keys that may change, with their values |
//! | `/api/recipes` | with a token: names of recipes that runs may be started from |
//! | `/api/schema` | JSON schema of a recipe |
//! | POST `/api/check`, `{"recipe": NAME, "set": ["KEY=VALUE"]}` | with a token: what `rollflow check --json` says, and all keys |
//! | POST `/api/runs`, the same with `"name"` | with a token: starts a run |
//! | POST the same, `{"set": ["KEY=VALUE"]}` | with a token, to a running run: sets keys from the next step on |
//! | POST `/api/runs/NAME/orders/ORDER` | with a token, to a running run: `pause`, `resume`, `checkpoint`, `drain` or `stop` |

use std::sync::Arc;

use anyhow::{Error, Result};
use axum::Router;
use axum::body::Bytes;
use axum::extract::{Path, Query, RawQuery, Request, State};
use axum::http::header::{
    CACHE_CONTROL, CONTENT_SECURITY_POLICY, CONTENT_TYPE, HeaderName, REFERRER_POLICY, X_CONTENT_TYPE_OPTIONS,
};
use axum::http::{HeaderValue, StatusCode};
use axum::middleware::{Next, from_fn};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use rollflow::net::{Fault, RemoteError};
use rollflow::observe::HtmlReport;
use rollflow::serve::{BearerToken, authenticated};
use rollflow::util::causes::full_message;
use rollflow::util::untrusted;
use serde::Deserialize;
use serde_json::json;
use sha2::{Digest, Sha256};

use super::events::events;
use super::relay::{Relay, as_part};
use super::runs::{Found, Runs};
use super::samples::{self, SampleKey, TokenPlace};
use super::start::{Starter, Wanted};
use crate::command::condition::ConditionError;
use crate::run::changes::ChangeError;
use crate::run::observed::Observed;
use crate::run::recipe_keys::differences;

const STYLE: &str = include_str!("live.css");
const SCRIPT: &str = concat!(
    include_str!("activity.js"),
    include_str!("tokens.js"),
    include_str!("change.js"),
    include_str!("start.js"),
    include_str!("live.js")
);

/// Reason why the page of a run's process takes no order.
const OTHER_TOKEN: &str = "the page of the run's process asks for another token; start the run from here, or with this token";

/// A response with JSON or a refusal.
type Answered = Result<Response, Refusal>;

/// Reason why a request has no answer.
enum Refusal {
    NoRun(String),
    NoOrder(&'static str),
    NoJson(String),
    NoChange(ChangeError),
    NoStart(Error),
    NoSample(String),
    Query(ConditionError),
    Failed(Error),
}

impl IntoResponse for Refusal {
    fn into_response(self) -> Response {
        let (status, why) = match self {
            Refusal::NoRun(name) => (StatusCode::NOT_FOUND, format!("there is no run {name:?} here")),
            Refusal::NoSample(key) => {
                (StatusCode::NOT_FOUND, format!("there is no sample {key:?}; its name is STEP-GROUP-INDEX, as in 40-1283-2"))
            }
            Refusal::Query(error) => (StatusCode::BAD_REQUEST, error.to_string()),
            Refusal::NoOrder(why) => (StatusCode::FORBIDDEN, why.to_owned()),
            Refusal::NoJson(why) => (StatusCode::BAD_REQUEST, why),
            Refusal::NoChange(error) => (StatusCode::BAD_REQUEST, error.to_string()),
            Refusal::NoStart(error) => (StatusCode::BAD_REQUEST, full_message(error.as_ref())),
            Refusal::Failed(error) => (StatusCode::INTERNAL_SERVER_ERROR, full_message(error.as_ref())),
        };
        (status, why + "\n").into_response()
    }
}

/// All routes.
pub(super) fn router(runs: &Arc<Runs>, token: Option<BearerToken>) -> Router {
    let api = Router::new()
        .route("/api/runs", get(list).post(start))
        .route("/api/recipes", get(recipes))
        .route("/api/schema", get(schema))
        .route("/api/check", post(check))
        .route("/api/runs/{name}", get(report))
        .route("/api/runs/{name}/samples", get(find_samples))
        .route("/api/runs/{name}/samples/{key}", get(sample))
        .route("/api/runs/{name}/samples/{key}/tokens", get(sample_tokens))
        .route("/api/runs/{name}/events", get(stream))
        .route("/api/differences", get(compared))
        .route("/api/runs/{name}/orders/{order}", post(order))
        .route("/api/runs/{name}/change", get(changeable).post(change))
        .with_state(runs.clone());
    let api = match token {
        Some(token) => authenticated(api, token),
        None => api,
    };
    let page: Arc<str> = HtmlReport::page_for(STYLE, SCRIPT).into();
    let policy = policy(&page);
    let shown = move || async move { ([(CONTENT_TYPE, "text/html; charset=utf-8")], page.to_string()) };
    Router::new().route("/", get(shown)).merge(api).layer(from_fn(move |request: Request, next: Next| {
        let headers: [(HeaderName, HeaderValue); 4] = [
            (CONTENT_SECURITY_POLICY, policy.clone()),
            (X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff")),
            (REFERRER_POLICY, HeaderValue::from_static("no-referrer")),
            (CACHE_CONTROL, HeaderValue::from_static("no-store")),
        ];
        async move { (headers, next.run(request).await) }
    }))
}

/// The page's content security policy: it may run its own script and style, and ask this server.
fn policy(page: &str) -> HeaderValue {
    let hash = |tag: &str| {
        let within = page.rsplit_once(&format!("<{tag}>")).and_then(|(_, rest)| rest.split_once(&format!("</{tag}>")));
        format!("'sha256-{}'", BASE64_STANDARD.encode(Sha256::digest(within.map_or("", |(within, _)| within))))
    };
    let policy = format!(
        "default-src 'none'; script-src {}; style-src {}; connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
        hash("script"),
        hash("style")
    );
    HeaderValue::try_from(policy).unwrap_or(HeaderValue::from_static("default-src 'none'"))
}

/// Does what may block.
async fn blocking<T: Send + 'static>(work: impl FnOnce() -> Result<T, Refusal> + Send + 'static) -> Result<T, Refusal> {
    tokio::task::spawn_blocking(work).await.map_err(|error| Refusal::Failed(error.into()))?
}

/// Makes JSON where reading files may block.
async fn made(make: impl FnOnce() -> Result<String, Refusal> + Send + 'static) -> Answered {
    Ok(([(CONTENT_TYPE, "application/json")], blocking(make).await?).into_response())
}

fn found(runs: &Runs, name: String) -> Result<Found, Refusal> {
    runs.find(&name).map_err(Refusal::Failed)?.ok_or(Refusal::NoRun(name))
}

async fn list(State(runs): State<Arc<Runs>>) -> Answered {
    made(move || Ok(runs.list().map_err(Refusal::Failed)?.to_string())).await
}

async fn report(State(runs): State<Arc<Runs>>, Path(name): Path<String>) -> Answered {
    made(move || runs.report(&found(&runs, name)?).map_err(Refusal::Failed)).await
}

async fn find_samples(State(runs): State<Arc<Runs>>, Path(name): Path<String>, Query(query): Query<samples::Query>) -> Answered {
    made(move || {
        let index = runs.cache(&found(&runs, name)?).samples().map_err(Refusal::Failed)?;
        let rows = samples::search(&index, &query).map_err(Refusal::Failed)?;
        Ok(rows.map_err(Refusal::Query)?.to_string())
    })
    .await
}

async fn sample(State(runs): State<Arc<Runs>>, Path((name, key)): Path<(String, String)>) -> Answered {
    made(move || {
        let index = runs.cache(&found(&runs, name)?).samples().map_err(Refusal::Failed)?;
        let group = SampleKey::parse(&key).map(|key| samples::group(&index, key)).transpose().map_err(Refusal::Failed)?;
        Ok(group.flatten().ok_or(Refusal::NoSample(key))?.to_string())
    })
    .await
}

async fn sample_tokens(
    State(runs): State<Arc<Runs>>,
    Path((name, key)): Path<(String, String)>,
    Query(place): Query<TokenPlace>,
) -> Answered {
    made(move || {
        let cache = runs.cache(&found(&runs, name)?);
        let (index, tokenizer) = (cache.samples().map_err(Refusal::Failed)?, cache.tokenizer().map_err(Refusal::Failed)?);
        let tokens = SampleKey::parse(&key).map(|key| samples::tokens(&index, key, place, &tokenizer));
        let tokens = tokens.transpose().map_err(Refusal::Failed)?;
        Ok(tokens.flatten().ok_or(Refusal::NoSample(key))?.to_string())
    })
    .await
}

async fn stream(State(runs): State<Arc<Runs>>, Path(name): Path<String>) -> Answered {
    let look = runs.clone();
    let run = blocking(move || found(&look, name)).await?;
    Ok(events(runs, run.path).into_response())
}

/// The process of a run.
enum Steered {
    /// This one.
    Here(Arc<Observed>),
    /// One with a page of the run.
    There(Box<Relay>),
}

/// The process of the run with this name, for a reader who may give it orders.
async fn steered(runs: Arc<Runs>, name: String) -> Result<Steered, Refusal> {
    if !runs.steerable {
        return Err(Refusal::NoOrder("orders need a token: start the run with observe.page_token_env"));
    }
    blocking(move || {
        let run = found(&runs, name)?;
        let there = || runs.elsewhere(&run.path).map(|relay| Steered::There(Box::new(relay)));
        let here = runs.live(&run.path).map(Steered::Here);
        here.or_else(there).ok_or(Refusal::NoOrder("only a running run with a page takes orders: start it with --page"))
    })
    .await
}

/// Reason why a request to the page of a run's process failed.
fn not_passed_on(error: RemoteError) -> Refusal {
    match error.fault {
        // The reader's token is right here.
        Fault::Refused { status: 401, .. } => Refusal::NoOrder(OTHER_TOKEN),
        _ => Refusal::Failed(error.into()),
    }
}

/// Passes an order on, and its answer back.
async fn passed_on(relay: &Relay, route: &str, body: Vec<u8>) -> Answered {
    let answer = relay.post(route, body).await.map_err(not_passed_on)?;
    let status = StatusCode::from_u16(answer.status).unwrap_or(StatusCode::BAD_GATEWAY);
    // The reader's token is right here.
    if status == StatusCode::UNAUTHORIZED {
        return Err(Refusal::NoOrder(OTHER_TOKEN));
    }
    let text = String::from_utf8_lossy(&answer.page).into_owned();
    Ok((status, [(CONTENT_TYPE, "application/json")], text).into_response())
}

/// Settings that are to change.
#[derive(Deserialize)]
struct Change {
    set: Vec<String>,
}

/// The starter of runs, for a reader who may.
fn starter(runs: &Runs) -> Result<&Starter, Refusal> {
    let refused =
        Refusal::NoOrder("runs are started from a dashboard with a token: rollflow dashboard --start RECIPES --token-file FILE");
    runs.powers.starter.as_ref().filter(|_| runs.steerable).ok_or(refused)
}

fn wanted(body: &[u8]) -> Result<Wanted, Refusal> {
    let shape = "expected {\"recipe\": NAME, \"set\": [\"KEY=VALUE\"], \"name\": NAME}";
    serde_json::from_slice(body).map_err(|error| Refusal::NoJson(format!("{shape}: {error}")))
}

async fn recipes(State(runs): State<Arc<Runs>>) -> Answered {
    // None where no runs are started: every list of runs asks.
    made(move || {
        starter(&runs).map_or_else(|_| Ok("[]".to_owned()), |starter| Ok(starter.list().map_err(Refusal::Failed)?.to_string()))
    })
    .await
}

async fn schema() -> Answered {
    made(|| Ok(rollflow::recipe::schema().to_string())).await
}

async fn check(State(runs): State<Arc<Runs>>, body: Bytes) -> Answered {
    made(move || Ok(starter(&runs)?.check(&wanted(&body)?).map_err(Refusal::NoStart)?.to_string())).await
}

async fn start(State(runs): State<Arc<Runs>>, body: Bytes) -> Answered {
    blocking(move || starter(&runs)?.start(&wanted(&body)?, runs.powers.token.as_deref()).map_err(Refusal::NoStart)).await?;
    Ok(StatusCode::CREATED.into_response())
}

async fn changeable(State(runs): State<Arc<Runs>>, Path(name): Path<String>) -> Answered {
    match steered(runs, name).await? {
        Steered::Here(observed) => made(move || Ok(json!(observed.changes.possible()).to_string())).await,
        Steered::There(relay) => {
            let possible = relay.get("change").await.map_err(not_passed_on)?;
            Ok(([(CONTENT_TYPE, "application/json")], possible).into_response())
        }
    }
}

async fn change(State(runs): State<Arc<Runs>>, Path(name): Path<String>, body: Bytes) -> Answered {
    let observed = match steered(runs, name).await? {
        Steered::Here(observed) => observed,
        Steered::There(relay) => return passed_on(&relay, "change", body.to_vec()).await,
    };
    made(move || {
        let Change { set } = serde_json::from_slice(&body)
            .map_err(|error| Refusal::NoJson(format!("expected {{\"set\": [\"KEY=VALUE\"]}}: {error}")))?;
        let shown = untrusted::line(&set.join(", "));
        let at = observed.changes.order(&observed.folder, set).map_err(Refusal::NoChange)?;
        tracing::warn!("The live page ordered from step {at} on: {shown}");
        Ok(json!({"at": at}).to_string())
    })
    .await
}

/// Gives an order to a run. Each is a line of the run's log.
async fn order(State(runs): State<Arc<Runs>>, Path((name, order)): Path<(String, String)>) -> Answered {
    let observed = match steered(runs, name).await? {
        Steered::Here(observed) => observed,
        Steered::There(relay) => return passed_on(&relay, &format!("orders/{}", as_part(&order)), Vec::new()).await,
    };
    match order.as_str() {
        "pause" => observed.orders.pause(),
        "resume" => observed.orders.resume(),
        "checkpoint" => observed.orders.save_checkpoint(),
        "drain" => observed.end_run(true),
        "stop" => observed.end_run(false),
        _ => return Err(Refusal::NoOrder("the orders are pause, resume, checkpoint, drain and stop")),
    }
    tracing::warn!("The live page ordered: {order}");
    Ok(StatusCode::NO_CONTENT.into_response())
}

async fn compared(State(runs): State<Arc<Runs>>, RawQuery(query): RawQuery) -> Answered {
    made(move || {
        let names = form_urlencoded::parse(query.as_deref().unwrap_or_default().as_bytes());
        let names = names.filter(|(key, _)| key == "run").map(|(_, name)| name.into_owned());
        let paths = names.map(|name| Ok(found(&runs, name)?.path)).collect::<Result<Vec<_>, _>>()?;
        let keys = if paths.len() < 2 { Default::default() } else { differences(&paths).map_err(Refusal::Failed)? };
        Ok(json!(keys).to_string())
    })
    .await
}
