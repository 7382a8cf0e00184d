//! A fleet at work: engines that die and come back, refuse and stand still, and the generator that drives it.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use rollflow::data::DataBuffer;
use rollflow::data::Prompt;
use rollflow::engine::remote::{Attempt, Ending, Fault, InferenceEngine, RemoteError, async_trait, connect};
use rollflow::engine::settings::EngineKind;
use rollflow::engine::{EngineError, FinishReason, SamplingParams, TokenEngine};
use rollflow::observe::logs::{DEAD_LETTERS, DeadLetter, dead_letters, read_lines};
use rollflow::observe::{Metric, Metrics};
use rollflow::prelude::*;
use rollflow::rollout::Admission;
use rollflow::rollout::{LOST, complete};
use rollflow::stages::reward::FailurePolicy;
use serde_json::{Value, json};
use tokio::sync::mpsc::Sender;

use super::server::{Piece, Reply, Server, answer_to, next, of_each, vllm_event, vllm_page, wait_for};
use super::*;

/// Right answers, each token after a pause.
fn right(body: &Value, version: &str, millis: u64) -> Reply {
    let prompt: Vec<u32> = body["token_ids"].as_array().unwrap().iter().map(|id| id.as_u64().unwrap() as u32).collect();
    let whole = answer_to(&prompt, body["sampling_params"]["max_tokens"].as_u64().unwrap() as usize);
    let (mut pieces, mut read) = (Vec::new(), prompt);
    for (place, token) in whole.iter().enumerate() {
        let (_, log_prob) = next(&read);
        read.push(*token);
        let last = place + 1 == whole.len();
        let finish = last.then_some(if *token == 1 { "stop" } else { "length" });
        let spans = if last { json!([{ "version": version, "start": 0, "end": whole.len() }]) } else { Value::Null };
        pieces.extend([Piece::Pause(millis), Piece::Event(vllm_event(&[(*token, log_prob)], finish, spans))]);
    }
    pieces.push(Piece::Raw("data: [DONE]\n\n".into()));
    Reply::Stream(of_each(pieces, body))
}

fn vllm(url: &str) -> Arc<dyn InferenceEngine> {
    connect(EngineKind::Vllm, url, None).unwrap()
}

fn params() -> SamplingParams {
    SamplingParams { max_new_tokens: 12, ..SamplingParams::default() }
}

#[test]
fn a_dead_engines_work_moves_with_all_its_tokens_and_it_comes_back_when_it_has_the_weights() {
    let serve = |path: &str, body: &Value| vllm_page(path).unwrap_or_else(|| right(body, "3", 3));
    let (dies, stays) = (Server::new(serve), Server::new(serve));
    let port = dies.port();
    let handle = handle([vllm(&dies.url), vllm(&stays.url)]);
    give(&handle, 3);
    let mut fleet = fleet(&handle, hasty());
    fleet.set_weights(3, &());
    (0..8).for_each(|ordinal| fleet.submit(request(ordinal, 4, &params())).unwrap());
    let (mut dies, mut made) = (Some(dies), 0);
    let ended = finish(&mut fleet, |fleet| {
        made += fleet.sampled().len();
        // In the middle of its work.
        if made > 30 {
            dies = None;
        }
    })
    .unwrap();
    assert!(handle.why_lost(0).is_some());
    for ((ordinal, _), finished) in &ended {
        assert_eq!(finished.tokens, answer_to(&prompt(*ordinal), 12));
    }
    assert_eq!((ended.len(), ended.values().map(|finished| finished.tokens.len()).sum::<usize>()), (32, made));

    // It is back, but nobody knows with which weights.
    let asked = Arc::new(AtomicUsize::new(0));
    let count = asked.clone();
    let _back = Server::at(port, move |path, body| {
        vllm_page(path).unwrap_or_else(|| {
            count.fetch_add(1, SeqCst);
            right(body, "3", 0)
        })
    });
    let until = Instant::now() + GUARD;
    while handle.behind().is_empty() {
        assert!(Instant::now() < until, "it is never found");
        std::thread::sleep(Duration::from_millis(5));
    }
    (8..10).for_each(|ordinal| fleet.submit(request(ordinal, 4, &params())).unwrap());
    finish(&mut fleet, |_| {}).unwrap();
    assert_eq!((handle.behind(), asked.load(SeqCst)), (vec![0], 0));
    assert_eq!(wait_for(manager(&handle).catch_up()).unwrap().held(), 1);
    (10..30).for_each(|ordinal| fleet.submit(request(ordinal, 4, &params())).unwrap());
    finish(&mut fleet, |_| {}).unwrap();
    assert!(asked.load(SeqCst) > 0 && handle.is_serving(0));
}

