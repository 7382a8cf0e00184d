//! A server of the Tinker API, by its routes: what it refuses, what stays usable after a failure, and what ends.

use std::path::Path;

use axum::http::Method;
use rollflow::net::{Client, Endpoint};
use serde_json::{Value, json};

use crate::tinker::serve;

async fn post(client: &Client, route: &str, body: Value) -> Value {
    send(client, Method::POST, route, body).await.1
}

/// Status and page of a request.
async fn send(client: &Client, method: Method, route: &str, body: Value) -> (u16, Value) {
    let headers = [("content-type".parse().unwrap(), "application/json".parse().unwrap())].into_iter().collect();
    let path = if route.starts_with('/') { route.to_owned() } else { format!("/api/v1/{route}") };
    let mut answer = client.request(method, &path, headers, Some(body.to_string().into())).await.unwrap();
    let (status, mut page) = (answer.status().as_u16(), Vec::new());
    while let Some(chunk) = answer.chunk().await.unwrap() {
        page.extend_from_slice(&chunk);
    }
    (status, serde_json::from_slice(&page).unwrap())
}

/// Runs `work` with a client of a server without models.
fn with_server(work: impl AsyncFnOnce(&Client)) {
    with_server_on(tempfile::tempdir().unwrap().path(), work);
}

/// The same with a server of the models in `state`.
fn with_server_on(state: &Path, work: impl AsyncFnOnce(&Client)) {
    let server = serve(state);
    let client = Client::new("server", Endpoint::new(format!("http://{}", server.address()))).unwrap();
    tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(work(&client));
}

#[test]
fn samples_that_a_client_cancels_end_and_others_go_on() {
    with_server(async |client| {
        let post = async |route: &str, body: Value| post(client, route, body).await;
        assert_eq!(post("client/dynamic_config", json!({})).await["sample_cancel_enabled"], true);
        let prompt = json!({"chunks": [{"type": "encoded_text", "tokens": [1, 2]}]});
        let ask =
            json!({"base_model": "tiny", "prompt": prompt, "num_samples": 1, "sampling_params": {"seed": 1, "max_tokens": 5}});
        post("/pause_generation", json!({"mode": "retract"})).await;
        let (cancelled, kept) = (post("asample", ask.clone()).await, post("asample", ask).await);
        post("cancel_future", json!({"request_id": cancelled["request_id"]})).await;
        post("/continue_generation", json!({})).await;
        let answer = post("retrieve_future", json!({"request_id": cancelled["request_id"]})).await;
        assert_eq!(answer["error"], "the client cancelled it");
        let answer = post("retrieve_future", json!({"request_id": kept["request_id"]})).await;
        assert_eq!(answer["sequences"].as_array().unwrap().len(), 1);
        post("cancel_future", json!({"request_id": kept["request_id"]})).await;
        let again = post("retrieve_future", json!({"request_id": kept["request_id"]})).await;
        assert_eq!(again, answer, "what is there stays");
    });
}

#[test]
fn saved_weights_are_never_replaced_by_others_of_the_same_name() {
    let state = tempfile::tempdir().unwrap();
    let mut told = Vec::new();
    with_server_on(state.path(), async |client| {
        let post = async |route: &str, body: Value| post(client, route, body).await;
        let model = model(client).await;
        for route in ["save_weights", "save_weights_for_sampler"] {
            for (seq, refused) in [(1, false), (2, true)] {
                let seq = if route == "save_weights" { seq } else { seq + 2 };
                let asked = post(route, json!({"model_id": model, "seq_id": seq, "path": "mine"})).await;
                let answer = post("retrieve_future", json!({"request_id": asked["request_id"]})).await;
                assert_eq!(answer.to_string().contains("is taken"), refused, "{route}, {seq}: {answer}");
                told.push((asked["request_id"].clone(), answer));
            }
        }
    });
    // A restart repeats the operations.
    with_server_on(state.path(), async |client| {
        for (request, answer) in told {
            assert_eq!(post(client, "retrieve_future", json!({"request_id": request})).await, answer);
        }
    });
}

