//! A process's work on a run: when, where, and with which code.

use std::process::Command;

use jiff::{Timestamp, Unit};
use serde::{Deserialize, Serialize};

use super::State;

/// A process's work on a run.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Session {
    /// UTC, as is `ended`.
    pub started: String,
    /// Empty while it works.
    pub ended: String,
    pub seconds: f64,
    pub state: State,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
    pub version: String,
    /// The state of the git repository that it was started in.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub git: Option<Git>,
    pub machine: Machine,
}

/// A repository's state.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Git {
    pub commit: String,
    /// The branch; empty for none.
    pub branch: String,
    /// If true, tracked files had uncommitted changes.
    pub changed: bool,
}

/// Machine of a session.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Machine {
    pub host: String,
    pub system: String,
    pub processor: String,
    /// Threads that run at the same time.
    pub threads: usize,
    pub memory_gib: u64,
}

impl Session {
    /// This process's, from now on.
    pub(super) fn begin() -> Self {
        let version = env!("CARGO_PKG_VERSION").to_owned();
        Session { started: now().to_string(), version, git: git(), machine: machine(), ..Session::default() }
    }

    /// Ends the session now. Without `seconds`, the clock gives the duration.
    pub(super) fn end(&mut self, state: State, error: Option<String>, seconds: Option<f64>) {
        let ended = now();
        let by_the_clock =
            || self.started.parse::<Timestamp>().map_or(0.0, |started| (ended - started).total(Unit::Second).unwrap_or(0.0));
        self.seconds = seconds.unwrap_or_else(by_the_clock);
        (self.state, self.error, self.ended) = (state, error, ended.to_string());
    }
}

/// To the second.
fn now() -> Timestamp {
    Timestamp::from_second(Timestamp::now().as_second()).unwrap_or_default()
}

/// The repository around the folder that the command runs in, if there is one and git is.
fn git() -> Option<Git> {
    let ask = |args: &[&str]| {
        // Its index is not locked: the user may be at work with git.
        let output =
            Command::new("git").arg("--no-optional-locks").args(args).output().ok().filter(|output| output.status.success())?;
        Some(String::from_utf8_lossy(&output.stdout).trim().to_owned())
    };
    Some(Git {
        commit: ask(&["rev-parse", "HEAD"])?,
        branch: ask(&["branch", "--show-current"]).unwrap_or_default(),
        changed: !ask(&["status", "--porcelain", "--untracked-files=no"])?.is_empty(),
    })
}

fn machine() -> Machine {
    let read = |path: &str| std::fs::read_to_string(path).unwrap_or_default();
    let field = |text: &str, name: &str| {
        let line = text.lines().find(|line| line.starts_with(name))?;
        Some(line.split_once(':')?.1.trim().to_owned())
    };
    let kib = field(&read("/proc/meminfo"), "MemTotal").and_then(|text| text.trim_end_matches("kB").trim().parse::<u64>().ok());
    Machine {
        host: read("/proc/sys/kernel/hostname").trim().to_owned(),
        system: format!("{} {}", std::env::consts::OS, std::env::consts::ARCH),
        processor: field(&read("/proc/cpuinfo"), "model name").unwrap_or_default(),
        threads: std::thread::available_parallelism().map_or(1, usize::from),
        memory_gib: kib.map_or(0, |kib| kib.div_ceil(1 << 20)),
    }
}
