//! Input and output of a worker. The runner owns every wait (law F4): each is one future that books
//! its state, with two interfaces, [`Io`] for OS threads and [`AsyncIo`] for tokio tasks.
//!
//! An item that is available, or has room, needs no wait: no clock is read and no state changes.

use std::sync::Arc;
use std::task::Poll;

use super::clock::{Meter, State};
use super::control::{Control, Signal};
use super::edge::{Offer, Parcel, Rx, Tx};
use super::order::{Ticket, Turnstile};
use super::{Message, StageError, WeightsRx};

/// Context that the ends of one worker share.
#[derive(Clone, Debug)]
pub(crate) struct Seat {
    pub(crate) stage: Arc<str>,
    pub(crate) meter: Arc<Meter>,
    pub(crate) control: Control,
}

/// Input of a worker.
pub(crate) struct Inlet<T> {
    rx: Rx<T>,
    seat: Seat,
    /// True once the worker received the end of its input.
    pub(crate) ended: bool,
    order: Option<Arc<Turnstile>>,
    /// Place of the newest item in the order.
    ticket: Option<Ticket>,
}

impl<T: Message> Inlet<T> {
    pub(crate) fn new(rx: Rx<T>, seat: Seat) -> Self {
        Inlet { rx, seat, ended: false, order: None, ticket: None }
    }

    /// Receives the next item; `None` at the end.
    pub(crate) async fn recv(&mut self) -> Option<T> {
        // Lets the other tasks of this thread run, also if the input is always full.
        tokio::task::coop::consume_budget().await;
        let item = match self.now() {
            Poll::Ready(item) => item,
            Poll::Pending => self.starve().await,
        };
        self.work(item)
    }

    pub(crate) fn recv_blocking(&mut self) -> Option<T> {
        let item = match self.now() {
            Poll::Ready(item) => item,
            Poll::Pending => Arc::clone(&self.seat.meter).block_on(self.starve()),
        };
        self.work(item)
    }

    fn try_recv(&mut self) -> Poll<Option<T>> {
        self.now().map(|item| self.work(item))
    }

    /// Lets the item's simulated time pass; does nothing on a real machine.
    fn work(&self, item: Option<T>) -> Option<T> {
        item.inspect(|item| self.seat.meter.clock.work(&self.seat.stage, || item.tokens()))
    }

    /// Receives without a wait.
    fn now(&mut self) -> Poll<Option<T>> {
        self.ticket = None;
        let mut intake = None;
        if let Some(order) = &self.order {
            let Ok(next) = order.intake.try_lock() else { return Poll::Pending };
            intake = Some((order, next));
        }
        let stops = self.seat.control.signal() == Signal::Stop;
        let popped = if stops { Poll::Ready(None) } else { self.rx.try_pop() };
        let Poll::Ready(popped) = popped else { return Poll::Pending };
        let ticket = popped.as_ref().and_then(|_| intake.map(|(order, mut next)| Ticket::draw(order, &mut next)));
        Poll::Ready(self.took(popped, ticket))
    }

    async fn starve(&mut self) -> Option<T> {
        let meter = Arc::clone(&self.seat.meter);
        let arrival = async {
            let intake = match &self.order {
                Some(order) => Some((order, order.intake.lock().await)),
                None => None,
            };
            let popped = self.rx.pop().await;
            let ticket = popped.as_ref().and_then(|_| intake.map(|(order, mut next)| Ticket::draw(order, &mut next)));
            self.took(popped, ticket)
        };
        meter.wait(State::Starved, arrival).await
    }

    fn took(&mut self, popped: Option<(T, usize)>, ticket: Option<Ticket>) -> Option<T> {
        self.ticket = ticket;
        self.ended |= popped.is_none();
        popped.map(|(item, tokens)| {
            self.seat.meter.took(tokens);
            item
        })
    }
}

/// Output of a worker.
pub(crate) struct Outlet<T> {
    tx: Tx<T>,
    seat: Seat,
}

