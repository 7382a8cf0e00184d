//! Servers that break in every way there is, drawn by a seed.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};
use std::sync::{Arc, Mutex};

use rollflow::data::Status;
use rollflow::engine::remote::connect;
use rollflow::engine::remote::sync::Carry;
use rollflow::engine::remote::transfer::{self, GroupInvitation, SharedMemory, TensorSource};
use rollflow::engine::settings::EngineKind;
use rollflow::engine::{FinishReason, SamplingParams, TokenEngine};
use serde_json::{Value, json};

use super::server::{Piece, Reply, Server, answer_to, next, of_each, vllm_event, vllm_page, wait_for};
use super::*;

/// What comes after so many right tokens, or at once.
fn reply(seed: u64, nth: u64, sglang: bool, body: &Value) -> Reply {
    let params = &body["sampling_params"];
    let ids = if sglang { &body["input_ids"] } else { &body["token_ids"] };
    let prompt: Vec<u32> = ids.as_array().unwrap().iter().map(|id| id.as_u64().unwrap() as u32).collect();
    let most = params[if sglang { "max_new_tokens" } else { "max_tokens" }].as_u64().unwrap() as usize;
    let whole = answer_to(&prompt, most);
    if draw(&[seed, 4], 4) == 0 && params["n"].as_u64() > Some(1) {
        // One that does not answer groups.
        return Reply::Page(400, json!({ "error": { "message": "n must be 1", "code": 400 } }).to_string());
    }
    let mut pieces = Vec::new();
    let fault = draw(&[seed, nth, 1], 40);
    let good = draw(&[seed, nth, 2], whole.len() as u64 + 1) as usize;
    match fault {
        0 => return Reply::Reset,
        1 => return Reply::Hang,
        2 => return Reply::Page(200, "<html><body>Welcome</body></html>".into()),
        3 => return Reply::Page(502, "<html>Bad gateway</html>".into()),
        4 => return Reply::Page(500, json!({ "error": { "message": "out of memory", "code": 500 } }).to_string()),
        5 => return Reply::Page(429, String::new()),
        6 => return Reply::Page(503, String::new()),
        7 => return Reply::Page(200, "{\"choices\": [".into()),
        // Every other fault is one of a stream, which begins well.
        _ => {}
    }
    let told = if fault < 20 { good.min(whole.len().saturating_sub(1)) } else { whole.len() };
    let (mut tokens, mut said) = (prompt.clone(), Vec::new());
    for token in &whole[..told] {
        let (_, log_prob) = next(&tokens);
        tokens.push(*token);
        said.push((*token, log_prob));
        let last = said.len() == whole.len();
        if last && fault >= 20 {
            break;
        }
        pieces.push(event(sglang, &said, None, Value::Null));
        if draw(&[seed, nth, 3], 6) == 0 {
            pieces.push(Piece::Pause(1));
        }
    }
    let ends = if said.last().is_some_and(|(token, _)| *token == 1) { "stop" } else { "length" };
    let count = said.len();
    let spans = json!([{ "version": "1", "start": 0, "end": count }]);
    match fault {
        8 => pieces.push(Piece::Cut),
        9 => pieces.push(Piece::Hang),
        10 => pieces.push(Piece::Raw("data: {\"choices\": [{\"token_ids\": [3], \"logpr\n\n".into())),
        11 => pieces.push(Piece::Raw(
            "data: {\"choices\":[{\"token_ids\":[3],\"logprobs\":{\"content\":[{\"logprob\":NaN}]}}],\"meta_info\":{}}\n\n"
                .into(),
        )),
        12 => pieces.push(wrong(sglang, &said, |said| said.push((3, 4.0)))),
        13 => pieces.push(wrong(sglang, &said, |said| said.push((99, -1.0)))),
        14 => pieces.push(wrong(sglang, &said, |said| said.extend(vec![(3, -1.0); 400]))),
        15 => {
            let code = [400, 500][draw(&[seed, nth, 4], 2) as usize];
            pieces.push(Piece::Raw(format!("data: {{\"error\": {{\"message\": \"it fell over\", \"code\": {code}}}}}\n\n")));
        }
        16 => pieces.push(event(sglang, &said, Some("abort"), spans)),
        17 => pieces.push(Piece::Raw("data: [DONE]\n\n".into())),
        18 => pieces.push(Piece::Raw("<html>".into())),
        19 => pieces.push(uneven(sglang)),
        20 => pieces.push(event(sglang, &said, Some(ends), json!([{ "version": "999", "start": 0, "end": count }]))),
        21 => pieces.push(event(sglang, &said, Some(ends), json!([{ "version": "1", "start": 0, "end": count + 1 }]))),
        22 => pieces.push(event(sglang, &said, Some(ends), json!([{ "version": "default", "start": 0, "end": count }]))),
        23 => pieces.push(event(sglang, &said, Some("tired"), spans)),
        // All was said but how it ended.
        24 => {
            pieces.push(event(sglang, &said, None, Value::Null));
            pieces.push(Piece::Cut);
        }
        _ => {
            pieces.push(event(sglang, &said, Some(ends), spans));
            pieces.push(Piece::Raw("data: [DONE]\n\n".into()));
        }
    }
    Reply::Stream(of_each(pieces, body))
}

