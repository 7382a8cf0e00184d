//! What the engine costs (law F1's bounds, law F4's accounting) over bare flume channels between the same number of threads, in
//! nanoseconds per message, and what longer edges do to throughput. `cargo bench --bench flow` prints both tables at the end.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use criterion::{BenchmarkId, Criterion};
use rollflow::flow::{Capacity, Flow, Until, from_iter, map};

const STAGES: [usize; 3] = [1, 5, 20];
const CAPACITIES: [usize; 7] = [1, 4, 16, 64, 256, 1024, 4096];
/// Starting threads must not weigh in what is printed.
const ENOUGH: u64 = 4_000;

fn through_flow(messages: u64, stages: usize, capacity: usize) -> Duration {
    let mut flow = Flow::new("bench");
    flow.capacity(Capacity::items(capacity));
    let mut port = flow.source("source", from_iter(0..messages));
    for stage in 0..stages {
        port = flow.stage(&format!("stage{stage}"), port, map(|n: u64| n));
    }
    flow.sink("sink", port, |n: u64| {
        std::hint::black_box(n);
    });
    let begun = Instant::now();
    flow.run(Until::finished()).expect("the graph is sound");
    begun.elapsed()
}

fn through_flume(messages: u64, stages: usize, capacity: usize) -> Duration {
    let begun = Instant::now();
    std::thread::scope(|scope| {
        let (first, mut last) = flume::bounded(capacity);
        scope.spawn(move || (0..messages).try_for_each(|n| first.send(n)));
        for _ in 0..stages {
            let (tx, rx) = flume::bounded(capacity);
            let input = std::mem::replace(&mut last, rx);
            scope.spawn(move || input.iter().try_for_each(|n| tx.send(n)));
        }
        scope.spawn(move || {
            last.iter().for_each(|n| {
                std::hint::black_box(n);
            });
        });
    });
    begun.elapsed()
}

/// The best nanoseconds per message by (engine or flume, stages, capacity).
type Best = BTreeMap<(&'static str, usize, usize), f64>;

fn measure(criterion: &mut Criterion, best: &mut Best, stages: usize, capacity: usize) {
    let mut group = criterion.benchmark_group(format!("{stages} stages, edges of {capacity}"));
    group.sample_size(10).warm_up_time(Duration::from_millis(300)).measurement_time(Duration::from_secs(2));
    for (name, run) in [("flow", through_flow as fn(u64, usize, usize) -> Duration), ("flume", through_flume)] {
        let best = best.entry((name, stages, capacity)).or_insert(f64::INFINITY);
        group.bench_function(BenchmarkId::from_parameter(name), |bencher| {
            bencher.iter_custom(|messages| {
                let took = run(messages, stages, capacity);
                if messages >= ENOUGH {
                    *best = best.min(took.as_nanos() as f64 / messages as f64);
                }
                took
            });
        });
    }
    group.finish();
}

fn main() {
    let mut criterion = Criterion::default().configure_from_args();
    let mut best = Best::new();
    for stages in STAGES {
        measure(&mut criterion, &mut best, stages, 64);
    }
    for capacity in CAPACITIES {
        measure(&mut criterion, &mut best, 5, capacity);
    }
    println!("\n{:>8} {:>8} {:>12} {:>12} {:>16}", "stages", "edges of", "flow ns/msg", "flume ns/msg", "overhead ns/hop");
    for (&(name, stages, capacity), &flow) in &best {
        let Some(&flume) = best.get(&("flume", stages, capacity)).filter(|_| name == "flow") else { continue };
        println!("{stages:>8} {capacity:>8} {flow:>12.0} {flume:>12.0} {:>16.0}", (flow - flume) / (stages + 1) as f64);
    }
    criterion.final_summary();
}