/// Item that can't be sent yet.
enum Pending<'a, T> {
    /// Earlier items come first.
    Turn(&'a Ticket, T),
    Room(Parcel<T>),
}

impl<T: Message> Outlet<T> {
    pub(crate) fn new(tx: Tx<T>, seat: Seat) -> Self {
        Outlet { tx, seat }
    }

    /// Sends an item, after all that come before its ticket.
    pub(crate) async fn send(&self, item: T, ticket: Option<&Ticket>) -> Result<(), StageError> {
        match self.now(item, ticket)? {
            None => Ok(()),
            Some(pending) => self.block(pending).await,
        }
    }

    pub(crate) fn send_blocking(&self, item: T, ticket: Option<&Ticket>) -> Result<(), StageError> {
        match self.now(item, ticket)? {
            None => Ok(()),
            Some(pending) => self.seat.meter.block_on(self.block(pending)),
        }
    }

    /// Sends without a wait, or returns what has to wait.
    fn now<'a>(&self, item: T, ticket: Option<&'a Ticket>) -> Result<Option<Pending<'a, T>>, StageError> {
        match ticket {
            Some(ticket) if !ticket.is_first() => Ok(Some(Pending::Turn(ticket, item))),
            _ => Ok(self.offer(item)?.map(Pending::Room)),
        }
    }

    /// Returns the item if there is no room.
    fn offer(&self, item: T) -> Result<Option<Parcel<T>>, StageError> {
        match self.tx.offer(item) {
            Offer::Sent(tokens) => {
                self.seat.meter.gave(tokens);
                Ok(None)
            }
            Offer::Closed => Err(StageError::closed()),
            Offer::Full(parcel) => Ok(Some(parcel)),
        }
    }

    async fn block(&self, pending: Pending<'_, T>) -> Result<(), StageError> {
        let sent = async {
            let parcel = match pending {
                Pending::Room(parcel) => parcel,
                Pending::Turn(ticket, item) => {
                    ticket.turn().await;
                    let Some(parcel) = self.offer(item)? else { return Ok(()) };
                    parcel
                }
            };
            let tokens = parcel.tokens;
            self.tx.push(parcel).await?;
            self.seat.meter.gave(tokens);
            Ok(())
        };
        self.seat.meter.wait(State::Blocked, sent).await
    }
}

/// Input and output of a worker of an [`AsyncStage`](super::AsyncStage).
pub struct AsyncIo<In, Out> {
    pub(crate) inlet: Inlet<In>,
    outlet: Outlet<Out>,
}

impl<In: Message, Out: Message> AsyncIo<In, Out> {
    pub(crate) fn new(rx: Rx<In>, tx: Tx<Out>, order: Option<Arc<Turnstile>>, seat: Seat) -> Self {
        AsyncIo { inlet: Inlet { order, ..Inlet::new(rx, seat.clone()) }, outlet: Outlet::new(tx, seat) }
    }

    /// Receives the next item, waiting in the state *starved*. Returns `None` at the end, after a
    /// drain, and immediately when the run stops; [`AsyncIo::signal`] distinguishes them.
    ///
    /// Not cancel-safe: await it to its end, not as a branch of a `select!`.
    pub async fn recv(&mut self) -> Result<Option<In>, StageError> {
        Ok(self.inlet.recv().await)
    }

    /// Receives the next item without a wait: `Pending` if there is none now, and `None` as
    /// [`AsyncIo::recv`] if there is none now or later.
    pub fn try_recv(&mut self) -> Poll<Option<In>> {
        self.inlet.try_recv()
    }

    /// Sends an item, waiting for room in the state *blocked*. Fails with [`StageError::closed`]
    /// when downstream is gone; the item is lost, and `?` returns the error.
    ///
    /// Not cancel-safe: a dropped future may drop the item.
    pub async fn send(&mut self, item: Out) -> Result<(), StageError> {
        self.outlet.send(item, self.inlet.ticket.as_ref()).await
    }

