//! The live page: `--page` on a run, and `rollflow dashboard`. It ends with its owner (law F3), shows time by state (F4)
//! and the fill of edges (F1), and texts of models stay data.

use std::collections::BTreeMap;
use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::Path;
use std::time::{Duration, Instant};

use rollflow::flow::State;
use serde_json::{Value, json};

use crate::running::{GRPO, Running, TINY, finished, rollflow, rollflow_with, run_args};
use crate::support::http::{get, get_as};

const STAGES: [&str; 8] = ["prompts", "generate", "reward", "filter", "batch", "train", "sync", "log"];

/// The address that the command prints.
pub fn address(running: &mut Running) -> SocketAddr {
    running.line(|line| Some(line.strip_prefix("page: http://")?.strip_suffix('/')?.parse().unwrap()))
}

/// The answer at `path` of a page.
pub fn json(address: SocketAddr, path: &str) -> Value {
    let answer = get(address, path);
    assert_eq!((answer.status, answer.content_type.as_str()), (200, "application/json"), "{path}: {}", answer.body);
    serde_json::from_str(&answer.body).unwrap()
}

/// Events of a stream, by name, until it ends, or for a minute. Its signs of life come even if events do not.
fn events(address: SocketAddr, path: &str, token: &str) -> impl Iterator<Item = (String, Value)> {
    let mut stream = TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    write!(stream, "GET {path} HTTP/1.1\r\nHost: {address}\r\nAuthorization: Bearer {token}\r\n\r\n").unwrap();
    let (mut name, until) = (String::new(), Instant::now() + Duration::from_secs(60));
    let lines = BufReader::new(stream).lines().map_while(Result::ok).take_while(move |_| Instant::now() < until);
    lines.filter_map(move |line| {
        if let Some(event) = line.strip_prefix("event: ") {
            name = event.to_owned();
        }
        Some((name.clone(), serde_json::from_str(line.strip_prefix("data: ")?).unwrap()))
    })
}

fn names(of: &Value) -> Vec<&str> {
    of.as_array().unwrap().iter().map(|one| one["name"].as_str().unwrap()).collect()
}

fn dashboard(folder: &Path) -> (Running, SocketAddr) {
    let mut running = Running::start(&["dashboard", folder.to_str().unwrap(), "--listen", "127.0.0.1:0"]);
    let address = address(&mut running);
    (running, address)
}

