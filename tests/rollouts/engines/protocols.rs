//! What is asked of servers and how their answers are read: replies as vLLM 0.32, SGLang 0.5.23 and OpenAI-like servers write them.

use std::sync::{Arc, Mutex};

use rollflow::data::{RouteShape, Routes};
use rollflow::engine::remote::{Attempt, Capabilities, Ending, Fault, InferenceEngine, RemoteError, connect};
use rollflow::engine::settings::EngineKind;
use rollflow::engine::{FinishReason, SamplingParams};
use serde_json::{Value, json};
use tokio::sync::mpsc;

use super::server::{Reply, Server, vllm_page};

fn attempt(params: SamplingParams) -> Attempt {
    Attempt {
        ordinal: 812,
        index: 3,
        number: 1,
        fleet: 7,
        tokens: vec![5, 6, 7].into(),
        answered: 1,
        params: Arc::new(params),
        seed: 9,
        cache_key: Some("v42".into()),
        adapter: None,
        together: 1,
        routes: None,
        log_probs: true,
    }
}

fn run<T>(work: impl Future<Output = T>) -> T {
    tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(work)
}

fn vllm(url: &str) -> Arc<dyn InferenceEngine> {
    connect(EngineKind::Vllm, url, None).unwrap()
}

pub fn sglang(url: &str) -> Arc<dyn InferenceEngine> {
    connect(EngineKind::Sglang, url, None).unwrap()
}

/// All that it told, and how it ended.
fn generate(engine: &dyn InferenceEngine, attempt: &Attempt) -> (Vec<(u32, f32)>, Result<Ending, RemoteError>) {
    run(async {
        let (tokens, mut chunks) = mpsc::channel(100);
        let ending = engine.generate(attempt, &tokens).await;
        let mut all = Vec::new();
        while let Ok(chunk) = chunks.try_recv() {
            all.extend(chunk);
        }
        (all, ending)
    })
}

fn ids(chunk: &[(u32, f32)]) -> Vec<u32> {
    chunk.iter().map(|(token, _)| *token).collect()
}

/// The end of a completion whose last token alone is of version 43.
fn stopped_in_43() -> Ending {
    Ending {
        finish: Some(FinishReason::Stop),
        spans: Some(vec![("42".to_owned(), 0..2), ("43".to_owned(), 2..3)]),
        ..Ending::default()
    }
}

/// A server that answers this path so, and notes the question.
fn scripted(
    pages: impl Fn(&str) -> Option<Reply> + Send + Sync + 'static,
    path: &'static str,
    reply: Reply,
) -> (Server, Arc<Mutex<Value>>) {
    let question: Arc<Mutex<Value>> = Arc::default();
    let asked = question.clone();
    let server = Server::new(move |at, body| {
        if at == path {
            *asked.lock().unwrap() = body.clone();
            return reply.clone();
        }
        pages(at).unwrap_or(Reply::Page(404, json!({ "detail": "Not Found" }).to_string()))
    });
    (server, question)
}