    /// Waits for weights of version `at_least` (0: any) or newer, in the state *weights*.
    /// Cancel-safe.
    ///
    /// Fails with [`StageError::closed`] when the run stops, or ends and the publisher is gone.
    /// Fails with an error when the publisher ends earlier.
    pub async fn wait_weights<W>(&mut self, rx: &mut WeightsRx<W>, at_least: u64) -> Result<(u64, Arc<W>), StageError> {
        if let Some(latest) = rx.latest().filter(|(version, _)| *version >= at_least) {
            return Ok(latest);
        }
        let seat = &self.inlet.seat;
        // Two `watch` cells, no channel end.
        let wait = async {
            tokio::select! {
                biased;
                found = rx.reach(at_least) => Some(found),
                () = seat.control.reached(Signal::Stop) => None,
            }
        };
        let Some(found) = seat.meter.wait_weights(at_least, wait).await else { return Err(StageError::closed()) };
        match found {
            Some(found) => Ok(found),
            // The publisher has finished and the run ends: this worker is no longer needed.
            None if seat.control.signal() != Signal::Run => Err(StageError::closed()),
            None => Err(StageError::new(match rx.version() {
                Some(last) => format!("waited for weights of version {at_least}, but their publisher ended at version {last}"),
                None => format!("waited for weights of version {at_least}, but their publisher ended before it published any"),
            })),
        }
    }

    /// Waits for `ready`, which code outside the graph brings about, in the state *credit*, until the run is
    /// drained or stopped. However long it takes, it is no stall. Cancel-safe if `ready` is.
    pub async fn hold(&mut self, ready: impl Future<Output = ()>) {
        let seat = &self.inlet.seat;
        let wait = async {
            tokio::select! {
                biased;
                () = ready => {}
                () = seat.control.reached(Signal::Drain) => {}
            }
        };
        seat.meter.hold(State::Credit, wait).await;
    }

    /// Name of the stage in the graph.
    pub fn stage(&self) -> &str {
        &self.inlet.seat.stage
    }

    /// Present request to the run.
    pub fn signal(&self) -> Signal {
        self.inlet.seat.control.signal()
    }

    /// Waits until the run stops, so that a stage can abandon work outside the graph. A drain does
    /// not count. Cancel-safe.
    pub async fn stopped(&self) {
        self.inlet.seat.control.reached(Signal::Stop).await;
    }
}

/// Input and output of a worker of a [`Stage`](super::Stage). The calls of [`AsyncIo`], blocking
/// the OS thread.
pub struct Io<In, Out>(pub(crate) AsyncIo<In, Out>);

impl<In: Message, Out: Message> Io<In, Out> {
    /// Blocking form of [`AsyncIo::recv`].
    pub fn recv(&mut self) -> Result<Option<In>, StageError> {
        Ok(self.0.inlet.recv_blocking())
    }

    /// Same as [`AsyncIo::try_recv`].
    pub fn try_recv(&mut self) -> Poll<Option<In>> {
        self.0.try_recv()
    }

    /// Blocking form of [`AsyncIo::send`].
    pub fn send(&mut self, item: Out) -> Result<(), StageError> {
        self.0.outlet.send_blocking(item, self.0.inlet.ticket.as_ref())
    }

    /// Blocking form of [`AsyncIo::wait_weights`].
    pub fn wait_weights<W>(&mut self, rx: &mut WeightsRx<W>, at_least: u64) -> Result<(u64, Arc<W>), StageError> {
        Arc::clone(&self.0.inlet.seat.meter).block_on(self.0.wait_weights(rx, at_least))
    }

    /// Blocking form of [`AsyncIo::hold`].
    pub fn hold(&mut self, ready: impl Future<Output = ()>) {
        Arc::clone(&self.0.inlet.seat.meter).block_on(self.0.hold(ready));
    }

    /// Name of the stage in the graph.
    pub fn stage(&self) -> &str {
        self.0.stage()
    }

    /// Present request to the run.
    pub fn signal(&self) -> Signal {
        self.0.signal()
    }

    /// Returns true if the run was stopped because no stage could make progress.
    pub(crate) fn is_stalled(&self) -> bool {
        self.0.inlet.seat.control.is_stalled()
    }
}