#[test]
fn a_run_serves_its_page_and_its_graph_in_motion_until_it_ends() {
    let folder = tempfile::tempdir().unwrap();
    let run = folder.path().join("mine");
    let sets = ["train.steps=1000000", "train.target_reward=9", "flow.max_staleness=1", "observe.rollouts_every=1"];
    let mut running = Running::start(&[run_args(GRPO, &run, &sets), vec!["--page", "127.0.0.1:0"]].concat());
    let address = address(&mut running);
    let page = get(address, "/");
    assert!(page.status == 200 && page.content_type.starts_with("text/html") && page.body.contains("<title>"));

    let metrics = run.join("metrics.jsonl");
    running.until("it trained", |_| fs::read_to_string(&metrics).is_ok_and(|rows| rows.lines().count() >= 3));
    let listed = json(address, "/api/runs");
    let row = listed.as_array().unwrap().iter().find(|row| row["name"] == "mine").unwrap();
    assert_eq!(
        (row["state"].as_str(), row["live"].as_bool(), row["planned"].as_u64()),
        (Some("running"), Some(true), Some(1_000_000))
    );
    assert!(row["step"].as_u64() >= Some(3) && row["last"].is_number() && !row["curve"].as_array().unwrap().is_empty(), "{row}");

    let report = json(address, "/api/runs/mine");
    assert_eq!(names(&report["graph"]["nodes"]), STAGES);
    assert_eq!(names(&report["stages"]), STAGES);
    assert!(report["curves"]["reward_mean"]["points"].is_array() && report["samples"].as_array().unwrap().is_empty());
    assert!(json(address, "/api/runs/mine/samples")["total"].as_u64() > Some(0));

    let (mut live, mut changed) = (Vec::new(), Vec::new());
    let mut stream = events(address, "/api/runs/mine/events", "");
    while live.len() < 3 || changed.is_empty() {
        match stream.next().expect("the stream lasts as long as the run") {
            (name, event) if name == "live" => live.push(event),
            (name, event) => {
                assert_eq!(name, "changed");
                changed.push(event);
            }
        }
    }
    assert!(changed[0]["files"].as_array().unwrap().contains(&"metrics.jsonl".into()), "{changed:?}");
    let last = &live[live.len() - 1];
    assert_eq!(names(&last["flow"]["stages"]), STAGES);
    for stage in last["flow"]["stages"].as_array().unwrap() {
        let shares = State::ALL.map(|state| stage[state.name()].as_f64().unwrap());
        assert!((shares.iter().sum::<f64>() - 1.0).abs() < 1e-9, "law F4: {stage}");
    }
    let edges = last["flow"]["edges"].as_array().unwrap();
    let ends: Vec<_> = edges.iter().map(|edge| (edge["from"].as_str().unwrap(), edge["to"].as_str().unwrap())).collect();
    assert_eq!(ends, STAGES.windows(2).map(|pair| (pair[0], pair[1])).collect::<Vec<_>>());
    assert!(edges.iter().all(|edge| edge["items"].as_u64() <= edge["capacity"]["items"].as_u64()), "law F1: {edges:?}");
    assert!(edges.iter().any(|edge| edge["tokens_per_second"].as_f64() > Some(0.0)), "{edges:?}");
    assert!(last["versions"]["trainer"].as_f64() >= Some(1.0) && last["tokens"]["generated"].as_f64() > Some(0.0), "{last}");

    running.interrupt();
    assert_eq!(running.end(), Some(0));
    assert!(stream.all(|(name, _)| name == "live" || name == "changed"), "it ends with the run");
    TcpListener::bind(address).unwrap();
}

#[test]
fn a_dashboard_lists_the_runs_of_its_folder_and_compares_them() {
    let folder = tempfile::tempdir().unwrap();
    finished(&folder.path().join("one"), &[]);
    finished(&folder.path().join("deeper/other"), &["seed=3"]);
    fs::create_dir(folder.path().join("damaged")).unwrap();
    ["recipe.toml", "run.json"].iter().for_each(|name| fs::write(folder.path().join("damaged").join(name), "{").unwrap());
    let (running, address) = dashboard(folder.path());
    let listed = json(address, "/api/runs");
    let mut found = names(&listed);
    found.sort_unstable();
    assert_eq!(found, ["damaged", "deeper/other", "one"]);
    for row in listed.as_array().unwrap() {
        let state = if row["name"] == "damaged" { "unreadable" } else { "finished" };
        assert!(row["state"] == state && row["live"] == false, "{row}");
    }
    let mut report = json(address, "/api/runs/deeper%2Fother");
    let page = fs::read_to_string(folder.path().join("deeper/other/report.html")).unwrap();
    let (_, rest) = page.split_once("type=\"application/json\">").unwrap();
    let embedded: Value = serde_json::from_str(rest.split_once("</script>").unwrap().0).unwrap();
    report["samples"] = embedded["samples"].clone();
    assert_eq!(report, embedded, "what report.html has");
    assert_eq!(json(address, "/api/differences?run=one&run=deeper%2Fother"), serde_json::json!({"seed": ["0", "3"]}));
    running.interrupt();
    assert_eq!(running.end(), Some(0));
    TcpListener::bind(address).unwrap();
}

