//! `rollflow serve` for its clients: routes, streams, weights, adapters, tokens and the end. Laws D1, D3, F1, F3, V5.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use rollflow::net::{Client, Endpoint, Events, Fault, RemoteError, Tasks};
use rollflow::observe::Metric;
use serde_json::{Value, json};

use crate::asking::tiny_run;
use crate::crashes::nothing_lost;
use crate::running::{GRPO, Running, TINY, finished, plain_run_args, rollflow, rollflow_with, rows, run_args};
use crate::support::exposition::Exposition;

/// Longest wait for an answer of a server on a busy machine.
pub const LIMIT: Duration = Duration::from_secs(120);

/// A server, and a client of it.
pub struct Server {
    pub running: Running,
    pub url: String,
    client: Client,
    tasks: Tasks,
}

impl Server {
    /// `serve MODEL` at a free port, with these arguments.
    pub fn start(model: &Path, args: &[&str]) -> Self {
        Server::start_at("127.0.0.1:0", model, args, None)
    }

    pub fn start_at(address: &str, model: &Path, args: &[&str], token: Option<&str>) -> Self {
        let mut running = Running::start(&[&["serve", model.to_str().unwrap(), "--listen", address], args].concat());
        let url = running.line(|line| line.strip_prefix("ready: ").map(str::to_owned));
        let client = client(&url, token);
        Server { running, url, client, tasks: Tasks::new().unwrap() }
    }

    pub fn get(&self, path: &str) -> Value {
        self.tasks.block_on(self.client.get(path, LIMIT)).unwrap()
    }

    pub fn post(&self, path: &str, body: &Value) -> Result<Value, RemoteError> {
        self.tasks.block_on(self.client.post(path, body, LIMIT))
    }

    pub fn ask(&self, path: &str, body: &Value) -> Value {
        self.post(path, body).unwrap()
    }

    pub fn refused(&self, path: &str, body: &Value) -> String {
        self.post(path, body).unwrap_err().to_string()
    }

    pub fn post_bytes(&self, path: &str, body: &[u8]) -> Result<(), RemoteError> {
        self.tasks.block_on(self.client.post_bytes(path, body.to_vec(), LIMIT)).map(drop)
    }

    pub fn stream(&self, path: &str, body: &Value) -> Events {
        self.tasks.block_on(self.client.events(path, body, LIMIT)).unwrap()
    }

    pub fn next(&self, events: &mut Events) -> Option<Value> {
        self.tasks.block_on(events.next()).unwrap().map(|data| serde_json::from_str(&data).unwrap())
    }

    pub fn metric(&self, metric: Metric, labels: &[(&str, &str)]) -> f64 {
        let text = self.get("/metrics");
        let scrape = Exposition::parse(text.as_str().unwrap()).unwrap();
        scrape.family(metric.name()).and_then(|family| family.value(metric.name(), labels)).unwrap()
    }

