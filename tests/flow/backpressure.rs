//! Law F1: every edge is bounded, in items and in tokens; a full edge blocks its producer. The
//! counts are exact.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};

use rollflow::flow::{Capacity, Ended, Flow, Message, Port, Report, Source, StageError, Until, map, map_async};

/// What a blocked source holds in its hands.
const HELD_BY_SOURCE: u64 = 1;
/// What a stage that is at work, or blocked, holds.
const HELD_BY_STAGE: u64 = 1;
/// What a sink that is at work holds.
const HELD_BY_SINK: u64 = 1;

/// A deadlock shows as a failure rather than as a test that hangs.
const GUARD: Duration = Duration::from_secs(60);

#[derive(Clone)]
struct Heavy(usize);

impl Message for Heavy {
    fn tokens(&self) -> usize {
        self.0
    }
}

/// Makes items of one weight for ever, and counts them.
struct Endless {
    weight: usize,
    made: Arc<AtomicU64>,
}

impl Source for Endless {
    type Out = Heavy;

    fn next(&mut self) -> Result<Option<Heavy>, StageError> {
        self.made.fetch_add(1, SeqCst);
        Ok(Some(Heavy(self.weight)))
    }
}

/// A flow whose sink holds every item until it is let go. Returns how many the source made when
/// everything had come to rest.
fn made_at_rest(weight: usize, expected: u64, wire: impl FnOnce(&mut Flow, Port<Heavy>) -> Port<Heavy>) -> (u64, Report) {
    let made = Arc::new(AtomicU64::new(0));
    let (go, gate): (Sender<()>, Receiver<()>) = channel();
    let mut flow = Flow::new("backpressure");
    let items = flow.source("source", Endless { weight, made: Arc::clone(&made) });
    let items = wire(&mut flow, items);
    flow.sink("sink", items, move |_: Heavy| gate.recv().unwrap_or(()));
    let handle = flow.handle();
    let run = std::thread::spawn(move || flow.run(Until::finished()).unwrap());
    let begun = Instant::now();
    while made.load(SeqCst) < expected && begun.elapsed() < GUARD {
        std::thread::sleep(Duration::from_millis(1));
    }
    // Whoever would exceed the bound gets time to.
    std::thread::sleep(Duration::from_millis(30));
    let at_rest = made.load(SeqCst);
    handle.stop();
    drop(go);
    (at_rest, run.join().unwrap())
}

#[test]
fn an_edge_holds_exactly_its_items() {
    for items in [1, 2, 7] {
        let expected = items as u64 + HELD_BY_SOURCE + HELD_BY_SINK;
        let (made, _) = made_at_rest(1, expected, |flow, port| {
            flow.edge(&port, Capacity::items(items));
            port
        });
        assert_eq!(made, expected, "capacity {items}");
    }
}

#[test]
fn a_chain_holds_the_sum_of_its_edges_and_one_item_per_stage() {
    let expected = 3 + 2 + 5 + HELD_BY_SOURCE + 2 * HELD_BY_STAGE + HELD_BY_SINK;
    let (made, _) = made_at_rest(1, expected, |flow, port| {
        flow.edge(&port, Capacity::items(3));
        let port = flow.stage("thread", port, map(|item: Heavy| item));
        flow.edge(&port, Capacity::items(2));
        let port = flow.stage("task", port, map_async(async |item: Heavy| Ok(item)));
        flow.edge(&port, Capacity::items(5));
        port
    });
    assert_eq!(made, expected);
}

#[test]
fn several_workers_hold_one_item_each_also_in_order() {
    for ordered in [false, true] {
        let expected = 2 + 2 + HELD_BY_SOURCE + 3 * HELD_BY_STAGE + HELD_BY_SINK;
        let (made, _) = made_at_rest(1, expected, |flow, port| {
            flow.capacity(Capacity::items(2));
            let stage = map(|item: Heavy| item).workers(3);
            flow.stage("workers", port, if ordered { stage.ordered() } else { stage })
        });
        assert_eq!(made, expected, "ordered: {ordered}");
    }
}

