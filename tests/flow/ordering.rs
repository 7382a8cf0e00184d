//! Law D6 as far as the engine holds it: behind several workers, items come in the order in which
//! they went in, if a stage asks for it.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use rollflow::flow::{Flow, Message, Port, Until, filter_map, flat_map, from_iter, map_async, try_map};

fn collected<T: Message>(wire: impl FnOnce(&mut Flow, Port<u64>) -> Port<T>, n: u64) -> Vec<T> {
    let out = Arc::new(Mutex::new(Vec::new()));
    let mut flow = Flow::new("order");
    let numbers = flow.source("numbers", from_iter(0..n));
    let port = wire(&mut flow, numbers);
    let keep = Arc::clone(&out);
    flow.sink("sink", port, move |item: T| keep.lock().unwrap().push(item));
    flow.run(Until::finished()).unwrap();
    Arc::into_inner(out).unwrap().into_inner().unwrap()
}

/// Uneven work, so that workers overtake each other.
fn work(n: u64) -> Duration {
    Duration::from_micros((n * 7919) % 13 * 50)
}

#[test]
fn ordered_workers_keep_the_order_on_threads_and_tasks() {
    let threads = |n: u64| {
        std::thread::sleep(work(n));
        Ok(n)
    };
    let kept = collected(|flow, port| flow.stage("threads", port, try_map(threads).workers(4).ordered()), 300);
    assert_eq!(kept, (0..300).collect::<Vec<_>>());

    let tasks = async |n: u64| {
        tokio::time::sleep(work(n)).await;
        Ok(n)
    };
    let kept = collected(|flow, port| flow.stage("tasks", port, map_async(tasks).workers(16).ordered()), 300);
    assert_eq!(kept, (0..300).collect::<Vec<_>>());
}

#[test]
fn order_survives_items_that_become_none_or_many() {
    let odd = |n: u64| {
        std::thread::sleep(work(n));
        (n % 2 == 1).then_some(n)
    };
    let kept = collected(|flow, port| flow.stage("odd", port, filter_map(odd).workers(4).ordered()), 300);
    assert_eq!(kept, (0..300).filter(|n| n % 2 == 1).collect::<Vec<_>>());

    let repeat = |n: u64| {
        std::thread::sleep(work(n));
        std::iter::repeat_n(n, n as usize % 4)
    };
    let kept = collected(|flow, port| flow.stage("repeat", port, flat_map(repeat).workers(4).ordered()), 300);
    assert_eq!(kept, (0..300).flat_map(|n| std::iter::repeat_n(n, n as usize % 4)).collect::<Vec<_>>());
}

#[test]
fn unordered_workers_lose_and_repeat_nothing() {
    let mut kept = collected(|flow, port| flow.stage("threads", port, try_map(|n: u64| Ok(n)).workers(4)), 3000);
    kept.sort();
    assert_eq!(kept, (0..3000).collect::<Vec<_>>());
}
