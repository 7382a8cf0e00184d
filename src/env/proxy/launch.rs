//! Start of an agent: as a command, or by a request to its address.

use std::io::{Read, Write};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::Arc;
use std::sync::mpsc::Sender;
use std::time::Duration;

use parking_lot::Mutex;
use rustix::io::retry_on_intr;
use rustix::process::{Pid, Signal, WaitId, WaitIdOptions, kill_process_group, waitid};
use serde_json::{Value, json};
use tokio::task::AbortHandle;

use super::Event;
use crate::env::{EnvError, Episode};
use crate::net::{Client, Tasks};
use crate::python::Workers;

/// Timeout of a posted task; the limits of a rollout end it earlier.
const LONGEST: Duration = Duration::from_secs(24 * 3600);
/// Longest end of an agent's output that is kept, in bytes.
const KEPT: usize = 1 << 16;

/// Start of an agent with a prompt.
#[derive(Clone)]
pub(super) enum Launch {
    Command(Vec<String>),
    Post(Client),
    Python(Workers),
}

/// A running agent; dropping it ends it.
pub(super) enum Launched {
    /// None once the process has been waited for.
    Process(Arc<Mutex<Option<Child>>>),
    Request(AbortHandle),
}

impl Launch {
    pub fn begin(
        &self,
        episode: &Episode,
        base: &str,
        model: &str,
        tasks: &Tasks,
        tell: Sender<Event>,
    ) -> Result<Launched, EnvError> {
        let task = json!({
            "base_url": base, "prompt": episode.prompt.text, "metadata": episode.prompt.metadata,
            "ordinal": episode.prompt.ordinal, "index": episode.index, "seed": episode.seed,
        });
        match self {
            Launch::Command(command) => start(command, base, task.to_string(), tell),
            Launch::Post(client) => {
                let client = client.clone();
                let posted = tasks.spawn(async move {
                    let answer = client.post("", &task, LONGEST).await.map_err(|error| error.to_string());
                    // The rollout may be over.
                    drop(tell.send(Event::Ended(answer)));
                });
                Ok(Launched::Request(posted))
            }
            Launch::Python(workers) => {
                let (workers, mut question) = (workers.clone(), task);
                (question["do"], question["model"]) = (json!("run"), json!(model));
                let asked = tasks.spawn(async move {
                    let answer = workers.play(question, LONGEST).await.map_err(|error| error.to_string());
                    // The rollout may be over.
                    drop(tell.send(Event::Ended(answer)));
                });
                Ok(Launched::Request(asked))
            }
        }
    }
}

fn start(command: &[String], base: &str, task: String, tell: Sender<Event>) -> Result<Launched, EnvError> {
    let (program, arguments) = command.split_first().ok_or_else(|| EnvError::new("the agent's command is empty"))?;
    let mut started = Command::new(program)
        .args(arguments)
        .env("OPENAI_BASE_URL", base)
        .env("OPENAI_API_KEY", "none")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .process_group(0)
        .spawn()
        .map_err(|error| EnvError::new(format!("the agent's command {program} can't be started: {error}")))?;
    let (stdin, stdout, stderr) = (started.stdin.take(), started.stdout.take(), started.stderr.take());
    let id = Pid::from_child(&started);
    let process = Arc::new(Mutex::new(Some(started)));
    let running = process.clone();
    std::thread::spawn(move || {
        let complaint = std::thread::spawn(move || end_of(stderr));
        let output = std::thread::spawn(move || {
            if let Some(mut stdin) = stdin {
                // An agent may ignore its input.
                drop(stdin.write_all(task.as_bytes()));
            }
            end_of(stdout)
        });
        // Waits for the exit only, so that the id stays valid until the group is ended.
        retry_on_intr(|| waitid(WaitId::Pid(id), WaitIdOptions::EXITED | WaitIdOptions::NOWAIT)).ok();
        // None if the rollout has ended.
        let Some(process) = running.lock().take() else { return };
        let status = end(process);
        // Processes that the agent left running held its output open.
        let (output, complaint) = (output.join().unwrap_or_default(), complaint.join().unwrap_or_default());
        let said = output.trim_end().lines().last().and_then(|line| serde_json::from_str::<Value>(line).ok());
        let ended = match status {
            Ok(status) if status.success() => Ok(said.filter(Value::is_object).unwrap_or(Value::Null)),
            Ok(status) => Err(format!("{status}: {}", complaint.trim_end().lines().last().unwrap_or("it said nothing"))),
            Err(error) => Err(error.to_string()),
        };
        drop(tell.send(Event::Ended(ended)));
    });
    Ok(Launched::Process(process))
}

/// Reads to the end and returns the last part.
fn end_of(from: Option<impl Read>) -> String {
    let Some(mut from) = from else { return String::new() };
    let (mut kept, mut buffer) = (Vec::new(), [0; 8192]);
    while let Ok(read @ 1..) = from.read(&mut buffer) {
        kept.extend_from_slice(&buffer[..read]);
        if kept.len() > 2 * KEPT {
            kept.drain(..kept.len() - KEPT);
        }
    }
    String::from_utf8_lossy(&kept).into_owned()
}

/// Ends a process and its group. The group's id is valid until the process is waited for.
fn end(mut process: Child) -> std::io::Result<ExitStatus> {
    if let Err(error) = kill_process_group(Pid::from_child(&process), Signal::KILL) {
        // Some systems say so of a group that has ended already.
        tracing::debug!("the agent's processes could not be ended: {error}");
    }
    process.wait()
}

impl Drop for Launched {
    fn drop(&mut self) {
        match self {
            Launched::Request(request) => request.abort(),
            Launched::Process(process) => {
                if let Some(process) = process.lock().take() {
                    drop(end(process));
                }
            }
        }
    }
}
