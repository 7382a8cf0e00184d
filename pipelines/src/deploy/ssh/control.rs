//! Looking at a process on a host, and ending it.

use std::net::TcpListener;
use std::path::Path;
use std::process::Stdio;

use anyhow::{Context, Result, bail, ensure};
use rollflow::util::{atomic_file, untrusted};

use super::host::Host;
use super::start::STARTED;

/// A process on a host.
pub struct Place<'a> {
    /// Host.
    pub host: Host<'a>,
    /// Name of the process.
    pub name: &'a str,
}

/// What a process does.
pub enum State {
    /// It runs under this number.
    Running(u32),
    /// It ended with this code; unknown if the host stopped under it.
    Ended(Option<u8>),
}

/// Opens the folder of a process, or fails.
const OPEN: &str = "open() { cd -- \"runs/$1\" 2> /dev/null || { echo \"there is no run $1\" >&2; exit 1; }; }\n\
                    runs() { ! flock -n lock true; }\n";

impl<'a> Place<'a> {
    /// The process `name` on `host`.
    pub fn of(host: Host<'a>, name: &'a str) -> Result<Self> {
        let plain = name.bytes().all(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-');
        ensure!(
            plain && name.len() < 64 && name.starts_with(|first: char| first.is_ascii_lowercase()),
            "{name:?} is not the name of a run; `rollflow deploy ssh` prints it as HOST:NAME"
        );
        Ok(Place { host, name })
    }

    fn script(&self, rest: &str) -> String {
        format!("{OPEN}open {}\n{rest}", self.name)
    }

    /// State of the process, and the last line of its log.
    pub fn status(&self) -> Result<(State, String)> {
        let text = self.host.ask(
            &self.script(
                "if runs; then echo \"running $(cat pid)\"; else echo \"ended $(cat exit 2> /dev/null)\"; fi\ntail -n 1 log",
            ),
            "",
        )?;
        let (first, last) = text.split_once('\n').unwrap_or((&text, ""));
        let state = match first.split_once(' ') {
            Some(("running", id)) => State::Running(id.parse().unwrap_or(0)),
            Some(("ended", code)) => State::Ended(code.parse().ok()),
            _ => bail!("{} answers {:?}", self.host.name, untrusted::line(first)),
        };
        Ok((state, untrusted::line(last.trim())))
    }

    /// Prints the log; with `follow`, until the process ends.
    pub fn logs(&self, follow: bool) -> Result<u8> {
        let follow = if follow { "if runs; then exec tail -n +1 --pid=\"$(cat pid)\" -F log 2> /dev/null; fi\n" } else { "" };
        self.shown(&[], &format!("{follow}cat log"))
    }

    /// Prints the log's end and what follows, with the metrics' port forwarded, until the process ends.
    /// Returns its exit code. `say` gets the address of the metrics.
    pub fn attach(&self, say: impl Fn(&str)) -> Result<u8> {
        let port = self.host.ask(&self.script(&find_port()), "")?.trim().parse::<u16>().ok();
        let forward = port.map(forward_to).transpose()?;
        let mut options = vec!["-o", "ExitOnForwardFailure=yes"];
        if let Some((local, rule)) = &forward {
            say(&format!("metrics: http://127.0.0.1:{local}/metrics"));
            options.extend(["-L", rule]);
        }
        let rest = "if runs; then tail -n 20 --pid=\"$(cat pid)\" -F log 2> /dev/null; else tail -n 20 log; fi\n\
                    tries=0\nwhile [ ! -s exit ] && [ $tries -lt 100 ]; do sleep 0.1; tries=$((tries + 1)); done\n\
                    exit \"$(cat exit)\"";
        self.shown(&options, rest)
    }

    /// Runs a script whose output goes to this process's own, and returns its exit code.
    fn shown(&self, options: &[&str], rest: &str) -> Result<u8> {
        let mut ssh = self.host.ssh(options, &self.script(rest))?;
        let status = ssh.stdin(Stdio::null()).status().context("starting ssh; is it installed?")?;
        match status.code().and_then(|code| u8::try_from(code).ok()) {
            Some(255) | None => bail!("the connection to {} ended; what runs there goes on", self.host.name),
            Some(code) => Ok(code),
        }
    }

    /// Drains the process: it finishes what is in flight, saves and ends. After `grace` seconds it
    /// is stopped, after as many again it is killed.
    pub fn stop(&self, grace: usize) -> Result<()> {
        // The lock is held while `start` waits for this number, so that it is no other process's.
        let rest = format!(
            "for signal in TERM TERM KILL; do\n  runs || exit 0\n  kill -s $signal \"$(cat pid)\"\n  \
               waited=0; while runs && [ $waited -lt {grace} ]; do sleep 1; waited=$((waited + 1)); done\n\
             done\nruns && {{ echo 'it does not end' >&2; exit 1; }}; exit 0"
        );
        self.host.ask(&self.script(&rest), "").map(drop)
    }

    /// Copies the run folder to `to`, which must not exist and appears by one rename. A checkpoint that
    /// is being written is left out.
    pub fn fetch(&self, to: &Path) -> Result<()> {
        ensure!(to.symlink_metadata().is_err(), "{} exists already; name another folder with --out", to.display());
        let parent = to.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
        atomic_file::create_folder(parent).with_context(|| format!("making {}", parent.display()))?;
        let new = tempfile::Builder::new().prefix(".fetching").tempdir_in(parent).context("making a folder")?;
        // 1: a file grew while it was read.
        let rest = "cd run/ || exit 1\ntar -c -f - --exclude='./checkpoints/.*' --exclude=./.lock . || [ $? -eq 1 ]";
        self.host.receive(&self.script(rest), new.path())?;
        let new = new.keep();
        std::fs::rename(&new, to).with_context(|| format!("renaming {} to {}", new.display(), to.display()))
    }
}

/// Script that prints the port of the metrics of the process that was started last, or an empty line.
fn find_port() -> String {
    let metrics = r"^.*metrics: http://127\.0\.0\.1:\([0-9]*\)/metrics.*$";
    // A start prints an empty line, so that the port of a process before it is not the last line.
    format!(
        "tries=0\nwhile :; do\n  port=$(sed -n 's|^{STARTED}$||p; s|{metrics}|\\1|p' log | tail -n 1)\n  \
         if [ -n \"$port\" ] || [ $tries -ge 100 ] || ! runs; then break; fi\n  \
         sleep 0.1; tries=$((tries + 1))\ndone\necho \"$port\""
    )
}

/// A free port here, and ssh's rule that forwards it to `port` there.
fn forward_to(port: u16) -> Result<(u16, String)> {
    let own = TcpListener::bind(("127.0.0.1", port)).or_else(|_| TcpListener::bind(("127.0.0.1", 0)));
    let local = own.and_then(|listener| listener.local_addr()).context("finding a free port")?.port();
    Ok((local, format!("127.0.0.1:{local}:127.0.0.1:{port}")))
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    #[test]
    fn the_port_of_the_metrics_is_that_of_the_process_that_was_started_last() {
        let folder = tempfile::tempdir().unwrap();
        let found = |log: &[&str]| {
            std::fs::write(folder.path().join("log"), log.join("\n")).unwrap();
            let script = format!("runs() {{ false; }}\n{}", find_port());
            let output = Command::new("sh").args(["-c", &script]).current_dir(folder.path()).output().unwrap();
            String::from_utf8(output.stdout).unwrap().trim().to_owned()
        };
        let [first, second] = ["metrics: http://127.0.0.1:1111/metrics", "2 metrics: http://127.0.0.1:2222/metrics"];
        assert_eq!(found(&[STARTED, first, "step 1"]), "1111");
        assert_eq!(found(&[STARTED, first, "step 1", STARTED, "loading"]), "");
        assert_eq!(found(&[STARTED, first, "step 1", STARTED, "loading", second]), "2222");
    }
}
