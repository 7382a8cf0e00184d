//! Rewards that another process serves (laws F3, F6): a group is one request, so many at a time and no more; whatever the service does, every
//! group comes out, errors name the service and the sample, and nothing waits for ever.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Mutex, mpsc};
use std::time::Duration;

use proptest::prelude::*;
use rollflow::algo::rewards::{Aggregator, Parts};
use rollflow::flow::from_iter;
use rollflow::flow::{Ended, Report, RunError};
use rollflow::judge::{JudgeConfig, Service};
use rollflow::net::RetryPolicy;
use rollflow::observe::Metric;
use rollflow::observe::logs::dead_letters;
use rollflow::prelude::*;
use rollflow::rollout::LOST;
use rollflow::stages::reward::OnFailure;
use rollflow::stages::reward::{FailurePolicy, RemoteReward};
use serde_json::{Value, json};

use crate::reward_failures::letters;

/// How long a test may hang before it is told so.
const GUARD: Duration = Duration::from_secs(60);

/// What the service does with a request.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Act {
    Right,
    Slow,
    Hang,
    Reset,
    Fails,
    Rejects,
    Busy,
    Text(&'static str),
    /// Promises more than it sends.
    Cut,
    Endless,
}

/// Speaks HTTP on the loopback, a thread for each connection; `act` decides by the question and how many came before it.
struct Judge {
    url: String,
    questions: Arc<Mutex<Vec<Value>>>,
    /// Requests under way, and the most there ever were.
    under_way: Arc<(AtomicUsize, AtomicUsize)>,
}

impl Judge {
    fn new(act: impl Fn(&Value, usize) -> Act + Send + Sync + 'static) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("http://{}/score", listener.local_addr().unwrap());
        let (questions, under_way) = (Arc::<Mutex<Vec<Value>>>::default(), Arc::<(AtomicUsize, AtomicUsize)>::default());
        let (asked, busy, act) = (questions.clone(), under_way.clone(), Arc::new(act));
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                let (asked, busy, act) = (asked.clone(), busy.clone(), act.clone());
                std::thread::spawn(move || {
                    let mut stream = stream.unwrap();
                    let Some(question) = read_question(&stream) else { return };
                    let before = {
                        let mut asked = asked.lock().unwrap();
                        asked.push(question.clone());
                        asked.len() - 1
                    };
                    busy.1.fetch_max(busy.0.fetch_add(1, SeqCst) + 1, SeqCst);
                    let act = act(&question, before);
                    // Before the answer: whoever has it may ask again at once.
                    busy.0.fetch_sub(1, SeqCst);
                    // A client that has gone hears no answer.
                    answer(&mut stream, act, &question).ok();
                });
            }
        });
        Judge { url, questions, under_way }
    }

    fn service(&self, timeout: Duration, busy_timeout: Duration) -> Service {
        let retry = RetryPolicy { pause: Duration::from_millis(1), busy_timeout, ..RetryPolicy::default() };
        Service::new(&self.url, timeout, retry).unwrap()
    }

    /// The service with this timeout, and the default wait while it is busy.
    fn within(&self, timeout: Duration) -> Service {
        self.service(timeout, RetryPolicy::default().busy_timeout)
    }

    fn served(&self) -> RemoteReward {
        RemoteReward::new(self.within(Duration::from_secs(30)))
    }
}

fn read_question(stream: &TcpStream) -> Option<Value> {
    let mut reader = BufReader::new(stream);
    let mut length = 0;
    loop {
        let mut line = String::new();
        if reader.read_line(&mut line).ok()? == 0 {
            return None;
        }
        if let Some(value) = line.to_ascii_lowercase().strip_prefix("content-length:") {
            length = value.trim().parse().ok()?;
        }
        if line == "\r\n" {
            break;
        }
    }
    let mut body = vec![0; length];
    reader.read_exact(&mut body).ok()?;
    serde_json::from_slice(&body).ok()
}

/// The completion that a judge model is asked about.
fn judged(question: &Value) -> Option<&str> {
    question["messages"][0]["content"].as_str()
}