#[test]
fn when_no_engine_is_left_the_error_says_what_waits_and_why() {
    let url = "http://127.0.0.1:1";
    let handle = handle([vllm(url)]);
    let config = FleetConfig { fleet_timeout: Duration::from_millis(300), ..hasty() };
    let mut fleet = fleet(&handle, config);
    fleet.set_weights(1, &());
    fleet.submit(request(4, 2, &params())).unwrap();
    let error = finish(&mut fleet, |_| {}).unwrap_err();
    assert!(matches!(error, EngineError::Stuck { .. }));
    let text = error.to_string();
    for words in ["sample p4-s0 on no engine with 0 tokens", "cannot connect", url, "rollflow engine status"] {
        assert!(text.contains(words), "{text}");
    }
}

#[test]
fn a_paused_server_is_waited_for_and_that_is_no_failure() {
    let paused = Arc::new(AtomicBool::new(true));
    let (stands, turned_away) = (paused.clone(), Arc::new(AtomicUsize::new(0)));
    let count = turned_away.clone();
    let server = Server::new(move |path, body| {
        vllm_page(path).unwrap_or_else(|| match stands.load(SeqCst) {
            true => {
                // Oftener than a failure may be.
                if count.fetch_add(1, SeqCst) > 5 {
                    stands.store(false, SeqCst);
                }
                Reply::Page(503, json!({ "error": "paused" }).to_string())
            }
            false => right(body, "1", 0),
        })
    });
    let handle = handle([vllm(&server.url)]);
    let mut fleet = fleet(&handle, FleetConfig { retries: 0, fleet_timeout: GUARD, ..hasty() });
    fleet.set_weights(1, &());
    fleet.submit(request(0, 1, &params())).unwrap();
    let ended = finish(&mut fleet, |_| {}).unwrap();
    assert_eq!(ended[&(0, 0)].tokens, answer_to(&prompt(0), 12));
    assert!(turned_away.load(SeqCst) > 5);
}

/// Nonsense that an engine of one's own can make: it panics, or says nothing.
struct Odd(AtomicUsize);

#[async_trait]
impl InferenceEngine for Odd {
    fn name(&self) -> String {
        "odd".into()
    }

    async fn generate(&self, attempt: &Attempt, tokens: &Sender<Vec<(u32, f32)>>) -> Result<Ending, RemoteError> {
        match self.0.fetch_add(1, SeqCst) {
            0 => panic!("odd"),
            1 => std::future::pending().await,
            2 => Err(RemoteError::new("odd", Fault::Broke("oddly".into()))),
            3 => Ok(Ending { finish: Some(FinishReason::Stop), ..Ending::default() }),
            _ => {
                let (token, log_prob) = next(&attempt.tokens);
                tokens.send(vec![(token, log_prob)]).await.ok();
                Ok(Ending { finish: (token == 1).then_some(FinishReason::Stop), ..Ending::default() })
            }
        }
    }
}

/// Groups of an engine whose weights are version 0.
fn completed(fleet: &mut Fleet, prompts: Vec<Prompt>, group_size: usize) -> Result<Vec<Group>, EngineError> {
    fleet.set_weights(0, &());
    complete(fleet, &tokenizer(), prompts, group_size, &params())
}