#[test]
fn d3_vllm_is_asked_for_tokens_and_answers_with_log_probabilities_and_spans() {
    let choice = |tokens: Value, content: Value, finish: Value, spans: Value| {
        json!({ "request_id": "generate-tokens-p1", "usage": null, "output_mode": "tokens", "choices": [{
            "index": 0, "finish_reason": finish, "stop_reason": null, "token_ids": tokens, "routed_experts": null,
            "sampling_mask": null, "weight_versions": spans, "logprobs": { "content": content } }] })
    };
    let entry = |token: u32, log_prob: f64| json!({ "token_id": token, "logprob": log_prob, "rank": 1, "top_logprobs": [{ "token_id": token, "logprob": log_prob, "rank": 1 }] });
    let reply = Reply::events([
        choice(json!([138]), json!([entry(138, -3.25)]), Value::Null, Value::Null),
        choice(
            json!([124, 79]),
            json!([entry(124, -2.5), entry(79, -3.0)]),
            json!("stop"),
            json!([{ "version": "42", "start": 0, "end": 2 }, { "version": "43", "start": 2, "end": 3 }]),
        ),
    ]);
    let (server, asked) = scripted(vllm_page, "/inference/v1/generate", reply);
    let engine = vllm(&server.url);
    let params = SamplingParams {
        max_new_tokens: 9,
        temperature: 0.5,
        stop: vec!["\n".into()],
        stop_token_ids: vec![2],
        repetition_penalty: 1.25,
        logit_bias: [(7, -1.5)].into(),
        ..SamplingParams::default()
    };
    let (chunk, ending) = generate(&*engine, &attempt(params));
    assert_eq!(chunk, [(138, -3.25), (124, -2.5), (79, -3.0)]);
    assert_eq!(ending.unwrap(), stopped_in_43());
    let asked = asked.lock().unwrap();
    assert_eq!(asked["request_id"], "p00000000000000000812-s00003-a0000000001-f00000007");
    let sampling = &asked["sampling_params"];
    assert_eq!((&sampling["repetition_penalty"], &sampling["logit_bias"]), (&json!(1.25), &json!({"7": -1.5})));
    assert_eq!(
        (&asked["token_ids"], &asked["model"], &asked["cache_salt"]),
        (&json!([5, 6, 7]), &json!("policy"), &json!("v42"))
    );
    let sampling = &asked["sampling_params"];
    assert_eq!((&sampling["max_tokens"], &sampling["logprobs"], &sampling["temperature"]), (&json!(8), &json!(0), &json!(0.5)));
    // What completes a stop stays; strings are found in text only.
    assert_eq!(
        (&sampling["stop"], &sampling["include_stop_str_in_output"], &sampling["detokenize"]),
        (&json!(["\n"]), &json!(true), &json!(true))
    );
    assert_eq!((&sampling["stop_token_ids"], &sampling["ignore_eos"]), (&json!([2]), &json!(false)));
}

#[test]
fn what_a_vllm_server_can_is_found_out_and_what_it_lacks_is_told_with_the_way_to_get_it() {
    let (server, _) = scripted(vllm_page, "/none", Reply::Reset);
    let all = run(async { vllm(&server.url).probe().await.unwrap() });
    assert_eq!((all.server.as_str(), all.model.as_str(), all.context), ("vLLM 0.32.0", "policy", Some(256)));
    assert!(all.spans && all.weights && all.checksums && all.lacks.is_empty(), "{all:?}");

    // Without its dev mode and its own route it answers by /v1/completions.
    let plain = |path: &str| match path {
        "/openapi.json" => Some(Reply::json(json!({ "paths": { "/v1/completions": {} } }))),
        other => vllm_page(other),
    };
    let completion = json!({ "id": "cmpl-8b", "object": "text_completion", "choices": [{ "index": 0, "text": "", "finish_reason": "length",
        "logprobs": { "text_offset": [0], "token_logprobs": [-3.25], "tokens": ["token_id:138"], "top_logprobs": [{ "token_id:138": -3.25 }] },
        "stop_reason": null, "prompt_token_ids": [5, 6, 7], "token_ids": [138] }] });
    let (server, asked) = scripted(plain, "/v1/completions", Reply::events([completion]));
    let engine = vllm(&server.url);
    let Capabilities { weights, spans, lacks, .. } = run(engine.probe()).unwrap();
    assert!(!weights && !spans && lacks[0].contains("VLLM_SERVER_DEV_MODE=1"), "{lacks:?}");
    let (chunk, ending) = generate(&*engine, &attempt(SamplingParams::default()));
    assert_eq!((ids(&chunk), ending.unwrap()), (vec![138], Ending { finish: Some(FinishReason::Length), ..Ending::default() }));
    let asked = asked.lock().unwrap();
    assert_eq!(asked["return_token_ids"], true);
    // What is left out, the server takes from the folder's generation_config.json.
    assert_eq!(["top_k", "min_p", "repetition_penalty"].map(|key| asked[key].as_f64()), [-1.0, 0.0, 1.0].map(Some));
}

#[test]
fn an_openai_like_server_without_token_ids_is_refused_and_one_that_spells_them_is_not() {
    let answer = |token: &str, content: Value| {
        let log_probs = json!({ "tokens": [token], "token_logprobs": [-0.5], "content": content });
        Reply::events([json!({ "choices": [{ "text": "8", "finish_reason": "stop", "logprobs": log_probs }] })])
    };
    // Some servers list the log-probabilities as a chat does, too.
    for content in [Value::Null, json!([{ "token": "8", "logprob": -0.5 }])] {
        let (server, _) = scripted(vllm_page, "/v1/completions", answer("token_id:17", content));
        let (chunk, ending) =
            generate(&*connect(EngineKind::OpenAi, &server.url, None).unwrap(), &attempt(SamplingParams::default()));
        assert_eq!((chunk, ending.unwrap().spans), (vec![(17, -0.5)], None));
    }
    let (server, _) = scripted(vllm_page, "/v1/completions", answer("8", Value::Null));
    let error = generate(&*connect(EngineKind::OpenAi, &server.url, None).unwrap(), &attempt(SamplingParams::default()))
        .1
        .unwrap_err()
        .to_string();
    assert!(error.contains("the token \"8\" as text") && error.contains(&server.url), "{error}");
}

