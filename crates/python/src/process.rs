//! One Python process that answers questions.

use std::collections::{BTreeMap, VecDeque};
use std::process::Stdio;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use rollflow_net::Tasks;
use rollflow_util::untrusted;
use rustix::io::retry_on_intr;
use rustix::process::{Pid, Signal, WaitId, WaitIdOptions, kill_process_group, waitid};
use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::process::{Child, ChildStderr, ChildStdin, ChildStdout};
use tokio::sync::{mpsc, oneshot, watch};
use tokio::task::spawn_blocking;
use tokio::time::timeout;

use super::PythonError;

/// Modules of `python/rollflow` that a process loads, in the order in which they import each other;
/// the one without a name is the package.
const MODULES: [(&str, &str); 10] = [
    ("loading", include_str!("../../../python/rollflow/loading.py")),
    ("rewards", include_str!("../../../python/rollflow/rewards.py")),
    ("tools", include_str!("../../../python/rollflow/tools.py")),
    ("environments", include_str!("../../../python/rollflow/environments.py")),
    ("verifiers_env", include_str!("../../../python/rollflow/verifiers_env.py")),
    ("openenv_env", include_str!("../../../python/rollflow/openenv_env.py")),
    ("sources", include_str!("../../../python/rollflow/sources.py")),
    ("running", include_str!("../../../python/rollflow/running.py")),
    ("", include_str!("../../../python/rollflow/__init__.py")),
    ("worker", include_str!("../../../python/rollflow/worker.py")),
];

/// Loads the modules from the first line of standard input, so that no file is written.
const BOOTSTRAP: &str = "\
import json, os, sys, types
questions = os.fdopen(os.dup(0), 'rb')
package = sys.modules['rollflow'] = types.ModuleType('rollflow')
package.__path__ = []
for name, source in json.loads(questions.readline()):
    full = 'rollflow.' + name if name else 'rollflow'
    module = sys.modules.setdefault(full, types.ModuleType(full))
    module.__package__ = 'rollflow'
    exec(compile(source, '<' + full + '>', 'exec'), module.__dict__)
    if name:
        setattr(package, name, module)
sys.modules['rollflow.worker'].main(questions)
";

/// Longest answer, in bytes.
const LONGEST: u64 = 64 << 20;
/// Longest wait for the exit of a process that closed its output.
const ENDING: Duration = Duration::from_secs(1);
/// Lines of a process's output that its end is explained with.
const LAST_LINES: usize = 8;
/// Lines of output that are logged in a second; the others are counted.
const LINES_PER_SECOND: usize = 50;

/// Start of a process.
pub(super) struct Command {
    pub python: String,
    /// File and what it defines, for errors.
    pub name: String,
    /// What the process loads: `serving` in `python/rollflow/worker.py`.
    pub loads: Value,
    pub load_timeout: Duration,
}

/// A running process. Dropping it ends it.
pub(super) struct Process {
    name: String,
    questions: mpsc::UnboundedSender<Vec<u8>>,
    shared: Arc<Shared>,
    next: AtomicU64,
    traits: Traits,
}

/// Properties of what a process serves.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Traits {
    /// If true, it answers several questions at the same time.
    pub concurrent: bool,
    /// If true, its function takes the tokens of completions.
    pub takes_tokens: bool,
    /// If true, its function takes the completions of a group as a list.
    pub takes_groups: bool,
    /// Columns of the data that its function can't do without.
    pub needs: Vec<String>,
}

type Answer = Result<Value, PythonError>;

/// State that a process's tasks share with those that ask it.
struct Shared {
    name: String,
    /// Its number, which is also that of the group with the processes that it starts.
    group: Pid,
    waiting: Mutex<BTreeMap<u64, oneshot::Sender<Answer>>>,
    /// Reason why it ended.
    ended: Mutex<Option<String>>,
    /// Its last lines of output.
    output: Mutex<VecDeque<String>>,
    /// True once its output has ended.
    silent: watch::Sender<bool>,
}

