//! Rewards behind a URL, by the very server that docs/reference/protocols.md shows, run by `python3`.

use std::fs;
use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};

use rollflow::observe::logs::{DEAD_LETTERS, Rollout};

use crate::running::{Ended, GRPO, read, rollflow, rollflow_with, rollouts, rows, run_args};

/// As a language model behind a chat completions URL grades: in words, for whoever has the key.
const GRADER: &str = r##"
import json, re, sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        question = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        allowed = self.headers["Authorization"] == "Bearer a-secret" and question["model"] == "grader"
        asked = re.fullmatch(r"Is <(.*)> right\? It is <(.*)>\.", question["messages"][0]["content"], re.DOTALL)
        grade = 10 if asked and asked[1].strip() == asked[2] else 2
        said = f"At first I thought score: 5, but no.\n**Score: {grade}**"
        body = json.dumps({"choices": [{"message": {"role": "assistant", "content": said}}]}).encode()
        self.send_response(200 if allowed else 401)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args):
        pass


server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
print(f"http://127.0.0.1:{server.server_port}/v1/chat/completions", flush=True)
server.serve_forever()
"##;

/// A server that ends with the test.
struct Server {
    child: Child,
    url: String,
}

impl Server {
    fn start(program: &str) -> Self {
        let mut child = Command::new("python3").args(["-c", program, "0"]).stdout(Stdio::piped()).spawn().unwrap();
        let mut url = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut url).unwrap();
        assert!(url.starts_with("http://127.0.0.1:"), "the server did not start: {url:?}");
        Server { child, url: url.trim().to_owned() }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

/// The server of the documentation, for those who know the token.
pub struct Guarded(Server);

impl Guarded {
    pub fn start(token: &str) -> Self {
        let guard = format!(
            "def do_POST(self):\n        if self.headers['Authorization'] != 'Bearer {token}':\n            return self.send_error(401)\n"
        );
        let (head, body) = shown().split_once("def do_POST(self):\n").map(|(a, b)| (a.to_owned(), b.to_owned())).unwrap();
        Guarded(Server::start(&format!("{head}{guard}{body}")))
    }