/// The newest of what was said, or for SGLang all of it.
fn event(sglang: bool, said: &[(u32, f32)], finish: Option<&str>, spans: Value) -> Piece {
    if !sglang {
        return Piece::Event(vllm_event(&said[said.len().saturating_sub(1)..], finish, spans));
    }
    let log_probs: Vec<Value> = said.iter().map(|(token, log_prob)| json!([log_prob, token, null])).collect();
    let ids: Vec<u32> = said.iter().map(|(token, _)| *token).collect();
    let finish = finish.map(|kind| json!({ "type": kind }));
    Piece::Event(json!({ "output_ids": ids, "meta_info": {
        "finish_reason": finish, "completion_tokens": ids.len(), "output_token_logprobs": log_probs, "weight_versions": spans } }))
}

fn wrong(sglang: bool, said: &[(u32, f32)], change: impl Fn(&mut Vec<(u32, f32)>)) -> Piece {
    let mut said = said.to_vec();
    let before = said.len();
    change(&mut said);
    if sglang { event(true, &said, None, Value::Null) } else { Piece::Event(vllm_event(&said[before..], None, Value::Null)) }
}

/// More tokens than log-probabilities.
fn uneven(sglang: bool) -> Piece {
    Piece::Event(if sglang {
        json!({ "output_ids": [3, 4], "meta_info": { "completion_tokens": 2, "output_token_logprobs": [[-1.0, 3, null]] } })
    } else {
        json!({ "choices": [{ "token_ids": [3, 4], "logprobs": { "content": [{ "token_id": 3, "logprob": -1.0 }] } }] })
    })
}

fn sglang_page(path: &str) -> Option<Reply> {
    let page = match path {
        "/model_info" => json!({ "model_path": "policy", "weight_version": "1" }),
        "/server_info" => json!({ "version": "0.5.23", "context_length": 256 }),
        "/ready" => json!({}),
        _ => return None,
    };
    Some(Reply::json(page))
}

fn server(seed: u64, sglang: bool) -> Server {
    let count = AtomicU64::new(0);
    Server::new(move |path, body| {
        let page = if sglang { sglang_page(path) } else { vllm_page(path) };
        page.unwrap_or_else(|| reply(seed, count.fetch_add(1, SeqCst), sglang, body))
    })
}

/// Two servers, a few groups, one seed. Whether all was made, or an error ended it.
fn play(seed: u64) -> bool {
    let mixed = seed.is_multiple_of(2);
    let servers = [server(2 * seed, false), server(2 * seed + 1, mixed)];
    let second = if mixed { EngineKind::Sglang } else { EngineKind::Vllm };
    let kinds = [EngineKind::Vllm, second].into_iter().zip(&servers);
    let handle = handle(kinds.map(|(kind, server)| connect(kind, &server.url, None).unwrap()));
    give(&handle, 1);
    // With room for it, samples of a prompt are asked for together.
    let per_engine = if seed % 4 < 2 { 16 } else { 64 };
    let mut fleet = fleet(&handle, FleetConfig { per_engine, ..hasty() });
    fleet.set_weights(1, &());
    let params = SamplingParams { max_new_tokens: 12, ..SamplingParams::default() };
    let (groups, samples) = (2 + draw(&[seed, 7], 4), 1 + draw(&[seed, 8], 4) as u32);
    (0..groups).for_each(|ordinal| fleet.submit(request(ordinal, samples, &params)).unwrap());
    // The book that a generator keeps.
    let mut book: BTreeMap<(u64, u32), (Vec<u32>, Status)> = BTreeMap::new();
    let ended = finish(&mut fleet, |fleet| {
        // As in a run, an engine that returns gets its weights again.
        if !handle.behind().is_empty() {
            wait_for(manager(&handle).catch_up());
        }
        for key in fleet.discarded() {
            book.remove(key);
        }
        for token in fleet.sampled() {
            let (tokens, status) = book.entry((token.ordinal, token.index)).or_default();
            assert_eq!(*status, Status::Pending, "seed {seed}: a token after the last");
            tokens.push(token.token);
            *status = token.status;
        }
    });
    // An error is no defeat where all that is broken is broken for long; it is typed and says more than that.
    let ended = match ended {
        Ok(ended) => ended,
        Err(error @ (EngineError::Stuck { .. } | EngineError::Refused { .. })) => {
            assert!(error.to_string().contains("http://127.0.0.1"), "seed {seed}: {error}");
            return false;
        }
        Err(error) => panic!("seed {seed}: {error}"),
    };
    assert_eq!(ended.len() as u64, groups * u64::from(samples), "seed {seed}");
    for ((ordinal, index), finished) in ended {
        let expected = answer_to(&prompt(ordinal), 12);
        let (tokens, status) = book.remove(&(ordinal, index)).unwrap_or_default();
        assert_eq!(tokens, finished.tokens, "seed {seed}: law D4");
        assert_eq!((finished.log_probs.len(), finished.versions.len()), (tokens.len(), tokens.len()), "seed {seed}: law D3");
        assert!(finished.versions.per_token().all(|version| version == Some(1)), "seed {seed}");
        if finished.finish.is_err() {
            assert!(expected.starts_with(&finished.tokens), "seed {seed}");
            continue;
        }
        assert_eq!(finished.tokens, expected, "seed {seed}: sample {ordinal}, {index}");
        assert_eq!(status, finished.status(), "seed {seed}");
        assert_eq!(finished.finish == Ok(FinishReason::Stop), expected.last() == Some(&1), "seed {seed}");
        let mut read = prompt(ordinal);
        for (token, log_prob) in finished.tokens.iter().zip(&finished.log_probs) {
            assert_eq!((*token, *log_prob), next(&read), "seed {seed}");
            read.push(*token);
        }
    }
    true
}

