//! Agents and environments in other processes: D1 and D3 (what was sampled through the proxy is kept exactly, and only it is trained), F6 (one that
//! hangs, breaks or talks nonsense costs its own rollout).

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpListener;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::speaker::Speaker;
use rollflow::data::chat::ChatTemplate;
use rollflow::env::{AgentProxy, ToolFormat, served_environment};
use rollflow::net::RetryPolicy;
use rollflow::prelude::*;
use rollflow::rollout::{Agent, roll_out, why_lost};
use serde_json::{Value, json};

const LETTERS: &str = "0123456789+-*/=() .,:;?!<>abcdefghijklmnopqrstuvwxyzABCD\n_";

fn prompt(ordinal: u64, text: &str, answer: &str) -> Prompt {
    let mut prompt = Prompt { ordinal, ..Prompt::from(text) };
    prompt.metadata.insert("answer".into(), answer.into());
    prompt
}

/// Groups of these prompts, answered by a model that says what the closure does.
fn groups(
    says: impl Fn(&str, u32) -> String + Send + Sync + 'static,
    agent: &Agent,
    prompts: Vec<Prompt>,
    size: usize,
) -> Vec<Group> {
    let tokenizer = Arc::new(Tokenizer::characters(LETTERS, 64).unwrap());
    let params = SamplingParams { max_new_tokens: 64, ..SamplingParams::default() };
    roll_out(&mut Speaker::new(&tokenizer, says), &tokenizer, Some(agent), prompts, size, &params).unwrap()
}

fn read(sample: &Sample) -> String {
    Tokenizer::characters(LETTERS, 64).unwrap().decode_all(&sample.tokens).unwrap()
}

/// What of it is trained.
fn trained(sample: &Sample) -> String {
    sample.validate().unwrap();
    let tokens = sample.tokens.iter().zip(&sample.loss_mask).filter(|(_, mask)| **mask > 0.0).map(|(token, _)| *token);
    Tokenizer::characters(LETTERS, 64).unwrap().decode_all(&tokens.collect::<Vec<_>>()).unwrap()
}

fn python(code: &str) -> AgentProxy {
    AgentProxy::command(["python3", "-c", code].map(str::to_owned).to_vec())
}

fn proxied(mut proxy: AgentProxy) -> Agent {
    proxy.parser = Arc::new(ToolFormat::Xml);
    Agent::remote(proxy.start().unwrap().1).limits(|of| of.step_timeout = 60.0)
}

/// What most agents of these tests begin with.
const ASK: &str = r#"
import json, os, sys, urllib.request, urllib.error
task = json.load(sys.stdin)
def post(path, body, timeout=None):
    asked = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + path, json.dumps(body).encode(), {"Content-Type": "application/json"})
    return json.load(urllib.request.urlopen(asked, timeout=timeout))
def ask(*said, **more):
    roles = ["user", "assistant"]
    messages = [{"role": roles[at % 2], "content": text} for at, text in enumerate(said)]
    return post("/chat/completions", {"model": "policy", "messages": messages}, **more)["choices"][0]["message"]["content"]
"#;

/// The part of the conversation after its last mark of a turn.
fn last_line(read: &str) -> &str {
    read.trim_end_matches("assistant: ").trim_end().lines().last().unwrap_or_default()
}

#[test]
fn d1_d3_an_agent_becomes_a_generator_by_its_base_url() {
    let agent = AgentProxy::command(
        ["python3", concat!(env!("CARGO_MANIFEST_DIR"), "/examples/proxied_agent.py")].map(str::to_owned).to_vec(),
    );
    let says = |read: &str, index: u32| match read.rsplit_once("tool: ") {
        None => "<calculator>3+4</calculator>".to_owned(),
        Some(_) => format!("that makes {}", 7 + index),
    };
    let groups = groups(says, &proxied(agent), vec![prompt(5, "3+4=", "7"), prompt(6, "3+4=", "7")], 2);
    assert_eq!(groups.len(), 2);
    for group in &groups {
        assert_eq!(group.samples.len(), 2, "every turn went on from the last: one sample a rollout");
        for (sample, says) in group.samples.iter().zip(["that makes 7", "that makes 8"]) {
            let turn = "<calculator>3+4</calculator><eos>";
            assert_eq!(read(sample), format!("user: 3+4=\nassistant: {turn}\ntool: 7\nassistant: {says}<eos>"));
            assert_eq!(trained(sample), format!("{turn}{says}<eos>"));
            for (mask, log_prob) in sample.loss_mask.iter().zip(&sample.log_probs) {
                assert_eq!(*log_prob, if *mask > 0.0 { -0.5 } else { 0.0 });
            }
            let right = says.ends_with('7');
            assert_eq!(sample.metadata["environment_reward"], json!(f64::from(u8::from(right))));
            assert_eq!((&sample.metadata["correct"], &sample.metadata["turns"]), (&json!(right), &json!(2)));
            assert_eq!(sample.metadata["agent"]["ended"], "by itself", "{:?}", sample.metadata);
        }
    }
}

