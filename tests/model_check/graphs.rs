//! Workers between two edges, with the ends that the runner gives them: order behind several workers (law D6), and shutdown (law F5).
//! No runner is here; what it does to its workers, each scenario does.

use std::sync::Arc;

use shuttle::thread::{JoinHandle, spawn};

use crate::clock::{Clock, Meter, State};
use crate::control::{Control, Signal};
use crate::crew::{Crew, Presence};
use crate::edge::{Capacity, Gauge, Rx, Tx, edge};
use crate::io::{AsyncIo, Inlet, Io, Outlet, Seat};
use crate::order::Turnstile;
use crate::sync::thread::{current, park};
use crate::wait::block_on;
use crate::weights::weights;
use crate::window::Window;
use crate::{Item, StageError, explore};

const CAPACITY: Capacity = Capacity { items: 1, tokens: 2 };

fn seat(control: &Control) -> Seat {
    Seat { stage: "model".into(), meter: Arc::new(Meter::new(Clock::start(), None)), control: control.clone() }
}

fn line() -> (Tx<Item>, Rx<Item>, Arc<Gauge>) {
    edge(CAPACITY, Vec::new())
}

/// Sends items until there are `count`, the run winds down, or nobody takes them.
fn source(tx: Tx<Item>, window: &Window, control: &Control, count: usize) -> JoinHandle<()> {
    let (window, control) = (window.clone(), control.clone());
    spawn(move || {
        let outlet = Outlet::new(tx, seat(&control));
        for number in 0..count {
            let goes_on = control.signal() == Signal::Run && block_on(window.admit(&control));
            if !goes_on || outlet.send_blocking(Item { from: 0, number, tokens: number % 3 }, None).is_err() {
                return;
            }
        }
    })
}

/// Passes on what it receives, but for every third item.
fn worker(rx: Rx<Item>, tx: Tx<Item>, order: Option<Arc<Turnstile>>, control: &Control) -> JoinHandle<()> {
    let mut io = Io(AsyncIo::new(rx, tx, order, seat(control)));
    spawn(move || {
        let mut work = || -> Result<(), StageError> {
            while let Some(item) = io.recv()? {
                if item.number % 3 != 2 {
                    io.send(item)?;
                }
            }
            Ok(())
        };
        // Whoever finds its output closed ends as well.
        let _closed = work();
    })
}

/// The same as a task.
async fn task(rx: Rx<Item>, tx: Tx<Item>, order: Option<Arc<Turnstile>>, control: Control) -> Result<(), StageError> {
    let mut io = AsyncIo::new(rx, tx, order, seat(&control));
    while let Some(item) = io.recv().await? {
        if item.number % 3 != 2 {
            io.send(item).await?;
        }
    }
    Ok(())
}

/// Takes all that comes, or only the first `at_most` items.
fn sink(rx: Rx<Item>, control: &Control, at_most: usize) -> JoinHandle<Vec<usize>> {
    let mut inlet = Inlet::new(rx, seat(control));
    spawn(move || std::iter::from_fn(|| inlet.recv_blocking()).take(at_most).map(|item| item.number).collect())
}

#[test]
fn items_leave_several_workers_in_the_order_in_which_they_came() {
    explore(|| {
        let (control, order) = (Control::new(), Arc::<Turnstile>::default());
        let ((tx_in, rx_in, before), (tx_out, rx_out, after)) = (line(), line());
        let source = source(tx_in, &Window::new(6), &control, 6);
        let workers = [(); 2].map(|()| worker(rx_in.clone(), tx_out.clone(), Some(Arc::clone(&order)), &control));
        let task = shuttle::future::spawn(task(rx_in, tx_out, Some(order), control.clone()));
        let sink = sink(rx_out, &control, usize::MAX);
        source.join().unwrap();
        workers.into_iter().for_each(|worker| worker.join().unwrap());
        block_on(task).unwrap().unwrap();
        assert_eq!(sink.join().unwrap(), [0, 1, 3, 4]);
        assert_eq!((before.read().credit_out, after.read().credit_out), (0, 0));
    });
}

#[test]
fn no_wait_outlives_a_stop_and_no_credit_is_kept() {
    explore(|| {
        let (control, window, order) = (Control::new(), Window::new(3), Arc::<Turnstile>::default());
        let ((tx_in, rx_in, before), (tx_out, rx_out, after)) = (line(), line());
        // The window is never raised, so the source waits for admission in the end.
        let source = source(tx_in, &window, &control, 6);
        let workers = [(); 2].map(|()| worker(rx_in.clone(), tx_out.clone(), Some(Arc::clone(&order)), &control));
        drop((tx_out, rx_in));
        let sink = sink(rx_out, &control, usize::MAX);
        control.stop();
        source.join().unwrap();
        workers.into_iter().for_each(|worker| worker.join().unwrap());
        assert!(sink.join().unwrap().is_sorted());
        assert_eq!((before.read().credit_out, after.read().credit_out), (0, 0));
    });
}