    pub fn url(&self) -> &str {
        &self.0.url
    }
}

/// The page's only Python.
fn shown() -> String {
    let page = fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/reference/protocols.md")).unwrap();
    let (_, code) = page.split_once("```python\n").unwrap();
    code.split_once("```").unwrap().0.to_owned()
}

fn run(out: &std::path::Path, reward: &str) -> Ended {
    rollflow(&run_args(GRPO, out, &[reward, "observe.rollouts_every=1"]))
}

#[test]
fn the_server_of_the_documentation_scores_a_run() {
    let server = Server::start(&shown());
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("run");
    run(&out, &format!("reward={{kind=\"http\",url={:?},concurrency=3}}", server.url)).ok();
    let rollouts = rollouts(&out);
    assert_eq!(rollouts.len(), 3 * 4 * 4, "three steps of four groups of four");
    for rollout in &rollouts {
        let right = Some(rollout.response.trim()) == rollout.metadata["answer"].as_str();
        let ended = rollout.status == rollflow::data::Status::Completed;
        assert_eq!(rollout.reward, Some(f64::from(right && ended)), "{rollout:?}");
    }
    assert!(!out.join(DEAD_LETTERS).exists());
}

#[test]
fn a_part_that_is_served_is_logged_beside_one_that_is_computed() {
    let server = Server::start(&shown().replace("return 1.0 if right", "return 0.5 if True or right"));
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("run");
    let parts = format!(
        "reward={{kind=\"parts\",part=[{{name=\"served\",kind=\"http\",url={:?}}},{{name=\"short\",kind=\"length\",max=9}}]}}",
        server.url
    );
    run(&out, &parts).ok();
    let row = &rows(&out)[0];
    let means = [row["reward_part_served"].as_f64(), row["reward_part_short"].as_f64()];
    assert_eq!(row["reward_mean"].as_f64(), means[0].zip(means[1]).map(|(served, short)| served + short), "{row}");
    assert_eq!(means[1], Some(1.0));
}

#[test]
fn a_service_that_is_gone_ends_the_run_with_its_address_and_its_letters_earn_once_it_is_back() {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("run");
    let gone = "127.0.0.1:1";
    let reward = format!("reward={{kind=\"http\",url=\"http://{gone}/\",retries=1,pause=0.001,max_poisoned=3}}");
    let ended = run(&out, &reward);
    assert_eq!(ended.code, Some(1));
    for part in [&format!("reward service http://{gone}: cannot connect"), "4 groups in a row", "check that the server runs"] {
        assert!(ended.err.contains(part), "{part} is missing: {}", ended.err);
    }
    let server = Server::start(&shown());
    let set = format!("reward.url={:?}", server.url);
    let replayed = rollflow(&["replay", out.to_str().unwrap(), "--set", &set]);
    assert_eq!(replayed.code, Some(0), "{}{}", replayed.out, replayed.err);
}

#[test]
fn r190_a_judge_grades_what_it_has_not_graded_before_and_its_key_is_written_nowhere() {
    let server = Server::start(GRADER);
    let folder = tempfile::tempdir().unwrap();
    let cache = folder.path().join("judged.jsonl");
    let reward = format!(
        "reward={{kind=\"judge\",url={:?},model=\"grader\",prompt=\"Is <{{response}}> right? It is <{{answer}}>.\",token_env=\"JUDGE_KEY\",cache={:?}}}",
        server.url,
        cache.to_str().unwrap()
    );
    let graded = |name: &str, key: &str| {
        let out = folder.path().join(name);
        let sets = [&reward[..], "observe.rollouts_every=1"];
        rollflow_with(&run_args(GRPO, &out, &sets), &[("JUDGE_KEY", key)]).ok();
        out
    };
    let out = graded("first", "a-secret");
    let rollouts = rollouts(&out);
    assert_eq!(rollouts.len(), 3 * 4 * 4);
    for rollout in &rollouts {
        let right = Some(rollout.response.trim()) == rollout.metadata["answer"].as_str();
        assert_eq!(rollout.reward, Some(if right { 1.0 } else { 0.2 }), "{rollout:?}");
    }
    for file in fs::read_dir(&out).unwrap().map(|entry| entry.unwrap().path()).filter(|path| path.is_file()) {
        assert!(!String::from_utf8_lossy(&fs::read(&file).unwrap()).contains("a-secret"), "{}", file.display());
    }
    // Nobody is there any more, and nobody needs to be asked.
    drop(server);
    let out = graded("second", "a-secret");
    assert!(!out.join(DEAD_LETTERS).exists());
    // With another key, nothing would be graded.
    fs::remove_file(&cache).unwrap();
    let server = Server::start(GRADER);
    let reward =
        format!("reward={{kind=\"judge\",url={:?},model=\"grader\",token_env=\"JUDGE_KEY\",max_poisoned=1}}", server.url);
    let out = folder.path().join("third");
    let ended = rollflow_with(&run_args(GRPO, &out, &[&reward]), &[("JUDGE_KEY", "wrong")]);
    assert_eq!(ended.code, Some(1));
    assert!(ended.err.contains("status 401") && ended.err.contains("check the token"), "{}", ended.err);
    let out = folder.path().join("fourth");
    let ended = rollflow(&run_args(GRPO, &out, &[&reward]));
    assert!(ended.err.contains("the environment has no JUDGE_KEY"), "{}", ended.err);
}

/// Likes the shortest of the answers that it is shown, and says so at the end.
const COMPARER: &str = r##"
        asked = question["messages"][0]["content"].removeprefix("Which of these is short?\n")
        answers = re.split(r"(?:^|\n\n)\[Response \d+\]\n", asked)[1:]
        shortest = min(map(len, answers))
        said = "Score: 5 is not what I mean.\n" + "\n".join(f"Score: {10 if len(answer) == shortest else 0}" for answer in answers)
"##;

#[test]
fn r190_a_judge_that_sees_all_answers_of_a_group_compares_them_in_one_question() {
    let (before, after) = GRADER.split_once("        allowed = ").unwrap();
    let (_, after) = after.split_once("        body = ").unwrap();
    let server = Server::start(&format!("{before}{COMPARER}        allowed = True\n        body = {after}"));
    let folder = tempfile::tempdir().unwrap();
    let (out, cache) = (folder.path().join("run"), folder.path().join("judged.jsonl"));
    let reward = format!(
        "reward={{kind=\"judge\",url={:?},model=\"comparer\",prompt=\"Which of these is short?\\n{{responses}}\",cache={:?}}}",
        server.url,
        cache.to_str().unwrap()
    );
    run(&out, &reward).ok();
    assert!(!out.join(DEAD_LETTERS).exists());
    let rollouts = rollouts(&out);
    assert_eq!(rollouts.len(), 3 * 4 * 4);
    for group in rollouts.chunk_by(|one, next| one.group == next.group) {
        let length = |rollout: &Rollout| rollout.response.chars().count();
        let shortest = group.iter().map(length).min();
        let expected: Vec<_> = group.iter().map(|rollout| Some(f64::from(Some(length(rollout)) == shortest))).collect();
        assert_eq!(group.iter().map(|rollout| rollout.reward).collect::<Vec<_>>(), expected, "{group:?}");
    }
    assert_eq!(read(&cache).lines().count(), 3 * 4, "a question for each group");
}