/// Tensors of a trainer, and the name of its group with the server.
#[derive(Debug)]
struct Tensors {
    pieces: Vec<transfer::Piece>,
    group: Mutex<Option<String>>,
}

impl TensorSource for Tensors {
    fn pieces(&self) -> &[transfer::Piece] {
        &self.pieces
    }

    fn link(&self, _: &str) -> Option<String> {
        self.group.lock().unwrap().clone()
    }

    fn open_group(&self, _: &str, _: &str, _: u16, _: usize) -> Result<GroupInvitation, String> {
        *self.group.lock().unwrap() = Some("new".into());
        Ok(GroupInvitation { address: "127.0.0.1".into(), port: 1, name: "new".into(), backend: "gloo" })
    }

    fn open_nccl(&self, _: &str, _: usize) -> Result<Vec<u8>, String> {
        Err("there is no GPU".into())
    }

    fn share_memory(&self, _: &str) -> Result<SharedMemory, String> {
        Err("there is no GPU".into())
    }

    fn join(&self, _: &str) -> Result<(), String> {
        Ok(())
    }

    fn send(&self, _: &str, _: usize) -> Result<(), String> {
        Ok(())
    }

    fn close(&self, _: &str) {
        *self.group.lock().unwrap() = None;
    }
}

#[test]
fn a_server_leaves_the_group_of_a_link_that_is_replaced() {
    let left = Arc::<Mutex<Vec<String>>>::default();
    let noted = left.clone();
    let server = Server::new(move |path, body| {
        let group = body["group_name"].as_str().unwrap_or_default();
        match path {
            "/server_info" => return Reply::json(json!({ "tp_size": 1 })),
            "/destroy_weights_update_group" => noted.lock().unwrap().push(group.to_owned()),
            "/update_weights_from_distributed" if group == "old" => {
                return Reply::json(json!({ "success": false, "message": "a rank has left" }));
            }
            _ => {}
        }
        Reply::json(json!({ "success": true }))
    });
    let group = Mutex::new(Some("old".into()));
    let tensors: Arc<dyn TensorSource> = Arc::new(Tensors { pieces: vec![transfer::Piece::default()], group });
    let engine = connect(EngineKind::Sglang, &server.url, None).unwrap();
    wait_for(engine.weights().unwrap().load_tensors(&tensors, Carry::Broadcast)).unwrap();
    let until = Instant::now() + GUARD;
    while *left.lock().unwrap() != ["old"] {
        assert!(Instant::now() < until, "{left:?}");
        std::thread::sleep(Duration::from_millis(5));
    }
    assert_eq!(tensors.link(""), Some("new".to_owned()));
}

/// 80; `ENGINE_SEEDS=10000` plays as many.
#[test]
fn whatever_servers_do_each_sample_comes_back_once_and_whole_or_an_error_says_why() {
    let seeds: u64 = std::env::var("ENGINE_SEEDS").ok().map_or(80, |seeds| seeds.parse().unwrap());
    let next = Arc::new(Mutex::new(0..seeds));
    let threads: Vec<_> = (0..8)
        .map(|_| {
            let next = next.clone();
            std::thread::spawn(move || {
                let mut made = 0;
                loop {
                    let seed = next.lock().unwrap().next();
                    let Some(seed) = seed else { return made };
                    made += u64::from(play(seed));
                }
            })
        })
        .collect();
    let made: u64 = threads.into_iter().map(|thread| thread.join().unwrap()).sum();
    println!("{made} of {seeds} seeds to the end");
    assert!(10 * made >= 9 * seeds, "{made} of {seeds} seeds to the end");
}