fn sglang_page(path: &str) -> Option<Reply> {
    match path {
        "/model_info" => Some(Reply::json(json!({ "model_path": "/models/policy", "weight_version": "default" }))),
        "/server_info" => Some(Reply::json(json!({ "version": "0.5.23", "context_length": 64 }))),
        _ => None,
    }
}

#[test]
fn d3_sglang_streams_all_so_far_or_what_is_new_and_both_are_read_alike() {
    let event = |ids: Value, count: usize, log_probs: Value, finish: Value, spans: Value| {
        json!({ "text": "…", "output_ids": ids, "meta_info": { "id": "p", "finish_reason": finish, "prompt_tokens": 3, "completion_tokens": count,
            "cached_tokens": 0, "weight_version": "43", "weight_versions": spans, "output_token_logprobs": log_probs } })
    };
    let spans = json!([{ "version": "42", "start": 0, "end": 2 }, { "version": "43", "start": 2, "end": 3 }]);
    let stop = json!({ "type": "stop", "matched": 374 });
    let (a, b, c) = (json!([-0.125, 785, null]), json!([-1.0, 4226, null]), json!([-0.5, 374, null]));
    let cumulative = Reply::events([
        event(json!([785]), 1, json!([a]), Value::Null, Value::Null),
        event(json!([785, 4226, 374]), 3, json!([a, b, c]), stop.clone(), spans.clone()),
    ]);
    let incremental = Reply::events([
        event(json!([785]), 1, json!([a]), Value::Null, Value::Null),
        event(json!([4226, 374]), 3, json!([b, c]), stop.clone(), spans.clone()),
    ]);
    // A list that has grown since its event was counted, and an end that repeats the last token.
    let ahead = Reply::events([
        event(json!([785, 4226]), 1, json!([a, b]), Value::Null, Value::Null),
        event(json!([785, 4226, 374]), 3, json!([a, b, c]), Value::Null, Value::Null),
        event(json!([374]), 3, json!([c]), stop.clone(), spans.clone()),
    ]);
    for reply in [cumulative, incremental, ahead] {
        let (server, asked) = scripted(sglang_page, "/generate", reply);
        let params = SamplingParams { max_new_tokens: 9, ignore_eos: true, ..SamplingParams::default() };
        let (chunk, ending) = generate(&*sglang(&server.url), &attempt(params));
        assert_eq!(chunk, [(785, -0.125), (4226, -1.0), (374, -0.5)]);
        assert_eq!(ending.unwrap(), stopped_in_43());
        let asked = asked.lock().unwrap();
        assert_eq!(
            (&asked["rid"], &asked["input_ids"]),
            (&json!("p00000000000000000812-s00003-a0000000001-f00000007"), &json!([5, 6, 7]))
        );
        let sampling = &asked["sampling_params"];
        assert_eq!(
            (&sampling["max_new_tokens"], &sampling["top_k"], &sampling["ignore_eos"]),
            (&json!(8), &json!(-1), &json!(true))
        );
        assert_eq!(
            (&sampling["no_stop_trim"], &sampling["skip_special_tokens"], &asked["extra_key"]),
            (&json!(true), &json!(false), &json!("v42"))
        );
    }
}

#[test]
fn d3_spans_of_sglang_are_not_used_where_a_completion_is_cut_at_a_stop_token() {
    let event = json!({ "output_ids": [785, 4226, 374], "meta_info": { "finish_reason": null, "completion_tokens": 3,
        "output_token_logprobs": [[-0.125, 785, null], [-1.0, 4226, null], [-0.5, 374, null]],
        "weight_versions": [{ "version": "42", "start": 0, "end": 3 }] } });
    let (server, _) = scripted(sglang_page, "/generate", Reply::events([event]));
    let params = SamplingParams { max_new_tokens: 9, ignore_eos: true, stop_token_ids: vec![4226], ..SamplingParams::default() };
    let (chunk, ending) = generate(&*sglang(&server.url), &attempt(params));
    assert_eq!(
        (ids(&chunk), ending.unwrap()),
        (vec![785, 4226], Ending { finish: Some(FinishReason::Stop), ..Ending::default() })
    );
}