#[test]
fn an_agent_reads_the_text_before_a_tool_call_and_may_leave_it_out_of_its_next_request() {
    let code = r#"
up = {"type": "function", "function": {"name": "up", "parameters": {"type": "object", "properties": {"of": {"type": "string"}}}}}
messages, seen = [{"role": "user", "content": "go"}], []
for more in ({}, {"content": None}, None):
    said = post("/chat/completions", {"messages": messages, "tools": [up]})["choices"][0]["message"]
    seen.append(said["content"])
    if more is not None:
        messages += [{**said, **more}, {"role": "tool", "tool_call_id": said["tool_calls"][0]["id"], "content": "A"}]
print(json.dumps({"metadata": {"seen": seen}}))
"#;
    let says =
        |read: &str, _: u32| if read.matches("tool: ").count() == 2 { "done".into() } else { "i look.\n<up>a</up>".into() };
    let group = groups(says, &proxied(python(&format!("{ASK}{code}"))), vec![prompt(0, "", "")], 1).remove(0);
    assert_eq!(group.samples.len(), 1, "each request continues the rollout");
    assert_eq!(group.samples[0].metadata["seen"], json!(["i look.", "i look.", "done"]), "{:?}", group.samples[0].metadata);
}

#[test]
fn r248_what_does_not_go_on_from_before_is_another_sample() {
    let code = r#"
first = ask("count")
second = ask("count", first, "go on")
other = ask("another matter")
changed = ask("another matter", other + " indeed", "go on")
text = post("/completions", {"prompt": "once upon"})["choices"][0]["text"]
again = ask("count")
models = json.load(urllib.request.urlopen(os.environ["OPENAI_BASE_URL"] + "/models"))["data"][0]["id"]
print(json.dumps({"reward": 0.5, "metadata": {"seen": [first, second, other, changed, text, again, models]}}))
"#;
    let says = |read: &str, _: u32| format!("{}", read.lines().count());
    let group = groups(says, &proxied(python(&format!("{ASK}{code}"))), vec![prompt(0, "unread", "")], 1).remove(0);
    let all: Vec<String> = group.samples.iter().map(read).collect();
    let expected = [
        "user: count\nassistant: 2<eos>\nuser: go on\nassistant: 4<eos>",
        "user: another matter\nassistant: 2<eos>",
        "user: another matter\nassistant: 2 indeed<eos>\nuser: go on\nassistant: 4<eos>",
        "once upon1<eos>",
        "user: count\nassistant: 2<eos>",
    ];
    assert_eq!(all, expected);
    assert_eq!(group.samples.iter().map(|sample| sample.part).collect::<Vec<_>>(), [0, 1, 2, 3, 4]);
    assert_eq!(trained(&group.samples[0]), "2<eos>4<eos>");
    let metadata = &group.samples[0].metadata;
    assert_eq!(metadata["seen"], json!(["2", "4", "2", "4", "1", "2", "policy"]));
    assert_eq!((&metadata["agent"]["forks"], &metadata["environment_reward"]), (&json!(4), &json!(0.5)));
}

/// What agents of these tests read streams with: the standard library's client, line by line as they come.
const STREAM: &str = r#"
import http.client, urllib.parse
BASE = urllib.parse.urlparse(os.environ["OPENAI_BASE_URL"])
def stream(path, body):
    connection = http.client.HTTPConnection(BASE.hostname, BASE.port, timeout=60)
    connection.request("POST", BASE.path + path, json.dumps({**body, "stream": True}), {"Content-Type": "application/json"})
    response = connection.getresponse()
    assert response.status == 200 and response.getheader("content-type").startswith("text/event-stream"), response.status
    for line in response:
        if line.strip() == b"data: [DONE]": return
        if line.strip(): yield json.loads(line[len(b"data: "):])
    raise ValueError("the stream broke off")
"#;

