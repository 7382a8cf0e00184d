//! Trackers of a run get each step once, also after a kill and a resume, and none of them ends a run. `scripts/trackers.sh` has the real ones; here a module
//! of the name `wandb` writes its calls into a file.

use std::path::Path;

use crate::running::{GRPO, Running, json_lines, rollflow, rollflow_with, rows, run_args, with_sets};

const MODULE: &str = "
import json, os, sys
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
    def finish(self):
        tell('finished')
def init(**settings):
    tell([settings[key] for key in ['project', 'id', 'resume']])
    return Run()
";

fn module(folder: &Path) -> [String; 2] {
    let modules = folder.join("modules");
    std::fs::create_dir_all(&modules).unwrap();
    std::fs::write(modules.join("wandb.py"), MODULE).unwrap();
    [modules, folder.join("told")].map(|path| path.to_str().unwrap().to_owned())
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
    assert_eq!(lines.last().unwrap(), "finished");
    let logged: Vec<_> = lines.iter().filter(|line| line[0].is_u64() && line[2].is_f64()).collect();
    let rows = rows(&run);
    assert_eq!((rows.len(), logged.len()), (steps, steps), "each step once");
    for (logged, row) in logged.iter().zip(&rows) {
        assert_eq!((&logged[0], &logged[2]), (&row["step"], &row["loss"]));
        assert!(logged[1].as_array().unwrap().contains(&"timing/step_seconds".into()), "{logged}");
    }
    let tables: Vec<u64> =
        lines.iter().filter(|line| line[1] == serde_json::json!(["samples"])).map(|line| line[0].as_u64().unwrap()).collect();
    assert!(tables.starts_with(&[1, 4, 8]), "{tables:?}");
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
