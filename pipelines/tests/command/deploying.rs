//! `rollflow deploy`: what is written for platforms says the same run, and hostile names stay names. `scripts/test_cluster.sh` starts it on
//! real ones.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::running::{read, rollflow, rollflow_with, with_sets};

const RECIPE: &str = "pipelines/recipes/grpo.toml";
/// Quotes, dollars, substitutions, newlines, and what YAML reads as something else.
const HOSTILE: &str = "name=\"it's $(touch pwned) `id` ${HOME} %h {{x}} yes: - # \\n 'end'\"";

/// What `deploy` prints of the shipped recipe on a platform.
fn dry(platform: &str, sets: &[&str]) -> String {
    rollflow(&with_sets(&["deploy", platform, RECIPE, "--dry-run"], sets)).ok().out
}

fn documents(text: &str) -> Vec<Value> {
    text.split("\n---\n")
        .map(|document| serde_saphyr::from_str(document).unwrap_or_else(|error| panic!("{error}:\n{document}")))
        .collect()
}

/// The value of `--set` in the words of a command.
fn set_of(words: &Value) -> String {
    let words: Vec<&str> = words.as_array().unwrap().iter().map(|word| word.as_str().unwrap()).collect();
    words[words.iter().position(|word| *word == "--set").unwrap() + 1].to_owned()
}

const ENGINES: [&str; 3] =
    ["engine.kind=vllm", "deploy.engines.count=2", "deploy.engines.command=[\"vllm\",\"serve\",\"$(id)\"]"];

#[test]
fn a_hostile_override_reaches_the_run_as_it_was_given_on_every_platform() {
    let kubernetes = documents(&dry("kubernetes", &[HOSTILE, "deploy.name=\"x\""]));
    let job = kubernetes.iter().find(|object| object["kind"] == "Job").unwrap();
    let words = &job["spec"]["template"]["spec"]["containers"][0]["command"];
    assert_eq!(set_of(words), HOSTILE.replace('$', "$$"), "Kubernetes reads $$ as $");
    let compose = documents(&dry("compose", &[HOSTILE, "deploy.name=\"x\""]));
    assert_eq!(set_of(&compose[0]["services"]["trainer-0"]["entrypoint"]), HOSTILE.replace('$', "$$"), "compose reads $$ as $");

    // The scripts run, with a program that prints its arguments in the place of the run.
    let folder = tempfile::tempdir().unwrap();
    let program = folder.path().join("print");
    let out = folder.path().join("out");
    fs::write(&program, format!("#!/bin/sh\nprintf '%s\\n' \"$@\" > {}\n", out.display())).unwrap();
    fs::write(folder.path().join("srun"), "#!/bin/sh\nwhile [ \"${1#--}\" != \"$1\" ]; do shift; done\nexec \"$@\"\n").unwrap();
    fs::write(folder.path().join("scontrol"), "#!/bin/sh\nexit 1\n").unwrap();
    for name in ["print", "srun", "scontrol"] {
        fs::set_permissions(folder.path().join(name), fs::Permissions::from_mode(0o755)).unwrap();
    }
    let program = format!("deploy.program={program:?}");
    let sky = documents(&dry("skypilot", &[HOSTILE, &program]))[0]["run"].as_str().unwrap().to_owned();
    for script in [sky, dry("slurm", &[HOSTILE, &program])] {
        let path = format!("{}:{}", folder.path().display(), std::env::var("PATH").unwrap());
        let ended = Command::new("bash").args(["-c", &script]).env("PATH", path).env("SLURM_JOB_ID", "1").output().unwrap();
        assert!(ended.status.success(), "{}", String::from_utf8_lossy(&ended.stderr));
        let printed = read(&out);
        assert!(printed.lines().any(|line| line == HOSTILE), "{printed}");
        fs::remove_file(&out).unwrap();
    }
    assert!(!Path::new("pwned").exists() && !Path::new("../pwned").exists());
}

/// Writes programs into a folder, and returns a search path that begins with it.
fn programs(folder: &Path, all: &[(&str, &str)]) -> String {
    for (name, text) in all {
        fs::write(folder.join(name), format!("#!/bin/sh\ncd {}\n{text}\n", folder.display())).unwrap();
        fs::set_permissions(folder.join(name), fs::Permissions::from_mode(0o755)).unwrap();
    }
    format!("{}:{}", folder.display(), std::env::var("PATH").unwrap())
}