#[test]
fn a_stream_tells_every_token_as_it_is_sampled_and_what_was_used_at_its_end() {
    let code = r#"
asked = {"messages": [{"role": "user", "content": "count"}], "stream_options": {"include_usage": True}}
chunks = []
for chunk in stream("/chat/completions", asked):
    chunks.append(chunk)
    if chunk["choices"] and chunk["choices"][0]["delta"].get("content"): open(task["metadata"]["heard"], "w").close()
assert len({chunk["id"] for chunk in chunks}) == 1 and all(chunk["usage"] is None for chunk in chunks[:-1]), chunks
deltas = [chunk["choices"][0]["delta"] for chunk in chunks[:-1]]
assert deltas[0] == {"role": "assistant", "content": ""} and chunks[-1]["choices"] == [], chunks
said = "".join(delta.get("content", "") for delta in deltas)
finishes = [chunk["choices"][0]["finish_reason"] for chunk in chunks[:-1]]
text = [chunk["choices"][0] for chunk in stream("/completions", {"prompt": "once upon"})]
print(json.dumps({"metadata": {"said": said, "pieces": sum(bool(delta.get("content")) for delta in deltas), "usage": chunks[-1]["usage"],
      "ended": [at for at, finish in enumerate(finishes) if finish] == [len(finishes) - 1] and finishes[-1],
      "text": ["".join(choice["text"] for choice in text), text[-1]["finish_reason"]]}}))
"#;
    let folder = tempfile::tempdir().unwrap();
    let heard = folder.path().join("heard");
    let mut task = prompt(0, "unread", "");
    task.metadata.insert("heard".into(), heard.to_str().unwrap().into());
    let tokenizer = Arc::new(Tokenizer::characters(LETTERS, 64).unwrap());
    // After a few letters it goes on once the agent has read some of them.
    let wait = move |steps: usize| {
        let until = Instant::now() + Duration::from_secs(60);
        while steps == 5 && !heard.exists() {
            assert!(Instant::now() < until, "nothing was told while the turn went on");
            std::thread::sleep(Duration::from_millis(5));
        }
    };
    let mut engine =
        Speaker::new(&tokenizer, |read, _| if read.contains("upon") { " a time".into() } else { "one two three".into() });
    engine = engine.before_step(wait);
    let params = SamplingParams { max_new_tokens: 64, ..SamplingParams::default() };
    let agent = proxied(python(&format!("{ASK}{STREAM}{code}")));
    let group = roll_out(&mut engine, &tokenizer, Some(&agent), vec![task], 1, &params).unwrap().remove(0);
    let metadata = &group.samples[0].metadata;
    assert_eq!((&metadata["said"], &metadata["ended"]), (&json!("one two three"), &json!("stop")), "{metadata:?}");
    assert!(metadata["pieces"].as_u64().unwrap() >= 2, "{metadata:?}");
    let (read, sampled) = ("user: count\nassistant: ".len(), "one two three".len() + 1);
    let usage = json!({"prompt_tokens": read, "completion_tokens": sampled, "total_tokens": read + sampled});
    assert_eq!((&metadata["usage"], &metadata["text"]), (&usage, &json!([" a time", "stop"])));
}

#[test]
fn a_turn_that_its_length_cuts_off_is_given_as_such_and_ends_the_rollout() {
    let code = r#"
body = {"messages": [{"role": "user", "content": "go on"}]}
page = post("/chat/completions", body)
choice = page["choices"][0]
try: post("/chat/completions", {"messages": body["messages"] + [choice["message"], {"role": "user", "content": "and?"}]})
except urllib.error.HTTPError as error: over = error.code
print(json.dumps({"reward": 0.5, "metadata": {"finish": choice["finish_reason"], "letters": len(choice["message"]["content"]),
      "usage": page["usage"]["completion_tokens"], "over": over}}))
"#;
    let says = |_: &str, _: u32| "on and ".repeat(20);
    let group = groups(says, &proxied(python(&format!("{ASK}{code}"))), vec![prompt(0, "", "")], 1).remove(0);
    let (sample, metadata) = (&group.samples[0], &group.samples[0].metadata);
    assert_eq!((sample.status, &metadata["stop_reason"]), (Status::Truncated, &json!("max_tokens")));
    let told = ["finish", "letters", "usage", "over", "environment_reward"].map(|key| metadata[key].clone());
    assert_eq!(told, [json!("length"), json!(64), json!(64), json!(410), json!(0.5)], "{metadata:?}");
    assert_eq!(trained(sample), "on and ".repeat(20)[..64], "what was sampled is trained");
}

