//! Trackers of a run: a process each, which follows the run's folder. One that is down neither slows
//! nor ends the run.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, ExitStatus, Stdio};
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use rollflow::observe::Console;
use rollflow::recipe::{Plan, Tracker};
use rollflow::util::causes::full_message;
use rollflow::util::{atomic_file, lock_file, untrusted};

use crate::run::LOCK;

/// Follows a run and logs it.
const PROGRAM: &str = include_str!("../../../python/rollflow/track.py");

/// Folder in the run's own: the state and the output of each tracker.
pub(crate) const FOLDER: &str = "trackers";

/// Interval of the looks whether a process has ended.
const LOOK: Duration = Duration::from_millis(500);
/// First pause before an ended process is started again, and the longest.
const PAUSES: [Duration; 2] = [Duration::from_secs(5), Duration::from_secs(300)];
/// Longest wait at the end of a run.
const PATIENCE: Duration = Duration::from_secs(60);

/// Processes that log a run. Dropping it waits until they have logged everything, for a minute at most.
pub(crate) struct Trackers {
    stop: Vec<Sender<()>>,
    threads: Vec<JoinHandle<()>>,
}

impl Trackers {
    /// Keys of trackers whose interpreter lacks the package, each with the reason.
    pub(crate) fn missing(plan: &Plan) -> Vec<(String, String)> {
        let lacks = |Tracker { kind, python, .. }: Tracker| {
            let python = python.display();
            let run = Command::new(python.to_string()).args(["-c", &format!("import {kind}")]).stdin(Stdio::null()).output();
            let why = match run {
                Ok(found) if found.status.success() => return None,
                Ok(found) => {
                    let told = String::from_utf8_lossy(&found.stderr);
                    format!(
                        "{python} can't import {kind}: {}",
                        untrusted::line_of(told.lines().next_back().unwrap_or_default(), 200)
                    )
                }
                Err(error) => format!("{python} can't be started: {error}"),
            };
            Some((
                format!("observe.{kind}"),
                format!("{why}; install it there (pip install {kind}), or set observe.{kind}.python"),
            ))
        };
        plan.trackers().into_iter().filter_map(lacks).collect()
    }

    /// Checks that no interpreter lacks its package.
    pub(crate) fn check(plan: &Plan) -> Result<()> {
        let missing: Vec<String> = Trackers::missing(plan).into_iter().map(|(key, why)| format!("{key}: {why}")).collect();
        ensure!(missing.is_empty(), missing.join("\n"));
        Ok(())
    }

    /// Starts a process for each tracker of the run in `folder`.
    pub(crate) fn start(plan: &Plan, folder: &Path, console: &Console) -> Result<Self> {
        let mut trackers = Trackers { stop: Vec::new(), threads: Vec::new() };
        for tracker in plan.trackers() {
            let (stop, stopped) = channel();
            let (following, console) = (Following::of(tracker, folder)?, console.clone());
            let name = format!("tracker-{}", following.tracker.kind);
            let work = move || following.keep(&stopped, &console);
            let thread = std::thread::Builder::new().name(name).spawn(work).context("starting the thread of a tracker")?;
            trackers.stop.push(stop);
            trackers.threads.push(thread);
        }
        Ok(trackers)
    }

    /// Logs what the trackers of a run miss, all of them at a time and however long it takes. A run that
    /// another process works on is followed until it ends.
    pub(crate) fn catch_up(plan: &Plan, folder: &Path) -> Result<()> {
        let all = plan.trackers().into_iter().map(|tracker| Following::of(tracker, folder)).collect::<Result<Vec<_>>>()?;
        let mut begun: Vec<_> = all.iter().map(|following| following.spawn(false)).collect();
        let mut follows = || begun.iter_mut().flatten().any(|(process, _)| matches!(process.try_wait(), Ok(None)));
        while lock_file::is_taken(&folder.join(LOCK)) && follows() {
            std::thread::sleep(LOOK);
        }
        // Without input, a process ends when it has logged everything.
        let begun: Vec<_> = begun.into_iter().map(|begun| begun.map(|(process, _)| process)).collect();
        let failed = |(following, begun): (&Following, Result<Child>)| {
            let why = match begun.and_then(|mut process| Ok(process.wait()?)) {
                Ok(status) if status.success() => return None,
                Ok(status) => following.ended(status),
                Err(error) => full_message(error.as_ref()),
            };
            Some(untrusted::line(&format!("observe.{}: {why}", following.tracker.kind)))
        };
        let failed: Vec<String> = all.iter().zip(begun).filter_map(failed).collect();
        ensure!(failed.is_empty(), failed.join("\n"));
        Ok(())
    }
}

