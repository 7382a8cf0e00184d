//! Ctrl-C, counted for whichever run is under way (law F5). SIGTERM counts like it: what a scheduler sends before it takes the machine away.
//!
//! Once drains, twice stops, the third time ends the process with code 130, for a stage that never comes back. The count belongs to
//! whoever listens and not to a run, so that what is pressed between two runs counts for the next.
//!
//! SIGTERMs within a second count once: launchers and schedulers send one to a process and to its group, or repeat it at once.
//! Ctrl-C is pressed by a person and always counts.

use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::runtime::{Builder, Runtime};
use tokio::sync::watch;
use tokio::task::JoinHandle;

use super::Control;

/// SIGTERMs count again after this long.
const SEPARATE: Duration = Duration::from_secs(1);

/// Listens for Ctrl-C and SIGTERM from its making until its last clone is gone. Give it to every flow of a program that runs several
/// ([`Flow::interrupted_by`](super::Flow::interrupted_by)); a flow alone listens for itself.
///
/// Costs a thread, `interrupts`. The process does not die of either by itself again: the handler, once installed, stays.
#[derive(Clone, Debug)]
pub struct Interrupts {
    presses: watch::Receiver<u32>,
    /// Runs the tasks that count and pass on; joins them when dropped (law F3).
    runtime: Arc<Runtime>,
}

impl Interrupts {
    /// Listens from the call on. Fails where the machine gives no thread or no handler.
    ///
    /// # Panics
    /// When dropped in async code: it waits for its thread.
    pub fn listen() -> io::Result<Self> {
        let runtime = Builder::new_multi_thread().worker_threads(1).thread_name("interrupts").enable_all().build()?;
        let (count, presses) = watch::channel(0);
        let mut heard = runtime.block_on(async { signals() })?;
        let mut heard_so_far = Presses::default();
        runtime.spawn(async move {
            while let Some(asked) = heard.recv().await {
                if !heard_so_far.count(asked, Instant::now()) {
                    continue;
                }
                count.send_replace(heard_so_far.count);
                match heard_so_far.count {
                    1 => tracing::warn!("interrupted: finishing what is in flight; again to stop"),
                    2 => tracing::warn!("interrupted again: stopping; once more to end the process"),
                    _ => std::process::exit(130),
                }
            }
        });
        Ok(Interrupts { presses, runtime: Arc::new(runtime) })
    }

    /// Whether anything was asked so far: for what a program does before its first run.
    pub fn pressed(&self) -> bool {
        *self.presses.borrow() > 0
    }

    /// Does to `control` what was asked so far, and what is asked while the answer is kept.
    pub(crate) fn steer(&self, control: Control) -> Steering {
        let mut presses = self.presses.clone();
        obey(&control, *presses.borrow_and_update());
        Steering(self.runtime.spawn(async move {
            while presses.changed().await.is_ok() {
                obey(&control, *presses.borrow_and_update());
            }
        }))
    }
}

/// A run's share of the listening; it ends when this is dropped.
pub(crate) struct Steering(JoinHandle<()>);

impl Drop for Steering {
    fn drop(&mut self) {
        self.0.abort();
    }
}

fn obey(control: &Control, presses: u32) {
    match presses {
        0 => {}
        1 => control.drain(),
        _ => control.stop(),
    }
}

/// Who asks for the end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Asked {
    /// Ctrl-C, by SIGINT.
    Interrupt,
    /// SIGTERM.
    #[cfg_attr(not(unix), allow(dead_code))]
    Terminate,
}

/// The count. Pure: the clock is the caller's.
#[derive(Debug, Default)]
struct Presses {
    count: u32,
    /// When the newest SIGTERM that counted came.
    terminated: Option<Instant>,
}

impl Presses {
    /// Counts a signal that came at `now`; false if it belongs to the one before.
    fn count(&mut self, asked: Asked, now: Instant) -> bool {
        if asked == Asked::Terminate {
            if self.terminated.is_some_and(|before| now.saturating_duration_since(before) < SEPARATE) {
                return false;
            }
            self.terminated = Some(now);
        }
        self.count += 1;
        true
    }
}

#[cfg(unix)]
struct Signals([tokio::signal::unix::Signal; 2]);

#[cfg(unix)]
impl Signals {
    async fn recv(&mut self) -> Option<Asked> {
        let [interrupt, terminate] = &mut self.0;
        tokio::select! {
            heard = interrupt.recv() => heard.map(|()| Asked::Interrupt),
            heard = terminate.recv() => heard.map(|()| Asked::Terminate),
        }
    }
}

#[cfg(unix)]
fn signals() -> io::Result<Signals> {
    use tokio::signal::unix::{SignalKind, signal};
    Ok(Signals([signal(SignalKind::interrupt())?, signal(SignalKind::terminate())?]))
}

#[cfg(windows)]
struct Signals(tokio::signal::windows::CtrlC);

#[cfg(windows)]
impl Signals {
    async fn recv(&mut self) -> Option<Asked> {
        self.0.recv().await.map(|()| Asked::Interrupt)
    }
}

#[cfg(windows)]
fn signals() -> io::Result<Signals> {
    Ok(Signals(tokio::signal::windows::ctrl_c()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn f5_sigterms_within_a_second_count_once_and_every_ctrl_c_counts() {
        let began = Instant::now();
        let counts = |heard: &[(Asked, u64)]| {
            let mut presses = Presses::default();
            let at = |millis: u64| began + Duration::from_millis(millis);
            let counted = heard.iter().map(|(asked, millis)| presses.count(*asked, at(*millis))).collect::<Vec<_>>();
            (counted, presses.count)
        };
        use Asked::{Interrupt, Terminate};
        assert_eq!(counts(&[(Terminate, 0), (Terminate, 20), (Terminate, 999)]), (vec![true, false, false], 1));
        assert_eq!(counts(&[(Terminate, 0), (Terminate, 1000), (Terminate, 1999)]), (vec![true, true, false], 2));
        // One that belongs to the one before does not put off the next.
        assert_eq!(counts(&[(Terminate, 0), (Terminate, 900), (Terminate, 1100)]), (vec![true, false, true], 2));
        assert_eq!(counts(&[(Interrupt, 0), (Interrupt, 1), (Interrupt, 2)]), (vec![true; 3], 3));
        assert_eq!(counts(&[(Terminate, 0), (Interrupt, 20), (Terminate, 40)]), (vec![true, true, false], 2));
    }
}