#[test]
fn an_edge_holds_exactly_its_tokens() {
    // 32 tokens at 10 a piece: three fit, the fourth waits with its source.
    let expected = 3 + HELD_BY_SOURCE + HELD_BY_SINK;
    let (made, _) = made_at_rest(10, expected, |flow, port| {
        flow.edge(&port, Capacity::items(100).tokens(32));
        port
    });
    assert_eq!(made, expected);
}

#[test]
fn an_item_heavier_than_the_edge_travels_alone() {
    let expected = 1 + HELD_BY_SOURCE + HELD_BY_SINK;
    let (made, _) = made_at_rest(1000, expected, |flow, port| {
        flow.edge(&port, Capacity::items(100).tokens(32));
        port
    });
    assert_eq!(made, expected);
}

#[test]
fn what_is_dropped_in_flight_is_counted_and_gives_back_its_credit() {
    let (_, report) = made_at_rest(10, 5, |flow, port| {
        flow.edge(&port, Capacity::items(100).tokens(32));
        port
    });
    let edge = report.edge("source", "sink").unwrap();
    assert_eq!((report.ended, edge.credit_out), (Ended::Stopped, 0));
    assert_eq!(edge.sent - edge.received, edge.depth_items);
    assert_eq!(edge.depth_tokens, 10 * edge.depth_items);
    assert!(edge.depth_items > 0, "the queue was full when the run was stopped");
}

#[test]
fn a_producer_that_waits_for_credit_is_released_when_its_consumer_goes() {
    for on_tokio in [false, true] {
        let mut flow = Flow::new("release");
        flow.capacity(Capacity::items(100).tokens(10));
        let mut items = flow.source("source", Endless { weight: 10, made: Arc::default() });
        if on_tokio {
            items = flow.stage("task", items, map_async(async |item: Heavy| Ok(item)));
        }
        flow.sink("sink", items, |_: Heavy| {});
        let report = flow.run(Until::items("sink", 3)).unwrap();
        assert_eq!(report.stage("sink").unwrap().items_in, 3);
    }
}

#[test]
fn a_tee_goes_as_fast_as_its_slowest_branch() {
    let (go, gate): (Sender<()>, Receiver<()>) = channel();
    let (made, fast) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicU64::new(0)));
    let mut flow = Flow::new("tee");
    flow.capacity(Capacity::items(2));
    let items = flow.source("source", Endless { weight: 1, made: Arc::clone(&made) });
    let mut branches = flow.tee("tee", items, 2).into_iter();
    let (first, second) = (branches.next().unwrap(), branches.next().unwrap());
    let seen = Arc::clone(&fast);
    flow.sink("fast", first, move |_: Heavy| {
        seen.fetch_add(1, SeqCst);
    });
    flow.sink("slow", second, move |_: Heavy| gate.recv().unwrap_or(()));
    let handle = flow.handle();
    let run = std::thread::spawn(move || flow.run(Until::finished()).unwrap());
    // The slow branch holds one item and queues two; of the fourth the fast branch has its copy already.
    let expected = HELD_BY_SINK + 2 + HELD_BY_STAGE;
    let begun = Instant::now();
    while fast.load(SeqCst) < expected && begun.elapsed() < GUARD {
        std::thread::sleep(Duration::from_millis(1));
    }
    std::thread::sleep(Duration::from_millis(30));
    assert_eq!(fast.load(SeqCst), expected);
    handle.stop();
    drop(go);
    run.join().unwrap();
}

#[test]
fn a_tap_sees_every_nth_item_and_changes_nothing() {
    let (seen, tapped) = channel();
    let mut flow = Flow::new("tap");
    let numbers = flow.source("numbers", rollflow::flow::from_iter(0..10u64));
    flow.tap(&numbers, 4, move |n: &u64| seen.send(*n).unwrap());
    flow.sink("sink", numbers, |_: u64| {});
    let report = flow.run(Until::finished()).unwrap();
    assert_eq!(tapped.try_iter().collect::<Vec<_>>(), [0, 4, 8]);
    assert_eq!(report.stage("sink").unwrap().items_in, 10);
}