impl Command {
    /// Starts a process as tasks of `tasks`, and waits until it has loaded the file. Runs on the
    /// runtime of `tasks`.
    pub async fn start(&self, tasks: &Tasks) -> Result<Process, PythonError> {
        let cannot = |why: &str| PythonError::Start { python: self.python.clone(), why: why.to_owned() };
        let mut command = tokio::process::Command::new(&self.python);
        command.args(["-u", "-c", BOOTSTRAP, &self.name]).kill_on_drop(true).process_group(0);
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().map_err(|error| cannot(&error.to_string()))?;
        let group = child.id().and_then(|id| Pid::from_raw(id.cast_signed())).ok_or_else(|| cannot("it ended immediately"))?;
        let (Some(stdin), Some(stdout), Some(stderr)) = (child.stdin.take(), child.stdout.take(), child.stderr.take()) else {
            return Err(cannot("it has no pipes"));
        };
        let shared = Arc::new(Shared {
            name: self.name.clone(),
            group,
            waiting: Mutex::default(),
            ended: Mutex::default(),
            output: Mutex::default(),
            silent: watch::Sender::new(false),
        });
        let (questions, asked) = mpsc::unbounded_channel();
        tasks.spawn(write(stdin, asked));
        tasks.spawn(log(BufReader::new(stderr), shared.clone()));
        let next = AtomicU64::new(0);
        let mut process = Process { name: self.name.clone(), questions, shared: shared.clone(), next, traits: Traits::default() };
        process.send(&json!(MODULES));
        process.send(&self.loads);
        let mut answers = BufReader::new(stdout);
        let failed = |why: String| PythonError::Load { name: self.name.clone(), python: self.python.clone(), why };
        let seconds = self.load_timeout.as_secs_f64();
        let first = timeout(self.load_timeout, line(&mut answers)).await;
        match first.map_err(|_| failed(format!("it took more than {seconds} s (load_timeout)")))? {
            None => Err(failed(shared.end(child).await)),
            Some(first) if first["failed"].is_string() => {
                Err(failed(untrusted::block(first["failed"].as_str().unwrap_or_default())))
            }
            Some(first) => {
                let ready = &first["ready"];
                let is = |key: &str| ready[key].as_bool().unwrap_or_default();
                let needs = ready["needs"].as_array().into_iter().flatten().filter_map(|name| name.as_str().map(str::to_owned));
                process.traits = Traits {
                    concurrent: is("concurrent"),
                    takes_tokens: is("tokens"),
                    takes_groups: is("groups"),
                    needs: needs.collect(),
                };
                tasks.spawn(read(answers, child, shared));
                Ok(process)
            }
        }
    }
}

impl Process {
    /// Properties of what it serves.
    pub fn traits(&self) -> &Traits {
        &self.traits
    }

    /// Returns the reason why it ended; none if it still runs.
    pub fn ended(&self) -> Option<String> {
        self.shared.ended.lock().clone()
    }

    /// Asks a question, which is an object. After `limit` without an answer the process is ended, with
    /// all other questions in it, because a call in Python can't be interrupted.
    pub async fn ask(&self, mut question: Value, limit: Duration) -> Answer {
        let id = self.next.fetch_add(1, Ordering::Relaxed);
        question["id"] = json!(id);
        let (answer, answered) = oneshot::channel();
        self.shared.waiting.lock().insert(id, answer);
        if let Some(why) = self.ended() {
            return Err(PythonError::Ended { name: self.name.clone(), why });
        }
        self.send(&question);
        match timeout(limit, answered).await {
            Ok(Ok(answer)) => answer,
            Ok(Err(_)) => Err(PythonError::Ended { name: self.name.clone(), why: "the run ends".to_owned() }),
            Err(_) => {
                let seconds = limit.as_secs_f64();
                self.end(format!("a call in it took more than {seconds:.1} s, which is its timeout"));
                Err(PythonError::Late { name: self.name.clone(), seconds })
            }
        }
    }

    fn send(&self, question: &Value) {
        let mut line = question.to_string().into_bytes();
        line.push(b'\n');
        // If the process has ended, its reader answers.
        drop(self.questions.send(line));
    }