fn wait_for(path: &Path) {
    let deadline = Instant::now() + Duration::from_secs(60);
    while !path.exists() {
        assert!(Instant::now() < deadline, "{} never appeared", path.display());
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// With programs that act as Slurm's: `srun` runs a step, and `squeue` names the steps.
#[test]
fn slurm_signals_a_script_that_drains_the_trainer_and_leaves_engines_to_serve() {
    let folder = tempfile::tempdir().unwrap();
    let run = "case $1 in --job-name=trainer) echo $$ > trainer.pid ;; esac\n\
               while [ \"${1#--}\" != \"$1\" ]; do shift; done\nexec \"$@\"";
    let control = "case $1 in show) printf 'a\\nb\\n' ;; *) echo \"$@\" > requeued ;; esac";
    let all = [
        ("srun", run),
        ("squeue", "printf '7.0 engine\\n7.1 trainer\\n7.batch batch\\n'"),
        ("scancel", "echo \"$@\" > signalled\nkill -s TERM \"$(cat trainer.pid)\""),
        ("scontrol", control),
        ("train", "trap 'exit 75' TERM\ntouch began\nwhile :; do sleep 0.1; done"),
    ];
    let path = programs(folder.path(), &all);
    let program = format!("deploy.program={:?}", folder.path().join("train"));
    let sets = ["engine.kind=vllm", "deploy.engines.count=1", "deploy.engines.command=[\"true\"]", &program];
    let mut bash = Command::new("bash");
    bash.args(["-c", &dry("slurm", &sets)]).env("PATH", path).env("SLURM_JOB_ID", "7");
    let mut script = bash.spawn().unwrap();
    wait_for(&folder.path().join("began"));
    rustix::process::kill_process(rustix::process::Pid::from_child(&script), rustix::process::Signal::TERM).unwrap();
    assert_eq!(script.wait().unwrap().code(), Some(75));
    assert_eq!(read(&folder.path().join("signalled")), "--ctld --signal=TERM 7.1\n", "the trainer's step alone");
    assert_eq!(read(&folder.path().join("requeued")), "requeue 7\n");
}

#[test]
fn a_host_of_skypilot_ends_with_the_code_of_the_rank_that_failed_by_itself() {
    let folder = tempfile::tempdir().unwrap();
    let program = folder.path().join("rollflow");
    fs::write(&program, "#!/bin/sh\ncase $RANK in 1) exit 3 ;; *) exit 69 ;; esac\n").unwrap();
    fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).unwrap();
    let path = format!("{}:{}", folder.path().display(), std::env::var("PATH").unwrap());
    let script = documents(&dry("skypilot", &["deploy.ranks=3"]))[0]["run"].as_str().unwrap().to_owned();
    let mut bash = Command::new("bash");
    let ended = bash.args(["-c", &script]).env("PATH", &path).env("SKYPILOT_NODE_RANK", "0").status().unwrap();
    assert_eq!(ended.code(), Some(3), "{script}");
}

#[test]
fn ranks_and_engines_find_each_other_on_every_platform() {
    let ranks = ["deploy.ranks=4", "deploy.hosts=2", "deploy.name=\"big\""];
    let sets = [&ranks[..], &ENGINES[..]].concat();
    let slurm = dry("slurm", &sets);
    for line in [
        "#SBATCH --nodes=4",
        "#SBATCH --ntasks-per-node=2",
        "#SBATCH --requeue",
        "#SBATCH --signal=B:TERM@120",
        "srun --job-name=trainer --nodes=2 --ntasks=4 --relative=0",
        "--kill-on-bad-exit=0 --wait=60",
    ] {
        assert!(slurm.contains(line), "{line} is missing:\n{slurm}");
    }
    assert!(slurm.contains("75|143) scontrol requeue"), "{slurm}");
    let kubernetes = documents(&dry("kubernetes", &sets));
    let kinds: Vec<&str> = kubernetes.iter().map(|object| object["kind"].as_str().unwrap()).collect();
    assert_eq!(kinds, ["ConfigMap", "Service", "Job", "Service", "StatefulSet", "NetworkPolicy"]);
    let job = &kubernetes[2]["spec"];
    assert_eq!((&job["completions"], &job["completionMode"]), (&Value::from(4), &Value::from("Indexed")));
    let codes = &job["podFailurePolicy"]["rules"][1]["onExitCodes"]["values"];
    assert_eq!(
        codes,
        &serde_json::json!([69, 75, 143]),
        "in order, as Kubernetes requires: a failure is counted once, by the rank that failed"
    );
    let first = serde_json::json!({"rules": [{"succeededIndexes": "0"}]});
    assert_eq!(job["successPolicy"], first, "other ranks may be evicted after rank 0 has succeeded");
    let pod = &job["template"]["spec"];
    let env = pod["containers"][0]["env"].to_string();
    for part in ["big-0.big", "job-completion-index", "http://big-engine-1.big-engine:8400"] {
        assert!(env.contains(part), "{part} is missing: {env}");
    }
    assert_eq!(
        (&pod["securityContext"]["runAsNonRoot"], &pod["automountServiceAccountToken"]),
        (&Value::from(true), &Value::from(false))
    );
    assert_eq!(
        kubernetes[0]["data"]["file-0"],
        read(&Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(RECIPE)),
        "the recipe, whole"
    );
    let sky = documents(&dry("skypilot", &sets));
    assert_eq!((&sky[0]["execution"], &sky[1]["num_nodes"], &sky[2]["num_nodes"]), (&"parallel".into(), &2.into(), &2.into()));
    for part in ["http://engine-1.big:8400", "WORLD_SIZE=4 LOCAL_WORLD_SIZE=2\n"] {
        assert!(sky[1]["run"].as_str().unwrap().contains(part), "{part} is missing: {}", sky[1]["run"]);
    }
    let compose = documents(&dry("compose", &sets));
    let services: Vec<&String> = compose[0]["services"].as_object().unwrap().keys().collect();
    assert_eq!(services, ["trainer-0", "trainer-1", "trainer-2", "trainer-3", "engine-0", "engine-1"]);
    let trainer = &compose[0]["services"]["trainer-3"];
    assert_eq!(trainer["environment"]["RANK"], "3");
    assert_eq!(compose[0]["services"]["engine-1"]["tmpfs"][0], "/tmp:exec", "Triton loads libraries from it");
    let user = format!("{}:{}", rustix::process::geteuid().as_raw(), rustix::process::getegid().as_raw());
    assert_eq!(trainer["user"], user.as_str(), "the run's folder is this user's");
}

#[test]
fn prometheus_finds_the_pods_of_a_trainer_at_the_port_of_its_metrics() {
    let kubernetes = documents(&dry("kubernetes", &[&ENGINES[..], &["deploy.metrics=9555"]].concat()));
    let pods = |kind: &str| &kubernetes.iter().find(|object| object["kind"] == kind).unwrap()["spec"]["template"];
    let (trainer, engine) = (pods("Job"), pods("StatefulSet"));
    let expected = serde_json::json!({"prometheus.io/scrape": "true", "prometheus.io/port": "9555"});
    assert_eq!(trainer["metadata"]["annotations"], expected);
    assert!(engine["metadata"]["annotations"].is_null(), "{engine}");
    let container = &trainer["spec"]["containers"][0];
    assert!(container["command"].to_string().contains("\"0.0.0.0:9555\""), "{container}");
    let scraping = documents(&read(&Path::new(env!("CARGO_MANIFEST_DIR")).join("../monitoring/kubernetes.yml")));
    let rules = scraping[0]["scrape_configs"][0]["relabel_configs"].as_array().unwrap();
    let label = "__meta_kubernetes_pod_label_app_kubernetes_io_name";
    let kept = rules.iter().find(|rule| rule["source_labels"][0] == label).unwrap();
    assert_eq!((&kept["action"], &kept["regex"]), (&"keep".into(), &trainer["metadata"]["labels"]["app.kubernetes.io/name"]));
}

#[test]
fn the_addresses_of_deployed_engines_take_precedence_over_given_ones() {
    let given = [&ENGINES[..], &["engine.urls=[\"http://x:1\"]"]].concat();
    for sets in [&ENGINES[..], &given[..]] {
        let compose = documents(&dry("compose", sets));
        let trainer = &compose[0]["services"]["trainer-0"];
        let words = trainer["entrypoint"].to_string();
        assert!(words.contains("engine.kind=vllm") && !words.contains("engine.urls"), "{words}");
        let urls = trainer["environment"]["ROLLFLOW__ENGINE__URLS"].as_str().unwrap();
        assert_eq!(urls, "[\"http://engine-0:8400\", \"http://engine-1:8400\"]");
    }
    let sets = [&["engine={kind=\"vllm\"}"], &ENGINES[1..]].concat();
    let refused = rollflow(&with_sets(&["deploy", "compose", RECIPE, "--dry-run"], &sets));
    assert!(refused.code == Some(2) && refused.err.contains("set its keys, such as engine.kind=vllm"), "{refused:?}");
}

#[test]
fn no_two_containers_of_a_machine_get_the_same_gpu() {
    let gpus = ["deploy.ranks=2", "deploy.gpus=1", "deploy.engines.gpus=2"];
    let compose = documents(&dry("compose", &[&gpus[..], &ENGINES[..]].concat()));
    let ids = |service: &str| {
        let devices = &compose[0]["services"][service]["deploy"]["resources"]["reservations"]["devices"];
        devices[0]["device_ids"].as_array().unwrap().iter().map(|id| id.as_str().unwrap().to_owned()).collect::<Vec<_>>()
    };
    let all: Vec<String> = ["trainer-0", "trainer-1", "engine-0", "engine-1"].into_iter().flat_map(ids).collect();
    assert_eq!(all, ["0", "1", "2", "3", "4", "5"]);
}

#[test]
fn settings_that_contradict_each_other_or_hold_a_secret_are_refused_before_anything_is_written() {
    for (sets, why) in [
        (&["deploy.ranks=3", "deploy.hosts=2"][..], "choose a multiple"),
        (&["deploy.engines.count=1"], "set engine.kind"),
        (&["deploy.env=[\"API_TOKEN=abc\"]"], "name those in deploy.secrets"),
        (&["deploy.slurm.partition=\"a\\n#SBATCH --uid=0\""], "letters, digits"),
        (&["deploy.rank=2"], "did you mean `ranks`"),
    ] {
        let refused = rollflow(&with_sets(&["deploy", "slurm", RECIPE, "--dry-run"], sets));
        assert!(refused.code == Some(2) && refused.err.contains(why) && refused.out.is_empty(), "{why}: {refused:?}");
    }
    let refused = rollflow(&["deploy", "slurm", "../outside.toml", "--dry-run"]);
    assert_eq!(refused.code, Some(2), "{refused:?}");
    for place in ["gpu1", "-oProxyCommand=id:run", "gpu1:a;b"] {
        let refused = rollflow(&["deploy", "status", "--", place]);
        assert_eq!(refused.code, Some(2), "{refused:?}");
    }
}

#[test]
fn a_file_that_was_edited_is_not_overwritten() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("run.sbatch");
    let write = || rollflow(&["deploy", "slurm", RECIPE, "--out", file.to_str().unwrap()]);
    assert!(write().code == Some(0) && write().code == Some(0), "the same again");
    fs::write(&file, "mine").unwrap();
    let refused = write();
    assert!(refused.code == Some(2) && refused.err.contains("exists and differs"), "{refused:?}");
    assert_eq!(read(&file), "mine");
}