impl Drop for Trackers {
    fn drop(&mut self) {
        self.stop.clear();
        self.threads.drain(..).for_each(|thread| drop(thread.join()));
    }
}

struct Following {
    tracker: Tracker,
    folder: PathBuf,
}

impl Following {
    fn of(tracker: Tracker, folder: &Path) -> Result<Self> {
        atomic_file::create_folder(&folder.join(FOLDER)).context("making the folder of trackers")?;
        Ok(Following { tracker, folder: folder.to_owned() })
    }

    fn ended(&self, status: ExitStatus) -> String {
        format!("its process ended ({status}): {}", self.last_line())
    }

    /// Keeps a process running until the run ends, and warns when it ended by itself.
    fn keep(&self, stopped: &std::sync::mpsc::Receiver<()>, console: &Console) {
        let kind = self.tracker.kind;
        let warn = |text: &str| console.warn(&untrusted::line(&format!("warning: observe.{kind}: {text}")));
        let mut pause = PAUSES[0];
        loop {
            let why = match self.spawn(true) {
                Err(error) => full_message(error.as_ref()),
                Ok((mut process, input)) => loop {
                    let ends = stopped.recv_timeout(LOOK) != Err(RecvTimeoutError::Timeout);
                    if ends {
                        drop(input);
                        if let Err(why) = finish(&mut process) {
                            warn(&format!("{why}; what is missing is logged by: rollflow track {}", self.folder.display()));
                        }
                        return;
                    }
                    match process.try_wait() {
                        Ok(None) => {}
                        Ok(Some(status)) => break self.ended(status),
                        Err(error) => break error.to_string(),
                    }
                },
            };
            warn(&format!("{why}; the run continues, and it is started again in {} s", pause.as_secs()));
            if stopped.recv_timeout(pause) != Err(RecvTimeoutError::Timeout) {
                warn(&format!("what is missing is logged by: rollflow track {}", self.folder.display()));
                return;
            }
            pause = (pause * 2).min(PAUSES[1]);
        }
    }

    fn log(&self) -> PathBuf {
        self.folder.join(FOLDER).join(format!("{}.log", self.tracker.kind))
    }

    /// Starts the process, with `apart` in another process group: Ctrl-C is for the run then, which ends
    /// its trackers last.
    fn spawn(&self, apart: bool) -> Result<(Child, ChildStdin)> {
        let Tracker { kind, python, settings } = &self.tracker;
        let log = self.log();
        let output = File::options().create(true).append(true).open(&log).with_context(|| log.display().to_string())?;
        let mut command = Command::new(python);
        command.args(["-u", "-c", PROGRAM, kind]).arg(&self.folder).arg(settings.to_string());
        command.stdin(Stdio::piped()).stdout(output.try_clone()?).stderr(output);
        #[cfg(unix)]
        if apart {
            std::os::unix::process::CommandExt::process_group(&mut command, 0);
        }
        let mut process = command.spawn().with_context(|| format!("starting {}", python.display()))?;
        let input = process.stdin.take().context("the process has no input")?;
        Ok((process, input))
    }

    /// The last line that the process wrote.
    fn last_line(&self) -> String {
        let text = std::fs::read(self.log()).unwrap_or_default();
        let text = String::from_utf8_lossy(&text);
        let last = text.lines().rev().find(|line| !line.trim().is_empty());
        untrusted::line_of(last.unwrap_or("it wrote nothing"), 200)
    }
}

/// Waits for a process whose input has ended.
fn finish(process: &mut Child) -> Result<(), String> {
    let began = Instant::now();
    while began.elapsed() < PATIENCE {
        match process.try_wait() {
            Ok(Some(status)) if status.success() => return Ok(()),
            Ok(Some(status)) => return Err(format!("its process ended ({status})")),
            Ok(None) => std::thread::sleep(Duration::from_millis(50)),
            Err(error) => return Err(error.to_string()),
        }
    }
    let ended = process.kill().and_then(|()| process.wait());
    Err(format!(
        "it did not finish within {} s, and was ended{}",
        PATIENCE.as_secs(),
        if ended.is_err() { " in vain" } else { "" }
    ))
}
