//! Ctrl-C and SIGTERM, counted for every run of a program (law F5).
//!
//! The first drains the run, the second stops it, and the third ends the process with code 130, for
//! a stage that never returns. The count outlives a run: a signal between two runs counts for the
//! next.
//!
//! SIGTERMs within a second count once: schedulers send one to a process and to its group, or
//! repeat it immediately. Every Ctrl-C counts.

use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::runtime::{Builder, Runtime};
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::watch;
use tokio::task::JoinHandle;

use super::Control;

/// Time after which a SIGTERM counts again.
const SEPARATE: Duration = Duration::from_secs(1);

/// Listener for Ctrl-C and SIGTERM, until its last clone is dropped.
///
/// A program with several runs gives one to each flow
/// ([`Flow::interrupted_by`](super::Flow::interrupted_by)). A flow without one listens while it
/// runs. Costs one thread, `interrupts`. The signal handler stays installed: afterwards neither
/// signal ends the process by default.
#[derive(Clone, Debug)]
pub struct Interrupts {
    presses: watch::Receiver<u32>,
    /// Runs the tasks that count and forward signals; joins them when dropped (law F3).
    runtime: Arc<Runtime>,
}

impl Interrupts {
    /// Listens from now on. Fails if the system provides no thread or no handler.
    ///
    /// # Panics
    /// When dropped in async code, because it waits for its thread.
    pub fn listen() -> io::Result<Self> {
        let runtime = Builder::new_multi_thread().worker_threads(1).thread_name("interrupts").enable_all().build()?;
        let (count, presses) = watch::channel(0u32);
        let signals =
            runtime.block_on(async { io::Result::Ok((signal(SignalKind::interrupt())?, signal(SignalKind::terminate())?)) });
        let (mut interrupt, mut terminate) = signals?;
        let mut terminated = None;
        runtime.spawn(async move {
            loop {
                let is_counted = tokio::select! {
                    Some(()) = interrupt.recv() => true,
                    Some(()) = terminate.recv() => counts(&mut terminated, Instant::now()),
                    else => break,
                };
                if !is_counted {
                    continue;
                }
                count.send_modify(|count| *count += 1);
                let presses = *count.borrow();
                match presses {
                    1 => tracing::warn!("interrupted: finishing what is in flight; again to stop"),
                    2 => tracing::warn!("interrupted again: stopping; once more to end the process"),
                    // No signal can reach a stage that does not return.
                    _ => std::process::exit(130),
                }
            }
        });
        Ok(Interrupts { presses, runtime: Arc::new(runtime) })
    }

    /// Returns true if a signal arrived: for what a program does before its first run.
    pub fn pressed(&self) -> bool {
        self.presses() > 0
    }

    /// Number of signals that arrived.
    pub fn presses(&self) -> u32 {
        *self.presses.borrow()
    }

    /// Returns true if a second signal arrived: stop instead of finishing what is in flight.
    pub fn pressed_again(&self) -> bool {
        *self.presses.borrow() > 1
    }

    /// Applies the signals so far to `control`, and later ones while the returned value lives.
    pub(crate) fn steer(&self, control: Control) -> Steering {
        let mut presses = self.presses.clone();
        apply(&control, *presses.borrow_and_update());
        Steering(self.runtime.spawn(async move {
            while presses.changed().await.is_ok() {
                apply(&control, *presses.borrow_and_update());
            }
        }))
    }
}

/// Forwards signals to one run until it is dropped.
pub(crate) struct Steering(JoinHandle<()>);

impl Drop for Steering {
    fn drop(&mut self) {
        self.0.abort();
    }
}

fn apply(control: &Control, presses: u32) {
    match presses {
        0 => {}
        1 => control.drain(),
        _ => control.stop(),
    }
}

/// Returns true if a SIGTERM at `now` counts; false if it repeats the newest that `counted`. Pure: the
/// caller passes the time.
fn counts(counted: &mut Option<Instant>, now: Instant) -> bool {
    let repeats = counted.is_some_and(|before| now.saturating_duration_since(before) < SEPARATE);
    if !repeats {
        *counted = Some(now);
    }
    !repeats
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn f5_sigterms_within_a_second_count_once() {
        let began = Instant::now();
        let counted = |millis: [u64; 3]| {
            let mut counted = None;
            millis.map(|millis| counts(&mut counted, began + Duration::from_millis(millis)))
        };
        assert_eq!(counted([0, 20, 999]), [true, false, false]);
        assert_eq!(counted([0, 1000, 1999]), [true, true, false]);
        // One that belongs to the one before does not put off the next.
        assert_eq!(counted([0, 900, 1100]), [true, false, true]);
    }
}