#[test]
fn only_listed_names_are_runs_and_only_known_hosts_are_answered() {
    let folder = tempfile::tempdir().unwrap();
    finished(&folder.path().join("runs/one"), &[]);
    fs::write(folder.path().join("secret"), "s").unwrap();
    let (_running, address) = dashboard(&folder.path().join("runs"));
    for name in ["two", "..", "..%2Fsecret", "one%2F..%2Fone", "%2Fetc", "one%2Fcheckpoints", "."] {
        for route in ["", "/samples", "/samples/1-0-0", "/samples/1-0-0/tokens", "/events"] {
            assert_eq!(get(address, &format!("/api/runs/{name}{route}")).status, 404, "{name}{route}");
        }
    }
    assert_eq!(get(address, "/api/differences?run=one&run=two").status, 404);
    for path in ["/", "/api/runs", "/api/runs/one"] {
        assert_eq!(get_as(address, path, "evil.example").status, 403, "{path}");
        assert_eq!(get_as(address, path, "localhost").status, 200, "{path}");
    }
}

#[test]
fn texts_of_models_stay_data_and_the_page_may_load_nothing_from_elsewhere() {
    let folder = tempfile::tempdir().unwrap();
    let run = folder.path().join("<img src=x>");
    finished(&run, &["observe.rollouts_every=1"]);
    let rollouts = run.join("rollouts.jsonl");
    let hostile = "</script><img src=x onerror=alert(1)>";
    let mut row: Value = serde_json::from_str(fs::read_to_string(&rollouts).unwrap().lines().next().unwrap()).unwrap();
    row["response"] = hostile.into();
    fs::write(&rollouts, format!("{row}\n")).unwrap();
    let (_running, address) = dashboard(folder.path());
    assert_eq!(json(address, "/api/runs/%3Cimg%20src=x%3E/samples")["rows"][0]["response"], hostile);
    let mut stream = TcpStream::connect(address).unwrap();
    write!(stream, "GET / HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\n\r\n").unwrap();
    let answer = std::io::read_to_string(stream).unwrap();
    let (head, page) = answer.split_once("\r\n\r\n").unwrap();
    let policy = head.lines().find_map(|line| line.strip_prefix("content-security-policy: ")).unwrap();
    assert!(policy.starts_with("default-src 'none'; script-src 'sha256-") && !policy.contains("unsafe"), "{policy}");
    assert!(head.contains("x-content-type-options: nosniff"));
    assert!(
        !page.contains("<img src=x>") && !page.replace("http://www.w3.org/2000/svg", "").contains("http"),
        "no data, no addresses"
    );
}

#[test]
fn an_address_that_others_can_reach_needs_a_token_which_data_then_asks_for() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().to_str().unwrap();
    finished(&folder.path().join("one"), &[]);
    let refused = rollflow(&["dashboard", path, "--listen", "0.0.0.0:0"]);
    assert_eq!(refused.code, Some(2), "{}", refused.err);
    assert!(refused.err.contains("0.0.0.0:0") && refused.err.contains("--token-file"), "{}", refused.err);
    let run = folder.path().join("run");
    let refused = rollflow(&[run_args(GRPO, &run, &[]), vec!["--page", "0.0.0.0:0"]].concat());
    assert_eq!(refused.code, Some(2), "{}", refused.err);
    assert!(refused.err.contains("observe.page_token_env") && !run.exists(), "{}", refused.err);
    let sets = ["observe.page_token_env=\"PAGE_TOKEN\""];
    let named = [run_args(GRPO, &run, &sets), vec!["--page", "0.0.0.0:0"]].concat();
    let unset = rollflow_with(&named, &[]);
    assert!(unset.code == Some(1) && unset.err.contains("PAGE_TOKEN") && !run.exists(), "{}", unset.err);

    let token = folder.path().join("token.txt");
    fs::write(&token, "one-secret\n").unwrap();
    let args = ["dashboard", path, "--listen", "0.0.0.0:0", "--token-file", token.to_str().unwrap()];
    let mut running = Running::start(&args);
    let address = SocketAddr::from(([127, 0, 0, 1], address(&mut running).port()));
    assert_eq!(get(address, "/").status, 200, "the page itself holds no data");
    for path in ["/api/runs", "/api/runs/one", "/api/runs/one/samples", "/api/runs/one/events", "/api/differences"] {
        assert_eq!(get(address, path).status, 401, "{path}");
    }
    let mut stream = TcpStream::connect(address).unwrap();
    write!(stream, "GET /api/runs HTTP/1.1\r\nHost: {address}\r\nAuthorization: Bearer one-secret\r\nConnection: close\r\n\r\n")
        .unwrap();
    assert!(std::io::read_to_string(stream).unwrap().starts_with("HTTP/1.1 200 "));
}