#[test]
fn f6_an_agent_that_hangs_fails_or_asks_for_nothing_costs_its_own_rollout() {
    let mark = format!("mark-{}", std::process::id());
    let code = format!(
        r#"{ASK}
import subprocess, time
text = task["prompt"]
if text == "hang": time.sleep(600) if "{mark}" else None
if text == "fail": raise ValueError("no such luck")
if text == "hang later":
    ask("well"); time.sleep(600)
if text == "wrong":
    for body in [b"no json", b"{{}}", b'{{"messages": []}}', b'{{"messages": [{{"role": "user", "content": "x"}}], "n": 3}}']:
        try: urllib.request.urlopen(urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body))
        except urllib.error.HTTPError as error: assert error.code == 400, error.code
        else: raise ValueError(body)
    try: urllib.request.urlopen(os.environ["OPENAI_BASE_URL"].replace("/r/", "/r/x") + "/chat/completions", b"{{\"messages\": [{{\"role\": \"user\", \"content\": \"x\"}}]}}")
    except urllib.error.HTTPError as error: assert error.code == 410, error.code
    ask("all were refused")
if text == "well":
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)", "{mark}"])
    print(json.dumps({{"reward": float(ask("well"))}}))
if text == "empty": post("/completions", {{"prompt": ""}})
if text == "untold":
    for path, body in [("/completions", {{"prompt": "x"}}), ("/chat/completions", {{"messages": [{{"role": "user", "content": "x"}}]}})]:
        said = post(path, body)["choices"][0]
        said = said.get("message") or said
        assert (said.get("text") or said["content"]) == "so <up>a</up>" and "tool_calls" not in said, said
    print(json.dumps({{"reward": 1.0}}))
if text == "endless":
    said = ["well"]
    while True: said += [ask(*said), "well"]
"#
    );
    let names = ["hang", "fail", "hang later", "nothing", "wrong", "well", "endless", "empty", "untold"];
    let prompts = names.iter().enumerate().map(|(at, name)| prompt(at as u64, name, "")).collect();
    let agent = proxied(python(&code)).limits(|of| (of.step_timeout, of.max_turns, of.replays) = (5.0, 3, 0));
    let says = |read: &str, _: u32| if read.contains('x') { "so <up>a</up>" } else { "1" }.to_owned();
    let groups = groups(says, &agent, prompts, 1);
    let ended: Vec<(&str, &str)> = groups
        .iter()
        .zip(names)
        .map(|(group, name)| (name, group.samples[0].metadata["stop_reason"].as_str().unwrap()))
        .collect();
    let failed = "environment_failed";
    let done = "environment_done";
    let expected = [failed, failed, "step_timeout", failed, done, done, "max_turns", "engine_failed", done];
    assert_eq!(ended, names.into_iter().zip(expected).collect::<Vec<_>>());
    let why = |at: usize| groups[at].samples[0].metadata["environment_failure"].as_str().unwrap_or_default().to_owned();
    assert!(why(1).contains("no such luck"), "{}", why(1));
    assert!(why(3).contains("without asking"), "{}", why(3));
    assert_eq!(groups[5].samples[0].metadata["environment_reward"], 1.0);
    assert_eq!(groups[8].samples[0].metadata["environment_reward"], 1.0, "without tools there are no calls");
    // Agents that hung are gone with their rollouts, and so is a process that one left running.
    let lives = Command::new("pgrep").args(["-f", &mark]).output().unwrap();
    assert_eq!(String::from_utf8_lossy(&lives.stdout), "");
}

#[test]
fn f6_an_agent_whose_messages_the_template_rejects_loses_its_own_rollout() {
    let code = r#"
first = ask("well")
twice = [{"role": "user", "content": text} for text in ("one", "two")]
if task["prompt"] == "twice": post("/chat/completions", {"messages": twice})
print(json.dumps({"reward": float(first)}))
"#;
    let source = "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must \
                  alternate') }}{% endif %}{{ m.role }}: {{ m.content }}{{ '\\n' }}{% endfor %}assistant: ";
    let template = ChatTemplate::new(source).unwrap();
    let tokenizer = Arc::new(Tokenizer::characters(LETTERS, 64).unwrap().with_chat(template));
    let (agent, params) = (proxied(python(&format!("{ASK}{code}"))), SamplingParams::default());
    let prompts = vec![prompt(0, "twice", ""), prompt(1, "well", "")];
    let mut engine = Speaker::new(&tokenizer, |_, _| "1".to_owned());
    let groups = roll_out(&mut engine, &tokenizer, Some(&agent), prompts, 1, &params).unwrap();
    let [lost, well] = [0, 1].map(|at| &groups[at].samples[0]);
    assert_eq!(lost.metadata["stop_reason"], "environment_failed");
    assert!(why_lost(lost).unwrap().contains("roles must alternate"), "{:?}", lost.metadata);
    assert_eq!((trained(lost).as_str(), &well.metadata["environment_reward"]), ("1<eos>", &json!(1.0)));
}

