//! Starting the binary, watching it, interrupting it.

use std::collections::BTreeMap;
use std::fs;
use std::io::{BufRead, BufReader, PipeReader, PipeWriter, Read, Write, pipe};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::{Duration, Instant};

use rollflow::observe::logs::{Rollout, read_lines};
use rustix::fs::{OFlags, fcntl_setfl};
use serde_json::Value;

use crate::fork_server::{self, BINARY, Process};

/// Nothing here takes long; this is how long a broken binary may hold the tests up.
const PATIENCE: Duration = Duration::from_secs(120);

/// The shipped recipe, of a size that a debug build runs in an instant. A digit is rewarded, so that even a random model earns something.
pub const TINY: [&str; 14] = [
    "model.hidden=16",
    "model.layers=1",
    "model.heads=2",
    "model.kv_heads=1",
    "model.intermediate=32",
    "sft.steps=2",
    "sft.batch=4",
    "train.steps=3",
    "batch.groups=4",
    "generate.group_size=4",
    "generate.max_num_seqs=8",
    "reward={kind=\"regex\",pattern=\"[0-9]\"}",
    "filter=[]",
    "flow.max_staleness=0",
];

/// Those of [`TINY`] that make the model.
pub const TINY_MODEL: &[&str] = TINY.as_slice().split_at(5).0;

pub const GRPO: &str = "pipelines/recipes/grpo.toml";
pub const SFT: &str = "pipelines/recipes/sft.toml";

/// How a command ended.
#[derive(Debug)]
pub struct Ended {
    pub code: Option<i32>,
    pub out: String,
    pub err: String,
}

impl Ended {
    /// Asserts that it succeeded; if not, its errors are shown.
    #[track_caller]
    pub fn ok(self) -> Self {
        assert_eq!(self.code, Some(0), "{}", self.err);
        self
    }
}

/// The command with these arguments, started in the project's folder.
pub fn command(args: &[&str]) -> Command {
    let mut command = Command::new(BINARY);
    // No test asks the public hub.
    command.current_dir(concat!(env!("CARGO_MANIFEST_DIR"), "/..")).env("HF_HUB_OFFLINE", "1").args(args);
    command
}

/// `args` and `--set SET` for each of `sets`.
pub fn with_sets<'a>(args: &[&'a str], sets: &'a [impl AsRef<str>]) -> Vec<&'a str> {
    args.iter().copied().chain(sets.iter().flat_map(|set| ["--set", set.as_ref()])).collect()
}

/// `run RECIPE --out OUT` with `sets`.
pub fn plain_run_args<'a>(recipe: &'a str, out: &'a Path, sets: &'a [impl AsRef<str>]) -> Vec<&'a str> {
    with_sets(&["run", recipe, "--out", out.to_str().unwrap()], sets)
}

/// `run RECIPE --out OUT` with the tiny values and `sets` after them.
pub fn run_args<'a>(recipe: &'a str, out: &'a Path, sets: &'a [&'a str]) -> Vec<&'a str> {
    with_sets(&plain_run_args(recipe, out, &TINY), sets)
}

/// Runs to the end.
pub fn rollflow(args: &[&str]) -> Ended {
    ended(&mut command(args))
}

/// A finished run of the shipped recipe with these values: made once for all tests that ask for it, and
/// copied to `to`.
pub fn finished(to: &Path, sets: &[&str]) {
    /// By values: the folder, and whether the run in it has ended.
    type Made = BTreeMap<String, Arc<(PathBuf, OnceLock<()>)>>;
    static MADE: Mutex<Made> = Mutex::new(BTreeMap::new());
    let mut made = MADE.lock().unwrap();
    let place = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("finished_run_{}", made.len()));
    let run = made.entry(sets.join(" ")).or_insert_with(|| Arc::new((place, OnceLock::new()))).clone();
    drop(made);
    let (place, done) = &*run;
    done.get_or_init(|| {
        let _none = fs::remove_dir_all(place);
        rollflow(&run_args(GRPO, place, sets)).ok();
    });
    copy(place, to);
}

fn copy(from: &Path, to: &Path) {
    fs::create_dir_all(to).unwrap();
    for entry in fs::read_dir(from).unwrap() {
        let (path, to) = (entry.as_ref().unwrap().path(), to.join(entry.unwrap().file_name()));
        if path.is_dir() {
            copy(&path, &to);
        } else {
            fs::copy(&path, &to).unwrap();
        }
    }
}

/// Runs to the end with these variables in its environment.
pub fn rollflow_with(args: &[&str], variables: &[(&str, &str)]) -> Ended {
    ended(command(args).envs(variables.iter().copied()))
}

/// Runs to the end in a shell that does `first` before.
pub fn rollflow_after(first: &str, args: &[&str]) -> Ended {
    let plain = command(args);
    let mut shell = Command::new("sh");
    shell.args(["-c", &format!("{first}; exec \"$0\" \"$@\"")]).arg(plain.get_program()).args(plain.get_args());
    ended(shell.current_dir(plain.get_current_dir().unwrap()))
}

fn ended(command: &mut Command) -> Ended {
    let output = fork_server::output(command);
    let text = |bytes| String::from_utf8(bytes).unwrap();
    Ended { code: output.status.code(), out: text(output.stdout), err: text(output.stderr) }
}