#[test]
fn an_engine_of_ones_own_may_panic_or_hang_and_answers_go_on_token_by_token() {
    let mut fleet = fleet(&handle([Arc::new(Odd(AtomicUsize::new(0))) as Arc<dyn InferenceEngine>]), hasty());
    let groups = completed(&mut fleet, vec![Prompt::from("1+2="), Prompt { ordinal: 1, ..Prompt::from("3=") }], 2).unwrap();
    assert_eq!(groups.len(), 2);
    for group in groups {
        for sample in &group.samples {
            let prompt = tokenizer().encode_prompt(&group.prompt).unwrap();
            assert_eq!(sample.tokens[prompt.len()..], answer_to(&prompt, 12));
        }
    }
}

#[test]
fn v5_prompts_are_remembered_apart_by_version_and_expired_answers_begin_anew() {
    let keys: Arc<Mutex<Vec<Value>>> = Arc::default();
    let seen = keys.clone();
    let server = Server::new(move |path, body| {
        vllm_page(path).unwrap_or_else(|| {
            seen.lock().unwrap().push(body["cache_salt"].clone());
            right(body, "2", 5)
        })
    });
    let handle = handle([vllm(&server.url)]);
    let mut fleet = fleet(&handle, hasty());
    give(&handle, 1);
    fleet.set_weights(1, &());
    // A prompt whose answer has several tokens.
    let ordinal = (0..).find(|ordinal| answer_to(&prompt(*ordinal), 12).len() > 6).unwrap();
    fleet.submit(request(ordinal, 1, &params())).unwrap();
    while fleet.sampled().is_empty() {
        fleet.step().unwrap();
    }
    assert_eq!(fleet.restart_expired(&|_, answer| answer.versions.oldest() == Some(1)), [(ordinal, 0)]);
    fleet.set_weights(2, &());
    assert_eq!(handle.behind(), [0], "it serves an older version than required");
    give(&handle, 2);
    let ended = finish(&mut fleet, |_| {}).unwrap();
    let finished = &ended[&(ordinal, 0)];
    assert_eq!((&finished.tokens, finished.versions.oldest()), (&answer_to(&prompt(ordinal), 12), Some(2)));
    // In another run, these versions are of other weights.
    let mut another = self::fleet(&handle, hasty());
    another.set_weights(2, &());
    another.submit(request(ordinal, 1, &params())).unwrap();
    finish(&mut another, |_| {}).unwrap();
    let keys: Vec<String> = keys.lock().unwrap().iter().map(|key| key.as_str().unwrap().to_owned()).collect();
    let [first, second, other] = &keys[..] else { panic!("{keys:?}") };
    assert!(first.starts_with("v1-") && second.starts_with("v2-") && other.starts_with("v2-") && second != other, "{keys:?}");
}

