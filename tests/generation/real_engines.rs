//! Against a server that runs (laws D1, D3, D4). These tests are ignored, since they need one: start vLLM (with `VLLM_SERVER_DEV_MODE=1`,
//! `--enable-scale-out`,
//! `--logprobs-mode processed_logprobs`, float32) or SGLang with a small model folder, and say which and where:
//!
//! ```sh
//! ROLLFLOW_ENGINE=vllm ROLLFLOW_ENGINE_URL=http://127.0.0.1:8000 ROLLFLOW_ENGINE_MODEL=folder cargo test --test generation -- real_engines:: --ignored
//! --test-threads 1
//! ```
//!
//! The model needs a context of 128 tokens and a vocabulary of 64. The server must hold the folder's weights, under whatever version.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rollflow::data::TopK;
use rollflow::engine::remote::{Fleet, FleetConfig, FleetHandle, InferenceEngine, connect};
use rollflow::engine::settings::EngineKind;
use rollflow::engine::{Finished, Request, SamplingParams, TokenEngine};
use rollflow::net::Client;
use rollflow::prelude::*;
use rollflow::train::Scorer;
use serde_json::json;

fn var(name: &str) -> String {
    std::env::var(name).unwrap_or_else(|_| panic!("set {name}: see the head of this file"))
}

fn engine() -> Arc<dyn InferenceEngine> {
    let url = var("ROLLFLOW_ENGINE_URL");
    match var("ROLLFLOW_ENGINE").as_str() {
        "vllm" => connect(EngineKind::Vllm, &url, None).unwrap(),
        "sglang" => connect(EngineKind::Sglang, &url, None).unwrap(),
        other => panic!("ROLLFLOW_ENGINE is {other}; expected vllm or sglang"),
    }
}

fn fleet(policy: &Policy, slots: usize) -> Fleet {
    let config = FleetConfig { per_engine: slots, ..FleetConfig::default() };
    let mut fleet = Fleet::new(&FleetHandle::new(vec![engine()]), config, policy.tokenizer(), slots, 7);
    fleet.set_weights(0, &());
    fleet
}

fn request(ordinal: u64, samples: u32, params: &SamplingParams) -> Request {
    let tokens: Vec<u32> =
        (0..8 + ordinal % 5).map(|place| 8 + ((ordinal * 31 + place * 17 + ordinal * place) % 50) as u32).collect();
    Request::new(ordinal, tokens, samples, Arc::new(params.clone()))
}

fn by_key(finished: impl IntoIterator<Item = Finished>) -> BTreeMap<(u64, u32), Finished> {
    let mut all = BTreeMap::new();
    for finished in finished {
        assert!(finished.finish.is_ok(), "{finished:?}");
        assert_eq!((finished.log_probs.len(), finished.versions.len()), (finished.tokens.len(), finished.tokens.len()));
        assert!(all.insert((finished.ordinal, finished.index), finished).is_none(), "a sample that ended twice");
    }
    all
}

fn greedy(max_new_tokens: usize) -> SamplingParams {
    SamplingParams { temperature: 0.0, max_new_tokens, ignore_eos: true, ..SamplingParams::default() }
}

fn run<T>(work: impl Future<Output = T>) -> T {
    tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(work)
}

/// Mean and largest difference of log-probabilities must be those of rounding.
fn close(what: &str, ours: &[f32], theirs: &[f32]) {
    assert_eq!(ours.len(), theirs.len(), "{what}");
    for (place, (ours, theirs)) in ours.iter().zip(theirs).enumerate() {
        assert!((ours - theirs).abs() < 1e-4, "{what}, token {place}: {ours} here, {theirs} there");
    }
}

#[test]
#[ignore = "needs a server"]
fn greedy_answers_are_those_of_the_local_engine_token_by_token_and_equally_likely() {
    let policy = Policy::load(var("ROLLFLOW_ENGINE_MODEL")).unwrap();
    let params = greedy(32);
    let (mut local, mut remote) = (policy.engine(16, 7), fleet(&policy, 16));
    for ordinal in 0..16 {
        local.submit(request(ordinal, 1, &params)).unwrap();
        remote.submit(request(ordinal, 1, &params)).unwrap();
    }
    let (local, remote) = (by_key(local.run().unwrap()), by_key(remote.run().unwrap()));
    assert_eq!(local.len(), remote.len());
    for (key, here) in &local {
        assert_eq!(here.tokens, remote[key].tokens, "{key:?}");
        close("greedy", &here.log_probs, &remote[key].log_probs);
    }
}

#[test]
#[ignore = "needs a server"]
fn sampled_tokens_are_as_likely_as_the_server_and_this_model_find_them() {
    let policy = Policy::load(var("ROLLFLOW_ENGINE_MODEL")).unwrap();
    let params = SamplingParams { max_new_tokens: 24, ignore_eos: true, ..SamplingParams::default() };
    let mut remote = fleet(&policy, 16);
    (0..8).for_each(|ordinal| remote.submit(request(ordinal, 2, &params)).unwrap());
    let engine = engine();
    for ((ordinal, _), finished) in by_key(remote.run().unwrap()) {
        let prompt = request(ordinal, 1, &params).tokens;
        let tokens = [&prompt[..], &finished.tokens].concat();
        let scored = run(engine.score(&tokens, None)).unwrap();
        close("sampled", &finished.log_probs, &scored[prompt.len() - 1..]);
    }
}