    /// Ends the process and those that it started.
    fn end(&self, why: String) {
        let mut ended = self.shared.ended.lock();
        if ended.is_some() {
            return;
        }
        *ended = Some(why);
        self.shared.kill();
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.end("the run ends".to_owned());
    }
}

impl Shared {
    /// Kills the process and those that it started.
    fn kill(&self) {
        if let Err(error) = kill_process_group(self.group, Signal::KILL) {
            tracing::warn!("{}: its processes could not be ended: {error}", self.name);
        }
    }

    /// Waits for the end of the process, ends those that it started, and returns the reason, which its
    /// callers read.
    async fn end(&self, mut child: Child) -> String {
        let group = self.group;
        // The process stays a zombie until `child` is waited for: its number can't be that of another group.
        let exits = move || waitid(WaitId::Pid(group), WaitIdOptions::EXITED | WaitIdOptions::NOWAIT);
        let gone = spawn_blocking(move || retry_on_intr(exits));
        // User code may close the pipe and stay.
        let gone = timeout(ENDING, gone).await.is_ok();
        self.kill();
        let status = if gone {
            child.wait().await.map_or_else(|error| error.to_string(), |status| status.to_string())
        } else {
            drop(child.kill().await);
            "it wrote something else than answers, or closed its output, and was ended".to_owned()
        };
        // Its last lines may still be in the pipe. A process that left the group may keep that open.
        drop(timeout(ENDING, self.silent.subscribe().wait_for(|silent| *silent)).await);
        let output: Vec<String> = self.output.lock().iter().cloned().collect();
        let why = if output.is_empty() { status } else { format!("{status}; its last lines: {}", output.join("\n")) };
        let why = self.ended.lock().get_or_insert(why).clone();
        for (_, answer) in std::mem::take(&mut *self.waiting.lock()) {
            // A caller may have given up.
            drop(answer.send(Err(PythonError::Ended { name: self.name.clone(), why: why.clone() })));
        }
        why
    }
}

async fn write(mut stdin: ChildStdin, mut questions: mpsc::UnboundedReceiver<Vec<u8>>) {
    while let Some(question) = questions.recv().await {
        if stdin.write_all(&question).await.is_err() {
            return;
        }
    }
}

/// Reads answers until the process ends.
async fn read(mut answers: BufReader<ChildStdout>, child: Child, shared: Arc<Shared>) {
    while let Some(mut reply) = line(&mut answers).await {
        let waiting = reply["id"].as_u64().and_then(|id| shared.waiting.lock().remove(&id));
        let answer = match reply["error"].as_str() {
            Some(why) => Err(PythonError::Failed { name: shared.name.clone(), traceback: untrusted::block(why) }),
            None => Ok(reply["answer"].take()),
        };
        if let Some(waiting) = waiting {
            // The caller may have given up.
            drop(waiting.send(answer));
        }
    }
    shared.end(child).await;
}

/// Returns the next line as JSON; none at the end of the output, or if user code wrote to the pipe.
async fn line(from: &mut BufReader<ChildStdout>) -> Option<Value> {
    let mut line = Vec::new();
    from.take(LONGEST).read_until(b'\n', &mut line).await.ok()?;
    serde_json::from_slice(&line).ok()
}

/// Logs what user code prints, and keeps the last lines.
async fn log(mut from: BufReader<ChildStderr>, shared: Arc<Shared>) {
    let (mut second, mut lines, mut line) = (Instant::now(), 0, Vec::new());
    while let Ok(1..) = (&mut from).take(LONGEST).read_until(b'\n', &mut line).await {
        let text = untrusted::line(String::from_utf8_lossy(&line).trim_end());
        line.clear();
        if second.elapsed() >= Duration::from_secs(1) {
            if lines > LINES_PER_SECOND {
                tracing::info!("{}: {} more lines", shared.name, lines - LINES_PER_SECOND);
            }
            (second, lines) = (Instant::now(), 0);
        }
        lines += 1;
        if lines <= LINES_PER_SECOND {
            tracing::info!("{}: {text}", shared.name);
        }
        let mut output = shared.output.lock();
        output.push_back(text);
        if output.len() > LAST_LINES {
            output.pop_front();
        }
    }
    shared.silent.send_replace(true);
}