#[test]
fn a_busy_address_is_named_and_leaves_the_folder_free() {
    let folder = tempfile::tempdir().unwrap();
    let run = folder.path().join("run");
    let holder = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = holder.local_addr().unwrap().to_string();
    let refused = rollflow(&[run_args(GRPO, &run, &[]), vec!["--page", &address]].concat());
    assert_eq!(refused.code, Some(1));
    assert!(refused.err.contains(&address), "{}", refused.err);
    assert!(!run.exists(), "the same command works once the port is free");
}

/// Samples are found by their numbers, their text and a condition, a page at a time, and each has a name.
#[test]
fn samples_are_found_on_the_server_and_each_token_has_its_numbers() {
    let folder = tempfile::tempdir().unwrap();
    finished(&folder.path().join("one"), &["observe.rollouts_every=1"]);
    let (_running, address) = dashboard(folder.path());
    let find = |query: &str| json(address, &format!("/api/runs/one/samples?{query}"));
    let all = find("sketch=true");
    let total = all["total"].as_u64().unwrap();
    assert_eq!((total, all["found"].as_u64(), all["sketch"]["step"].to_string().as_str()), (48, Some(48), "[1.0,3.0]"));
    assert_eq!((all["rows"].as_array().unwrap().len(), all["next"].as_u64()), (48, None));
    assert_eq!((find("step=2")["found"].as_u64(), find("from=40")["rows"].as_array().unwrap().len()), (Some(16), 8));
    let rewarded = find("min_reward=0.5&order=best")["found"].as_u64().unwrap();
    let same = find("where=reward+%3E%3D+0.5");
    assert_eq!((same["rows"].as_array().unwrap().len() as u64, same["found"].is_null()), (rewarded, true));
    assert_eq!(find("text=no+such+text+anywhere")["rows"].as_array().unwrap().len(), 0);
    let wrong = get(address, "/api/runs/one/samples?where=rewrad+%3C+1");
    assert!(wrong.status == 400 && wrong.body.contains("unknown field `rewrad`; the fields are step"), "{}", wrong.body);

    // The trainer passes over samples without an advantage.
    let row = all["rows"].as_array().unwrap().iter().find(|row| row["advantage"] != 0.0).unwrap();
    let key = format!("{}-{}-{}", row["step"], row["group"], row["index"]);
    let group = json(address, &format!("/api/runs/one/samples/{key}"));
    assert_eq!((group["size"].as_u64(), group["samples"].as_array().unwrap().len()), (Some(4), 4));
    let tokens = json(address, &format!("/api/runs/one/samples/{key}-0/tokens"));
    let column = |name: &str| tokens[name].as_array().unwrap_or_else(|| panic!("{name}: {tokens}")).clone();
    let text: String = column("texts").iter().map(|text| text.as_str().unwrap()).collect();
    let own = group["samples"].as_array().unwrap().iter().find(|sample| sample["index"] == row["index"]).unwrap();
    let response = own["response"].as_str().unwrap();
    assert!(text.starts_with(response), "{text:?} of {response:?}");
    for name in ["generator", "trainer", "entropy", "versions", "ids"] {
        assert_eq!(column(name).len(), column("texts").len(), "{name}");
    }
    let [generator, trainer] = ["generator", "trainer"].map(|name| column(name)[0].as_f64().unwrap());
    assert!((trainer - generator).abs() < 1e-3, "a synchronous run: {trainer} and {generator}");
    for wrong in ["9-9-9", "one", "1-2", "1-2-x", "1-2-3-4-5", &format!("{key}-1")] {
        let answer = get(address, &format!("/api/runs/one/samples/{wrong}"));
        assert!(answer.status == 404 && answer.body.contains("STEP-GROUP-INDEX"), "{wrong}: {}", answer.body);
    }

    // A resume cuts the files off, and writes other lines of the same steps.
    let (rollouts, metrics) = (folder.path().join("one/rollouts.jsonl"), folder.path().join("one/metrics.jsonl"));
    let lines = fs::read_to_string(&rollouts).unwrap();
    let other: String =
        lines.lines().take(20).map(|line| line.replacen("\"response\":\"", "\"response\":\"again ", 1) + "\n").collect();
    fs::write(&rollouts, other.repeat(3)).unwrap();
    let rows = fs::read_to_string(&metrics).unwrap();
    fs::write(&metrics, rows.lines().next().unwrap().to_owned() + "\n").unwrap();
    assert_eq!((find("")["total"].as_u64(), find("text=AGAIN")["rows"].as_array().unwrap().len()), (Some(60), 60));
    let points = &json(address, "/api/runs/one")["curves"]["loss"]["points"];
    assert_eq!(points.as_array().unwrap().len(), 1, "{points}");
}