/// Law F6 in a run: the prompt that a server refuses is a dead letter, the others are scored, and the book balances.
#[test]
fn f6_a_prompt_that_is_refused_for_good_costs_its_group_and_nothing_else() {
    let server = Server::new(|path, body| {
        vllm_page(path).unwrap_or_else(|| match body["token_ids"][0].as_u64() {
            Some(6) => Reply::Page(400, json!({ "error": { "message": "no such luck", "code": 400 } }).to_string()),
            _ => right(body, "1", 0),
        })
    });
    let handle = handle([vllm(&server.url)]);
    give(&handle, 1);
    let folder = tempfile::tempdir().unwrap();
    let admission = Admission::new(8, 8, None);
    let (publisher, published) = weights();
    publisher.publish(1, Arc::new(())).unwrap();
    admission.published(1);
    let seen: Arc<Mutex<Vec<Scored>>> = Arc::default();
    let sink = seen.clone();
    let mut flow = Flow::new("remote").admission(&admission);
    let buffer = DataBuffer::new(["1+", "2+", "3+", "4+"], 0).unwrap();
    let prompts = flow.source("prompts", Prompts::new(buffer).limited(4));
    let generator = Generator::remote(&handle, hasty(), &tokenizer()).weights(published).group_size(3).max_new_tokens(12);
    let groups = flow.stage("generate", prompts, generator);
    let reward = Reward::each(|_: &Sample| 1.0)
        .failures(FailurePolicy { dead_letters: Some(dead_letters(folder.path())), ..FailurePolicy::default() });
    let scored = flow.stage("reward", groups, reward);
    flow.sink("seen", scored, move |scored: Scored| sink.lock().unwrap().push(scored));
    flow.run(Until::finished()).unwrap();
    drop(publisher);
    let seen = seen.lock().unwrap();
    assert_eq!(seen.len(), 4);
    let lost = seen.iter().filter(|scored| scored.dropped() == Some(LOST)).count();
    assert_eq!(lost, 1, "the prompt that begins with token 6");
    let letter = read_lines::<DeadLetter>(folder.path().join(DEAD_LETTERS)).unwrap().next().unwrap().unwrap();
    let text = &letter.failures[0].text;
    assert!(letter.failures.len() == 3 && text.contains("no such luck") && text.contains(&server.url), "{text}");
    let made: usize = seen.iter().map(|scored| scored.group().generated()).sum();
    let totals = admission.totals();
    assert_eq!((totals.open_tokens, totals.imbalance()), (made as u64, (0, 0)));
}

#[test]
fn engines_that_refuse_everything_end_the_run() {
    let server = Server::new(|path, _| vllm_page(path).unwrap_or(Reply::Page(422, "no".into())));
    let mut fleet = fleet(&handle([vllm(&server.url)]), FleetConfig { max_refused: 5, ..hasty() });
    let prompts = (0..4).map(|ordinal| Prompt { ordinal, ..Prompt::from("1") }).collect();
    let error = completed(&mut fleet, prompts, 4).unwrap_err();
    assert!(matches!(&error, EngineError::Refused { in_a_row: 6, .. }), "{error}");
}

#[test]
fn connections_are_used_again() {
    let server = Server::new(|path, body| vllm_page(path).unwrap_or_else(|| right(body, "1", 0)));
    let mut fleet = fleet(&handle([vllm(&server.url)]), FleetConfig { per_engine: 4, ..hasty() });
    let prompts = (0..50).map(|ordinal| Prompt { ordinal, ..Prompt::from(format!("{ordinal}+")) }).collect();
    completed(&mut fleet, prompts, 4).unwrap();
    let made = server.connections.load(SeqCst);
    assert!(made <= 16, "{made} connections for 200 samples, of which at most 4 were under way");
}

