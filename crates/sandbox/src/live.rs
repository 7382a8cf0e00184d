//! A running program that exchanges lines with this process.

use std::io::Write;
use std::net::Shutdown;
use std::thread;
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, RecvTimeoutError, TrySendError, bounded, unbounded};

use super::run::{self, Heard, Started};
use super::{Ended, Job, Ran, SandboxConfig, SandboxError, Walls};

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
    /// Starts the program of `job`; [`Live::send`] writes to its standard input. It is ended if more
    /// than `waiting` lines of its output wait.
    pub(super) fn start(config: &SandboxConfig, walls: Walls, job: &Job, waiting: Option<usize>) -> Result<Self, SandboxError> {
        let started = run::start(config, walls, job, true)?;
        let wire = started.wire.try_clone().map_err(SandboxError::Start)?;
        let mut heard = Heard::new(job.limits.unwrap_or(config.limits));
        let (sender, events) = waiting.map_or_else(unbounded, bounded);
        // Reads at all times, so that sending never blocks on a program that blocks on its output. The
        // limit on output bounds the memory of a line, and `waiting` the number of lines.
        let listen = move || {
            // The first `scanned` bytes have no line end.
            let (mut scanned, mut flooded) = (0, false);
            loop {
                if let Some(ended) = heard.frame(&wire).transpose() {
                    let ended = ended.map(|ran| if flooded { Ran { ended: Ended::TooMuchOutput, ..ran } } else { ran });
                    // The receiver may be gone.
                    drop(sender.send(Event::Ended(ended)));
                    return;
                }
                let mut from = 0;
                while !flooded && let Some(end) = heard.stdout[scanned..].iter().position(|byte| *byte == b'\n') {
                    let line = heard.stdout[from..scanned + end].to_vec();
                    scanned += end + 1;
                    from = scanned;
                    match sender.try_send(Event::Line(line)) {
                        Ok(()) => {}
                        Err(TrySendError::Full(_)) => {
                            flooded = true;
                            // The warden ends the program, or is gone.
                            drop(wire.shutdown(Shutdown::Write));
                        }
                        Err(TrySendError::Disconnected(_)) => return,
                    }
                }
                heard.stdout.drain(..if flooded { heard.stdout.len() } else { from });
                scanned = heard.stdout.len();
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
        match self.events.recv_deadline(deadline) {
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Limits, Sandbox};

    #[test]
    fn a_program_that_sends_more_lines_than_may_wait_is_ended() {
        // Where walls hide root's home, that of the system.
        let of = |python| SandboxConfig::python(python).map(Sandbox::new);
        let sandbox = of("python3").unwrap().or_else(|_| of("/usr/bin/python3").unwrap()).unwrap();
        let limits = Limits { output: 1 << 20, ..sandbox.config().limits };
        let job = Job::quick_python("import os\nwhile True: os.write(1, b'\\n' * 4096)").limits(limits);
        let live = sandbox.start(&job, Some(1)).unwrap();
        let deadline = Instant::now() + 2 * limits.wall;
        // Its input is closed when it is ended.
        while (&live.started.wire).write_all(b"\n").is_ok() {
            assert!(Instant::now() < deadline, "it runs on");
            thread::sleep(Duration::from_millis(1));
        }
        assert!(matches!(live.next(deadline), Event::Line(line) if line.is_empty()));
        assert!(matches!(live.next(deadline), Event::Ended(Ok(Ran { ended: Ended::TooMuchOutput, .. }))));
    }
}