/// A new model.
async fn model(client: &Client) -> String {
    let session = post(client, "create_session", json!({"tags": [], "sdk_version": "0"})).await["session_id"].clone();
    let lora = json!({"rank": 4, "seed": 7, "train_unembed": false, "train_mlp": true, "train_attn": true});
    let model = json!({"session_id": session, "model_seq_id": 0, "base_model": "tiny", "lora_config": lora});
    post(client, "create_model", model).await["model_id"].as_str().unwrap().to_owned()
}

/// The answer to operation `seq` of a model.
async fn done(client: &Client, model: &str, seq: u64, route: &str, mut body: Value) -> Value {
    (body["model_id"], body["seq_id"]) = (model.into(), seq.into());
    let asked = post(client, route, body).await;
    assert!(asked["request_id"].is_string(), "{route}: {asked}");
    post(client, "retrieve_future", json!({"request_id": asked["request_id"]})).await
}

/// A pass over one sequence, with these columns.
fn pass(loss: &str, columns: Value) -> Value {
    let mut inputs = json!({"target_tokens": {"data": [2, 3], "dtype": "int64"}});
    for (name, data) in columns.as_object().unwrap() {
        inputs[name] = json!({"data": data, "dtype": "float32"});
    }
    let input = json!({"chunks": [{"type": "encoded_text", "tokens": [1, 2]}]});
    json!({"forward_backward_input": {"data": [{"model_input": input, "loss_fn_inputs": inputs}], "loss_fn": loss}})
}

#[test]
fn a_refused_operation_takes_its_number_and_later_ones_run() {
    with_server(async |client| {
        let model = model(client).await;
        let mut table = pass("cross_entropy", json!({"weights": [1, 1]}));
        table["forward_backward_input"]["data"][0]["loss_fn_inputs"]["weights"]["shape"] = json!([1, 1, 2]);
        let mut sparse = pass("cross_entropy", json!({"weights": []}));
        let weights = &mut sparse["forward_backward_input"]["data"][0]["loss_fn_inputs"]["weights"];
        (weights["shape"], weights["sparse_crow_indices"]) = (json!([1, 1 << 28]), json!([0, 0]));
        let mut text = pass("ppo", json!({"logprobs": [-1, -1], "advantages": [1, 1]}));
        text["forward_backward_input"]["loss_fn_config"] = json!({"clip_low_threshold": "low"});
        let mut image = pass("cross_entropy", json!({}));
        let chunks = &mut image["forward_backward_input"]["data"][0]["model_input"]["chunks"];
        chunks.as_array_mut().unwrap().push(json!({"type": "image", "data": ""}));
        let refused = [
            ("save_weights", json!({"path": "run 1/step 3"}), "other characters"),
            ("save_weights", json!({"path": "again", "overwrite": true}), "`overwrite` is not possible"),
            ("save_weights_for_sampler", json!({"kind": "inflight"}), "are snapshots"),
            ("save_weights_for_sampler", json!({"path": "session-3"}), "is one of sessions without a name"),
            ("optim_step", json!({"adam_params": {"learning_rate": -1.0}}), "is negative"),
            ("forward_backward", table, "one and two dimensions"),
            ("forward_backward", sparse, "send fewer sequences"),
            ("forward_backward", text, "can't be read"),
            ("forward_backward", image, "only text is understood"),
        ];
        let mut seq = 0;
        for (route, body, why) in refused {
            seq += 1;
            let answer = done(client, &model, seq, route, body).await;
            assert!(answer["category"] == "user" && answer["error"].as_str().unwrap().contains(why), "{route}: {answer}");
        }
        let answer = done(client, &model, seq + 1, "forward", pass("cross_entropy", json!({}))).await;
        assert!(answer["metrics"]["loss:sum"].as_f64().unwrap() > 0.0, "{answer}");
    });
}