/// What an engine makes between its going on under new weights and their probe.
#[test]
fn v4_what_was_made_under_weights_on_trial_is_given_back_when_they_are_right_and_made_anew_when_they_are_not() {
    for wrong in [false, true] {
        // The log-probabilities by which the weights are judged; without any the server is busy.
        let (verdicts, probes) = (Arc::<Mutex<Vec<f64>>>::default(), Arc::<AtomicUsize>::default());
        let (given, count) = (verdicts.clone(), probes.clone());
        let server = Server::new(move |path, body| match path {
            "/v1/completions" => {
                count.fetch_add(1, SeqCst);
                let Some(log_prob) = given.lock().unwrap().pop() else { return Reply::Page(503, String::new()) };
                Reply::json(json!({ "choices": [{ "prompt_logprobs": [null, { "6": { "logprob": log_prob } }] }] }))
            }
            _ => vllm_page(path).unwrap_or_else(|| right(body, "1", 2)),
        });
        let handle = handle([vllm(&server.url)]);
        give(&handle, 1);
        let mut fleet = fleet(&handle, FleetConfig { fleet_timeout: GUARD, ..hasty() });
        fleet.set_weights(1, &());
        (0..4).for_each(|ordinal| fleet.submit(request(ordinal, 2, &params())).unwrap());
        let (texts, expected) = (vec![vec![5, 6]], vec![vec![-7.5]]);
        let (manager, update) = (manager(&handle), Update { texts, expected, tolerance: 1e-3, ..unprobed(1) });
        let syncing = std::thread::spawn(move || wait_for(manager.sync(update)));
        while probes.load(SeqCst) == 0 {
            std::thread::sleep(Duration::from_millis(1));
        }
        let (mut told, mut withdrawn) = (0, Vec::new());
        let started = Instant::now();
        while told < (0..4).map(|ordinal| 2 * answer_to(&prompt(ordinal), 12).len()).sum::<usize>() - 8 {
            assert_eq!(fleet.step().unwrap(), [], "nobody knows yet what these are worth");
            told += fleet.sampled().len();
            assert!(started.elapsed() < GUARD, "all but the last token of each is told");
        }
        // The newest first: wrong weights are loaded once more.
        verdicts.lock().unwrap().extend(if wrong { vec![-7.5, -1.0] } else { vec![-7.5] });
        let mut anew = 0;
        let ended = finish(&mut fleet, |fleet| {
            withdrawn.extend(fleet.discarded().to_vec());
            anew += fleet.sampled().len();
        })
        .unwrap();
        assert_eq!((withdrawn.len(), syncing.join().unwrap().unwrap().held()), (if wrong { 8 } else { 0 }, 1));
        let tokens: usize = ended.values().map(|finished| finished.tokens.len()).sum();
        assert_eq!((ended.len(), anew), (8, if wrong { tokens } else { 8 }), "made anew, all of them, or given back as they are");
    }
}

/// A sync that reports a late engine goes on with it.
#[test]
fn v4_work_of_an_engine_on_trial_is_kept_while_its_probe_is_late() {
    let scored = || Reply::json(json!({ "choices": [{ "prompt_logprobs": [null, { "6": { "logprob": -7.5 } }] }] }));
    let (answers, probes) = (Arc::<AtomicBool>::default(), Arc::<AtomicUsize>::default());
    let (ready, count) = (answers.clone(), probes.clone());
    let quick = Server::new(move |path, body| match path {
        "/v1/completions" => scored(),
        _ => vllm_page(path).unwrap_or_else(|| right(body, "1", 2)),
    });
    let late = Server::new(move |path, body| match path {
        "/v1/completions" => {
            count.fetch_add(1, SeqCst);
            if ready.load(SeqCst) { scored() } else { Reply::Page(503, String::new()) }
        }
        _ => vllm_page(path).unwrap_or_else(|| right(body, "1", 2)),
    });
    let handle = handle([vllm(&quick.url), vllm(&late.url)]);
    give(&handle, 1);
    let mut fleet = fleet(&handle, FleetConfig { fleet_timeout: GUARD, ..hasty() });
    fleet.set_weights(1, &());
    (0..4).for_each(|ordinal| fleet.submit(request(ordinal, 2, &params())).unwrap());
    let (texts, expected) = (vec![vec![5, 6]], vec![vec![-7.5]]);
    let (manager, update) = (manager(&handle), Update { texts, expected, tolerance: 1e-3, ..unprobed(1) });
    let syncing = std::thread::spawn(move || wait_for(manager.sync(update)));
    while probes.load(SeqCst) == 0 {
        std::thread::sleep(Duration::from_millis(1));
    }
    let (mut ended, mut withdrawn) = (0, 0);
    while !syncing.is_finished() {
        ended += fleet.step().unwrap().len();
        withdrawn += fleet.discarded().len();
    }
    assert_eq!((syncing.join().unwrap().unwrap().held(), handle.behind()), (1, vec![1]));
    assert!(ended < 8, "its samples wait for the verdict");
    answers.store(true, SeqCst);
    ended += finish(&mut fleet, |fleet| withdrawn += fleet.discarded().len()).unwrap().len();
    assert_eq!((ended, withdrawn, handle.is_serving(1)), (8, 0, true));
}

