//! Runs whose engine is `rollflow serve`: they are the runs of one process, by every way of weights to the servers, also when servers die. Laws
//! D1, D2, D3, D4, V2, V4.

use std::collections::BTreeMap;
use std::fs;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use rollflow::model::load_hf;
use rollflow::observe::Metric;
use rollflow::observe::logs::Rollout;
use serde_json::{Value, json};

use crate::asking::tiny_run;
use crate::crashes::{lines, nothing_lost};
use crate::model_serving::{Server, checkpoint, farthest, run_of};
use crate::running::{GRPO, Running, rollflow, rollouts, run_args, with_sets};

/// Tokens of each sample, and the versions that sampled them.
fn sampled(run: &Path) -> BTreeMap<(u64, u64, u32), (Vec<u32>, String)> {
    let of = |row: Rollout| ((row.step, row.group, row.index), (row.tokens, format!("{:?}", row.versions)));
    rollouts(run).into_iter().map(of).collect()
}

fn flat(folder: &Path) -> Vec<f32> {
    Vec::try_from(load_hf(folder).unwrap().1.merged().flat).unwrap()
}

/// Supervised samples train the model at each step, whatever completions that are all but greedy earn.
const GREEDY: [&str; 4] = ["generate.temperature=1e-3", "mix={batch=4,every=1}", "train.lr=1e-2", "observe.rollouts_every=1"];

/// Laws D1, D3 and V4: completions without chance, their versions and the trained weights are those of one process, with whole weights and with
/// adapters.
#[test]
fn a_run_with_a_server_is_the_run_of_one_process() {
    let folder = tempfile::tempdir().unwrap();
    let base = checkpoint(&tiny_run(folder.path(), &[]));
    for (name, more) in [("whole", &[][..]), ("adapters", &["lora={rank=2,alpha=4}"])] {
        let [local, served] = ["local", "served"].map(|place| folder.path().join(format!("{name}_{place}")));
        run_of(&base, &local, &[&GREEDY, more].concat());
        let server = Server::start(&base, &["--slots", "3"]);
        let engine = format!("engine={{kind=\"rollflow\",urls=[{:?}]}}", server.url);
        let sync: &[&str] = if more.is_empty() { &[] } else { &["lora.sync=adapter"] };
        run_of(&base, &served, &[&GREEDY, more, &[&engine], sync].concat());

        assert_eq!(sampled(&served), sampled(&local), "{name}");
        assert_eq!(sampled(&local).len(), 3 * 4 * 4);
        let [before, here, there] = [&base, &checkpoint(&local), &checkpoint(&served)].map(|folder| flat(folder));
        assert!(farthest(&before, &here) > 1e-3 && farthest(&here, &there) < 1e-4, "{name}: {}", farthest(&here, &there));
        if more.is_empty() {
            assert_eq!(server.get("/model_info")["weight_version"], "4", "the version after the third step");
        }
    }
}

/// Laws D1 and V4: two servers are given tensors out of the trainer's memory, and one of them restarts, so that it has forgotten its group.
#[test]
fn a_run_that_broadcasts_its_weights_is_the_run_of_one_process_also_when_a_server_restarts() {
    let folder = tempfile::tempdir().unwrap();
    let base = checkpoint(&tiny_run(folder.path(), &[]));
    let [local, served] = ["local", "served"].map(|place| folder.path().join(place));
    run_of(&base, &local, &GREEDY);
    let mut servers: Vec<Server> = (0..2).map(|_| Server::start(&base, &["--slots", "3"])).collect();
    let urls: Vec<&str> = servers.iter().map(|server| &*server.url).collect();
    let engine = format!("engine={{kind=\"rollflow\",carry=\"broadcast\",urls={urls:?}}}");
    run_of(&base, &served, &[&GREEDY, &[&*engine][..]].concat());
    assert_eq!(sampled(&served), sampled(&local));
    assert!(farthest(&flat(&checkpoint(&local)), &flat(&checkpoint(&served))) < 1e-4);
    assert!(
        !served.join("engine/versions").exists() || walk(&served.join("engine/versions")).is_empty(),
        "nothing is written for servers"
    );
    for server in &servers {
        assert_eq!(server.get("/model_info")["weight_version"], "4");
    }

    let port = servers[0].url.rsplit(':').next().unwrap().to_owned();
    drop(servers.remove(0));
    let again = Server::start_at(&format!("127.0.0.1:{port}"), &base, &["--slots", "3"], None);
    rollflow(&["resume", served.to_str().unwrap(), "--set", "train.steps=5"]).ok();
    assert_eq!(again.get("/model_info")["weight_version"], "6");
    nothing_lost(&served, 5);
}

