//! A running program that exchanges lines with this process.

use std::io::Write;
use std::net::Shutdown;
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::thread;
use std::time::{Duration, Instant};

use super::run::{self, Heard, Started};
use super::{Job, Ran, SandboxConfig, SandboxError, Walls};

/// Longest wait for the end of a program after its input was closed.
const ENDING: Duration = Duration::from_secs(10);

/// A running program. Dropping it kills it with all processes that it started.
pub(super) struct Live {
    started: Started,
    since: Instant,
    events: Receiver<Event>,
}

/// Event of a program.
pub(super) enum Event {
    /// A line of its output, without the line end.
    Line(Vec<u8>),
    /// The program or its warden ended.
    Ended(Result<Ran, SandboxError>),
    /// No event before the deadline.
    Nothing,
}

impl Live {
    /// Starts the program of `job`; [`Live::send`] writes to its standard input.
    pub(super) fn start(config: &SandboxConfig, walls: Walls, job: &Job) -> Result<Self, SandboxError> {
        let started = run::start(config, walls, job, true)?;
        let wire = started.wire.try_clone().map_err(SandboxError::Start)?;
        let mut heard = Heard::new(job.limits.unwrap_or(config.limits));
        let (sender, events) = channel();
        // Reads at all times, so that sending never blocks on a program that blocks on its output. The
        // limit on output bounds the memory.
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
                    // The receiver may be gone.
                    drop(sender.send(Event::Ended(ended)));
                    return;
                }
            }
        };
        thread::Builder::new().name("sandbox".to_owned()).spawn(listen).map_err(SandboxError::Start)?;
        Ok(Live { started, since: Instant::now(), events })
    }

    /// Returns the running time.
    pub(super) fn age(&self) -> Duration {
        self.since.elapsed()
    }

    /// Sends a line. If the program is gone, its end is the next event.
    pub(super) fn send(&self, line: &[u8]) {
        let mut wire = &self.started.wire;
        if let Err(error) = wire.write_all(line).and_then(|()| wire.write_all(b"\n")) {
            tracing::trace!("a program in the sandbox reads no more: {error}");
        }
    }

    /// Waits for the next event.
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