/// 10 × group + index; of a judge model, the number of the completion.
fn right(question: &Value) -> Value {
    if let Some(number) = judged(question).and_then(|text| text.strip_prefix("answer ")) {
        return json!({"choices": [{"message": {"content": format!("Score: {number}")}}]});
    }
    let reward = |sample: &Value| 10 * question["group"].as_u64().unwrap() + sample["index"].as_u64().unwrap();
    json!({ "rewards": question["samples"].as_array().unwrap().iter().map(reward).collect::<Vec<_>>() })
}

fn answer(stream: &mut TcpStream, act: Act, question: &Value) -> std::io::Result<()> {
    let mut send = |status: &str, body: &str, promised: usize| {
        write!(stream, "HTTP/1.1 {status}\r\nContent-Length: {promised}\r\nConnection: close\r\n\r\n{body}")
    };
    let body = right(question).to_string();
    match act {
        Act::Right => send("200 OK", &body, body.len()),
        Act::Slow => {
            std::thread::sleep(Duration::from_millis(30));
            send("200 OK", &body, body.len())
        }
        Act::Hang => {
            // Until the client goes.
            stream.read_exact(&mut [0])
        }
        Act::Reset => Ok(()),
        Act::Fails => send("500 Internal Server Error", "out of memory", 13),
        Act::Rejects => send("400 Bad Request", "too long", 8),
        Act::Busy => send("503 Service Unavailable\r\nRetry-After: 0", "", 0),
        Act::Text(text) => send("200 OK", text, text.len()),
        Act::Cut => send("200 OK", &body[..body.len() / 2], body.len()),
        Act::Endless => {
            send("200 OK", "", usize::MAX)?;
            loop {
                stream.write_all(&[b' '; 1 << 16])?;
            }
        }
    }
}

fn group(id: u64) -> Group {
    let prompt = Prompt { ordinal: id, ..Prompt::from(format!("prompt {id}")) };
    let sample = |index| Sample { response: format!("answer {index}"), ..Sample::begin(&prompt, index, &[1, 2]) };
    Group { samples: (0..3).map(sample).collect(), prompt: Arc::new(prompt), ..Group::default() }
}

/// Why each group was dropped and its rewards, by id.
type Scores = BTreeMap<u64, (Option<String>, Vec<f64>)>;

/// Scores `groups` groups; panics if that never ends.
fn score(groups: u64, reward: RemoteReward) -> (Result<Report, RunError>, Scores) {
    let scores: Arc<Mutex<Scores>> = Arc::default();
    let seen = Arc::clone(&scores);
    let mut flow = Flow::new("rewards");
    let groups = flow.source("groups", from_iter((0..groups).map(group)));
    let scored = flow.stage("judge", groups, reward);
    flow.sink("seen", scored, move |scored: Scored| {
        let why = scored.dropped().map(str::to_owned);
        assert!(seen.lock().unwrap().insert(scored.group().id(), (why, scored.group().rewards())).is_none(), "once each");
    });
    let (done, ended) = mpsc::channel();
    std::thread::spawn(move || done.send(flow.run(Until::finished())).ok());
    let result = ended.recv_timeout(GUARD).expect("the run never ended");
    let scores = std::mem::take(&mut *scores.lock().unwrap());
    (result, scores)
}

fn dead_letters_in(folder: &std::path::Path) -> FailurePolicy {
    FailurePolicy { dead_letters: Some(dead_letters(folder)), ..FailurePolicy::default() }
}

#[test]
fn a_group_is_one_request_and_each_sample_gets_its_own_reward() {
    let judge = Judge::new(|_, _| Act::Right);
    let (result, scores) = score(20, judge.served());
    result.unwrap();
    assert_eq!(scores.len(), 20);
    for (id, (dropped, rewards)) in scores {
        let expected = (0..3).map(|index| (10 * id + index) as f64).collect::<Vec<_>>();
        assert_eq!((dropped, rewards), (None, expected), "group {id}");
    }
    let questions = judge.questions.lock().unwrap();
    assert_eq!(questions.len(), 20);
    let first = questions.iter().find(|question| question["group"] == 0).unwrap();
    assert_eq!(first["samples"][1]["response"], "answer 1");
}