fn post(address: SocketAddr, path: &str, token: Option<&str>) -> u16 {
    asked(address, "POST", path, token, "").0
}

/// Status and body.
fn asked(address: SocketAddr, method: &str, path: &str, token: Option<&str>, body: &str) -> (u16, String) {
    let mut stream = TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    let token = token.map_or_else(String::new, |token| format!("Authorization: Bearer {token}\r\n"));
    let length = body.len();
    write!(
        stream,
        "{method} {path} HTTP/1.1\r\nHost: {address}\r\nContent-Length: {length}\r\nConnection: close\r\n{token}\r\n{body}"
    )
    .unwrap();
    let mut answer = String::new();
    BufReader::new(stream).read_to_string(&mut answer).unwrap();
    let (head, body) = answer.split_once("\r\n\r\n").unwrap();
    (head.split(' ').nth(1).unwrap().parse().unwrap(), body.to_owned())
}

/// Orders take effect between two steps, and change no number of a synchronous run (law C2).
#[test]
fn a_reader_with_the_token_pauses_saves_and_ends_a_run() {
    let folder = tempfile::tempdir().unwrap();
    let [run, other] = ["mine", "other"].map(|name| folder.path().join(name));
    let common = ["flow.max_staleness=0", "checkpoint.every=0", "train.schedule={kind='constant'}"];
    let sets = [&common[..], &["train.steps=1000000", "train.target_reward=9", "observe.page_token_env='PAGE'"]].concat();
    let args = [run_args(GRPO, &run, &sets), vec!["--page", "127.0.0.1:0"]].concat();
    let mut running = Running::start_with(&args, &[("PAGE", "a-secret")]);
    let address = address(&mut running);
    let rows = || fs::read_to_string(run.join("metrics.jsonl")).unwrap_or_default();
    let order = |of: &str, token| post(address, &format!("/api/runs/mine/orders/{of}"), token);
    running.until("it trained", |_| rows().lines().count() >= 3);
    assert_eq!((order("pause", None), order("pause", Some("another")), order("leap", Some("a-secret"))), (401, 401, 403));
    assert_eq!(order("pause", Some("a-secret")), 204);
    running.line(|line| line.contains("The live page ordered: pause").then_some(()));
    assert_eq!(order("checkpoint", Some("a-secret")), 204);
    let saved = || {
        fs::read_dir(run.join("checkpoints"))
            .ok()?
            .flatten()
            .find_map(|entry| entry.file_name().to_str()?.strip_prefix("step_")?.parse::<usize>().ok())
    };
    running.until("the newest step was saved", |_| saved().is_some());
    let steps = saved().unwrap();
    assert_eq!(rows().lines().count(), steps, "a checkpoint is published with the rows of its steps");
    std::thread::sleep(Duration::from_millis(300));
    assert_eq!(rows().lines().count(), steps, "no step is taken during a pause");
    assert_eq!(order("resume", Some("a-secret")), 204);
    running.until("it trained again", |_| rows().lines().count() >= steps + 3);
    // A run that is drained during a pause ends.
    assert_eq!((order("pause", Some("a-secret")), order("drain", Some("a-secret"))), (204, 204));
    assert_eq!(running.end(), Some(0));
    let taken = rows().lines().count();
    rollflow(&run_args(GRPO, &other, &[&common[..], &[&format!("train.steps={taken}")]].concat())).ok();
    assert_eq!(fs::read_to_string(other.join("metrics.jsonl")).unwrap(), rows());
}