#[test]
fn a_run_by_ssh_is_one_detached_process_per_rank_and_engine() {
    let sets =
        [&["deploy.ranks=4", "deploy.runs=\"/shared\"", "deploy.ssh.engine_hosts=[\"c\",\"d\"]"][..], &ENGINES[..]].concat();
    let ended = rollflow(&with_sets(&["deploy", "ssh", "a,me@b", RECIPE, "--dry-run"], &sets)).ok();
    let heads: Vec<&str> =
        ended.out.lines().filter_map(|line| line.strip_prefix("# ")).filter(|line| line.contains(':')).collect();
    let name = "grpo-addition";
    let all = [
        format!("c:{name}-engine-0"),
        format!("d:{name}-engine-1"),
        format!("a:{name}"),
        format!("a:{name}-rank-1"),
        format!("me@b:{name}-rank-2"),
        format!("me@b:{name}-rank-3"),
    ];
    assert_eq!(heads, all);
    for part in
        ["export MASTER_ADDR=a\n", "export RANK=3\n", "export LOCAL_RANK=1\n", "export LOCAL_WORLD_SIZE=2\n", "http://d:8400"]
    {
        assert!(ended.out.contains(part), "{part} is missing:\n{}", ended.out);
    }
}

/// With an `ssh` that runs its commands on this machine.
#[test]
fn a_run_by_ssh_that_starts_again_keeps_its_engines() {
    let folder = tempfile::tempdir().unwrap();
    let home = folder.path().join("home");
    let ssh = "for last; do :; done\ncase \" $* \" in *' -G '*) echo \"hostname $last\"; exit ;; esac\n\
               mkdir -p home\nHOME=$PWD/home exec sh -c \"$last\"";
    let path = programs(folder.path(), &[("ssh", ssh), ("train", "exit 0")]);
    let program = format!("deploy.program={:?}", folder.path().join("train"));
    let sets = [
        "engine.kind=vllm",
        "deploy.engines.count=1",
        "deploy.engines.command=[\"sleep\",\"100\"]",
        "deploy.ssh.engine_hosts=[\"b\"]",
        &program,
    ];
    let deploy = |words: &[&str]| rollflow_with(&with_sets(&[&["deploy"], words].concat(), &sets), &[("PATH", &path)]);
    let runs = home.join(".rollflow/runs");
    let engine = runs.join("grpo-addition-engine-0/pid");
    deploy(&["ssh", "a", RECIPE]).ok();
    let started = read(&engine);
    wait_for(&runs.join("grpo-addition/exit"));
    // The lock is free a moment later.
    let lock = runs.join("grpo-addition/lock");
    assert!(Command::new("flock").args(["-w", "60"]).arg(&lock).arg("true").status().unwrap().success());
    let again = deploy(&["ssh", "a", RECIPE]);
    let stopped = deploy(&["stop", "b:grpo-addition-engine-0"]);
    assert_eq!(again.code, Some(0), "{}", again.err);
    for part in ["b:grpo-addition-engine-0 runs already and is kept", "started a:grpo-addition"] {
        assert!(again.err.contains(part), "{part} is missing: {}", again.err);
    }
    assert!(!again.err.contains("started b:") && !started.is_empty(), "{}", again.err);
    assert_eq!(read(&engine), started, "the same process");
    let log = read(&runs.join("grpo-addition/log"));
    assert_eq!(log.lines().filter(|line| *line == "rollflow deploy: started").count(), 2, "a line for each start: {log}");
    stopped.ok();
}

