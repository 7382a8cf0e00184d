//! Trackers of a run get each step once, also after a kill and a resume, and none of them ends a run. `scripts/trackers.sh` has the real ones; here modules
//! of their names write their calls into a file.

use std::fs::File;
use std::path::Path;

use serde_json::{Value, json};

use crate::running::{GRPO, Running, finished, json_lines, rollflow, rollflow_with, rows, run_args, with_sets};

const WANDB: &str = "
import json, os
if os.environ.get('BROKEN') == 'import':
    raise ImportError('no such package')
FILE = os.environ['TOLD']
def tell(what):
    with open(FILE, 'a') as file:
        file.write(json.dumps(what) + chr(10))
class Table:
    def __init__(self, columns, data):
        self.rows = data
class Run:
    id = 'the-run'
    def log(self, values, step):
        if os.environ.get('BROKEN') == 'log':
            raise ConnectionError('the service is down')
        tell([step, sorted(values), len(values['samples'].rows) if 'samples' in values else values['loss']])
    def finish(self, exit_code):
        tell(['ended', exit_code])
def init(**settings):
    tell([settings[key] for key in ['project', 'id', 'resume', 'name']])
    return Run()
";

/// With the limits of the real one.
const MLFLOW: &str = "
import re, types
from wandb import tell
def checked(values):
    assert all(re.fullmatch(r'[0-9A-Za-z_\\-. :/]+', key) for key in values), f'invalid name: {values}'
    return sorted(values)
def set_experiment(name):
    pass
def start_run(run_id, run_name):
    return types.SimpleNamespace(info=types.SimpleNamespace(run_id='the-run'))
def log_params(params):
    assert len(params) <= 100, 'too many params'
    tell(['params', checked(params)])
def log_metrics(values, step):
    tell([step, checked(values)])
def end_run(status):
    tell(['ended', status])
";

const TRACKIO: &str = "
from wandb import tell
def init(project, name, resume, config):
    tell([name, resume])
def log(values, step):
    pass
def finish():
    pass
";

fn module(folder: &Path) -> [String; 2] {
    let modules = folder.join("modules");
    std::fs::create_dir_all(&modules).unwrap();
    for (name, text) in [("wandb.py", WANDB), ("mlflow.py", MLFLOW), ("trackio.py", TRACKIO)] {
        std::fs::write(modules.join(name), text).unwrap();
    }
    [modules, folder.join("told")].map(|path| path.to_str().unwrap().to_owned())
}

/// Logs the ended run in `path` to a tracker, and returns the calls of its module.
fn tracked(folder: &Path, path: &Path, tracker: &str) -> Vec<Value> {
    let [modules, told] = module(folder);
    std::fs::write(&told, "").unwrap();
    let variables = [("PYTHONPATH", modules.as_str()), ("TOLD", told.as_str())];
    rollflow_with(&["track", path.to_str().unwrap(), "--set", tracker], &variables).ok();
    json_lines(Path::new(&told))
}

/// The steps of these calls in which losses were logged.
fn steps(lines: &[Value]) -> Vec<u64> {
    lines.iter().filter(|line| line[2].is_f64()).filter_map(|line| line[0].as_u64()).collect()
}

const SETS: [&str; 4] =
    ["observe.wandb={project='sums', samples=3}", "flow.max_staleness=0", "checkpoint.every=2", "observe.rollouts_every=4"];

#[test]
fn a_tracker_gets_each_step_once_and_goes_on_after_a_kill() {
    let folder = tempfile::tempdir().unwrap();
    let [modules, told] = module(folder.path());
    let run = folder.path().join("run");
    let read = || std::fs::read_to_string(&told).unwrap_or_default();
    let variables = [("PYTHONPATH", modules.as_str()), ("TOLD", told.as_str())];
    let sets = [&SETS[..], &["train.steps=1000000", "train.target_reward=9", "train.schedule={kind='constant'}"]].concat();
    let mut running = Running::start_with(&run_args(GRPO, &run, &sets), &variables);
    running.until("some steps were logged", |_| read().lines().count() >= 4);
    drop(running);
    let steps = std::fs::read_to_string(run.join("metrics.jsonl")).unwrap().lines().count() + 5;
    let more = format!("train.steps={steps}");
    rollflow_with(&["resume", run.to_str().unwrap(), "--set", &more], &variables).ok();
    let lines = json_lines(Path::new(&told));
    let begun: Vec<_> = lines.iter().filter(|line| line[0] == "sums").collect();
    assert!(begun.len() >= 2 && begun[0][1].is_null() && begun[1][1] == "the-run", "{begun:?}");
    assert_eq!(lines.last().unwrap(), &json!(["ended", 0]));
    let logged: Vec<_> = lines.iter().filter(|line| line[0].is_u64() && line[2].is_f64()).collect();
    let rows = rows(&run);
    assert_eq!((rows.len(), logged.len()), (steps, steps), "each step once");
    for (logged, row) in logged.iter().zip(&rows) {
        assert_eq!((&logged[0], &logged[2]), (&row["step"], &row["loss"]));
        assert!(logged[1].as_array().unwrap().contains(&"timing/step_seconds".into()), "{logged}");
    }
    let tables: Vec<u64> =
        lines.iter().filter(|line| line[1] == json!(["samples"])).map(|line| line[0].as_u64().unwrap()).collect();
    assert!(tables.starts_with(&[1, 4, 8]), "{tables:?}");
}

