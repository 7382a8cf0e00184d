//! A program that is spoken with while it runs: a line goes in, a line comes out.

use std::io::Write;
use std::net::Shutdown;
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::thread;
use std::time::{Duration, Instant};

use super::run::{self, Heard, Started};
use super::{Job, Ran, SandboxConfig, SandboxError, Walls};

/// How long a program's end may take once it was asked for.
const ENDING: Duration = Duration::from_secs(10);

/// A running program. Dropping it ends it, with all that it started.
pub(super) struct Live {
    started: Started,
    since: Instant,
    events: Receiver<Event>,
}

/// What a program did next.
pub(super) enum Event {
    /// It wrote a line, which is here without its end.
    Line(Vec<u8>),
    /// It ended, or its warden did.
    Ended(Result<Ran, SandboxError>),
    /// Nothing, before the deadline.
    Nothing,
}

impl Live {
    /// Starts the program of `job`; its standard input is what [`Live::send`] sends.
    pub(super) fn start(config: &SandboxConfig, walls: Walls, job: &Job) -> Result<Self, SandboxError> {
        let started = run::start(config, walls, job, true)?;
        let wire = started.wire.try_clone().map_err(SandboxError::Start)?;
        let mut heard = Heard::new(job.limits.unwrap_or(config.limits));
        let (sender, events) = channel();
        // It reads whatever happens, so that sending never waits for a program that waits for us. What it holds is bounded by the limit on output.
        let listen = move || {
            loop {
                let ended = heard.frame(&wire).transpose();
                while let Some(end) = heard.stdout.iter().position(|byte| *byte == b'\n') {
                    let mut line: Vec<u8> = heard.stdout.drain(..=end).collect();
                    line.pop();
                    if sender.send(Event::Line(line)).is_err() {
                        return;
                    }
                }
                if let Some(ended) = ended {
                    // Nobody may be left to hear it.
                    drop(sender.send(Event::Ended(ended)));
                    return;
                }
            }
        };
        thread::Builder::new().name("sandbox".to_owned()).spawn(listen).map_err(SandboxError::Start)?;
        Ok(Live { started, since: Instant::now(), events })
    }

    /// How long it has been running.
    pub(super) fn age(&self) -> Duration {
        self.since.elapsed()
    }

    /// Sends a line. Where the program is gone nothing happens: its end is the next event.
    pub(super) fn send(&self, line: &[u8]) {
        let mut wire = &self.started.wire;
        if let Err(error) = wire.write_all(line).and_then(|()| wire.write_all(b"\n")) {
            tracing::trace!("a program in the sandbox reads no more: {error}");
        }
    }

    /// What it does next.
    pub(super) fn next(&self, deadline: Instant) -> Event {
        match self.events.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
            Ok(event) => event,
            Err(RecvTimeoutError::Timeout) => Event::Nothing,
            Err(RecvTimeoutError::Disconnected) => Event::Ended(Err(SandboxError::Broken("it ended before".to_owned()))),
        }
    }
}

impl Drop for Live {
    fn drop(&mut self) {
        if self.started.wire.shutdown(Shutdown::Write).is_ok() {
            let deadline = Instant::now() + ENDING;
            while let Event::Line(_) = self.next(deadline) {}
        }
    }
}