/// Three tokens of the request and two new ones, of which the last has no experts.
#[test]
fn sglang_is_asked_for_the_experts_of_tokens_and_an_answer_without_all_of_them_is_refused() {
    let shape = RouteShape { layers: 1, per_token: 2 };
    let answer = |experts: Option<&str>| {
        Reply::events([
            json!({ "output_ids": [785, 4226], "meta_info": { "finish_reason": { "type": "length" }, "completion_tokens": 2,
            "output_token_logprobs": [[-0.125, 785, null], [-1.0, 4226, null]], "routed_experts": experts } }),
        ])
    };
    let asked_for = |experts: Option<&str>| {
        let (server, asked) = scripted(sglang_page, "/generate", answer(experts));
        let params = SamplingParams { max_new_tokens: 9, ..SamplingParams::default() };
        let (_, ending) = generate(&*sglang(&server.url), &Attempt { routes: Some(shape), ..attempt(params) });
        assert_eq!(asked.lock().unwrap()["return_routed_experts"], true);
        ending
    };
    // numpy.array([0, 1, 2, 3, 4, 5, 6, 7], "<i4") in base64.
    let routes = asked_for(Some("AAAAAAEAAAACAAAAAwAAAAQAAAAFAAAABgAAAAcAAAA=")).unwrap().routes.unwrap();
    assert_eq!(routes, Routes { layers: 1, per_token: 2, experts: (0..8).collect() });
    for (experts, why) in [(None, "without its experts"), (Some("AAAAAA=="), "experts in 4 bytes, where 5 tokens but the last")] {
        let error = asked_for(experts).unwrap_err().to_string();
        assert!(error.contains(why), "{error}");
    }
}

/// Law D3: SGLang's log-probabilities are those from before truncation; no answer is trained on with them.
#[test]
fn d3_sglang_is_not_asked_for_truncated_samples_unless_none_is_trained_on() {
    let event = json!({ "output_ids": [785], "meta_info": { "finish_reason": { "type": "length" }, "completion_tokens": 1,
        "output_token_logprobs": [[-0.125, 785, null]] } });
    let (server, _) = scripted(sglang_page, "/generate", Reply::events([event]));
    let whole = SamplingParams { max_new_tokens: 2, temperature: 0.5, ..SamplingParams::default() };
    let truncated = [
        SamplingParams { top_p: 0.9, ..whole.clone() },
        SamplingParams { top_k: 40, ..whole.clone() },
        SamplingParams { min_p: 0.1, ..whole.clone() },
    ];
    for params in truncated {
        let error = generate(&*sglang(&server.url), &attempt(params.clone())).1.unwrap_err();
        assert!(error.to_string().contains("generate.top_p") && matches!(error.fault, Fault::Refused { .. }), "{error}");
        let evaluated = Attempt { log_probs: false, ..attempt(params.clone()) };
        assert_eq!(generate(&*sglang(&server.url), &evaluated).0.len(), 1);
        let of_rollflow = connect(EngineKind::Rollflow, server.url.as_str(), None).unwrap();
        assert_eq!(generate(&*of_rollflow, &attempt(params)).0.len(), 1, "its own are those of what it draws from");
    }
    assert_eq!(generate(&*sglang(&server.url), &attempt(whole)).0.len(), 1);
}

#[test]
fn sglangs_aborts_are_interruptions_unless_they_are_refusals() {
    let abort = |finish: Value| {
        Reply::events([json!({ "output_ids": [785], "meta_info": { "finish_reason": finish, "completion_tokens": 1,
            "output_token_logprobs": [[-0.125, 785, null]] } })])
    };
    let (server, _) = scripted(sglang_page, "/generate", abort(json!({ "type": "abort", "message": "Abort in waiting queue" })));
    let (chunk, ending) =
        generate(&*sglang(&server.url), &attempt(SamplingParams { max_new_tokens: 9, ..SamplingParams::default() }));
    assert_eq!((chunk.len(), ending.unwrap().finish), (1, None));
    let finish =
        json!({ "type": "abort", "message": "The input is too long", "status_code": 400, "err_type": "BadRequestError" });
    let (server, _) = scripted(sglang_page, "/generate", abort(finish));
    let error = generate(&*sglang(&server.url), &attempt(SamplingParams { max_new_tokens: 9, ..SamplingParams::default() }))
        .1
        .unwrap_err();
    assert!(matches!(&error.fault, Fault::Refused { status: 400, begins, .. } if begins == "The input is too long"), "{error}");
}