/// Requests of a trainer that breaks off or is wrong change nothing.
#[test]
fn an_update_without_all_tensors_is_refused_and_the_old_weights_stay() {
    let folder = tempfile::tempdir().unwrap();
    let base = checkpoint(&tiny_run(folder.path(), &[]));
    let server = Server::start(&base, &[]);
    let before = server.ask("/weights_checker", &json!({"action": "checksum"}));
    let piece = json!({"names": ["model.norm.weight"], "dtypes": ["float32"], "shapes": [[1]], "group_name": "none", "load_format": "flattened_bucket"});
    for (path, body, why) in [
        ("/update_weights_from_distributed", &piece, "no group of this name"),
        ("/end_weight_update", &json!({}), "no update has begun"),
        ("/destroy_weights_update_group", &json!({"group_name": "none"}), "no group of this name"),
        (
            "/init_weights_update_group",
            &json!({"master_address": "127.0.0.1", "master_port": 9, "rank_offset": 0, "world_size": 2, "group_name": "a"}),
            "rank 0 is the trainer",
        ),
        (
            "/init_weights_update_group",
            &json!({"master_address": "127.0.0.1", "master_port": 9, "rank_offset": 1, "world_size": 2, "group_name": "a"}),
            "on a processor",
        ),
    ] {
        let told = server.refused(path, body);
        assert!(told.contains(why), "{path}: {told}");
    }
    server.ask("/begin_weight_update", &json!({}));
    assert!(server.refused("/begin_weight_update", &json!({})).contains("has begun already"));
    assert!(server.refused("/end_weight_update", &json!({})).contains("tensors are missing"));
    assert_eq!(server.ask("/weights_checker", &json!({"action": "checksum"})), before);
}

/// Laws D1 and V4: a server that gives its memory away during steps, and was left so by another run, changes nothing.
#[test]
fn a_run_whose_server_sleeps_during_steps_is_the_run_of_one_process() {
    let folder = tempfile::tempdir().unwrap();
    let base = checkpoint(&tiny_run(folder.path(), &[]));
    let eval = "eval={every=1,task={kind=\"arithmetic\",digits=1}}";
    for (name, more) in [("whole", &[eval][..]), ("adapters", &["lora={rank=2,alpha=4}", "lora.sync=adapter"])] {
        let [local, served] = ["local", "served"].map(|place| folder.path().join(format!("{name}_{place}")));
        run_of(&base, &local, &[&GREEDY, more].concat());
        let server = Server::start(&base, &["--slots", "3"]);
        server.ask("/release_memory_occupation", &json!({}));
        let engine = format!("engine={{kind=\"rollflow\",sleep=true,urls=[{:?}]}}", server.url);
        run_of(&base, &served, &[&GREEDY, more, &[&engine]].concat());

        assert_eq!(sampled(&served), sampled(&local), "{name}");
        // By the request above, and once before each of three steps.
        assert_eq!(server.metric(Metric::ServedSleeps, &[]), 4.0, "{name}");
        assert_eq!(server.get("/ready")["success"], true, "it is awake for others");
        nothing_lost(&served, 3);

        // As a run that was killed left it, and without `engine.sleep`.
        server.ask("/release_memory_occupation", &json!({}));
        let (next, engine) = (folder.path().join(format!("{name}_next")), engine.replace("sleep=true,", ""));
        run_of(&base, &next, &[&GREEDY, more, &[&engine]].concat());
        assert_eq!(sampled(&next), sampled(&local), "{name}");
    }
    let (engine, late) = ("engine={kind=\"rollflow\",sleep=true,urls=[\"http://127.0.0.1:9\"]}", folder.path().join("late"));
    let ended = rollflow(&run_args(GRPO, &late, &[engine, "flow.max_staleness=1"]));
    assert!(ended.code == Some(2) && ended.err.contains("`engine.sleep` is for synchronous runs"), "{}", ended.err);
}