/// A command that runs. Killed if a test gives up on it.
pub struct Running {
    process: Process,
    lines: Receiver<String>,
    /// The standard output of a command that waits for a reader, and where its lines go.
    unread: Option<(PipeReader, Sender<String>)>,
}

impl Running {
    pub fn start(args: &[&str]) -> Self {
        Self::start_with(args, &[])
    }

    /// The same, with these environment variables.
    pub fn start_with(args: &[&str], variables: &[(&str, &str)]) -> Self {
        let mut command = command(args);
        command.envs(variables.iter().copied());
        let mut running = Self::start_on(&command, pipe().unwrap());
        running.read_on();
        running
    }

    /// The same; after `room` bytes on standard output it waits until [`Self::read_on`].
    pub fn start_unread(args: &[&str], room: usize) -> Self {
        let (mut out, mut out_end) = pipe().unwrap();
        fcntl_setfl(&out_end, OFlags::NONBLOCK).unwrap();
        while out_end.write(&[b'\n'; 4096]).is_ok() {}
        out.read_exact(&mut vec![0; room]).unwrap();
        Self::start_on(&command(args), (out, out_end))
    }

    fn start_on(command: &Command, (out, out_end): (PipeReader, PipeWriter)) -> Self {
        let (error, error_end) = pipe().unwrap();
        let process = Process::start(command, out_end, error_end);
        let (send, lines) = channel();
        forward(error, send.clone());
        Running { process, lines, unread: Some((out, send)) }
    }

    /// Reads standard output from now on.
    pub fn read_on(&mut self) {
        self.unread.take().into_iter().for_each(|(out, to)| forward(out, to));
    }

    /// Waits for a line, on either stream, that `pick` makes something of.
    pub fn line<T>(&mut self, pick: impl Fn(&str) -> Option<T>) -> T {
        let mut seen = Vec::new();
        while let Ok(line) = self.lines.recv_timeout(PATIENCE) {
            if let Some(found) = pick(&line) {
                return found;
            }
            seen.push(line);
        }
        panic!("the line never came; these did: {seen:?}");
    }

    /// Waits until `done`, while the command runs.
    pub fn until(&mut self, what: &str, mut done: impl FnMut(&Self) -> bool) {
        let deadline = Instant::now() + PATIENCE;
        while !done(self) {
            assert!(Instant::now() < deadline, "it was never seen that {what}");
            assert_eq!(self.process.try_wait(), None, "it ended before {what}");
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// Whether there is nothing left to kill.
    pub fn has_ended(&mut self) -> bool {
        self.process.try_wait().is_some()
    }

    /// The processes that it started and that still run.
    pub fn children(&self) -> Vec<u32> {
        let parent = |id: &u32| {
            let stat = read(Path::new(&format!("/proc/{id}/stat")));
            stat.rsplit_once(") ").and_then(|(_, rest)| rest.split(' ').nth(1)?.parse::<u32>().ok())
        };
        let all = fs::read_dir("/proc").unwrap().filter_map(|entry| entry.unwrap().file_name().to_str()?.parse().ok());
        let mut own: Vec<u32> = all.filter(|id| parent(id) == Some(self.process.id)).collect();
        own.sort_unstable();
        own
    }

    /// Its resident memory, in bytes.
    pub fn resident(&self) -> u64 {
        let status = read(Path::new(&format!("/proc/{}/status", self.process.id)));
        let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
        line.trim().trim_end_matches(" kB").parse::<u64>().unwrap() << 10
    }

    /// What Ctrl-C does.
    pub fn interrupt(&self) {
        assert!(self.process.signal("-INT"));
    }

    /// What a launcher or an init system does.
    pub fn terminate(&self) {
        assert!(self.process.signal("-TERM"));
    }

    /// Stops it as a machine that hangs; `false` lets it go on.
    pub fn stand_still(&self, still: bool) {
        assert!(self.process.signal(if still { "-STOP" } else { "-CONT" }));
    }

    /// Waits for its end; gives the exit code.
    pub fn end(mut self) -> Option<i32> {
        let deadline = Instant::now() + PATIENCE;
        loop {
            if let Some(status) = self.process.try_wait() {
                return status.code();
            }
            assert!(Instant::now() < deadline, "it never ended");
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

fn forward(stream: impl Read + Send + 'static, to: Sender<String>) {
    // Read to its end, also when nobody listens any more: a full pipe would hold the command up.
    std::thread::spawn(move || BufReader::new(stream).lines().map_while(Result::ok).for_each(|line| drop(to.send(line))));
}

/// A whole file, or nothing where it isn't there yet.
pub fn read(path: &Path) -> String {
    fs::read_to_string(path).unwrap_or_default()
}

/// The rows of a run's `metrics.jsonl`. Empty if there is no such file yet.
pub fn rows(run: &Path) -> Vec<Value> {
    json_lines(&run.join("metrics.jsonl"))
}

/// The rows of a run's `rollouts.jsonl`.
pub fn rollouts(run: &Path) -> Vec<Rollout> {
    read_lines(run.join("rollouts.jsonl")).unwrap().map(Result::unwrap).collect()
}

/// The values of a JSON-lines file. Empty if there is no such file yet.
pub fn json_lines(path: &Path) -> Vec<Value> {
    read(path).lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}