#[test]
fn a_tracker_has_the_state_in_which_the_run_ended() {
    let folder = tempfile::tempdir().unwrap();
    let run = folder.path().join("run");
    finished(&run, &[]);
    let record = run.join("run.json");
    let text = std::fs::read_to_string(&record).unwrap();
    // The record of a process that was killed says that it runs.
    for (state, code, status) in [
        ("finished", 0, "FINISHED"),
        ("drained", 0, "KILLED"),
        ("stopped", 1, "KILLED"),
        ("failed", 1, "FAILED"),
        ("running", 1, "FAILED"),
    ] {
        let mut changed: Value = serde_json::from_str(&text).unwrap();
        changed["state"] = state.into();
        std::fs::write(&record, changed.to_string()).unwrap();
        for (tracker, ended) in [("observe.wandb={}", json!(code)), ("observe.mlflow={samples=0}", json!(status))] {
            let lines = tracked(folder.path(), &run, tracker);
            assert_eq!(lines.last(), Some(&json!(["ended", ended])), "{state}");
        }
    }
}

#[test]
fn a_run_that_goes_on_from_a_store_stays_one_run_of_the_tracker() {
    let folder = tempfile::tempdir().unwrap();
    let [modules, told] = module(folder.path());
    let [store, begun, moved] = ["store", "begun", "moved"].map(|name| folder.path().join(name));
    let address = format!("file://{}", store.display());
    let variables = [("PYTHONPATH", modules.as_str()), ("TOLD", told.as_str())];
    let kept = format!("store={{url={address:?}}}");
    let sets = ["observe.wandb={samples=0}", &kept, "checkpoint.every=1"];
    rollflow_with(&run_args(GRPO, &begun, &sets), &variables).ok();
    std::fs::remove_dir_all(&begun).unwrap();
    rollflow_with(&["resume", &address, "--out", moved.to_str().unwrap(), "--set", "train.steps=5"], &variables).ok();
    let lines = json_lines(Path::new(&told));
    let begun: Vec<&Value> = lines.iter().filter(|line| line[0] == "rollflow").collect();
    assert!(begun.len() == 2 && begun[1][1] == "the-run", "{begun:?}");
    let all = steps(&lines);
    assert!(all.iter().is_sorted() && all.last() == Some(&5), "{all:?}");
}

#[test]
fn a_run_that_another_process_works_on_is_followed_until_it_ends() {
    let folder = tempfile::tempdir().unwrap();
    let [modules, told] = module(folder.path());
    let run = folder.path().join("run");
    finished(&run, &[]);
    let record = run.join("run.json");
    let text = std::fs::read_to_string(&record).unwrap();
    let in_state = |state: &str| {
        let mut changed: Value = serde_json::from_str(&text).unwrap();
        changed["state"] = state.into();
        std::fs::write(&record, changed.to_string()).unwrap();
    };
    in_state("running");
    let working = File::open(run.join(".lock")).unwrap();
    working.lock().unwrap();
    let variables = [("PYTHONPATH", modules.as_str()), ("TOLD", told.as_str())];
    let mut track = Running::start_with(&["track", run.to_str().unwrap(), "--set", "observe.wandb={samples=0}"], &variables);
    track.until("its steps were logged", |_| std::fs::read_to_string(&told).unwrap_or_default().lines().count() == 4);
    in_state("finished");
    drop(working);
    assert_eq!(track.end(), Some(0));
    assert_eq!(json_lines(Path::new(&told)).last(), Some(&json!(["ended", 0])));
}

#[test]
fn mlflow_gets_every_part_of_the_reward_and_every_key_of_the_recipe_under_names_that_it_takes() {
    let folder = tempfile::tempdir().unwrap();
    let [run, file] = ["run", "rewards.py"].map(|name| folder.path().join(name));
    std::fs::write(&file, "def reward(completion):\n    return {'reward': 0.5, 'len>3': 1.0, 'f1 (macro)': 0.25}\n").unwrap();
    let reward = format!("reward={{kind=\"python\",file={file:?},function=\"reward\"}}");
    rollflow(&run_args(GRPO, &run, &[&reward])).ok();
    let lines = tracked(folder.path(), &run, "observe.mlflow={samples=0}");
    let names =
        |line: &Value| line[1].as_array().unwrap().iter().map(|name| name.as_str().unwrap().to_owned()).collect::<Vec<_>>();
    let logged: Vec<&Value> = lines.iter().filter(|line| line[0].is_u64()).collect();
    assert_eq!(logged.len(), 3, "{lines:?}");
    for part in ["reward_part_len_3", "reward_part_f1 _macro_", "timing/step_seconds"] {
        assert!(logged.iter().all(|line| names(line).iter().any(|name| name == part)), "{part}: {logged:?}");
    }
    let params: Vec<String> = lines.iter().filter(|line| line[0] == "params").flat_map(names).collect();
    assert!(params.len() > 100 && params.iter().any(|key| key == "train.lr"), "{params:?}");
}