/// Law V4, without a shared disk: each server gets the files over HTTP and loads its own copy; what was damaged on its way is never loaded.
#[test]
fn weights_are_sent_to_servers_and_what_was_damaged_on_its_way_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let (base, uploads) = (checkpoint(&tiny_run(folder.path(), &[])), folder.path().join("uploads"));
    fs::create_dir(&uploads).unwrap();
    let uploads = uploads.canonicalize().unwrap();
    let servers: Vec<Server> = (0..2).map(|_| Server::start(&base, &["--uploads", uploads.to_str().unwrap()])).collect();
    let urls: Vec<&str> = servers.iter().map(|server| &*server.url).collect();
    let engine = format!("engine={{kind=\"rollflow\",carry=\"stream\",urls={urls:?}}}");
    for (name, more) in [("adapters", &["lora={rank=2,alpha=4}", "lora.sync=adapter"][..]), ("whole", &[])] {
        let run = folder.path().join(name);
        run_of(&base, &run, &[&[&*engine, "observe.rollouts_every=1"], more].concat());
        nothing_lost(&run, 3);
    }
    for server in &servers {
        let page = server.get("/model_info");
        assert!(Path::new(page["model_path"].as_str().unwrap()).starts_with(&uploads) && page["weight_version"] == "4", "{page}");
    }
    // Of each server, those of the newest two.
    let kept =
        || fs::read_dir(&uploads).unwrap().map(|entry| fs::read_dir(entry.unwrap().path()).unwrap().count()).collect::<Vec<_>>();
    assert_eq!(kept(), [2, 2]);

    let server = &servers[0];
    let body = fs::read(base.join("model.safetensors")).unwrap();
    let begin = || server.ask("/uploads", &Value::Null)["upload"].as_str().unwrap().to_owned();
    let send = |id: &str, name: &str, at: u64, piece: &[u8]| server.post_bytes(&format!("/uploads/{id}/{name}/{at}"), piece);
    let id = begin();
    let sum = "0".repeat(64);
    send(&id, "model.safetensors", 0, &body).unwrap();
    let told = server.refused(&format!("/uploads/{id}"), &json!({"files": {"model.safetensors": sum}}));
    assert!(told.contains("damaged on its way"), "{told}");
    let told = server.refused(&format!("/uploads/{id}"), &json!({"files": {}}));
    assert!(told.contains("other files"), "{told}");
    for name in ["..%2Fup", ".hidden", "a%2Fb", "%00"] {
        assert!(send(&id, name, 0, &body).is_err(), "{name}");
    }
    assert!(send(&id, "more", 1 << 40, &body).unwrap_err().to_string().contains("at most"));
    begin();
    begin();
    assert!(send(&id, "model.safetensors", 0, &body).unwrap_err().to_string().contains("no such upload"));
    assert_eq!(server.get("/model_info")["weight_version"], "4");
    drop(servers);
}

/// All files below a folder.
fn walk(folder: &Path) -> Vec<PathBuf> {
    let below = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    below.flat_map(|path| if path.is_dir() { walk(&path) } else { vec![path] }).collect()
}

/// Python's web server of a folder, which ends when it is dropped.
struct WebServer {
    process: Child,
    url: String,
}

impl WebServer {
    fn start(folder: &Path) -> Self {
        let words = ["-u", "-m", "http.server", "0", "--bind", "127.0.0.1", "--directory", folder.to_str().unwrap()];
        let mut process = Command::new("python3").args(words).stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
        let mut line = String::new();
        BufReader::new(process.stdout.as_mut().unwrap()).read_line(&mut line).unwrap();
        let port: u16 = line.split_whitespace().find_map(|word| word.parse().ok()).unwrap();
        WebServer { process, url: format!("http://127.0.0.1:{port}") }
    }
}

impl Drop for WebServer {
    fn drop(&mut self) {
        self.process.kill().ok();
        self.process.wait().ok();
    }
}