/// Law F3 of a group: what one question asks for ends once and whole, however the question ends.
#[test]
fn samples_of_a_prompt_are_asked_for_together_and_go_on_by_themselves_when_that_fails() {
    // What becomes of the first question.
    for fate in ["well", "refused", "cut", "nonsense", "busy", "error"] {
        let asked: Arc<Mutex<Vec<u64>>> = Arc::default();
        let seen = asked.clone();
        let server = Server::new(move |path, body| {
            vllm_page(path).unwrap_or_else(|| {
                let mut seen = seen.lock().unwrap();
                seen.push(body["sampling_params"]["n"].as_u64().unwrap());
                let Reply::Stream(mut pieces) = right(body, "1", 0) else { unreachable!() };
                match fate {
                    _ if seen.len() > 1 => {}
                    "refused" => return Reply::Page(400, "sampling_params.n must be at most 2".into()),
                    "busy" => return Reply::Page(429, String::new()),
                    // After the first token of the first answer.
                    "cut" => pieces.splice(2.., [Piece::Cut]).for_each(drop),
                    "error" => {
                        let error = "data: {\"error\": {\"message\": \"not any more\", \"code\": 400}}\n\n";
                        pieces.splice(2.., [Piece::Raw(error.into())]).for_each(drop);
                    }
                    "nonsense" => {
                        let mut event = vllm_event(&[(3, -1.0)], None, Value::Null);
                        event["choices"][0]["index"] = 4.into();
                        pieces.splice(2.., [Piece::Event(event)]).for_each(drop);
                    }
                    _ => {}
                }
                Reply::Stream(pieces)
            })
        });
        let handle = handle([vllm(&server.url)]);
        give(&handle, 1);
        // A busy machine must not look like a stalled engine, whose samples would move.
        let patient =
            FleetConfig { per_engine: 64, fleet_timeout: GUARD, stall_timeout: GUARD, attempt_timeout: GUARD, ..hasty() };
        let mut fleet = fleet(&handle, patient);
        fleet.set_weights(1, &());
        fleet.submit(request(0, 4, &params())).unwrap();
        let ended = finish(&mut fleet, |_| {}).unwrap();
        assert_eq!(ended.len(), 4, "{fate}");
        for finished in ended.values() {
            assert_eq!(finished.tokens, answer_to(&prompt(0), 12), "{fate}");
        }
        let asked = asked.lock().unwrap();
        // A sample whose task starts late, on a busy machine, is left out of the group's question.
        let again = if fate == "well" { 0 } else { asked[0] };
        assert!(asked[0] > 1, "{fate}: {asked:?}");
        assert_eq!(asked.iter().sum::<u64>(), 4 + again, "{fate}: {asked:?}");
        assert!(
            fate == "well" || asked[1..].iter().filter(|samples| **samples == 1).count() as u64 >= again,
            "{fate}: {asked:?}"
        );
        assert!(handle.is_serving(0), "{fate}: one fault, however many shared it");
    }
}

/// Law F6: load balancers give up requests whose bodies come slowly.
#[test]
fn f6_a_request_that_a_server_gave_up_waiting_for_is_sent_again() {
    let statuses = Mutex::new(vec![425, 408]);
    let server = Server::new(move |path, body| {
        vllm_page(path).unwrap_or_else(|| match statuses.lock().unwrap().pop() {
            Some(status) => Reply::Page(status, String::new()),
            None => right(body, "1", 0),
        })
    });
    let handle = handle([vllm(&server.url)]);
    give(&handle, 1);
    let mut fleet = fleet(&handle, hasty());
    fleet.set_weights(1, &());
    fleet.submit(request(0, 1, &params())).unwrap();
    let ended = finish(&mut fleet, |_| {}).unwrap();
    assert_eq!(ended.values().map(|of| &of.tokens).collect::<Vec<_>>(), [&answer_to(&prompt(0), 12)]);
    assert!(handle.is_serving(0));
}