#[test]
fn a_drain_delivers_everything_that_was_admitted() {
    explore(|| {
        let (control, window) = (Control::new(), Window::new(2));
        let ((tx_in, rx_in, _), (tx_out, rx_out, _)) = (line(), line());
        let source = source(tx_in, &window, &control, 6);
        let workers = [(); 2].map(|()| worker(rx_in.clone(), tx_out.clone(), None, &control));
        drop((tx_out, rx_in));
        let sink = sink(rx_out, &control, usize::MAX);
        control.drain();
        source.join().unwrap();
        workers.into_iter().for_each(|worker| worker.join().unwrap());
        let mut delivered = sink.join().unwrap();
        delivered.sort();
        assert_eq!(delivered, (0..window.admitted() as usize).collect::<Vec<_>>());
    });
}

#[test]
fn a_sink_that_leaves_early_takes_everyone_upstream_with_it() {
    explore(|| {
        let (control, window) = (Control::new(), Window::new(20));
        let ((tx_in, rx_in, before), (tx_out, rx_out, after)) = (line(), line());
        let source = source(tx_in, &window, &control, 20);
        let workers = [(); 2].map(|()| worker(rx_in.clone(), tx_out.clone(), None, &control));
        drop((tx_out, rx_in));
        assert_eq!(sink(rx_out, &control, 2).join().unwrap().len(), 2);
        source.join().unwrap();
        workers.into_iter().for_each(|worker| worker.join().unwrap());
        assert_eq!((before.read().credit_out, after.read().credit_out), (0, 0));
    });
}

#[test]
fn a_stop_wakes_whoever_waits_for_weights_that_never_come() {
    explore(|| {
        let (control, (tx, rx)) = (Control::new(), weights::<u64>());
        let waiters = [1, 2].map(|at_least| {
            let ((_, rx_in, _), (tx_out, _, _)) = (line(), line());
            let (mut io, mut rx) = (Io(AsyncIo::new(rx_in, tx_out, None, seat(&control))), rx.clone());
            spawn(move || io.wait_weights(&mut rx, at_least).map(|(version, _)| version))
        });
        let publisher = spawn(move || {
            tx.publish(1, Arc::new(10)).unwrap();
            tx
        });
        control.stop();
        let [first, second] = waiters.map(|waiter| waiter.join().unwrap());
        assert!(first.is_err() || first.is_ok_and(|version| version == 1));
        assert!(second.is_err(), "there never was a second version");
        // Only now does the publisher go.
        drop(publisher.join().unwrap());
    });
}

/// Law F7: the last worker that waits is noticed, and none that was woken is overlooked.
#[test]
fn a_crew_is_idle_when_each_worker_waits_and_none_was_woken() {
    explore(|| {
        let (control, window, runner) = (Control::new(), Window::new(2), current());
        let crew = Crew::new(move || runner.unpark());
        let seat = || {
            let meter = Arc::new(Meter::new(Clock::start(), Some(Presence::new(&crew))));
            meter.begin();
            Seat { stage: "model".into(), meter, control: control.clone() }
        };
        let ((tx_in, rx_in, before), (tx_out, rx_out, after)) = (line(), line());
        let (source_seat, task_seat, sink_seat) = (seat(), seat(), seat());
        let (admitted, asked) = (window.clone(), control.clone());
        let source = spawn(move || {
            let (meter, outlet) = (source_seat.meter.clone(), Outlet::new(tx_in, source_seat));
            for number in 0..4 {
                if !admitted.try_admit() {
                    assert!(meter.block_on(meter.wait(State::Credit, admitted.admit(&asked))));
                }
                outlet.send_blocking(Item { from: 0, number, tokens: number % 3 }, None).unwrap();
            }
            drop(outlet);
            meter.leave();
        });
        let task = shuttle::future::spawn(async move {
            let meter = task_seat.meter.clone();
            let mut io = AsyncIo::new(rx_in, tx_out, None, task_seat);
            let body = async {
                while let Some(item) = io.recv().await? {
                    io.send(item).await?;
                }
                Ok::<(), StageError>(())
            };
            meter.attend(body).await.unwrap();
            drop(io);
            meter.leave();
        });
        let sink = spawn(move || {
            let meter = sink_seat.meter.clone();
            let mut inlet = Inlet::new(rx_out, sink_seat);
            let taken = std::iter::from_fn(|| inlet.recv_blocking()).count();
            drop(inlet);
            meter.leave();
            taken
        });
        for delivered in [2, 3] {
            while !crew.is_idle() {
                park();
            }
            // Idle, so all that was admitted has arrived.
            for edge in [&before, &after] {
                let flowed = edge.read();
                assert_eq!((flowed.sent, flowed.received), (delivered, delivered));
            }
            window.raise(1);
        }
        source.join().unwrap();
        block_on(task).unwrap();
        assert_eq!(sink.join().unwrap(), 4);
        assert!(crew.is_idle(), "all of them are gone");
    });
}