#[test]
fn prompts_are_scored_by_their_own_log_probabilities() {
    let scored = json!({ "meta_info": { "input_token_logprobs": [[null, 5, null], [-7.5, 6, null], [-4.5, 7, null]] } });
    let (server, _) = scripted(sglang_page, "/generate", Reply::json(scored));
    assert_eq!(run(sglang(&server.url).score(&[5, 6, 7], None)).unwrap(), [-7.5, -4.5]);
    let scored = json!({ "choices": [{ "prompt_logprobs": [null, { "6": { "logprob": -7.5, "rank": 280 } },
        { "7": { "logprob": -4.5, "rank": 32 }, "9": { "logprob": -0.5, "rank": 1 } }] }] });
    let (server, _) = scripted(vllm_page, "/v1/completions", Reply::json(scored));
    assert_eq!(run(vllm(&server.url).score(&[5, 6, 7], None)).unwrap(), [-7.5, -4.5]);
    assert!(
        run(vllm(&server.url).score(&[5, 6, 8], None)).unwrap_err().to_string().contains("no log-probability for each token")
    );
}

#[test]
fn errors_name_the_engine_its_address_and_what_to_check() {
    let told = |page: Reply| {
        let (server, _) = scripted(vllm_page, "/inference/v1/generate", page);
        let error = generate(&*vllm(&server.url), &attempt(SamplingParams::default())).1.unwrap_err().to_string();
        assert!(error.contains(&format!("vLLM {}", server.url)), "{error}");
        error
    };
    let unknown = json!({ "error": { "message": "Unexpected keyword argument 'min_p'", "type": "Bad Request", "param": null, "code": 400 } });
    for (page, words) in [
        (
            Reply::Page(400, unknown.to_string()),
            "refused with status 400: \"Unexpected keyword argument 'min_p'\"; check that prompt and answer fit",
        ),
        (Reply::Page(401, json!({ "error": "Unauthorized" }).to_string()), "check the token"),
        (Reply::Page(500, "Internal Server Error".into()), "look into the server's log"),
        (Reply::Page(200, "<html>Welcome</html>".into()), "check that the server is of the kind and version"),
        (Reply::Reset, "look for a crash in the server's log"),
    ] {
        assert!(told(page).contains(words), "{words}");
    }
    // Longer than the context that it told.
    let (server, _) = scripted(vllm_page, "/inference/v1/generate", Reply::Reset);
    let long = attempt(SamplingParams { max_new_tokens: 300, ..SamplingParams::default() });
    let error = generate(&*vllm(&server.url), &long).1.unwrap_err().to_string();
    assert!(
        error.contains("3 tokens and up to 299 more don't fit the context of 256") && error.contains("--max-model-len"),
        "{error}"
    );
    // Log-probabilities of another distribution than that which was sampled.
    let raw = |path: &str| match path {
        "/openapi.json" => Some(Reply::json(json!({ "paths": { "/inference/v1/generate": {}, "/server_info": {} } }))),
        "/server_info?config_format=json" => {
            Some(Reply::json(json!({ "vllm_config": { "model_config": { "logprobs_mode": "raw_logprobs" } } })))
        }
        other => vllm_page(other),
    };
    let (server, _) = scripted(raw, "/inference/v1/generate", Reply::Reset);
    let warm = attempt(SamplingParams { temperature: 0.7, ..SamplingParams::default() });
    let error = generate(&*vllm(&server.url), &warm).1.unwrap_err().to_string();
    assert!(error.contains("--logprobs-mode processed_logprobs"), "{error}");
    // Nobody there.
    let url = "http://127.0.0.1:1";
    let error = generate(&*vllm(url), &attempt(SamplingParams::default())).1.unwrap_err().to_string();
    assert!(error.contains("cannot connect") && error.contains(url), "{error}");
    for (url, why) in [
        ("ftp://host:1", "does not begin with http://"),
        ("host", "does not begin with http://"),
        ("http://a:b@host", "a name or a password"),
    ] {
        let error = connect(EngineKind::Vllm, url, None).err().unwrap().to_string();
        assert!(error.contains(why) && !error.contains("a:b"), "{error}");
    }
}