/// An order for a step is written down, so that a run that is killed repeats it (law C2).
#[test]
fn a_change_from_the_page_is_in_the_recipe_and_a_resume_repeats_it() {
    let folder = tempfile::tempdir().unwrap();
    let [run, other] = ["mine", "other"].map(|name| folder.path().join(name));
    let common =
        ["flow.max_staleness=0", "checkpoint.every=2", "train.schedule={kind='constant'}", "filter=[]", "train.steps=400"];
    let sets = [&common[..], &["observe.page_token_env='PAGE'"]].concat();
    let args = [run_args(GRPO, &run, &sets), vec!["--page", "127.0.0.1:0"]].concat();
    let mut running = Running::start_with(&args, &[("PAGE", "a-secret")]);
    let address = address(&mut running);
    let rows = || fs::read_to_string(run.join("metrics.jsonl")).unwrap_or_default();
    let order = |body: Value| asked(address, "POST", "/api/runs/mine/change", Some("a-secret"), &body.to_string());
    let refused = |set: &str, why: &str| {
        let (status, text) = order(json!({ "set": [set] }));
        assert!(status == 400 && text.contains(why), "{set}: {status} {text}");
    };
    running.until("it trained", |_| rows().lines().count() >= 3);
    assert_eq!(asked(address, "POST", "/api/runs/mine/change", None, "{}").0, 401);
    refused("flow.max_staleness=3", "is the same in all steps");
    refused("train.lr=-1", "train.lr");
    refused("train.learning=1", "train.learning");
    refused("pairs={select='best_worst'}", "what the run's graph is made of");
    refused("train.loss={kind='dpo'}", "dpo");
    assert_eq!(order(json!({ "set": [] })).0, 400);
    assert_eq!(order(json!([1])).0, 400);
    let (_, possible) = asked(address, "GET", "/api/runs/mine/change", Some("a-secret"), "");
    let possible: BTreeMap<String, String> = serde_json::from_str(&possible).unwrap();
    assert_eq!((possible["generate.temperature"].as_str(), possible["observe.log_every"].as_str()), ("1.0", "10"));
    assert!(possible.keys().all(|key| !key.starts_with("flow.") && !key.starts_with("pairs")));
    let sets =
        [json!(["train.lr=2e-3", "train.entropy_coef=0.01"]), json!(["generate.temperature=0.8", "observe.rollouts_every=1"])];
    let mut at = Vec::new();
    for set in &sets {
        let (status, text) = order(json!({ "set": set }));
        assert_eq!(status, 200, "{text}");
        let first = serde_json::from_str::<Value>(&text).unwrap()["at"].as_u64().unwrap();
        running.until("the change came", |_| rows().lines().count() as u64 > first + 2);
        at.push(first);
    }
    drop(running);
    let steps = at[1] + 8;
    let more = format!("train.steps={steps}");
    rollflow_with(&["resume", run.to_str().unwrap(), "--set", &more], &[("PAGE", "a-secret")]).ok();
    let change = format!("change=[{{at={},set={}}},{{at={},set={}}}]", at[0], sets[0], at[1], sets[1]);
    rollflow(&run_args(GRPO, &other, &[&common[..4], &[&more, &change]].concat())).ok();
    assert!(rows().contains("setting_changes"));
    assert_eq!(fs::read_to_string(other.join("metrics.jsonl")).unwrap(), rows());
    let recorded = |run: &Path| fs::read_to_string(run.join("rollouts.jsonl")).unwrap();
    assert!(recorded(&run) == recorded(&other) && recorded(&run).contains(&format!("{{\"step\":{},", steps - 1)));
}