#[test]
fn so_many_groups_are_asked_for_at_once_and_no_more() {
    // Nobody is answered until three have asked; a fourth would be seen.
    let gate = Arc::new(std::sync::Barrier::new(3));
    let judge = Judge::new(move |_, _| {
        gate.wait();
        Act::Right
    });
    let (result, scores) = score(12, judge.served().concurrency(3));
    result.unwrap();
    assert_eq!((scores.len(), judge.under_way.1.load(SeqCst)), (12, 3));
}

#[test]
fn a_busy_service_is_waited_for_and_that_is_no_failure() {
    let judge = Judge::new(|_, before| if before < 5 { Act::Busy } else { Act::Right });
    let metrics = Metrics::new();
    let (result, scores) = score(
        1,
        judge.served().retries(0).failures(FailurePolicy { metrics: Some(metrics.clone()), ..FailurePolicy::default() }),
    );
    result.unwrap();
    assert_eq!(scores[&0].1, [0.0, 1.0, 2.0]);
    assert_eq!(metrics.newest(Metric::RewardFailures, &[]), Some(0.0));

    // For ever is too long.
    let judge = Judge::new(|_, _| Act::Busy);
    let folder = tempfile::tempdir().unwrap();
    let busy = judge.service(Duration::from_secs(30), Duration::from_millis(20));
    let reward = RemoteReward::new(busy).failures(dead_letters_in(folder.path()));
    score(1, reward).0.unwrap();
    let text = &letters(folder.path())[0].failures[0].text;
    assert!(text.contains("said 503 for") && text.contains("raise busy_timeout"), "{text}");
}

#[test]
fn every_way_to_fail_is_named_with_the_service_the_sample_and_what_to_look_at() {
    for (act, why) in [
        (Act::Hang, "no answer to POST within 0.1 s; check whether the server hangs"),
        (Act::Endless, "no answer to POST within 0.1 s"),
        (Act::Reset, "look for a crash in the server's log"),
        (Act::Cut, "look for a crash in the server's log"),
        (Act::Fails, "was answered with status 500: \"out of memory\""),
        (Act::Text("<html>Welcome</html>"), "answered with no JSON"),
        (Act::Text("{\"rewards\": [1, 2]}"), "answered with 2 rewards for"),
        (Act::Text("{\"rewards\": [1, NaN, 2]}"), "answered with no JSON"),
    ] {
        let judge = Judge::new(move |_, _| act);
        let folder = tempfile::tempdir().unwrap();
        // What sends without end is cut off by its length or the clock, whichever comes first.
        let served = RemoteReward::new(judge.within(Duration::from_millis(100))).retries(1);
        let (result, scores) = score(1, served.failures(dead_letters_in(folder.path())));
        result.unwrap();
        assert_eq!(scores[&0].0.as_deref(), Some(LOST));
        let letter = letters(folder.path()).remove(0);
        assert_eq!(letter.failures.iter().map(|failure| failure.sample).collect::<Vec<_>>(), [0, 1, 2]);
        for failure in letter.failures {
            let named = failure.text.contains(&judge.url) && (failure.text.contains(why) || act == Act::Endless);
            assert!(named && failure.attempts == 2, "{act:?}: {failure}");
        }
    }
}

#[test]
fn nobody_listening_is_told_with_the_address() {
    let url = "http://127.0.0.1:1/score";
    let served = RemoteReward::new(Service::new(url, Duration::from_secs(30), RetryPolicy::default()).unwrap()).retries(0);
    let error = score(1, served.failures(FailurePolicy { on_failure: OnFailure::Fail, ..FailurePolicy::default() }))
        .0
        .unwrap_err()
        .to_string();
    assert!(
        error.contains(&format!("the reward of sample 0 of group 0 failed: it refused: reward service {url}: cannot connect")),
        "{error}"
    );
}

#[test]
fn only_the_samples_that_lack_a_reward_are_asked_for_again() {
    let judge = Judge::new(|_, before| match before {
        0 => Act::Text("{\"rewards\": [0, {\"error\": \"the sandbox crashed\"}, 2]}"),
        _ => Act::Right,
    });
    let metrics = Metrics::new();
    let (result, scores) =
        score(1, judge.served().failures(FailurePolicy { metrics: Some(metrics.clone()), ..FailurePolicy::default() }));
    result.unwrap();
    assert_eq!(scores[&0].1, [0.0, 1.0, 2.0]);
    assert_eq!(metrics.newest(Metric::RewardFailures, &[]), Some(1.0), "and is seen all the same");
    let questions = judge.questions.lock().unwrap();
    let asked: Vec<u64> = questions[1]["samples"].as_array().unwrap().iter().map(|s| s["index"].as_u64().unwrap()).collect();
    assert_eq!(asked, [1]);
}