/// Laws V2, V4 and D1: a server without the trainer's disk loads what `weights pull` brings to its host, a second one that missed every version
/// gets the newest from the store, and a run goes on from the store on another machine.
#[test]
fn weights_reach_a_server_through_a_store_and_checkpoints_come_back_from_it() {
    let folder = tempfile::tempdir().unwrap();
    let base = checkpoint(&tiny_run(folder.path(), &[]));
    let [store, pulled, late, run, moved] = ["store", "pulled", "late", "storing", "moved"].map(|name| folder.path().join(name));
    let address = format!("file://{}", store.to_str().unwrap());
    let server = Server::start(&base, &["--slots", "3"]);
    let host = ["--follow", "--host", "127.0.0.1", "--every", "1"];
    let puller = Running::start(&[&["weights", "pull", &address, pulled.to_str().unwrap()], &host[..]].concat());
    let engine = format!("engine={{kind=\"rollflow\",urls=[{:?}]}}", server.url);
    let kept = format!("store={{url={address:?}}}");
    run_of(&base, &run, &[&engine, &kept, "checkpoint.every=1", "observe.rollouts_every=1"]);
    nothing_lost(&run, 3);
    let page = server.get("/model_info");
    let path = Path::new(page["model_path"].as_str().unwrap());
    assert!(path.starts_with(pulled.canonicalize().unwrap()) && page["weight_version"] == "4", "{page}");

    rollflow(&["weights", "pull", &address, late.to_str().unwrap()]).ok();
    let files = ["model.safetensors", "config.json"].map(|file| (path.join(file), late.join("latest").join(file)));
    for (here, there) in files {
        assert_eq!(fs::read(here).unwrap(), fs::read(there).unwrap());
    }
    // A server pulls from its own store, what is named and no other.
    let server = Server::start(&base, &["--store", &address]);
    let load = |path: &str, more: Value| {
        let mut body = json!({ "model_path": path });
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        server.post("/update_weights_from_disk", &body)
    };
    load(&address, json!({})).unwrap();
    let page = server.get("/model_info");
    assert_eq!(page["weight_version"], "4", "the newest: {page}");
    let pulled = Path::new(page["model_path"].as_str().unwrap());
    assert_eq!(flat(pulled), flat(&late.join("latest")));
    load(&format!("{address}/"), json!({"weight_version": "3"})).unwrap();
    assert_eq!(server.get("/model_info")["weight_version"], "3");
    for (path, more, why) in [
        ("s3://other/run", json!({}), "--store alone"),
        (&*address, json!({"weight_version": "99"}), "99"),
        (&*address, json!({"weight_version": "best"}), "the number of a version"),
    ] {
        let told = load(path, more).unwrap_err().to_string();
        assert!(told.contains(why), "{told}");
    }
    // From a web server, too.
    let web = WebServer::start(&store);
    let server = Server::start(&base, &["--store", &web.url]);
    server.post("/update_weights_from_disk", &json!({ "model_path": web.url })).unwrap();
    let page = server.get("/model_info");
    assert_eq!(page["weight_version"], "4", "the newest: {page}");
    assert_eq!(flat(Path::new(page["model_path"].as_str().unwrap())), flat(&late.join("latest")));
    server.post("/update_weights_from_disk", &json!({ "model_path": web.url, "weight_version": "3" })).unwrap();
    assert_eq!(server.get("/model_info")["weight_version"], "3");
    let ended = rollflow(&["check", GRPO, "--set", &format!("store={{url={:?}}}", web.url)]);
    assert!(ended.code != Some(0) && ended.err.contains("can be read, and not written"), "{}", ended.err);
    // A damaged object is refused, and the version before stays.
    let fresh = [&address, &web.url].map(|address| (address, Server::start(&base, &["--store", address])));
    let damage = || {
        for path in walk(&store.join("weights/data")) {
            let mut bytes = fs::read(&path).unwrap();
            let middle = bytes.len() / 2;
            bytes[middle] ^= 1;
            fs::write(&path, bytes).unwrap();
        }
    };
    damage();
    for (address, fresh) in fresh {
        let told = fresh.refused("/update_weights_from_disk", &json!({ "model_path": address }));
        assert!(told.contains("checksum"), "{told}");
        assert_eq!(fresh.get("/model_info")["weight_version"], "default");
    }
    // Twice is as before.
    damage();

    let ended = rollflow(&["resume", &address, "--out", moved.to_str().unwrap(), "--set", "train.steps=5"]);
    assert_eq!(ended.code, Some(0), "{}{}", ended.out, ended.err);
    nothing_lost(&moved, 5);
    drop(puller);
}

/// Laws V2, V4, D2 and D4: a server that is killed and comes back at its address serves nothing before it holds verified weights again, and
/// nothing is lost or trained twice.
#[test]
fn a_run_with_three_servers_loses_nothing_when_one_is_killed_and_returns() {
    for carry in ["folder", "broadcast"] {
        one_of_three_is_killed_and_returns(carry);
    }
}