/// The run that a reader starts is the one that `rollflow run` would be, in a process apart.
#[test]
fn a_reader_with_the_token_checks_a_recipe_and_starts_a_run_that_outlives_the_page() {
    let folder = tempfile::tempdir().unwrap();
    let (runs, token) = (folder.path().join("runs"), folder.path().join("token"));
    fs::write(&token, "a-secret\n").unwrap();
    let open = ["dashboard", runs.to_str().unwrap(), "--listen", "127.0.0.1:0", "--start", "pipelines/recipes"];
    let refused = rollflow(&open);
    assert!(refused.code == Some(2) && refused.err.contains("--start needs a token"), "{}", refused.err);
    let mut running = Running::start(&[&open[..], &["--token-file", token.to_str().unwrap()]].concat());
    let address = address(&mut running);
    let secret = Some("a-secret");
    let told = |path: &str, body: Value| asked(address, "POST", path, secret, &body.to_string());
    let check = |set: &[&str]| -> Value {
        let (status, answer) = told("/api/check", json!({ "recipe": "grpo", "set": set }));
        assert_eq!(status, 200, "{answer}");
        serde_json::from_str(&answer).unwrap()
    };
    assert_eq!(asked(address, "GET", "/api/recipes", None, "").0, 401);
    let (_, recipes) = asked(address, "GET", "/api/recipes", secret, "");
    assert!(recipes.contains("\"grpo\"") && recipes.contains("\"sft\""), "{recipes}");
    let sound = check(&["train.lr=2e-3"]);
    assert!(sound["ok"] == true && sound["keys"]["train.lr"] == "0.002", "{sound}");
    assert!(sound["facts"]["samples a step"].is_string() && sound["derived"].is_array(), "{sound}");
    let wrong = check(&["train.lr=-1", "train.learning=2"]);
    let keys: Vec<&str> = wrong["errors"].as_array().unwrap().iter().map(|error| error["key"].as_str().unwrap()).collect();
    assert!(wrong["ok"] == false && keys.contains(&"train.lr") && wrong["keys"].is_object(), "{wrong}");
    let start = |name: &str, set: &[&str]| told("/api/runs", json!({"recipe": "grpo", "set": set, "name": name}));
    for name in ["", "..", "../else", "a/b", ".hidden"] {
        let (status, why) = start(name, &TINY);
        assert!(status == 400 && why.contains("is no name for a run's folder"), "{name}: {status} {why}");
    }
    let (status, why) = start("bad", &["train.lr=-1"]);
    assert!(status == 400 && why.contains("train.lr") && !runs.join("bad").exists(), "{status} {why}");
    assert_eq!(told("/api/runs", json!({"recipe": "none", "name": "x"})).0, 400);
    let (status, why) = start("mine", &[&TINY[..], &["train.steps=40"]].concat());
    assert_eq!(status, 201, "{why}");
    assert_eq!(start("mine", &TINY).0, 400, "a name is taken once");
    let (_, listed) = asked(address, "GET", "/api/runs", secret, "");
    assert!(listed.contains("\"mine\""), "{listed}");
    drop(running);
    let ended = || fs::read_to_string(runs.join("mine/run.json")).is_ok_and(|record| record.contains("\"state\": \"finished\""));
    let until = Instant::now() + Duration::from_secs(120);
    while !ended() {
        assert!(Instant::now() < until, "{}", fs::read_to_string(runs.join("mine/console.log")).unwrap());
        std::thread::sleep(Duration::from_millis(50));
    }
    assert_eq!(fs::read_to_string(runs.join("mine/metrics.jsonl")).unwrap().lines().count(), 40);
}

