//! Order of items after several workers (law D6).
//!
//! A worker draws a ticket with every item, under one lock, so tickets number items in the order of
//! the edge. It sends only when all earlier tickets are done. A ticket is done when its worker asks
//! for the next item or ends. The workers themselves are the reorder buffer: each holds at most one
//! finished item, in the state *blocked*.

use std::collections::BTreeSet;
use std::sync::Arc;

use super::sync::{Mutex, watch};

/// Order of one stage, shared by its workers.
#[derive(Debug, Default)]
pub(crate) struct Turnstile {
    /// Next ticket. The worker that holds the lock may take an item.
    pub(crate) intake: Mutex<u64>,
    line: watch::Sender<Line>,
}

#[derive(Debug, Default)]
struct Line {
    turn: u64,
    /// Tickets that were done before their turn.
    done: BTreeSet<u64>,
}

/// Right to send in order; done when dropped, also by a panic.
#[derive(Debug)]
pub(crate) struct Ticket {
    turnstile: Arc<Turnstile>,
    number: u64,
}

impl Ticket {
    /// Draws the next number; the caller holds the lock on `intake`.
    pub(crate) fn draw(turnstile: &Arc<Turnstile>, intake: &mut u64) -> Self {
        let number = *intake;
        *intake += 1;
        Ticket { turnstile: Arc::clone(turnstile), number }
    }

    pub(crate) fn is_first(&self) -> bool {
        self.turnstile.line.borrow().turn == self.number
    }

    /// Waits until all earlier tickets are done. Every holder works, sends or is gone, so the wait
    /// ends. Cancel-safe.
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