fn one_of_three_is_killed_and_returns(carry: &str) {
    let folder = tempfile::tempdir().unwrap();
    let (base, run) = (checkpoint(&tiny_run(folder.path(), &[])), folder.path().join("three"));
    let mut servers: Vec<Server> = (0..3).map(|_| Server::start(&base, &["--slots", "4"])).collect();
    let urls: Vec<&str> = servers.iter().map(|server| &*server.url).collect();
    let engine = format!("engine={{kind=\"rollflow\",carry={carry:?},urls={urls:?}}}");
    let sets = [&engine, "train.steps=30", "flow.max_staleness=2", "observe.rollouts_every=1", "sft.steps=20"];
    let mut running = Running::start(&run_args(GRPO, &run, &sets));
    running.until("three steps are taken", |_| lines(&run) >= 3);

    let address = servers[0].url.strip_prefix("http://").unwrap().to_owned();
    let before = servers[0].get("/model_info")["instance"].clone();
    drop(servers.remove(0));
    let returned = Server::start_at(&address, &base, &["--slots", "4"], None);
    assert_ne!(returned.get("/model_info")["instance"], before);
    running.line(|line| line.contains("Step 30:").then_some(()));
    assert_eq!(running.end(), Some(0));
    nothing_lost(&run, 30);
    assert!(returned.metric(Metric::ServedSamples, &[("status", "completed")]) > 0.0, "it serves again");
    for server in &servers {
        assert!(server.metric(Metric::ServedSamples, &[("status", "completed")]) > 0.0);
        // A run does not wait until the weights after its last step have reached all servers.
        let version = &server.get("/model_info")["weight_version"];
        assert!(version == "30" || version == "31", "{version}");
    }
}

/// Laws V2, V4, D2 and D4: servers join by a line in a file and leave when it is gone; one that stops answering is passed over. Nothing is lost or
/// trained twice.
#[test]
fn servers_join_and_leave_by_a_file_and_one_that_stands_still_is_passed_over() {
    let folder = tempfile::tempdir().unwrap();
    let (base, run) = (checkpoint(&tiny_run(folder.path(), &[])), folder.path().join("members"));
    let list = folder.path().join("members.txt");
    let write = |servers: &[&Server]| {
        let lines: Vec<&str> = servers.iter().map(|server| &*server.url).collect();
        fs::write(&list, format!("# servers of the test\n{}\n", lines.join("\n"))).unwrap();
    };
    let engine = format!("engine={{kind=\"rollflow\",members={list:?},hedge_after=1,drain_timeout=1,pause_timeout=5}}");
    let sets = [&engine, "train.steps=1000", "flow.max_staleness=2", "observe.rollouts_every=1"];
    // The run waits for the first server.
    let mut running = Running::start(&run_args(GRPO, &run, &sets));
    running.line(|line| line.contains("members.txt").then_some(()));
    let first = Server::start(&base, &["--slots", "4"]);
    write(&[&first]);
    running.until("three steps are taken", |_| lines(&run) >= 3);

    let second = Server::start(&base, &["--slots", "4"]);
    write(&[&first, &second]);
    let completed = |server: &Server| server.metric(Metric::ServedSamples, &[("status", "completed")]);
    running.until("the second server works", |_| completed(&second) > 0.0);

    first.running.stand_still(true);
    let before = lines(&run);
    running.until("steps go on without the first", |_| lines(&run) > before + 5);
    write(&[&second]);
    running.line(|line| line.contains("leaves").then_some(()));
    first.running.stand_still(false);
    drop(first);

    let third = Server::start(&base, &["--slots", "4"]);
    write(&[&second, &third]);
    running.until("the third server works", |_| completed(&third) > 0.0);
    drop(second);
    let before = lines(&run);
    running.until("steps go on with the third alone", |_| lines(&run) > before + 5);
    running.terminate();
    assert_eq!(running.end(), Some(0));
    nothing_lost(&run, lines(&run));
}

/// No server listens, and the interpreter is not there.
#[test]
fn a_graph_has_the_stages_of_servers_and_processes_and_starts_neither() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("rewards.py");
    fs::write(&file, "def reward(completion):\n    return 1.0\n").unwrap();
    let python = format!("reward={{kind=\"python\",file={file:?},python=\"/no/such/python\",processes=3}}");
    let servers = "engine={kind=\"rollflow\",urls=[\"http://127.0.0.1:1\"],sleep=true}";
    // The model that is drawn has no head apart from its embedding.
    let sets = [servers, "flow.max_staleness=0", "train.lr_scale={head=0.5}", &python];
    let drawn = rollflow(&with_sets(&["graph", GRPO, "--format", "json"], &sets)).ok();
    let graph: Value = serde_json::from_str(&drawn.out).unwrap();
    let node = |name: &str| graph["nodes"].as_array().unwrap().iter().find(|node| node["name"] == name).cloned();
    assert_eq!(node("sleep").unwrap()["kind"], "task");
    assert_eq!(node("sync").unwrap()["kind"], "task", "it waits for servers");
    assert_eq!((node("reward").unwrap()["kind"].as_str(), node("reward").unwrap()["workers"].as_u64()), (Some("task"), Some(3)));
}