/// A dashboard has the graph in motion of a run with a page in another process, and gives it orders.
#[test]
fn a_dashboard_follows_and_steers_a_run_of_another_process() {
    let folder = tempfile::tempdir().unwrap();
    let (runs, token) = (folder.path().join("runs"), folder.path().join("token"));
    fs::write(&token, "a-secret\n").unwrap();
    let open = ["dashboard", runs.to_str().unwrap(), "--listen", "127.0.0.1:0", "--start", "pipelines/recipes"];
    let mut running = Running::start(&[&open[..], &["--token-file", token.to_str().unwrap()]].concat());
    let owner = address(&mut running);
    let post = |path: &str, body: Value| asked(owner, "POST", path, Some("a-secret"), &body.to_string());
    let set = [&TINY[..], &["train.steps=1000000", "train.target_reward=9"]].concat();
    assert_eq!(post("/api/runs", json!({"recipe": "grpo", "set": set, "name": "mine"})).0, 201);
    let live = |address, token| {
        let all = events(address, "/api/runs/mine/events", token).filter(|(name, _)| name == "live");
        all.map(|(_, event)| event)
    };
    let mut seen = live(owner, "a-secret");
    let event = seen.next().expect("the stream lasts as long as the dashboard");
    assert_eq!((names(&event["flow"]["stages"]), &event["paused"]), (STAGES.to_vec(), &json!(false)), "{event}");
    let (_, report) = asked(owner, "GET", "/api/runs/mine", Some("a-secret"), "");
    assert_eq!(names(&serde_json::from_str::<Value>(&report).unwrap()["graph"]["nodes"]), STAGES);

    assert_eq!(post("/api/runs/mine/orders/pause", json!(null)).0, 204);
    assert!(seen.by_ref().take(100).any(|event| event["paused"] == true));
    assert_eq!(post("/api/runs/mine/orders/dance", json!(null)).0, 403, "the run's page refuses it");
    assert_eq!(post("/api/runs/mine/orders/..%2Fchange", json!(null)).0, 403, "it stays one part of the path");
    let (status, keys) = asked(owner, "GET", "/api/runs/mine/change", Some("a-secret"), "");
    assert!(status == 200 && keys.contains("\"train.lr\""), "{keys}");
    let (status, why) = post("/api/runs/mine/change", json!({"set": ["train.lr=-1"]}));
    assert!(status == 400 && why.contains("train.lr"), "{status} {why}");
    let (status, at) = post("/api/runs/mine/change", json!({"set": ["train.lr=1e-3"]}));
    assert!(status == 200 && at.contains("\"at\":"), "{status} {at}");
    assert_eq!(post("/api/runs/mine/orders/resume", json!(null)).0, 204);
    assert!(seen.by_ref().take(100).any(|event| event["paused"] == false));
    assert_eq!(post("/api/runs/mine/orders/stop", json!(null)).0, 204);
    let ended = || fs::read_to_string(runs.join("mine/run.json")).is_ok_and(|record| record.contains("\"state\": \"stopped\""));
    running.until("the run ended", |_| ended());
    let said = fs::read_to_string(runs.join("mine/console.log")).unwrap();
    assert!(said.contains("ordered: pause") && said.contains("on: train.lr=1e-3") && !said.contains("a-secret"), "{said}");
    assert!(fs::read_to_string(runs.join("mine/recipe.toml")).unwrap().contains("train.lr=1e-3"));
    assert_eq!(post("/api/runs/mine/orders/pause", json!(null)).0, 403, "it has ended");

    // A page without a token shows the run to a dashboard without one, which gives no orders.
    let (open, name) = (folder.path().join("open"), "mine");
    let sets = ["train.steps=1000000", "train.target_reward=9"];
    let mut run = Running::start(&[run_args(GRPO, &open.join(name), &sets), vec!["--page", "127.0.0.1:0"]].concat());
    self::address(&mut run);
    let (_dashboard, reader) = dashboard(&open);
    let event = live(reader, "none").next().expect("the stream lasts as long as the dashboard");
    assert_eq!((names(&event["flow"]["stages"]), &event["paused"]), (STAGES.to_vec(), &Value::Null), "{event}");
    assert_eq!(asked(reader, "POST", "/api/runs/mine/orders/pause", None, "").0, 403);
}