#[test]
fn a_group_of_which_all_are_given_up_leaves_no_question_open() {
    let server = Server::new(|path, body| {
        vllm_page(path).unwrap_or_else(|| {
            let Reply::Stream(mut pieces) = right(body, "1", 0) else { unreachable!() };
            let samples = body["sampling_params"]["n"].as_u64().unwrap() as usize;
            if samples > 1 {
                // A token of each, and nothing more.
                pieces.splice(1 + samples.., [Piece::Hang]).for_each(drop);
            }
            Reply::Stream(pieces)
        })
    });
    let handle = handle([vllm(&server.url)]);
    let patient = FleetConfig { per_engine: 64, fleet_timeout: GUARD, stall_timeout: GUARD, attempt_timeout: GUARD, ..hasty() };
    let mut fleet = fleet(&handle, patient);
    fleet.set_weights(1, &());
    let ordinal = (0..).find(|ordinal| answer_to(&prompt(*ordinal), 12).len() > 6).unwrap();
    fleet.submit(request(ordinal, 4, &params())).unwrap();
    // The newest token of each is held back, as it may be the last: nothing is told of them yet.
    let (started, mut begun) = (Instant::now(), Vec::new());
    while begun.len() < 4 {
        fleet.step().unwrap();
        assert_eq!(server.left.load(SeqCst), 0, "some are still waited for");
        begun.extend(fleet.restart_expired(&|_, _| true));
        assert!(started.elapsed() < GUARD, "{begun:?}");
    }
    let ended = finish(&mut fleet, |_| {}).unwrap();
    assert!(ended.len() == 4 && ended.values().all(|finished| finished.tokens == answer_to(&prompt(ordinal), 12)));
    while server.left.load(SeqCst) == 0 {
        assert!(started.elapsed() < GUARD, "the question of all four is still open");
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn each_engine_is_measured_by_itself() {
    let well = Server::new(|path, body| vllm_page(path).unwrap_or_else(|| right(body, "1", 0)));
    let ill = Server::new(|path, _| vllm_page(path).unwrap_or(Reply::Page(500, "out of memory".into())));
    let (handle, metrics) = (handle([vllm(&well.url), vllm(&ill.url)]), Metrics::new());
    handle.observe(&metrics);
    give(&handle, 1);
    let mut fleet = fleet(&handle, hasty());
    fleet.set_weights(1, &());
    (0..8).for_each(|ordinal| fleet.submit(request(ordinal, 4, &params())).unwrap());
    let made: usize = finish(&mut fleet, |_| {}).unwrap().values().map(|finished| finished.tokens.len()).sum();
    let names: Vec<String> = handle.engines().iter().map(|engine| engine.name()).collect();
    let of = |metric, labels: &[&str]| metrics.newest(metric, labels).unwrap_or(-1.0);
    assert_eq!(of(Metric::EngineTokens, &[&names[0]]), made as f64);
    assert!(of(Metric::EngineRequests, &[&names[0]]) >= 32.0 && of(Metric::EngineFirstToken, &[&names[0]]) >= 0.0);
    let failed = of(Metric::EngineErrors, &[&names[1], "failed"]);
    assert_eq!((of(Metric::EngineRequests, &[&names[1]]), of(Metric::EngineTokens, &[&names[1]])), (failed, 0.0));
    assert!(failed >= 3.0, "three failures in a row make it lost");
    assert_eq!((of(Metric::EngineState, &[&names[0], "serving"]), of(Metric::EngineVersion, &[&names[0]])), (1.0, 1.0));
    let stands = |word| of(Metric::EngineState, &[&names[1], word]);
    assert_eq!(stands("serving") + stands("behind") + stands("lost"), 1.0);
    assert_eq!(stands("serving"), 0.0);
}