#[test]
fn a_sample_that_stays_refused_costs_itself_and_the_others_keep_theirs() {
    let judge = Judge::new(|question, _| match question["samples"].as_array().unwrap().len() {
        3 => Act::Text("{\"rewards\": [0, null, 2]}"),
        _ => Act::Text("{\"rewards\": [null]}"),
    });
    let folder = tempfile::tempdir().unwrap();
    let (result, scores) = score(1, judge.served().failures(dead_letters_in(folder.path())));
    result.unwrap();
    assert_eq!(scores[&0], (None, vec![0.0, 2.0]));
    let letter = letters(folder.path()).remove(0);
    assert_eq!((letter.failures.len(), letter.failures[0].sample, letter.failures[0].attempts), (1, 1, 3));
    assert!(letter.failures[0].text.contains("gave null where a finite number must stand"), "{}", letter.failures[0]);
    let rewards: Vec<Option<f64>> = letter.samples.iter().map(|sample| sample.reward).collect();
    assert_eq!(rewards, [Some(0.0), None, Some(2.0)]);
}

/// A service that crashes on one sample answers for the whole request.
#[test]
fn a_sample_on_which_the_service_fails_costs_no_other_sample_its_reward() {
    for fails in [Act::Fails, Act::Reset, Act::Rejects] {
        let judge = Judge::new(move |question, _| {
            let samples = question["samples"].as_array().unwrap();
            if samples.iter().any(|sample| sample["index"] == 1) { fails } else { Act::Right }
        });
        let folder = tempfile::tempdir().unwrap();
        let reward = judge.served().retries(2).failures(dead_letters_in(folder.path()));
        let (result, scores) = score(1, reward);
        result.unwrap();
        assert_eq!(scores[&0], (None, vec![0.0, 2.0]), "{fails:?}");
        let failed: Vec<u32> = letters(folder.path()).remove(0).failures.iter().map(|failure| failure.sample).collect();
        assert_eq!(failed, [1], "{fails:?}");
    }
}

#[test]
fn a_judge_that_hangs_on_or_rejects_one_completion_grades_the_others_once_each() {
    for act in [Act::Hang, Act::Busy, Act::Rejects] {
        let judge = Judge::new(move |question, _| if judged(question) == Some("answer 1") { act } else { Act::Right });
        let config = JudgeConfig { model: "grader".into(), prompt: "{response}".into(), ..JudgeConfig::default() };
        let service = judge.service(Duration::from_secs(5), Duration::from_millis(20)).judge(config).unwrap();
        let mut asked = group(0);
        asked.samples.push(Sample { index: 3, ..asked.samples[2].clone() });
        let (scored, failures) = RemoteReward::new(service).retries(0).score_blocking(asked).unwrap();
        let rewards: BTreeMap<u32, Option<f64>> = scored.samples.iter().map(|of| (of.index, of.reward)).collect();
        assert_eq!(rewards, [(0, Some(0.0)), (1, None), (2, Some(0.2)), (3, Some(0.2))].into(), "{act:?}");
        assert_eq!(failures.iter().map(|failure| failure.sample).collect::<Vec<_>>(), [1], "{act:?}");
        let questions = judge.questions.lock().unwrap();
        assert_eq!(questions.iter().filter(|question| judged(question) == Some("answer 2")).count(), 1, "{act:?}");
    }
}

