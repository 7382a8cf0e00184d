//! Restores the order of items behind several workers (law D6).
//!
//! A worker draws a ticket with every item, under one lock, so tickets number items in the order of the edge. It sends only when all
//! earlier tickets are done, and a ticket is done when its worker asks for the next item or goes, whatever became of it. The workers
//! themselves are the reorder buffer: at most one finished item each, waiting in the state *blocked*.

use std::collections::BTreeSet;
use std::sync::Arc;

use super::sync::{Mutex, watch};

/// Shared by the workers of one stage.
#[derive(Debug, Default)]
pub(crate) struct Turnstile {
    /// The next ticket. Whoever holds the lock is the one who may take an item.
    pub(crate) intake: Mutex<u64>,
    line: watch::Sender<Line>,
}

#[derive(Debug, Default)]
struct Line {
    turn: u64,
    /// Done before their turn came.
    done: BTreeSet<u64>,
}

/// The right to send in order; done when dropped, also by a panic.
#[derive(Debug)]
pub(crate) struct Ticket {
    turnstile: Arc<Turnstile>,
    number: u64,
}

impl Ticket {
    /// Draws the next number; `intake` is the caller's lock on the turnstile.
    pub(crate) fn draw(turnstile: &Arc<Turnstile>, intake: &mut u64) -> Self {
        let number = *intake;
        *intake += 1;
        Ticket { turnstile: Arc::clone(turnstile), number }
    }

    pub(crate) fn is_first(&self) -> bool {
        self.turnstile.line.borrow().turn == self.number
    }

    /// Waits until all earlier tickets are done. Every holder is working, sending or gone, so the turn comes. Cancel-safe.
    pub(crate) async fn turn(&self) {
        let mut line = self.turnstile.line.subscribe();
        line.wait_for(|line| line.turn == self.number).await.expect("the sender lives in the turnstile");
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        self.turnstile.line.send_modify(|line| {
            line.done.insert(self.number);
            while line.done.remove(&line.turn) {
                line.turn += 1;
            }
        });
    }
}
