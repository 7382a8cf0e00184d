//! Law F4: each worker's time is busy + starved + blocked + credit + weights = wall-clock, to the nanosecond.

use std::sync::Arc;
use std::time::Duration;

use rollflow::flow::{
    Capacity, Flow, Io, Report, Snapshot, Stage, StageError, StageReport, StageSpec, State, Until, WeightsRx, Window, batch,
    from_iter, map, map_async, weights,
};

const NAP: Duration = Duration::from_millis(5);

fn assert_exact(stages: &[StageReport]) {
    for stage in stages {
        for worker in &stage.workers {
            assert_eq!(worker.time.total(), worker.wall, "{}: {worker:?}", stage.name);
        }
    }
}

fn nanos(report: &Report, stage: &str, state: State) -> u128 {
    u128::from(report.stage(stage).unwrap().time().of(state))
}

fn naps(n: u64) -> u64 {
    std::thread::sleep(NAP);
    n
}

#[test]
fn the_states_sum_to_the_wall_clock_exactly_at_the_end_and_at_any_moment() {
    let mut flow = Flow::new("exact");
    flow.capacity(Capacity::items(2));
    let numbers = flow.source("numbers", from_iter(0..20_000u64));
    let mut branches = flow.tee("tee", numbers, 2).into_iter();
    let a = flow.stage("threads", branches.next().unwrap(), map(|n: u64| n).workers(2).ordered());
    let b = flow.stage("tasks", branches.next().unwrap(), map_async(async |n: u64| Ok(n)).workers(3));
    let both = flow.merge("merge", vec![a, b]);
    let rows = flow.stage("rows", both, batch(10));
    flow.sink("sink", rows, |_: Vec<u64>| {});
    let stats = flow.stats();
    let run = std::thread::spawn(move || flow.run(Until::finished()).unwrap());
    let mut live = 0;
    while !run.is_finished() {
        live += stats.snapshot().iter().map(|snapshot: &Snapshot| assert_exact(&snapshot.stages)).count();
    }
    let report = run.join().unwrap();
    assert_exact(&report.stages);
    assert!(live > 0, "it was looked at while it ran");
    assert!(report.stages.iter().flat_map(|stage| &stage.workers).all(|worker| worker.wall > 0 && worker.wall <= report.wall));
}

#[test]
fn who_computes_is_busy_who_waits_for_input_is_starved_who_waits_for_room_is_blocked() {
    let mut flow = Flow::new("three");
    flow.capacity(Capacity::items(1));
    let numbers = flow.source("numbers", from_iter(0..10u64));
    let slow = flow.stage("slow", numbers, map(naps));
    flow.sink("sink", slow, |_: u64| {});
    let report = flow.run(Until::finished()).unwrap();
    assert_exact(&report.stages);
    assert!(nanos(&report, "slow", State::Busy) >= 10 * NAP.as_nanos());
    assert!(nanos(&report, "sink", State::Starved) > 0);
    assert!(nanos(&report, "numbers", State::Blocked) > 0);
    assert!(report.bottleneck.starts_with("bottleneck: slow (busy "), "{}", report.bottleneck);
    assert!(report.bottleneck.ends_with("give it more workers"), "{}", report.bottleneck);
}

#[test]
fn who_waits_for_admission_waits_in_credit() {
    let window = Window::new(1);
    let mut flow = Flow::new("credit");
    let numbers = flow.source("numbers", from_iter(0..10u64).with(|spec| spec.window(window.clone())));
    // Raised by another thread, so that nobody in the graph is busy meanwhile.
    let (trained, raises) = std::sync::mpsc::channel::<()>();
    let raiser = std::thread::spawn(move || {
        for () in raises {
            std::thread::sleep(NAP);
            window.raise(1);
        }
    });
    flow.sink("sink", numbers, move |_: u64| trained.send(()).map_err(StageError::from));
    let report = flow.run(Until::finished()).unwrap();
    raiser.join().unwrap();
    assert_exact(&report.stages);
    assert!(nanos(&report, "numbers", State::Credit) > 0);
    assert!(report.bottleneck.starts_with("bottleneck: admission (numbers waited "), "{}", report.bottleneck);
}

struct NeedsNewest(WeightsRx<u64>);

impl Stage for NeedsNewest {
    type In = u64;
    type Out = u64;

    fn run(&mut self, io: &mut Io<u64, u64>) -> Result<(), StageError> {
        while let Some(n) = io.recv()? {
            let (version, _) = io.wait_weights(&mut self.0, n)?;
            io.send(version)?;
        }
        Ok(())
    }

    fn spec(&self) -> StageSpec {
        StageSpec::thread().subscribes(self.0.id())
    }
}

#[test]
fn who_waits_for_weights_waits_in_weights() {
    let (tx, rx) = weights::<u64>();
    let (trained, publishes) = std::sync::mpsc::channel();
    tx.publish(0, Arc::new(0)).unwrap();
    let publisher = std::thread::spawn(move || {
        for version in publishes {
            std::thread::sleep(NAP);
            tx.publish(version, Arc::new(version)).unwrap();
        }
    });
    let mut flow = Flow::new("weights");
    let numbers = flow.source("numbers", from_iter(0..10u64));
    let versions = flow.stage("generate", numbers, NeedsNewest(rx));
    flow.sink("sink", versions, move |version: u64| trained.send(version + 1).map_err(StageError::from));
    let report = flow.run(Until::finished()).unwrap();
    publisher.join().unwrap();
    assert_exact(&report.stages);
    assert!(nanos(&report, "generate", State::Weights) > 0);
    assert!(report.bottleneck.starts_with("bottleneck: weights (generate waited "), "{}", report.bottleneck);
}

#[test]
fn whoever_waits_for_its_turn_is_blocked() {
    let mut flow = Flow::new("turn");
    let numbers = flow.source("numbers", from_iter(0..2u64));
    // The first item is made only after the second, which may not overtake it.
    let (made, second) = std::sync::mpsc::channel();
    let second = Arc::new(std::sync::Mutex::new(second));
    let second_first = move |n: u64| match n {
        0 => second.lock().unwrap().recv().map(|()| naps(n)).unwrap(),
        _ => made.send(()).map(|()| n).unwrap(),
    };
    let out = flow.stage("workers", numbers, map(second_first).workers(2).ordered());
    let mut last = None;
    flow.sink("sink", out, move |n: u64| assert!(last.replace(n) < Some(n)));
    let report = flow.run(Until::finished()).unwrap();
    assert!(nanos(&report, "workers", State::Blocked) > 0);
    assert_exact(&report.stages);
}

#[test]
fn the_report_is_a_table_with_a_row_per_stage_and_edge_and_a_last_line_with_the_bottleneck() {
    let mut flow = Flow::new("table");
    let numbers = flow.source("numbers", from_iter(0..5u64));
    let slow = flow.stage("slow", numbers, map(naps));
    flow.sink("sink", slow, |_: u64| {});
    let report = flow.run(Until::finished()).unwrap();
    let text = report.to_string();
    let lines: Vec<&str> = text.lines().collect();
    assert_eq!(lines.len(), 1 + 4 + 3 + 1, "{text}");
    for (line, start) in lines.iter().zip([
        "table finished",
        "  stage ",
        "  numbers ",
        "  slow ",
        "  sink ",
        "  edge ",
        "  numbers → slow",
        "  slow → sink",
    ]) {
        assert!(line.starts_with(start), "{line:?} should start with {start:?}");
    }
    assert_eq!(lines.last(), Some(&report.bottleneck.as_str()));
}