#[test]
fn a_model_trains_on_after_a_pass_that_failed_also_after_a_restart() {
    let state = tempfile::tempdir().unwrap();
    let good = || pass("cross_entropy", json!({"weights": [1, 1]}));
    let step = || json!({"adam_params": {"learning_rate": 0.01}});
    let (mut id, mut seen) = (String::new(), Value::Null);
    with_server_on(state.path(), async |client| {
        id = model(client).await;
        // Infinity times 0.
        let bad = pass("importance_sampling", json!({"logprobs": [-1e9, -1.0], "advantages": [0, 1]}));
        done(client, &id, 1, "forward_backward", good()).await;
        let answer = done(client, &id, 2, "forward_backward", bad).await;
        assert!(answer["category"] == "user" && answer["error"].as_str().unwrap().contains("not finite"), "{answer}");
        let answer = done(client, &id, 3, "optim_step", step()).await;
        assert!(answer["error"].as_str().unwrap().contains("no gradient"), "a failed pass drops the gradient: {answer}");
        done(client, &id, 4, "forward_backward", good()).await;
        let answer = done(client, &id, 5, "optim_step", step()).await;
        assert!(answer["metrics"]["grad_norm"].as_f64().unwrap() > 0.0, "{answer}");
        seen = done(client, &id, 6, "forward", good()).await;
    });
    with_server_on(state.path(), async |client| {
        assert_eq!(done(client, &id, 7, "forward", good()).await, seen);
        done(client, &id, 8, "forward_backward", good()).await;
        let answer = done(client, &id, 9, "optim_step", step()).await;
        assert!(answer["metrics"]["grad_norm"].as_f64().unwrap() > 0.0, "{answer}");
    });
}

#[test]
fn a_session_that_ends_frees_its_models_and_saved_weights_stay_until_they_are_removed() {
    with_server(async |client| {
        let model = model(client).await;
        let saved = done(client, &model, 1, "save_weights", json!({"path": "mine"})).await["path"].clone();
        let sampled = done(client, &model, 2, "save_weights_for_sampler", json!({"path": "mine"})).await;
        assert!(sampled["path"].is_string(), "{sampled}");
        let session = post(client, "create_session", json!({"tags": [], "sdk_version": "0"})).await["session_id"].clone();
        let loaded = post(client, "load_weights", json!({"session_id": session, "path": saved})).await;
        post(client, "retrieve_future", json!({"request_id": loaded["request_id"]})).await;
        let finish = async |session: &str| post(client, &format!("sessions/{session}/finish"), json!({"detail": null})).await;
        finish(model.split(':').next().unwrap()).await;
        let info = async |model: &str| send(client, Method::POST, "get_info", json!({"model_id": model})).await.0;
        assert_eq!([info(&model).await, info(loaded["model_id"].as_str().unwrap()).await], [404, 200]);
        let checkpoints = format!("training_runs/{model}/checkpoints");
        let remove = async |kind: &str| send(client, Method::DELETE, &format!("{checkpoints}/{kind}/mine"), Value::Null).await.0;
        assert_eq!([remove("weights").await, remove("sampler_weights").await], [400, 200], "a model began with the weights");
        finish(session.as_str().unwrap()).await;
        assert_eq!([remove("weights").await, remove("weights").await], [200, 404]);
        assert_eq!(send(client, Method::GET, &checkpoints, Value::Null).await.1["checkpoints"], json!([]));
    });
}