#[test]
fn parts_that_are_served_and_parts_that_are_computed_make_one_reward() {
    let judges = [Judge::new(|_, _| Act::Right), Judge::new(|_, _| Act::Text("{\"rewards\": [0.5, 0.5, {\"reward\": 0.25}]}"))];
    let parts = Parts::new(Aggregator::weighted([1.0, 2.0, 4.0]))
        .remote("right")
        .part("here", |sample: &Sample| f64::from(sample.index))
        .remote("style");
    let services =
        judges.iter().zip(["right", "style"]).map(|(judge, name)| (name.to_owned(), judge.within(Duration::from_secs(30))));
    let served = RemoteReward::with_parts(parts, services);
    let (scored, failures) = served.score_blocking(group(0)).unwrap();
    assert_eq!((scored.rewards(), failures.len()), (vec![2.0, 5.0, 7.0], 0));
    assert_eq!(
        scored.samples[2].reward_parts,
        [("here", 2.0), ("right", 2.0), ("style", 0.25)].map(|(k, v)| (k.to_owned(), v)).into()
    );
}

#[test]
fn a_stop_does_not_wait_for_a_service_that_hangs() {
    let (asked, hangs) = mpsc::channel();
    let asked = Mutex::new(asked);
    let judge = Judge::new(move |_, _| {
        asked.lock().unwrap().send(()).ok();
        Act::Hang
    });
    let service = judge.within(Duration::from_secs(3600));
    let mut flow = Flow::new("rewards");
    let groups = flow.source("groups", from_iter((0..100).map(group)));
    let scored = flow.stage("judge", groups, RemoteReward::new(service).concurrency(2));
    flow.sink("seen", scored, |_: Scored| {});
    let control = flow.handle();
    let (done, ended) = mpsc::channel();
    std::thread::spawn(move || done.send(flow.run(Until::finished()).unwrap().ended));
    hangs.recv_timeout(GUARD).unwrap();
    control.stop();
    assert_eq!(ended.recv_timeout(GUARD), Ok(Ended::Stopped));
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, ..ProptestConfig::default() })]

    /// Laws F3 and F6, over seeded mixtures of everything that a service can do wrong.
    #[test]
    fn whatever_a_service_does_every_group_comes_out_right_or_named(seed in any::<u64>(), concurrency in 1_usize..9, retries in 0_u32..4) {
        const ACTS: [Act; 12] = [
            Act::Right, Act::Right, Act::Right, Act::Slow, Act::Hang, Act::Reset, Act::Fails, Act::Busy, Act::Cut,
            Act::Text("<html></html>"), Act::Text("{\"rewards\": [1, 1, 1, 1]}"), Act::Text("{\"rewards\": [0, {\"error\": \"no\"}, null]}"),
        ];
        let judge = Judge::new(move |_, before| {
            let mixed = (seed ^ before as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15);
            ACTS[(mixed >> 32) as usize % ACTS.len()]
        });
        let folder = tempfile::tempdir().unwrap();
        let reward = RemoteReward::new(judge.within(Duration::from_millis(60))).retries(retries)
            .concurrency(concurrency)
            .failures(FailurePolicy { max_poisoned: u64::MAX, ..dead_letters_in(folder.path()) });
        let (result, scores) = score(12, reward);
        result.unwrap();
        prop_assert_eq!(scores.len(), 12);
        let lessened = |(why, rewards): &(Option<String>, Vec<f64>)| why.is_some() || rewards.len() < 3;
        let mut dropped: Vec<u64> = scores.iter().filter(|(_, scored)| lessened(scored)).map(|(id, _)| *id).collect();
        for (id, scored) in &scores {
            let rewards = &scored.1;
            prop_assert!(scored.0.is_some() || rewards.len() > 1, "two are compared at least");
            if !lessened(scored) {
                let expected: Vec<f64> = (0..3).map(|index| (10 * id + index) as f64).collect();
                // One of the acts gives the first sample 0 and the others nothing, which are then asked for again.
                prop_assert!(rewards[1..] == expected[1..] && [0.0, expected[0]].contains(&rewards[0]), "{}: {:?}", id, rewards);
            }
        }
        if !dropped.is_empty() {
            let mut written: Vec<u64> = letters(folder.path()).iter().map(|letter| letter.prompt.ordinal).collect();
            for letter in letters(folder.path()) {
                prop_assert!(letter.failures.iter().all(|failure| failure.text.contains(&judge.url)), "{:?}", letter.failures);
            }
            written.sort_unstable();
            dropped.sort_unstable();
            prop_assert_eq!(written, dropped);
        }
    }
}