#[test]
#[ignore = "needs a server"]
fn what_an_abort_interrupts_goes_on_and_is_as_if_it_had_not_been() {
    let policy = Policy::load(var("ROLLFLOW_ENGINE_MODEL")).unwrap();
    let params = greedy(100);
    let mut whole = fleet(&policy, 16);
    (0..16).for_each(|ordinal| whole.submit(request(ordinal, 1, &params)).unwrap());
    let whole = by_key(whole.run().unwrap());
    let mut fleet = fleet(&policy, 16);
    (0..16).for_each(|ordinal| fleet.submit(request(ordinal, 1, &params)).unwrap());
    let (path, body) = match var("ROLLFLOW_ENGINE").as_str() {
        "vllm" => ("/abort_requests", json!({})),
        _ => ("/abort_request", json!({ "rid": "", "abort_all": true })),
    };
    let client = Client::new("server", var("ROLLFLOW_ENGINE_URL").as_str()).unwrap();
    let (mut all, mut made, mut aborts) = (Vec::new(), 0, 0);
    while !fleet.is_idle() {
        all.extend(fleet.step().unwrap());
        made += fleet.sampled().len();
        if made > 200 * (aborts + 1) && aborts < 3 {
            aborts += 1;
            run(client.post(path, &body, Duration::from_secs(10))).unwrap();
        }
    }
    let all = by_key(all);
    assert!(aborts > 0);
    assert_eq!(made, all.values().map(|finished| finished.tokens.len()).sum::<usize>(), "each token is told once");
    for (key, whole) in &whole {
        assert_eq!(whole.tokens, all[key].tokens, "{key:?}");
    }
}

#[test]
#[ignore = "needs a server"]
fn of_512_samples_in_flight_none_is_lost() {
    let policy = Policy::load(var("ROLLFLOW_ENGINE_MODEL")).unwrap();
    let params = SamplingParams { max_new_tokens: 16, ..SamplingParams::default() };
    let mut remote = fleet(&policy, 512);
    let started = Instant::now();
    (0..64).for_each(|ordinal| remote.submit(request(ordinal, 8, &params)).unwrap());
    let all = by_key(remote.run().unwrap());
    assert_eq!(all.len(), 512);
    assert!(all.values().all(|finished| (1..=16).contains(&finished.tokens.len())));
    let tokens: usize = all.values().map(|finished| finished.tokens.len()).sum();
    println!("512 samples of {tokens} tokens in {:.2} s", started.elapsed().as_secs_f64());
}

#[test]
#[ignore = "needs a server"]
fn stop_strings_and_stop_tokens_end_an_answer_there_as_here() {
    let policy = Policy::load(var("ROLLFLOW_ENGINE_MODEL")).unwrap();
    let mut local = policy.engine(1, 7);
    local.submit(request(0, 1, &greedy(24))).unwrap();
    let whole = local.run().unwrap().remove(0);
    let params = SamplingParams { stop_token_ids: vec![whole.tokens[9]], ..greedy(24) };
    let (mut local, mut remote) = (policy.engine(1, 7), fleet(&policy, 1));
    local.submit(request(0, 1, &params)).unwrap();
    remote.submit(request(0, 1, &params)).unwrap();
    let (here, there) = (local.run().unwrap().remove(0), remote.run().unwrap().remove(0));
    assert_eq!((here.tokens, here.finish), (there.tokens, there.finish));
}

/// The likeliest tokens in the places of given ones, as a teacher on the server sends them.
#[test]
#[ignore = "needs a server"]
fn likeliest_tokens_are_those_of_the_local_model() {
    let policy = Policy::load(var("ROLLFLOW_ENGINE_MODEL")).unwrap();
    let tokens = request(3, 1, &greedy(1)).tokens.to_vec();
    let mut samples = [Sample::supervised(&tokens[..1], &tokens[1..])];
    let top = TopK { k: 5, below: policy.config().vocab_size };
    let config = LocalConfig::new(CrossEntropy, Schedule::constant(0.0));
    Scorer::new(config, policy.config().clone()).annotate(&policy.frozen(), &mut samples, top).unwrap();
    let (log_probs, theirs) = run(engine().score_top(&tokens, top)).unwrap();
    close("given tokens", &samples[0].ref_log_probs[1..], &log_probs);
    let sorted = |(ids, log_probs): (&[u32], &[f32])| {
        let mut both: Vec<(u32, f32)> = ids.iter().copied().zip(log_probs.iter().copied()).collect();
        both.sort_by(|a, b| b.1.total_cmp(&a.1));
        both.into_iter().unzip::<u32, f32, Vec<u32>, Vec<f32>>()
    };
    for position in 1..tokens.len() {
        let (ours, theirs) = (samples[0].teacher.as_ref().unwrap().at(position).unwrap(), theirs.at(position).unwrap());
        let ((ours, our_scores), (theirs, their_scores)) = (sorted(ours), sorted(theirs));
        close("likeliest tokens", &our_scores, &their_scores);
        // Equally likely ones may come in any order.
        assert!(ours[0] == theirs[0] || (our_scores[0] - our_scores[1]).abs() < 1e-4, "position {position}: {ours:?} {theirs:?}");
    }
}