#[test]
fn requests_name_the_adapter_that_they_are_answered_with() {
    let adapted = Attempt {
        adapter: Some("adapter-7".into()),
        ..attempt(SamplingParams { max_new_tokens: 9, ..SamplingParams::default() })
    };
    let (server, asked) = scripted(vllm_page, "/inference/v1/generate", Reply::Reset);
    assert!(generate(&*vllm(&server.url), &adapted).1.is_err());
    assert_eq!(asked.lock().unwrap()["model"], "adapter-7");
    // A server that was started anew has none, and says that the request is bad: another may be asked, and this one is to be given it again.
    let refused = json!({ "error": { "message": "The following requested LoRA adapters are not loaded: adapter-7" } });
    let (server, asked) = scripted(sglang_page, "/generate", Reply::Page(400, refused.to_string()));
    let error = generate(&*sglang(&server.url), &adapted).1.unwrap_err();
    assert!(matches!(error.fault, Fault::Refused { status: 404, .. }), "{error}");
    assert_eq!(asked.lock().unwrap()["lora_path"], "adapter-7");
    // Log-probabilities of prompts under an adapter would end the server's engine.
    let sampled = json!({ "choices": [{ "logprobs": { "top_logprobs": [{ "token_id:9": -0.5, "token_id:6": -7.5 }] } }] });
    let (server, asked) = scripted(vllm_page, "/v1/completions", Reply::json(sampled));
    assert_eq!(run(vllm(&server.url).score(&[5, 6], Some("adapter-7"))).unwrap(), [-7.5]);
    let asked = asked.lock().unwrap();
    assert_eq!(
        (&asked["model"], &asked["logprob_token_ids"], asked.get("prompt_logprobs")),
        (&json!("adapter-7"), &json!([6]), None)
    );
    assert_eq!([&asked["top_p"], &asked["repetition_penalty"]], [&json!(1.0); 2]);
}

/// What both kinds of servers say of adapters, and are asked.
#[test]
fn adapters_are_loaded_listed_and_forgotten_by_name() {
    let names = Arc::<Mutex<Vec<String>>>::default;
    let (has, asked) = (names(), names());
    let (held, seen) = (has.clone(), asked.clone());
    let server = Server::new(move |path, body| {
        let mut has = held.lock().unwrap();
        let name = body["lora_name"].as_str().unwrap_or_default().to_owned();
        seen.lock().unwrap().push(path.to_owned());
        let again = has.contains(&name);
        match path.trim_start_matches("/v1") {
            "/models" => {
                let listed = has.iter().map(|name| json!({ "id": name, "parent": "policy" }));
                Reply::json(json!({ "data": listed.chain([json!({ "id": "policy", "parent": null })]).collect::<Vec<_>>() }))
            }
            "/load_lora_adapter" if again => Reply::Page(400, json!({ "success": false, "error_message": "loaded" }).to_string()),
            "/load_lora_adapter" => {
                has.retain(|other| *other != name);
                has.push(name);
                Reply::json(json!({ "success": true }))
            }
            "/unload_lora_adapter" if has.contains(&name) => {
                has.retain(|other| *other != name);
                Reply::json(json!({ "success": true }))
            }
            _ => Reply::Page(404, "no".into()),
        }
    });
    let engines = [vllm(&server.url), sglang(&server.url)];
    for engine in &engines {
        let control = engine.weights().unwrap();
        run(async {
            for name in ["adapter-1", "adapter-2", "adapter-1"] {
                control.load_adapter(name, std::path::Path::new("/there")).await.unwrap();
            }
            let mut listed = control.adapters().await.unwrap();
            listed.sort();
            assert_eq!(listed, ["adapter-1", "adapter-2"], "one that has the name is replaced");
            control.unload_adapter("adapter-1").await.unwrap();
            control.unload_adapter("adapter-2").await.unwrap();
            assert!(!control.unload_adapter("adapter-2").await.unwrap_err().fault.passes());
            assert_eq!(control.adapters().await.unwrap(), Vec::<String>::new());
        });
    }
    let asked = asked.lock().unwrap();
    assert!(asked.contains(&"/v1/load_lora_adapter".to_owned()) && asked.contains(&"/load_lora_adapter".to_owned()));
}
