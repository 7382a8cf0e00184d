//! A worker's two ends. The runner owns every wait (law F4): each is written once, as a future that books its state, and has two
//! faces, [`Io`] for OS threads and [`AsyncIo`] for tokio tasks.
//!
//! What is there, or has room, is taken and given without a wait: then no clock is read and no state changes.

use std::sync::Arc;

use super::clock::{Meter, State};
use super::control::{Control, Signal};
use super::edge::{Closed, Offer, Parcel, Pop, Rx, Tx};
use super::order::{Ticket, Turnstile};
use super::{Message, StageError, WeightsRx};

/// What the ends of one worker share.
#[derive(Clone, Debug)]
pub(crate) struct Seat {
    pub(crate) stage: Arc<str>,
    pub(crate) meter: Arc<Meter>,
    pub(crate) control: Control,
}

impl Seat {
    /// On a simulated machine an item takes the time that was said; on a real one, what it takes.
    fn work<T: Message>(&self, item: &T) {
        self.meter.clock.work(&self.stage, || item.tokens());
    }
}

/// A worker's input.
pub(crate) struct Inlet<T> {
    rx: Rx<T>,
    seat: Seat,
    /// Whether the worker was told that nothing more comes.
    pub(crate) ended: bool,
}

/// What an end gave without waiting.
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

    /// Waits for an item, in whatever state its worker is.
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

/// A worker's output.
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

    /// Waits for room, in whatever state its worker is.
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

/// What [`Io::try_recv`] found.
#[derive(Debug, PartialEq, Eq)]
pub enum TryRecv<T> {
    /// An item.
    Item(T),
    /// Nothing now.
    Empty,
    /// Nothing now or ever: the input ended, or the run stops.
    Closed,
}

/// The ends of an [`AsyncStage`](super::AsyncStage)'s worker.
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

    /// The next item, waiting for it in the state *starved*. `None` at the end, when a drain finished, and at once when the run stops;
    /// [`AsyncIo::signal`] tells which.
    ///
    /// Not cancel-safe: await it to its end rather than as a branch of a `select!`.
    pub async fn recv(&mut self) -> Result<Option<In>, StageError> {
        // A full input would otherwise never let the other tasks of this thread run.
        tokio::task::coop::consume_budget().await;
        let item = match self.recv_now() {
            Now::Item(item) => Some(item),
            Now::Ended => None,
            Now::Wait => self.recv_wait().await,
        };
        Ok(item.inspect(|item| self.inlet.seat.work(item)))
    }

    /// The next item if there is one. Never waits.
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

    /// Sends an item, waiting for room in the state *blocked*. Fails with [`StageError::closed`] when downstream is gone: pass it on
    /// with `?`, the item is lost.
    ///
    /// Not cancel-safe: a dropped future may drop the item.
    pub async fn send(&mut self, item: Out) -> Result<(), StageError> {
        match self.send_now(item)? {
            None => Ok(()),
            Some(pending) => self.send_wait(pending).await,
        }
    }

    /// Weights of version `at_least` or newer, waiting for them in the state *weights* (0: any). Fails with [`StageError::closed`] when
    /// the run stops, or winds down and the publisher is gone; with an error when the publisher just went. Cancel-safe.
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
            // A publisher that has done its part takes the run down with it; whoever still waits is no longer needed.
            None if seat.control.signal() != Signal::Run => Err(StageError::closed()),
            None => Err(StageError::new(match rx.version() {
                Some(last) => format!("waited for weights of version {at_least}, but their publisher ended at version {last}"),
                None => format!("waited for weights of version {at_least}, but their publisher ended before it published any"),
            })),
        }
    }

    /// The stage's name in the graph.
    pub fn stage(&self) -> &str {
        &self.inlet.seat.stage
    }

    /// What the run is to do now.
    pub fn signal(&self) -> Signal {
        self.inlet.seat.control.signal()
    }

    /// Waits until the run stops: for a stage to give up what it awaits outside the graph. A drain does not count. Cancel-safe.
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

/// The ends of a [`Stage`](super::Stage)'s worker. As [`AsyncIo`], but each call blocks its OS thread.
pub struct Io<In, Out>(pub(crate) AsyncIo<In, Out>);

impl<In: Message, Out: Message> Io<In, Out> {
    /// As [`AsyncIo::recv`].
    pub fn recv(&mut self) -> Result<Option<In>, StageError> {
        let item = match self.0.recv_now() {
            Now::Item(item) => Some(item),
            Now::Ended => None,
            Now::Wait => Arc::clone(&self.0.inlet.seat.meter).block_on(self.0.recv_wait()),
        };
        Ok(item.inspect(|item| self.0.inlet.seat.work(item)))
    }

    /// As [`AsyncIo::try_recv`].
    pub fn try_recv(&mut self) -> Result<TryRecv<In>, StageError> {
        self.0.try_recv()
    }

    /// As [`AsyncIo::send`].
    pub fn send(&mut self, item: Out) -> Result<(), StageError> {
        match self.0.send_now(item)? {
            None => Ok(()),
            Some(pending) => Arc::clone(&self.0.inlet.seat.meter).block_on(self.0.send_wait(pending)),
        }
    }

    /// As [`AsyncIo::wait_weights`].
    pub fn wait_weights<W>(&mut self, rx: &mut WeightsRx<W>, at_least: u64) -> Result<(u64, Arc<W>), StageError> {
        Arc::clone(&self.0.inlet.seat.meter).block_on(self.0.wait_weights(rx, at_least))
    }

    /// As [`AsyncIo::stage`].
    pub fn stage(&self) -> &str {
        self.0.stage()
    }

    /// What the run is to do now.
    pub fn signal(&self) -> Signal {
        self.0.signal()
    }
}