#[test]
fn an_answer_that_got_lost_is_given_again_and_not_sampled_twice() {
    let code = r#"
try: ask("slowly", timeout=0.2)
except Exception: pass
print(json.dumps({"reward": float(ask("slowly") == "1")}))
"#;
    let says = |_: &str, _: u32| {
        std::thread::sleep(Duration::from_secs(1));
        "1".to_owned()
    };
    let group = groups(says, &proxied(python(&format!("{ASK}{code}"))), vec![prompt(0, "", "")], 1).remove(0);
    assert_eq!(group.samples.len(), 1);
    let metadata = &group.samples[0].metadata;
    assert_eq!((&metadata["turns"], &metadata["environment_reward"]), (&json!(1), &json!(1.0)));
}

/// A process that prints its address first.
struct Serving(Child, String);

impl Serving {
    fn python(arguments: &[&str]) -> Self {
        let mut child = Command::new("python3").args(arguments).stdout(Stdio::piped()).spawn().unwrap();
        let mut address = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut address).unwrap();
        Serving(child, address.trim().to_owned())
    }
}

impl Drop for Serving {
    fn drop(&mut self) {
        self.0.kill().unwrap();
        self.0.wait().unwrap();
    }
}

#[test]
fn an_agent_that_listens_is_given_its_task_and_the_base_url() {
    let code = r#"
import json, urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
class Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        task = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        body = json.dumps({"messages": [{"role": "user", "content": task["prompt"]}]}).encode()
        page = json.load(urllib.request.urlopen(urllib.request.Request(task["base_url"] + "/chat/completions", body)))
        right = page["choices"][0]["message"]["content"] == task["metadata"]["answer"]
        page = json.dumps({"reward": 1.0 if right else 0.0}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(page)))
        self.end_headers()
        self.wfile.write(page)
    def log_message(self, *_): pass
server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
print(f"http://127.0.0.1:{server.server_port}", flush=True)
server.serve_forever()
"#;
    let server = Serving::python(&["-c", code]);
    let agent = proxied(AgentProxy::post(format!("{}/run", server.1)).unwrap());
    let says = |read: &str, _: u32| if last_line(read).contains("two") { "2".to_owned() } else { "0".to_owned() };
    let groups = groups(says, &agent, vec![prompt(0, "two", "2"), prompt(1, "three", "3")], 4);
    let rewards: Vec<Vec<Value>> = groups
        .iter()
        .map(|group| group.samples.iter().map(|sample| sample.metadata["environment_reward"].clone()).collect())
        .collect();
    assert_eq!(rewards, [vec![json!(1.0); 4], vec![json!(0.0); 4]]);
}

#[test]
fn the_environment_server_of_the_documentation_is_played_with() {
    let server = Serving::python(&[concat!(env!("CARGO_MANIFEST_DIR"), "/examples/environment_server.py")]);
    let make = served_environment(&*server.1, RetryPolicy::default(), 64).unwrap();
    let agent = Agent::by(make).parser(ToolFormat::Xml).limits(|of| (of.max_turns, of.step_timeout) = (12, 60.0));
    // From 1 upwards until it is found.
    let says = |read: &str, _: u32| format!("<compare>{}</compare>", read.matches("tool: ").count() + 1);
    let groups = groups(says, &agent, vec![prompt(3, "guess", ""), prompt(4, "guess", "")], 3);
    for group in &groups {
        let metadata: Vec<_> = group.samples.iter().map(|sample| &sample.metadata).collect();
        assert!(metadata.iter().all(|each| each["turns"] == metadata[0]["turns"]), "the seed is the prompt's: {metadata:?}");
        let turns = metadata[0]["turns"].as_f64().unwrap();
        assert!((1.0..=9.0).contains(&turns));
        assert_eq!((&metadata[0]["environment_reward"], &metadata[0]["correct"]), (&json!(1.0 / turns), &json!(true)));
        assert!(read(&group.samples[0]).matches("tool: higher").count() as f64 == turns - 1.0);
    }
}