#[test]
fn samples_stop_as_asked_and_requests_for_more_than_the_server_has_are_refused() {
    with_server(async |client| {
        let prompt = json!({"chunks": [{"type": "encoded_text", "tokens": [5, 6]}]});
        let ask = |stop: Value, more: Value| {
            let mut ask = json!({"base_model": "tiny", "prompt": prompt, "num_samples": 16});
            ask["sampling_params"] = json!({"seed": 1, "max_tokens": 40, "stop": stop});
            more.as_object().unwrap().iter().for_each(|(name, value)| ask[name] = value.clone());
            ask
        };
        for (stop, all) in [(Value::Null, false), (json!([]), true)] {
            let asked = post(client, "asample", ask(stop, json!({}))).await;
            let answer = post(client, "retrieve_future", json!({"request_id": asked["request_id"]})).await;
            let whole = |sequence: &Value| sequence["tokens"].as_array().unwrap().len() == 40;
            let sequences = answer["sequences"].as_array().unwrap();
            assert_eq!(sequences.iter().all(whole), all, "the end of text ends a sample, unless nothing shall");
        }
        for (name, value) in [
            ("target_prompt_logprobs", json!({"data": [1], "dtype": "int64", "shape": [1, 1]})),
            ("prompt_alt_tokens_k", json!(2)),
            ("topk_prompt_logprobs", json!(5000)),
            ("topk_sample_logprobs", json!(5000)),
        ] {
            let (status, page) = send(client, Method::POST, "asample", ask(Value::Null, json!({name: value}))).await;
            assert!(status == 400 && page["error"]["message"].as_str().unwrap().contains(name), "{page}");
        }
    });
}

#[test]
fn a_prompt_that_fills_the_context_is_scored() {
    with_server(async |client| {
        let found = send(client, Method::GET, "get_server_capabilities", Value::Null).await.1;
        let context = found["supported_models"][0]["max_context_length"].as_u64().unwrap() as usize;
        let tokens = vec![1; context];
        let prompt = json!({"chunks": [{"type": "encoded_text", "tokens": tokens}]});
        let mut ask = json!({"base_model": "tiny", "prompt": prompt, "num_samples": 1, "sampling_params": {"max_tokens": 1}});
        assert_eq!(send(client, Method::POST, "asample", ask.clone()).await.0, 400, "there is no room for a token");
        ask["prompt_logprobs"] = true.into();
        let asked = post(client, "asample", ask).await;
        let answer = post(client, "retrieve_future", json!({"request_id": asked["request_id"]})).await;
        let count = |list: &Value| list.as_array().map(Vec::len);
        assert_eq!(count(&answer["prompt_logprobs"]), Some(context), "{answer}");
        assert_eq!(count(&answer["sequences"][0]["tokens"]), Some(0), "{answer}");
        let mut ask = json!({"input_ids": tokens, "sampling_params": {"max_new_tokens": 1}});
        (ask["return_logprob"], ask["logprob_start_len"]) = (json!(true), json!(0));
        let answer = post(client, "/generate", ask).await;
        assert_eq!(count(&answer["meta_info"]["input_token_logprobs"]), Some(context), "{answer}");
        let ask = json!({"model": "tiny", "prompt": tokens, "max_tokens": 1, "echo": true, "logprobs": 1});
        let answer = post(client, "/v1/completions", ask).await;
        assert_eq!(count(&answer["choices"][0]["logprobs"]["token_logprobs"]), Some(context), "{answer}");
    });
}

#[test]
fn weights_that_were_deleted_are_not_there_again_after_a_restart() {
    let state = tempfile::tempdir().unwrap();
    let mut id = String::new();
    let checkpoints = |id: &str| format!("training_runs/{id}/checkpoints");
    with_server_on(state.path(), async |client| {
        id = model(client).await;
        for (seq, route, kind) in [(1, "save_weights", "weights"), (2, "save_weights_for_sampler", "sampler_weights")] {
            let saved = done(client, &id, seq, route, json!({"path": "mine"})).await;
            assert!(saved["path"].is_string(), "{saved}");
            let removed = send(client, Method::DELETE, &format!("{}/{kind}/mine", checkpoints(&id)), Value::Null).await;
            assert_eq!(removed.0, 200, "{}", removed.1);
        }
    });
    with_server_on(state.path(), async |client| {
        // Operations run in order: those before it were repeated.
        done(client, &id, 3, "forward", pass("cross_entropy", json!({}))).await;
        assert_eq!(send(client, Method::GET, &checkpoints(&id), Value::Null).await.1["checkpoints"], json!([]));
    });
}