/// With an `ssh` that runs its commands on this machine, unless a file in its folder makes host b fail.
#[test]
fn ranks_start_once_all_hosts_are_prepared_and_those_that_wait_for_another_are_named() {
    let folder = tempfile::tempdir().unwrap();
    let ssh = "for last; do :; done\ncase \" $* \" in\n*' -G '*) echo \"hostname $last\"; exit ;;\n\
               *' -- b '*'setsid ./start'*) [ ! -e stuck ] || exit 1 ;;\n*' -- b '*) [ ! -e away ] || exit 255 ;;\nesac\n\
               mkdir -p home\nHOME=$PWD/home exec sh -c \"$last\"";
    let path = programs(folder.path(), &[("ssh", ssh), ("train", "exit 0")]);
    let program = format!("deploy.program={:?}", folder.path().join("train"));
    let shared = format!("deploy.runs={:?}", folder.path().join("shared"));
    let sets = ["deploy.ranks=2", &program, &shared];
    let deploy = || rollflow_with(&with_sets(&["deploy", "ssh", "a,b", RECIPE], &sets), &[("PATH", &path)]);
    let log = folder.path().join("home/.rollflow/runs/grpo-addition/log");

    fs::write(folder.path().join("away"), "").unwrap();
    let refused = deploy();
    assert!(refused.code == Some(1) && refused.err.contains("could not reach b"), "{refused:?}");
    assert!(!refused.err.contains("started a:") && !log.exists(), "rank 0 is not started: {refused:?}");

    fs::rename(folder.path().join("away"), folder.path().join("stuck")).unwrap();
    let failed = deploy();
    assert_eq!(failed.code, Some(1), "{failed:?}");
    for part in ["b:grpo-addition-rank-1 did not start", "\n  rollflow deploy stop a:grpo-addition\n"] {
        assert!(failed.err.contains(part), "{part:?} is missing: {}", failed.err);
    }
    assert!(log.exists(), "rank 0 was started");
}
