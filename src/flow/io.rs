//! Input and output of a worker. The runner owns every wait (law F4): each is one future that books
//! its state, with two interfaces, [`Io`] for OS threads and [`AsyncIo`] for tokio tasks.
//!
//! An item that is available, or has room, needs no wait: no clock is read and no state changes.

use std::sync::Arc;

use super::clock::{Meter, State};
use super::control::{Control, Signal};
use super::edge::{Closed, Offer, Parcel, Pop, Rx, Tx};
use super::order::{Ticket, Turnstile};
use super::{Message, StageError, WeightsRx};

/// Context that the ends of one worker share.
#[derive(Clone, Debug)]
pub(crate) struct Seat {
    pub(crate) stage: Arc<str>,
    pub(crate) meter: Arc<Meter>,
    pub(crate) control: Control,
}

impl Seat {
    /// Lets an item's simulated time pass; does nothing on a real machine.
    fn work<T: Message>(&self, item: &T) {
        self.meter.clock.work(&self.stage, || item.tokens());
    }
}

/// Input of a worker.
pub(crate) struct Inlet<T> {
    rx: Rx<T>,
    seat: Seat,
    /// True once the worker received the end of its input.
    pub(crate) ended: bool,
}

/// Result of a receive without a wait.
enum Now<T> {
    Item(T),
    Ended,
    Wait,
}

impl<T: Message> Inlet<T> {
    pub(crate) fn new(rx: Rx<T>, seat: Seat) -> Self {
        Inlet { rx, seat, ended: false }
    }

    fn now(&mut self) -> Now<T> {
        if self.seat.control.signal() == Signal::Stop {
            self.ended = true;
            return Now::Ended;
        }
        match self.rx.try_pop() {
            Pop::Item(item, tokens) => {
                self.seat.meter.took(tokens);
                Now::Item(item)
            }
            Pop::Empty => Now::Wait,
            Pop::Closed => {
                self.ended = true;
                Now::Ended
            }
        }
    }

    /// Waits for an item, without a change of state.
    async fn arrival(&mut self) -> Option<T> {
        match self.rx.pop().await {
            Some((item, tokens)) => {
                self.seat.meter.took(tokens);
                Some(item)
            }
            None => {
                self.ended = true;
                None
            }
        }
    }

    async fn starve(&mut self) -> Option<T> {
        let meter = Arc::clone(&self.seat.meter);
        meter.wait(State::Starved, self.arrival()).await
    }

    pub(crate) async fn recv(&mut self) -> Option<T> {
        let item = match self.now() {
            Now::Item(item) => Some(item),
            Now::Ended => None,
            Now::Wait => self.starve().await,
        };
        item.inspect(|item| self.seat.work(item))
    }

    pub(crate) fn recv_blocking(&mut self) -> Option<T> {
        let item = match self.now() {
            Now::Item(item) => Some(item),
            Now::Ended => None,
            Now::Wait => Arc::clone(&self.seat.meter).block_on(self.starve()),
        };
        item.inspect(|item| self.seat.work(item))
    }
}

/// Output of a worker.
pub(crate) struct Outlet<T> {
    tx: Tx<T>,
    seat: Seat,
}

impl<T: Message> Outlet<T> {
    pub(crate) fn new(tx: Tx<T>, seat: Seat) -> Self {
        Outlet { tx, seat }
    }

    fn offer(&self, item: T) -> Offer<T> {
        let offer = self.tx.offer(item);
        if let Offer::Sent(tokens) = offer {
            self.seat.meter.gave(tokens);
        }
        offer
    }

    /// Waits for room, without a change of state.
    async fn room(&self, parcel: Parcel<T>) -> Result<(), StageError> {
        let tokens = parcel.tokens;
        self.tx.push(parcel).await.map_err(|Closed| StageError::closed())?;
        self.seat.meter.gave(tokens);
        Ok(())
    }

    async fn block(&self, parcel: Parcel<T>) -> Result<(), StageError> {
        self.seat.meter.wait(State::Blocked, self.room(parcel)).await
    }

    pub(crate) async fn send(&self, item: T) -> Result<(), StageError> {
        match self.offer(item) {
            Offer::Sent(_) => Ok(()),
            Offer::Closed => Err(StageError::closed()),
            Offer::Full(parcel) => self.block(parcel).await,
        }
    }

    pub(crate) fn send_blocking(&self, item: T) -> Result<(), StageError> {
        match self.offer(item) {
            Offer::Sent(_) => Ok(()),
            Offer::Closed => Err(StageError::closed()),
            Offer::Full(parcel) => self.seat.meter.block_on(self.block(parcel)),
        }
    }
}

/// Result of [`Io::try_recv`].
#[derive(Debug, PartialEq, Eq)]
pub enum TryRecv<T> {
    /// An item.
    Item(T),
    /// No item now.
    Empty,
    /// No item now or later: the input ended, or the run stops.
    Closed,
}

/// Input and output of a worker of an [`AsyncStage`](super::AsyncStage).
pub struct AsyncIo<In, Out> {
    pub(crate) inlet: Inlet<In>,
    outlet: Outlet<Out>,
    order: Option<Arc<Turnstile>>,
    ticket: Option<Ticket>,
}

enum Pending<T> {
    Turn(T),
    Room(Parcel<T>),
}

impl<In: Message, Out: Message> AsyncIo<In, Out> {
    pub(crate) fn new(rx: Rx<In>, tx: Tx<Out>, order: Option<Arc<Turnstile>>, seat: Seat) -> Self {
        AsyncIo { inlet: Inlet::new(rx, seat.clone()), outlet: Outlet::new(tx, seat), order, ticket: None }
    }