/// Answers each connection with the next of these, then with the last for ever.
fn scripted(pages: Vec<String>) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    std::thread::spawn(move || {
        let mut held = Vec::new();
        for (at, stream) in listener.incoming().enumerate() {
            let mut stream = stream.unwrap();
            let mut heard = Vec::new();
            let mut byte = [0];
            while !heard.ends_with(b"\r\n\r\n") && stream.read(&mut byte).is_ok_and(|read| read == 1) {
                heard.push(byte[0]);
            }
            let page = pages.get(at).or(pages.last()).unwrap();
            stream.write_all(page.as_bytes()).unwrap();
            if page.is_empty() {
                held.push(stream);
            }
        }
    });
    url
}

fn page(status: &str, body: &str) -> String {
    format!("HTTP/1.1 {status}\r\ncontent-length: {}\r\nconnection: close\r\n\r\n{body}", body.len())
}

#[test]
fn f6_a_server_that_is_busy_breaks_or_talks_nonsense_is_asked_again_within_the_deadline() {
    let good = page(
        "200 OK",
        r#"{"messages": [{"role": "user", "content": "go"}], "done": true, "reward": 0.25, "metadata": {"map": 3}}"#,
    );
    let bad = [
        page("503 Service Unavailable", ""),
        page("429 Too Many Requests", ""),
        "HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\n{\"mess".to_owned(),
        page("200 OK", "<html>"),
    ];
    let ask = |pages: Vec<String>, timeout: u64| {
        let retry = RetryPolicy { busy_timeout: Duration::MAX, pause: Duration::from_millis(10), ..RetryPolicy::default() };
        let agent =
            Agent::by(served_environment(scripted(pages), retry, 64).unwrap()).limits(|of| of.step_timeout = timeout as f64);
        groups(|_, _| "on".to_owned(), &agent, vec![prompt(0, "x", "")], 1).remove(0).samples.remove(0).metadata
    };
    // Being busy is no failure: two retries are left for what is.
    let came = ask(bad.iter().cloned().chain([good.clone()]).collect(), 60);
    assert_eq!((&came["environment_reward"], &came["map"]), (&json!(0.5), &json!(3)), "{came:?}");
    for (pages, timeout, why) in [
        (vec![page("200 OK", "<html>")], 60, "a page for browsers"),
        (vec![page("200 OK", "[1]")], 60, "object"),
        (vec![page("200 OK", r#"{"error": "no map"}"#)], 60, "no map"),
        (vec![page("400 Bad Request", "what?")], 60, "what?"),
        (vec![page("503 Service Unavailable", "")], 1, "503"),
        (vec![String::new()], 1, "no answer"),
    ] {
        let came = ask(pages, timeout);
        let said = came["environment_failure"].as_str().unwrap_or_default();
        assert!(said.contains(why) || said.contains("longer than"), "{why}: {came:?}");
    }
    assert!(served_environment("ftp://x", RetryPolicy::default(), 64).is_err());
}

#[test]
fn calls_without_their_form_are_refused() {
    let (address, _listening) = python("").start().unwrap();
    for calls in [r#"["x"]"#, r#"[{"function": "look"}]"#, r#"{"function": {}}"#] {
        let body = format!(r#"{{"messages": [{{"role": "assistant", "content": "", "tool_calls": {calls}}}]}}"#);
        let mut stream = std::net::TcpStream::connect(address).unwrap();
        let head = format!("POST /r/none/v1/chat/completions HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\n");
        write!(stream, "{head}Content-Length: {}\r\n\r\n{body}", body.len()).unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        assert!(answer.starts_with("HTTP/1.1 400 ") && answer.contains("tool_calls"), "{calls}: {answer}");
    }
}

/// No web page can talk to the model by a name of its own that points here (DNS rebinding).
#[test]
fn the_proxy_answers_to_known_hosts_only() {
    let mut proxy = python("");
    proxy.allowed_hosts = vec!["trainer.lan".to_owned()];
    let (address, _listening) = proxy.start().unwrap();
    let status = |host: &str| {
        let mut stream = std::net::TcpStream::connect(address).unwrap();
        write!(stream, "GET /v1/models HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n").unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        answer.split(' ').nth(1).unwrap().to_owned()
    };
    for (host, expected) in [
        (address.to_string(), "200"),
        ("localhost".to_owned(), "200"),
        ("trainer.lan:80".to_owned(), "200"),
        ("evil.example".to_owned(), "403"),
    ] {
        assert_eq!(status(&host), expected, "{host}");
    }
}
