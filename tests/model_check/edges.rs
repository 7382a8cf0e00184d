//! One edge, several producers and consumers (law F1).

use shuttle::thread::spawn;

use crate::edge::{Capacity, Gauge, Offer, Rx, Tx, edge};
use crate::wait::block_on;
use crate::{Item, StageError, explore};

const CAPACITY: Capacity = Capacity { items: 2, tokens: 3 };
/// What each producer sends: light items, one without weight, and one that is heavier than the edge.
const WEIGHTS: [usize; 4] = [2, 0, 7, 1];

/// As a worker sends: without waiting if it can be.
fn send(tx: &Tx<Item>, item: Item) -> Result<(), StageError> {
    match tx.offer(item) {
        Offer::Sent(_) => Ok(()),
        Offer::Closed => Err(StageError::closed()),
        Offer::Full(parcel) => block_on(tx.push(parcel)),
    }
}

fn items(from: usize) -> impl Iterator<Item = Item> + Clone {
    WEIGHTS.into_iter().enumerate().map(move |(number, tokens)| Item { from, number, tokens })
}

fn take_all(rx: &Rx<Item>) -> Vec<Item> {
    std::iter::from_fn(|| block_on(rx.pop()).map(|(item, _)| item)).collect()
}

fn rests(gauge: &Gauge) {
    let flowed = gauge.read();
    assert_eq!(flowed.credit_out, 0, "all credit came back");
    assert_eq!((flowed.sent, flowed.tokens_sent), (flowed.received, flowed.tokens_received));
}

#[test]
fn two_producers_and_two_consumers_lose_and_repeat_nothing_and_all_credit_comes_back() {
    explore(|| {
        let (tx, rx, gauge) = edge(CAPACITY, Vec::new());
        let producers = [0, 1].map(|from| {
            let tx = tx.clone();
            spawn(move || items(from).for_each(|item| send(&tx, item).unwrap()))
        });
        let consumers = [0, 1].map(|_| {
            let rx = rx.clone();
            spawn(move || take_all(&rx))
        });
        drop((tx, rx));
        producers.into_iter().for_each(|producer| producer.join().unwrap());
        let taken = consumers.map(|consumer| consumer.join().unwrap());
        for taken in &taken {
            for from in [0, 1] {
                assert!(
                    taken.iter().filter(|item| item.from == from).is_sorted(),
                    "each producer's items stay in order: {taken:?}"
                );
            }
        }
        let mut taken = taken.concat();
        taken.sort();
        assert_eq!(taken, [0, 1].into_iter().flat_map(items).collect::<Vec<_>>());
        rests(&gauge);
    });
}

#[test]
fn an_edge_never_holds_more_than_its_capacity() {
    explore(|| {
        let (tx, rx, gauge) = edge(CAPACITY, Vec::new());
        let producers = [0, 1].map(|from| {
            let tx = tx.clone();
            spawn(move || [2, 1, 2].into_iter().for_each(|tokens| send(&tx, Item { from, number: 0, tokens }).unwrap()))
        });
        drop(tx);
        let consumer = spawn(move || take_all(&rx));
        for _ in 0..6 {
            let flowed = gauge.read();
            let (items, tokens) =
                (flowed.sent.saturating_sub(flowed.received), flowed.tokens_sent.saturating_sub(flowed.tokens_received));
            assert!(flowed.credit_out <= CAPACITY.tokens, "{flowed:?}");
            // An item is counted as received before its credit goes back, but after it left the queue.
            assert!(tokens <= CAPACITY.tokens as u64 && items <= CAPACITY.items as u64 + 1, "{flowed:?}");
        }
        producers.into_iter().for_each(|producer| producer.join().unwrap());
        assert_eq!(consumer.join().unwrap().len(), 6);
        rests(&gauge);
    });
}

#[test]
fn whoever_waits_for_credit_or_room_hears_that_the_last_consumer_went() {
    explore(|| {
        let (tx, rx, gauge) = edge(CAPACITY, Vec::new());
        let producers = [0, 1].map(|from| {
            let tx = tx.clone();
            // Without end: only the consumers' going ends it.
            spawn(move || items(from).cycle().take_while(|item| send(&tx, *item).is_ok()).count())
        });
        let consumers = [rx.clone(), rx].map(|rx| spawn(move || block_on(rx.pop()).map(|(item, _)| item)));
        let taken = consumers.map(|consumer| consumer.join().unwrap());
        assert!(taken.iter().all(Option::is_some), "the producers outlast the consumers");
        let sent: usize = producers.into_iter().map(|producer| producer.join().unwrap()).sum();
        assert!(sent >= taken.len());
        drop(tx);
        assert_eq!(gauge.read().credit_out, 0, "what was dropped unread gave its credit back");
    });
}

#[test]
fn a_send_that_was_given_up_gives_its_credit_back() {
    explore(|| {
        let (tx, rx, gauge) = edge(CAPACITY, Vec::new());
        let giver_up = shuttle::future::spawn({
            let tx = tx.clone();
            async move {
                for item in items(0) {
                    if let Offer::Full(parcel) = tx.offer(item) {
                        tx.push(parcel).await.unwrap();
                    }
                }
            }
        });
        let producer = spawn(move || items(1).for_each(|item| send(&tx, item).unwrap()));
        let consumer = spawn(move || take_all(&rx));
        giver_up.abort();
        producer.join().unwrap();
        let taken = consumer.join().unwrap();
        assert!(taken.iter().filter(|item| item.from == 1).copied().eq(items(1)), "the other producer is not held up");
        let _aborted_or_done = shuttle::future::block_on(giver_up);
        assert_eq!(gauge.read().credit_out, 0);
    });
}