    /// Receives the next item, waiting in the state *starved*. Returns `None` at the end, after a
    /// drain, and immediately when the run stops; [`AsyncIo::signal`] distinguishes them.
    ///
    /// Not cancel-safe: await it to its end, not as a branch of a `select!`.
    pub async fn recv(&mut self) -> Result<Option<In>, StageError> {
        // Lets the other tasks of this thread run, also if the input is always full.
        tokio::task::coop::consume_budget().await;
        let item = match self.recv_now() {
            Now::Item(item) => Some(item),
            Now::Ended => None,
            Now::Wait => self.recv_wait().await,
        };
        Ok(item.inspect(|item| self.inlet.seat.work(item)))
    }

    /// Receives the next item if there is one, without a wait.
    pub fn try_recv(&mut self) -> Result<TryRecv<In>, StageError> {
        Ok(match self.recv_now() {
            Now::Item(item) => {
                self.inlet.seat.work(&item);
                TryRecv::Item(item)
            }
            Now::Ended => TryRecv::Closed,
            Now::Wait => TryRecv::Empty,
        })
    }

    /// Sends an item, waiting for room in the state *blocked*. Fails with [`StageError::closed`]
    /// when downstream is gone; the item is lost, and `?` returns the error.
    ///
    /// Not cancel-safe: a dropped future may drop the item.
    pub async fn send(&mut self, item: Out) -> Result<(), StageError> {
        match self.send_now(item)? {
            None => Ok(()),
            Some(pending) => self.send_wait(pending).await,
        }
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

    fn recv_now(&mut self) -> Now<In> {
        let Some(turnstile) = &self.order else { return self.inlet.now() };
        self.ticket = None;
        let Ok(mut intake) = turnstile.intake.try_lock() else { return Now::Wait };
        let now = self.inlet.now();
        if matches!(now, Now::Item(_)) {
            self.ticket = Some(Ticket::draw(turnstile, &mut intake));
        }
        now
    }

    async fn recv_wait(&mut self) -> Option<In> {
        let meter = Arc::clone(&self.inlet.seat.meter);
        let Some(turnstile) = &self.order else { return meter.wait(State::Starved, self.inlet.arrival()).await };
        let arrival = async {
            let mut intake = turnstile.intake.lock().await;
            let item = self.inlet.arrival().await;
            if item.is_some() {
                self.ticket = Some(Ticket::draw(turnstile, &mut intake));
            }
            item
        };
        meter.wait(State::Starved, arrival).await
    }

    fn send_now(&mut self, item: Out) -> Result<Option<Pending<Out>>, StageError> {
        if self.ticket.as_ref().is_some_and(|ticket| !ticket.is_first()) {
            return Ok(Some(Pending::Turn(item)));
        }
        match self.outlet.offer(item) {
            Offer::Sent(_) => Ok(None),
            Offer::Closed => Err(StageError::closed()),
            Offer::Full(parcel) => Ok(Some(Pending::Room(parcel))),
        }
    }

    async fn send_wait(&mut self, pending: Pending<Out>) -> Result<(), StageError> {
        let sent = async {
            let parcel = match pending {
                Pending::Room(parcel) => parcel,
                Pending::Turn(item) => {
                    if let Some(ticket) = &self.ticket {
                        ticket.turn().await;
                    }
                    match self.outlet.offer(item) {
                        Offer::Sent(_) => return Ok(()),
                        Offer::Closed => return Err(StageError::closed()),
                        Offer::Full(parcel) => parcel,
                    }
                }
            };
            self.outlet.room(parcel).await
        };
        self.outlet.seat.meter.wait(State::Blocked, sent).await
    }
}

/// Input and output of a worker of a [`Stage`](super::Stage). The calls of [`AsyncIo`], blocking
/// the OS thread.
pub struct Io<In, Out>(pub(crate) AsyncIo<In, Out>);

impl<In: Message, Out: Message> Io<In, Out> {
    /// Blocking form of [`AsyncIo::recv`].
    pub fn recv(&mut self) -> Result<Option<In>, StageError> {
        let item = match self.0.recv_now() {
            Now::Item(item) => Some(item),
            Now::Ended => None,
            Now::Wait => Arc::clone(&self.0.inlet.seat.meter).block_on(self.0.recv_wait()),
        };
        Ok(item.inspect(|item| self.0.inlet.seat.work(item)))
    }

    /// Same as [`AsyncIo::try_recv`].
    pub fn try_recv(&mut self) -> Result<TryRecv<In>, StageError> {
        self.0.try_recv()
    }

    /// Blocking form of [`AsyncIo::send`].
    pub fn send(&mut self, item: Out) -> Result<(), StageError> {
        match self.0.send_now(item)? {
            None => Ok(()),
            Some(pending) => Arc::clone(&self.0.inlet.seat.meter).block_on(self.0.send_wait(pending)),
        }
    }

    /// Blocking form of [`AsyncIo::wait_weights`].
    pub fn wait_weights<W>(&mut self, rx: &mut WeightsRx<W>, at_least: u64) -> Result<(u64, Arc<W>), StageError> {
        Arc::clone(&self.0.inlet.seat.meter).block_on(self.0.wait_weights(rx, at_least))
    }

    /// Name of the stage in the graph.
    pub fn stage(&self) -> &str {
        self.0.stage()
    }

    /// Present request to the run.
    pub fn signal(&self) -> Signal {
        self.0.signal()
    }
}
