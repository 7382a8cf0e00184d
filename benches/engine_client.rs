//! What the client of servers costs: the same requests by a fleet and by a bare load generator, in turns, against one vLLM server that runs.
//!
//! `rollflow engine launch pipelines/recipes/grpo_vllm.toml`, then `cargo bench --bench engine_client -- http://127.0.0.1:8400 [ROUNDS]`. A round
//! is 8 times 64 answers of 16 tokens, eight to a prompt and asked for together, and once 512 requests at a time, of a prompt each. The bare one
//! posts bytes that were made before and drops those that come, over connections that stay open; the fleet does what it does in a run. At most 5%
//! more time is meant to be its cost, on a machine that does nothing else: both sides share its cores with the server.

use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use http_body_util::{BodyExt, Full};
use hyper::body::Bytes;
use hyper::client::conn::http1::{SendRequest, handshake};
use hyper::header::{CONTENT_TYPE, HOST};
use hyper::{Request as Post, Uri};
use hyper_util::rt::TokioIo;
use rollflow::data::Tokenizer;
use rollflow::engine::remote::{self, Fleet, FleetConfig, FleetHandle};
use rollflow::engine::settings::EngineKind;
use rollflow::engine::{Request, SamplingParams, TokenEngine};
use serde_json::json;
use tokio::net::TcpStream;
use tokio::runtime::{Builder, Runtime};
use tokio::task::JoinSet;

/// Tokens of an answer.
const TOKENS: usize = 16;

/// Most requests at a time.
const MOST: usize = 512;

fn main() -> Result<()> {
    let args: Vec<String> = std::env::args().skip(1).filter(|arg| !arg.starts_with("--")).collect();
    let url = args.first().context("say where the server is: http://host:port")?;
    let rounds = args.get(1).map_or(Ok(7), |rounds| rounds.parse()).context("ROUNDS is a number")?;
    let (mut bare, mut fleet) = (Bare::new(url)?, fleet(url)?);
    // The server's first requests take seconds.
    bare.run(&questions(64, 8))?;
    by_fleet(&mut fleet, 64, 8)?;
    for (name, answers, group, times) in [("64 answers to 8 prompts", 64, 8, 8), ("512 requests at a time", MOST, 1, 1)] {
        let bodies = questions(answers, group);
        let (mut ours, mut theirs) = (Vec::new(), Vec::new());
        for round in 0..rounds {
            let both = |first: bool| -> Result<()> {
                // Who begins changes with every round.
                let started = Instant::now();
                if first == (round % 2 == 0) {
                    (0..times).try_for_each(|_| bare.run(&bodies))?;
                    theirs.push(started.elapsed());
                } else {
                    (0..times).try_for_each(|_| by_fleet(&mut fleet, answers, group))?;
                    ours.push(started.elapsed());
                }
                Ok(())
            };
            [true, false].into_iter().try_for_each(both)?;
        }
        let (ours, theirs) = (median(ours), median(theirs));
        let rate = |time: Duration| (times * answers * TOKENS) as f64 / time.as_secs_f64();
        println!(
            "{name}: bare {:.0} tokens/s, fleet {:.0} tokens/s: {:.3} times the time (load {})",
            rate(theirs),
            rate(ours),
            ours.as_secs_f64() / theirs.as_secs_f64(),
            load()
        );
    }
    Ok(())
}

fn median(mut times: Vec<Duration>) -> Duration {
    times.sort();
    times[times.len() / 2]
}

fn load() -> String {
    let load = std::fs::read_to_string("/proc/loadavg").unwrap_or_default();
    load.split(' ').next().unwrap_or("unknown").to_owned()
}

fn prompt(ordinal: u64) -> Vec<u32> {
    (0..8 + ordinal % 5).map(|place| 8 + ((ordinal * 31 + place * 17) % 50) as u32).collect()
}

fn fleet(url: &str) -> Result<Fleet> {
    let tokenizer = Arc::new(Tokenizer::characters("0123456789+-=", 64)?);
    let config = FleetConfig { per_engine: MOST, vocabulary: 64, ..FleetConfig::default() };
    let mut fleet =
        Fleet::new(&FleetHandle::new(vec![remote::connect(EngineKind::Vllm, url, None)?]), config, &tokenizer, MOST, 7);
    fleet.set_weights(0, &());
    Ok(fleet)
}

fn by_fleet(fleet: &mut Fleet, answers: usize, group: usize) -> Result<()> {
    let params = Arc::new(SamplingParams { max_new_tokens: TOKENS, ignore_eos: true, ..SamplingParams::default() });
    for ordinal in 0..(answers / group) as u64 {
        fleet.submit(Request::new(ordinal, prompt(ordinal), group as u32, params.clone()))?;
    }
    let finished = fleet.run()?;
    ensure!(finished.len() == answers && finished.iter().all(|answer| answer.tokens.len() == TOKENS), "an answer is not whole");
    Ok(())
}

/// What a bare generator posts for so many answers.
fn questions(answers: usize, group: usize) -> Vec<Bytes> {
    (0..answers / group).map(|ordinal| question(ordinal as u64, group)).collect()
}

fn question(ordinal: u64, group: usize) -> Bytes {
    let sampling = json!({
        "n": group, "temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "seed": ordinal, "max_tokens": TOKENS, "stop_token_ids": [],
        "ignore_eos": true, "logprobs": 0, "detokenize": false, "skip_special_tokens": false,
    });
    let question = json!({
        "model": "policy", "token_ids": prompt(ordinal), "sampling_params": sampling, "stream": true, "output_mode": "tokens",
        "cache_salt": "v0",
    });
    Bytes::from(question.to_string())
}

/// Connections that stay open.
struct Bare {
    runtime: Runtime,
    authority: String,
    open: Vec<SendRequest<Full<Bytes>>>,
}

impl Bare {
    fn new(url: &str) -> Result<Self> {
        let uri: Uri = url.parse().context("the server's address")?;
        let authority = uri.authority().context("the address has no host")?.to_string();
        let runtime = Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
        Ok(Bare { runtime, authority, open: Vec::new() })
    }

    fn run(&mut self, bodies: &[Bytes]) -> Result<()> {
        let Bare { runtime, authority, open } = self;
        runtime.block_on(async {
            let mut under_way = JoinSet::new();
            for body in bodies {
                let (kept, to) = (open.pop(), authority.clone());
                let post = Post::post("/inference/v1/generate").header(HOST, authority.as_str());
                let post = post.header(CONTENT_TYPE, "application/json").body(Full::new(body.clone()))?;
                under_way.spawn(async move {
                    // One that was idle for long was closed by the server.
                    let mut sender = match kept {
                        Some(kept) if !kept.is_closed() => kept,
                        _ => connect(&to).await?,
                    };
                    sender.ready().await?;
                    let response = sender.send_request(post).await?;
                    ensure!(response.status().is_success(), "the server answered {}", response.status());
                    let mut body = response.into_body();
                    while let Some(frame) = body.frame().await {
                        frame?;
                    }
                    Ok(sender)
                });
            }
            while let Some(done) = under_way.join_next().await {
                open.push(done??);
            }
            Ok(())
        })
    }
}

async fn connect(authority: &str) -> Result<SendRequest<Full<Bytes>>> {
    let stream = TcpStream::connect(authority).await?;
    stream.set_nodelay(true)?;
    let (sender, connection) = handshake(TokioIo::new(stream)).await?;
    tokio::spawn(connection);
    Ok(sender)
}
