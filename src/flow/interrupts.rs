//! Ctrl-C, counted for whichever run is under way (law F5). SIGTERM counts like it: what a scheduler sends before it takes the machine away.
//!
//! Once drains, twice stops, the third time ends the process with code 130, for a stage that never comes back. The count belongs to
//! whoever listens and not to a run, so that what is pressed between two runs counts for the next.

use std::io;
use std::sync::Arc;

use tokio::runtime::{Builder, Runtime};
use tokio::sync::watch;
use tokio::task::JoinHandle;

use super::Control;

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
        runtime.spawn(async move {
            while heard.recv().await.is_some() {
                let presses = *count.borrow() + 1;
                count.send_replace(presses);
                match presses {
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

#[cfg(unix)]
struct Signals([tokio::signal::unix::Signal; 2]);

#[cfg(unix)]
impl Signals {
    async fn recv(&mut self) -> Option<()> {
        let [interrupt, terminate] = &mut self.0;
        tokio::select! {
            heard = interrupt.recv() => heard,
            heard = terminate.recv() => heard,
        }
    }
}

#[cfg(unix)]
fn signals() -> io::Result<Signals> {
    use tokio::signal::unix::{SignalKind, signal};
    Ok(Signals([signal(SignalKind::interrupt())?, signal(SignalKind::terminate())?]))
}

#[cfg(windows)]
fn signals() -> io::Result<tokio::signal::windows::CtrlC> {
    tokio::signal::windows::ctrl_c()
}