#[test]
fn runs_of_one_recipe_have_names_of_their_own_which_their_resumes_keep() {
    let folder = tempfile::tempdir().unwrap();
    let [one, other] = ["one", "other/one"].map(|name| folder.path().join(name));
    [&one, &other].into_iter().for_each(|run| finished(run, &[]));
    let begun = |run: &Path| tracked(folder.path(), run, "observe.trackio={samples=0}").swap_remove(0);
    let [first, again, another] = [&one, &one, &other].map(|run| begun(run));
    assert!(first[0].as_str().unwrap().starts_with("grpo-addition-one-"), "{first}");
    assert_eq!((&first[1], &again[1], &again[0]), (&json!("never"), &json!("allow"), &first[0]));
    assert!(another[1] == "never" && another[0] != first[0], "trackio finds a run by its name: {another}");
    assert_eq!(tracked(folder.path(), &one, "observe.wandb={}")[0][3], "grpo-addition-one");
}

#[test]
fn the_supervised_part_of_a_run_is_a_run_of_the_tracker_too() {
    let folder = tempfile::tempdir().unwrap();
    let [modules, told] = module(folder.path());
    let run = folder.path().join("mine");
    let variables = [("PYTHONPATH", modules.as_str()), ("TOLD", told.as_str())];
    let sets = ["observe.wandb={samples=0}", "pipeline=\"sft_then_grpo\""];
    rollflow_with(&run_args(GRPO, &run, &sets), &variables).ok();
    let lines = json_lines(Path::new(&told));
    let mut names: Vec<&str> = lines.iter().filter_map(|line| line[3].as_str()).collect();
    names.sort_unstable();
    assert_eq!(names, ["grpo-addition-mine", "grpo-addition-sft-mine"]);
    assert_eq!(steps(&lines), [1, 2, 1, 2, 3]);
    assert_eq!(lines.iter().filter(|line| **line == json!(["ended", 0])).count(), 2, "{lines:?}");
}

#[test]
fn a_tracker_that_is_down_ends_no_run_and_one_that_is_not_installed_starts_none() {
    let folder = tempfile::tempdir().unwrap();
    let [modules, told] = module(folder.path());
    let run = |name: &str, broken: &str| {
        let path = folder.path().join(name);
        let sets = [&SETS[..], &["train.steps=4"]].concat();
        let variables = [("PYTHONPATH", modules.as_str()), ("TOLD", told.as_str()), ("BROKEN", broken)];
        rollflow_with(&run_args(GRPO, &path, &sets), &variables)
    };
    let down = run("down", "log").ok();
    let missing = format!("what is missing is logged by: rollflow track {}", folder.path().join("down").display());
    assert!(down.err.contains("warning: observe.wandb: ") && down.err.contains(&missing), "{}", down.err);
    let path = folder.path().join("down");
    let variables = [("PYTHONPATH", modules.as_str()), ("TOLD", told.as_str()), ("BROKEN", "log")];
    let still = rollflow_with(&["track", path.to_str().unwrap()], &variables);
    assert!(still.code == Some(1) && still.err.contains("observe.wandb: its process ended"), "{}", still.err);
    rollflow_with(&["track", path.to_str().unwrap()], &[("PYTHONPATH", modules.as_str()), ("TOLD", told.as_str())]).ok();
    let lines = std::fs::read_to_string(&told).unwrap();
    assert_eq!(lines.lines().filter(|line| line.contains("grad_norm")).count(), 4, "{lines}");
    let missing = run("missing", "import");
    assert_eq!(missing.code, Some(1));
    assert!(
        missing.err.contains("observe.wandb: python3 can't import wandb: ImportError: no such package; install it there"),
        "{}",
        missing.err
    );
    assert!(!folder.path().join("missing").exists());
    let variables = [("PYTHONPATH", modules.as_str()), ("BROKEN", "import")];
    let checked = rollflow_with(&with_sets(&["check", GRPO], &SETS), &variables);
    assert!(checked.code == Some(2) && checked.err.contains("`observe.wandb`: python3 can't import wandb"), "{}", checked.err);
    let none = rollflow(&["track", path.to_str().unwrap(), "--set", "observe.wandb={python='no-such-python'}"]);
    assert!(none.code == Some(1) && none.err.contains("no-such-python"), "{}", none.err);
}