    pub fn until(&mut self, what: &str, done: impl Fn(&Self) -> bool) {
        let deadline = std::time::Instant::now() + LIMIT;
        while !done(self) {
            assert!(std::time::Instant::now() < deadline && !self.running.has_ended(), "it was never seen that {what}");
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

fn client(url: &str, token: Option<&str>) -> Client {
    let endpoint = Endpoint::new(url);
    Client::new("the server", token.map_or(endpoint.clone(), |token| endpoint.with_token(token).unwrap())).unwrap()
}

pub fn checkpoint(run: &Path) -> PathBuf {
    run.join("checkpoints/step_000003")
}

/// A run of the model in `folder`, whatever its own model would be.
pub fn run_of(model: &Path, out: &Path, sets: &[&str]) {
    let model = format!("model={{kind=\"folder\",path={:?}}}", model.to_str().unwrap());
    rollflow(&plain_run_args(GRPO, out, &[&TINY[5..], &[&*model], sets].concat())).ok();
}

pub fn farthest(a: &[f32], b: &[f32]) -> f32 {
    a.iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max)
}

/// Laws D1 and D3: every route gives the completion that `generate` gives, as a page and as a stream.
#[test]
fn all_routes_and_streams_give_the_completion_of_generate() {
    let folder = tempfile::tempdir().unwrap();
    let run = tiny_run(folder.path(), &[]);
    let server = Server::start(&run, &["--name", "sums"]);
    let run = run.to_str().unwrap();
    let generated = |args: &[&str]| -> Value {
        let args = [&["generate", run, "3+4=", "--temperature", "0", "--max-tokens", "12", "--json"], args].concat();
        serde_json::from_str(&rollflow(&args).ok().out).unwrap()
    };
    let plain = generated(&[]);
    let sampling = json!({"temperature": 0, "max_new_tokens": 12});
    let mut body = json!({"text": "3+4=", "sampling_params": sampling, "return_logprob": true});
    let page = server.ask("/generate", &body);
    assert_eq!((&page["text"], &page["output_ids"]), (&plain["text"], &plain["tokens"]));
    for (listed, (token, log_prob)) in page["meta_info"]["output_token_logprobs"]
        .as_array()
        .unwrap()
        .iter()
        .zip(plain["tokens"].as_array().unwrap().iter().zip(plain["log_probs"].as_array().unwrap()))
    {
        assert_eq!(listed[1], *token);
        assert!((listed[0].as_f64().unwrap() - log_prob.as_f64().unwrap()).abs() < 1e-5);
    }
    body["stream"] = true.into();
    for incremental in [false, true] {
        body["incremental_streaming_output"] = incremental.into();
        let (mut events, mut tokens, mut text, mut count) = (server.stream("/generate", &body), Vec::new(), String::new(), 0);
        while let Some(event) = server.next(&mut events) {
            if !incremental {
                (tokens, text) = (Vec::new(), String::new());
            }
            tokens.extend(event["output_ids"].as_array().unwrap().clone());
            text += event["text"].as_str().unwrap();
            assert_eq!(event["meta_info"]["completion_tokens"], tokens.len());
            count += 1;
        }
        assert_eq!((Value::from(tokens), Value::from(text)), (plain["tokens"].clone(), plain["text"].clone()), "{incremental}");
        assert!(count > 0);
    }
    let completion = json!({"model": "sums", "prompt": "3+4=", "temperature": 0, "max_tokens": 12, "return_token_ids": true});
    let messages = json!([{"role": "user", "content": "3+4="}]);
    let chat = json!({"messages": messages, "temperature": 0, "max_tokens": 12, "return_token_ids": true});
    for (path, mut body, expected, whole, part) in [
        ("/v1/completions", completion, plain, "/text", "/text"),
        ("/v1/chat/completions", chat, generated(&["--chat"]), "/message/content", "/delta/content"),
    ] {
        let answer = server.ask(path, &body);
        let page = answer["choices"][0].clone();
        assert_eq!((page.pointer(whole).unwrap(), &page["token_ids"]), (&expected["text"], &expected["tokens"]), "{path}");
        // Of a completion each choice has them, of a chat the response.
        let asked = |answer: &Value| [&answer["choices"][0]["prompt_token_ids"], &answer["prompt_token_ids"]].map(Value::clone);
        let prompt = asked(&answer).into_iter().find(Value::is_array).unwrap();
        assert_eq!(
            prompt.as_array().map(Vec::len),
            answer["usage"]["prompt_tokens"].as_u64().map(|count| count as usize),
            "{path}"
        );
        body["stream"] = true.into();
        let (mut events, mut text, mut finish) = (server.stream(path, &body), String::new(), Value::Null);
        let mut first = Some(asked(&answer));
        while let Some(event) = server.next(&mut events) {
            assert_eq!(asked(&event), first.take().unwrap_or_default(), "{path}: the first event has them");
            text += event["choices"][0].pointer(part).unwrap().as_str().unwrap();
            finish = event["choices"][0]["finish_reason"].clone();
        }
        assert_eq!((Value::from(text), &finish), (expected["text"].clone(), &page["finish_reason"]), "{path}");
        body["model"] = "another".into();
        assert!(server.refused(path, &body).contains("another"));
    }
    // Of a prompt that is remembered, only the last token is computed again.
    let prefilled = || server.metric(Metric::ServedPrefill, &[]);
    let long = json!({"text": "3+4=73+4=73+4=", "sampling_params": sampling});
    let first = server.ask("/generate", &long);
    let before = prefilled();
    let again = server.ask("/generate", &long);
    assert_eq!((&again["output_ids"], prefilled()), (&first["output_ids"], before + 1.0));
    let tokens = again["meta_info"]["prompt_tokens"].as_f64().unwrap();
    assert!(server.metric(Metric::ReusedTokens, &[]) >= tokens - 1.0);
    let wide = json!({"text": ["3+4=", "1+1=", "3+4="], "sampling_params": sampling});
    let wide = server.ask("/generate", &wide);
    assert_eq!((&wide[0]["output_ids"], &wide[2]["output_ids"]), (&page["output_ids"], &page["output_ids"]));
    assert!(prefilled() > before);
    server.ask("/flush_cache", &Value::Null);
    let before = prefilled();
    let flushed = server.ask("/generate", &json!({"text": ["3+4=", "3+4="], "sampling_params": sampling}));
    assert_eq!((&flushed[0]["output_ids"], &flushed[1]["output_ids"]), (&page["output_ids"], &page["output_ids"]));
    assert_eq!(prefilled() - before, page["meta_info"]["prompt_tokens"].as_f64().unwrap());

    // Seeded completions are the same however few prompts are remembered and however many slots there are.
    let texts = ["3+4=", "1+1=", "3+4=", "9+8=", "1+1=", "3+4="];
    let sampling = json!({"n": 3, "max_new_tokens": 12, "sampling_seed": 5, "ignore_eos": true});
    let seeded = |slots: &str, prompts: &str| {
        let server = Server::start(Path::new(run), &["--slots", slots, "--prefix-cache", prompts]);
        let page = server.ask("/generate", &json!({"text": texts, "sampling_params": sampling, "return_logprob": true}));
        let scores = |of: &Value| -> Vec<f32> {
            let columns = of["meta_info"]["output_token_logprobs"].as_array().unwrap();
            columns.iter().map(|column| column[0].as_f64().unwrap() as f32).collect()
        };
        page.as_array().unwrap().iter().map(|of| (of["output_ids"].clone(), scores(of))).collect::<Vec<_>>()
    };
    let alone = seeded("2", "0");
    assert!(alone.len() == 18 && farthest(&alone[0].1, &alone[3].1) > 1e-3, "prompts matter: {alone:?}");
    for other in [seeded("2", "1"), seeded("5", "3")] {
        for ((tokens, scores), (others, theirs)) in alone.iter().zip(&other) {
            assert!(tokens == others && farthest(scores, theirs) < 1e-4, "{scores:?} {theirs:?}");
        }
    }

    let small = Server::start(Path::new(run), &["--cache-tokens", "32"]);
    let long = json!({"text": "3+4=", "sampling_params": {"max_new_tokens": 29}});
    assert!(small.refused("/generate", &long).contains("context of 32 tokens"), "a cache holds a whole completion");
    drop(small);

    let unknown = json!({"text": "3+4=", "sampling_params": {"min_new_tokens": 5}});
    assert!(server.refused("/generate", &unknown).contains("min_new_tokens"), "nothing is ignored silently");
    let biased = json!({"text": "3+4=", "sampling_params": {"max_new_tokens": 3, "logit_bias": {"9": 100}}});
    assert_eq!(server.ask("/generate", &biased)["output_ids"], json!([9, 9, 9]));
    let beyond = json!({"text": "3+4=", "sampling_params": {"logit_bias": {"99999": 1}}});
    assert!(server.refused("/generate", &beyond).contains("99999"), "it has no such token");
    let far = json!({"input_ids": [1_000_000], "sampling_params": {}});
    assert!(server.refused("/generate", &far).contains("vocabulary"));
}

#[test]
fn a_server_that_sleeps_refuses_work_and_wakes_with_what_it_had_or_was_given_meanwhile() {
    let folder = tempfile::tempdir().unwrap();
    let run = tiny_run(folder.path(), &["train.lr=1e-2"]);
    let (first, last) =
        (run.join("checkpoints/step_000003"), tiny_run(&folder.path().join("other"), &["train.lr=1e-2", "seed=5"]));
    let mut server = Server::start(&first, &["--slots", "2", "--name", "policy"]);
    let greedy = json!({"text": "3+4=", "sampling_params": {"temperature": 0, "max_new_tokens": 8}, "return_logprob": true});
    let before = server.ask("/generate", &greedy)["meta_info"]["output_token_logprobs"].clone();

    let mut events = server.stream("/generate", &long(600));
    assert!(server.next(&mut events).is_some());
    assert!(server.refused("/release_memory_occupation", &json!({})).contains("completions"), "it works");
    drop(events);
    server.until("its completions are dropped", |server| server.metric(Metric::ServedOpen, &[]) == 0.0);
    assert!(server.refused("/release_memory_occupation", &json!({"tags": ["weights"]})).contains("as a whole"));
    for _ in 0..2 {
        server.ask("/release_memory_occupation", &json!({"tags": ["kv_cache", "weights"]}));
    }
    assert_eq!(server.metric(Metric::ServedSleeps, &[]), 1.0);
    for (path, body) in [("/generate", &greedy), ("/v1/completions", &json!({"model": "policy", "prompt": "3+4="}))] {
        let Fault::Busy { status: 503, .. } = server.post(path, body).unwrap_err().fault else { panic!("{path}") };
    }
    server.ask("/resume_memory_occupation", &json!({"tags": ["weights"]}));
    assert!(server.post("/generate", &greedy).is_err(), "half of it sleeps");
    server.ask("/resume_memory_occupation", &json!({"tags": ["kv_cache"]}));
    server.ask("/resume_memory_occupation", &json!({}));
    assert_eq!(server.ask("/generate", &greedy)["meta_info"]["output_token_logprobs"], before);

    server.ask("/release_memory_occupation", &json!({}));
    let update = json!({"model_path": checkpoint(&last), "weight_version": "2"});
    server.ask("/update_weights_from_disk", &update);
    server.ask("/resume_memory_occupation", &json!({}));
    let after = server.ask("/generate", &greedy)["meta_info"].clone();
    assert_eq!(after["weight_version"], "2");
    assert_ne!(after["output_token_logprobs"], before);
}

/// A request for eight completions of this length.
fn long(tokens: usize) -> Value {
    json!({
        "text": "3+4=", "stream": true, "return_logprob": true, "incremental_streaming_output": true,
        "sampling_params": {"n": 8, "max_new_tokens": tokens, "ignore_eos": true},
    })
}

#[test]
fn a_client_that_leaves_frees_its_slots_and_a_full_queue_is_told_so() {
    let folder = tempfile::tempdir().unwrap();
    let mut server = Server::start(&tiny_run(folder.path(), &[]), &["--slots", "2", "--max-queue", "6"]);
    let mut events = server.stream("/generate", &long(600));
    assert!(server.next(&mut events).is_some());
    server.ask("/pause_generation", &json!({"mode": "in_place"}));
    assert_eq!(server.metric(Metric::ServedActive, &[]), 2.0);
    let short = json!({"text": "3+4=", "sampling_params": {"max_new_tokens": 2}});
    let busy = server.post("/generate", &short).unwrap_err();
    let Fault::Busy { status: 429, retry_after: Some(_) } = busy.fault else { panic!("law F1: {busy}") };
    let many = json!({"text": "3+4=", "sampling_params": {"n": 9}});
    assert!(server.refused("/generate", &many).contains("--max-queue"), "it would never have room");

    drop(events);
    server.until("its completions are dropped", |server| server.metric(Metric::ServedOpen, &[]) == 0.0);
    assert_eq!(server.metric(Metric::ServedActive, &[]), 0.0);
    assert_eq!(server.metric(Metric::ServedSamples, &[("status", "aborted")]), 8.0);
    server.ask("/continue_generation", &json!({}));
    assert_eq!(server.ask("/generate", &short)["meta_info"]["weight_version"], "default");
    let scored =
        json!({"text": "3+4=", "return_logprob": true, "logprob_start_len": 0, "sampling_params": {"n": 8, "max_new_tokens": 2}});
    assert!(server.ask("/generate", &scored)[7]["meta_info"]["input_token_logprobs"].is_array(), "its prompt takes no more room");

    // A run that asks for more at once than the server takes waits, and loses nothing.
    let run = folder.path().join("busy");
    let engine = format!("engine={{kind=\"rollflow\",urls=[{:?}]}}", server.url);
    rollflow(&run_args(GRPO, &run, &[&engine, "generate.max_num_seqs=16", "observe.rollouts_every=1"])).ok();
    nothing_lost(&run, 3);
    for row in rows(&run) {
        assert!(row[Metric::LogProbGapMax.key()].as_f64().unwrap() < 1e-4, "its log-probabilities are the trainer's: {row}");
    }
}

/// Law V5: a completion continues under new weights, and each part has the label and the log-probabilities of its weights. Folders that
/// do not hold the model's weights change nothing.
#[test]
fn weights_change_in_a_pause_and_a_damaged_folder_changes_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let (run, other) = (tiny_run(folder.path(), &[]), folder.path().join("other"));
    finished(&other, &["seed=1"]);
    let other = checkpoint(&other).canonicalize().unwrap();
    let server = Server::start(&run, &["--slots", "2"]);
    let mut events = server.stream("/generate", &long(600));
    let mut samples: BTreeMap<u64, (Vec<Value>, Value)> = BTreeMap::new();
    let mut take = |event: Value| {
        let (columns, last) = samples.entry(event["index"].as_u64().unwrap()).or_default();
        columns.extend(event["meta_info"]["output_token_logprobs"].as_array().unwrap().clone());
        *last = event["meta_info"].clone();
    };
    take(server.next(&mut events).unwrap());
    server.ask("/pause_generation", &json!({"mode": "retract"}));
    let sums = server.ask("/weights_checker", &json!({"action": "checksum"}));

    let [damaged, foreign] = ["damaged", "foreign"].map(|name| folder.path().join(name));
    fs::create_dir(&damaged).unwrap();
    let bytes = fs::read(other.join("model.safetensors")).unwrap();
    fs::write(damaged.join("model.safetensors"), &bytes[..bytes.len() - 4]).unwrap();
    finished(&foreign, &["model.hidden=32"]);
    for (wrong, why) in [
        (damaged, "model.safetensors"),
        (checkpoint(&foreign).canonicalize().unwrap(), "shape"),
        (folder.path().join("nothing"), "nothing"),
        ("relative".into(), "absolute"),
    ] {
        let told = server.refused("/update_weights_from_disk", &json!({"model_path": wrong, "weight_version": "6"}));
        assert!(told.contains(why), "{why}: {told}");
        let told = server.refused("/prepare_weights", &json!({"model_path": wrong, "weight_version": "6"}));
        assert!(told.contains(why), "{why}: {told}");
    }
    // Prepared weights are installed from memory, and only by the update that names them.
    let away = other.with_extension("away");
    for (label, installed) in [("8", false), ("7", true)] {
        server.ask("/prepare_weights", &json!({"model_path": other, "weight_version": "7"}));
        assert_eq!(server.get("/model_info")["weight_version"], "default");
        assert_eq!(server.ask("/weights_checker", &json!({"action": "checksum"})), sums);
        fs::rename(&other, &away).unwrap();
        let update = json!({"model_path": other, "weight_version": label});
        match installed {
            true => drop(server.ask("/update_weights_from_disk", &update)),
            false => assert!(server.refused("/update_weights_from_disk", &update).contains("step_")),
        }
        fs::rename(&away, &other).unwrap();
    }
    assert_ne!(server.ask("/weights_checker", &json!({"action": "checksum"})), sums);
    server.ask("/continue_generation", &json!({}));
    while let Some(event) = server.next(&mut events) {
        take(event);
    }
    assert_eq!(samples.len(), 8);
    let prompt = server.ask("/generate", &json!({"text": "3+4=", "sampling_params": {"max_new_tokens": 0}}));
    let read = prompt["meta_info"]["prompt_tokens"].as_u64().unwrap() as usize;
    let mut changed = 0;
    for (columns, last) in samples.values() {
        assert_eq!((columns.len(), &last["finish_reason"]["type"]), (600, &json!("length")));
        let spans = last["weight_versions"].as_array().unwrap();
        let new = spans.last().unwrap();
        assert_eq!((new["version"].as_str(), new["end"].as_u64()), (Some("7"), Some(600)), "{spans:?}");
        changed += usize::from(spans.len() == 2 && spans[0]["version"] == "default" && spans[0]["end"] == new["start"]);
        // The new weights find these tokens as likely as the continued completion said.
        let ids: Vec<Value> = columns.iter().map(|column| column[1].clone()).collect();
        let encoded = rollflow::prelude::Policy::load(&other).unwrap().tokenizer().encode("3+4=").unwrap();
        assert_eq!(encoded.len(), read);
        let text: Vec<Value> = encoded.into_iter().map(Value::from).chain(ids).collect();
        let scored = server.ask(
            "/generate",
            &json!({
                "input_ids": text, "return_logprob": true, "logprob_start_len": 0, "sampling_params": {"max_new_tokens": 1},
            }),
        );
        let scored = scored["meta_info"]["input_token_logprobs"].as_array().unwrap();
        let from = new["start"].as_u64().unwrap() as usize;
        for (column, score) in columns[from..].iter().zip(&scored[read + from..]) {
            assert!((column[0].as_f64().unwrap() - score[0].as_f64().unwrap()).abs() < 1e-3, "{column} {score}");
        }
    }
    assert!((1..=2).contains(&changed), "those of the two slots had begun");
}

#[test]
fn only_a_client_with_the_token_is_served() {
    let folder = tempfile::tempdir().unwrap();
    let run = tiny_run(folder.path(), &[]);
    let token = folder.path().join("token");
    fs::write(&token, "open-sesame\n").unwrap();
    let server = Server::start_at("127.0.0.1:0", &run, &["--token-file", token.to_str().unwrap()], Some("open-sesame"));
    assert_eq!(server.get("/model_info")["weight_version"], "default");
    for wrong in [None, Some("open-sesam")] {
        let stranger = client(&server.url, wrong);
        assert_eq!(server.tasks.block_on(stranger.get("/health", LIMIT)).unwrap(), json!("ok\n"));
        for path in ["/model_info", "/metrics", "/v1/models"] {
            let told = server.tasks.block_on(stranger.get(path, LIMIT)).unwrap_err();
            assert!(matches!(told.fault, Fault::Refused { status: 401, .. }), "{told}");
        }
        let told = server.tasks.block_on(stranger.post("/update_weights_from_disk", &json!({}), LIMIT)).unwrap_err();
        assert!(matches!(told.fault, Fault::Refused { status: 401, .. }), "{told}");
    }
    let recipe = folder.path().join("recipe.toml");
    let engine = format!("kind = \"rollflow\"\nurls = [{:?}]\ntoken_env = \"SERVE_TOKEN\"", server.url);
    fs::write(&recipe, format!("pipeline = \"grpo\"\nmodel.kind = \"tiny\"\ntask.kind = \"arithmetic\"\n[engine]\n{engine}\n"))
        .unwrap();
    let status = rollflow_with(&["engine", "status", recipe.to_str().unwrap()], &[("SERVE_TOKEN", "open-sesame")]);
    assert!(status.code == Some(0) && status.out.contains("spans, weights, checksums, adapters"), "{}{}", status.out, status.err);

    let open = rollflow(&["serve", run.to_str().unwrap(), "--listen", "0.0.0.0:0"]);
    assert!(open.code == Some(2) && open.err.contains("--token-file"), "{}", open.err);
}

#[test]
fn adapters_answer_by_name_alongside_the_model_until_they_are_unloaded() {
    let folder = tempfile::tempdir().unwrap();
    let base = checkpoint(&tiny_run(folder.path(), &[]));
    let server = Server::start(&base, &["--slots", "4", "--name", "base"]);
    let request = |model: &str| json!({"model": model, "prompt": "3+4=", "temperature": 0, "max_tokens": 40, "ignore_eos": true, "return_token_ids": true});
    let completed = |server: &Server, model: &str| {
        server.post("/v1/completions", &request(model)).map(|page| page["choices"][0]["token_ids"].as_array().unwrap().clone())
    };
    let mut expected = vec![("base".to_owned(), completed(&server, "base").unwrap())];
    for name in ["seed=1", "seed=2"] {
        let run = folder.path().join(name);
        run_of(&base, &run, &["lora={rank=2,alpha=32}", "mix={batch=4,every=1}", "train.lr=1e-1", name]);
        let adapter = checkpoint(&run).canonicalize().unwrap();
        let alone = Server::start(&adapter, &["--name", "base"]);
        expected.push((name.to_owned(), completed(&alone, "base").unwrap()));
        let body = json!({"lora_name": name, "lora_path": adapter});
        server.ask("/load_lora_adapter", &body);
        assert!(server.refused("/load_lora_adapter", &body).contains("taken"));
    }
    assert!(expected[0].1 != expected[1].1 && expected[1].1 != expected[2].1, "they differ: {expected:?}");
    // All in one batch.
    server.ask("/pause_generation", &json!({"mode": "in_place"}));
    let streamed = |(name, _): &(String, Vec<Value>)| {
        let mut body = request(name);
        body["stream"] = true.into();
        server.stream("/v1/completions", &body)
    };
    let streams: Vec<Events> = expected.iter().map(streamed).collect();
    server.ask("/continue_generation", &json!({}));
    for (mut events, (name, expected)) in streams.into_iter().zip(&expected) {
        let mut tokens = Vec::new();
        while let Some(event) = server.next(&mut events) {
            tokens.extend(event["choices"][0]["token_ids"].as_array().unwrap().clone());
        }
        assert_eq!(tokens, *expected, "{name}");
    }
    let models = server.get("/v1/models")["data"].clone();
    let names: Vec<&str> = models.as_array().unwrap().iter().map(|model| model["id"].as_str().unwrap()).collect();
    assert_eq!(names, ["base", "seed=1", "seed=2"]);
    server.ask("/unload_lora_adapter", &json!({"lora_name": "seed=1"}));
    assert!(completed(&server, "seed=1").is_err());
    for (name, expected) in expected.iter().filter(|(name, _)| name != "seed=1") {
        assert_eq!(completed(&server, name).unwrap(), *expected, "{name}");
    }
}

/// Law F3: SIGTERM ends the server after the responses in progress; those that a pause holds are aborted.
#[test]
fn sigterm_drains() {
    let folder = tempfile::tempdir().unwrap();
    let server = Server::start(&tiny_run(folder.path(), &[]), &["--slots", "2", "--drain-timeout", "600"]);
    let mut events = server.stream("/generate", &long(100));
    let mut ended = BTreeMap::new();
    let mut event = server.next(&mut events);
    server.running.terminate();
    while let Some(page) = event {
        if page["meta_info"]["finish_reason"].is_object() {
            ended.insert(page["index"].as_u64(), page["meta_info"]["completion_tokens"].clone());
        }
        event = server.next(&mut events);
    }
    assert!(ended.len() == 8 && ended.values().all(|tokens| *tokens == 100), "{ended:?}");
    assert_eq!(server.running.end(), Some(0));

    let server = Server::start(&folder.path().join("run"), &["--drain-timeout", "600"]);
    server.ask("/pause_generation", &json!({"mode": "in_place"}));
    let mut events = server.stream("/generate", &long(100));
    server.running.terminate();
    while let Some(page) = server.next(&mut events) {
        assert_eq!(page["meta_info"]["finish_reason"]["type"], "abort");
    }
    assert_eq!(server.running.end(), Some(0));
}
