//! Law F4: each worker's time is busy + starved + blocked + credit + weights = wall-clock, to the
//! nanosecond, and each share is what the simulated clock says.

use std::sync::Arc;
use std::time::Duration;

use proptest::prelude::*;
use rollflow::flow::{
    Capacity, Flow, Io, Report, Simulation, Stage, StageError, StageReport, StageSpec, State, Until, WeightsRx, Window, batch,
    from_iter, map, map_async, try_map, weights,
};

const NAP: Duration = Duration::from_millis(5);

fn assert_exact(stages: &[StageReport]) {
    for stage in stages {
        for worker in &stage.workers {
            assert_eq!(worker.total(), worker.wall, "{}: {worker:?}", stage.name);
        }
    }
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
        live += stats.report().iter().map(|report| assert_exact(&report.stages)).count();
    }
    let report = run.join().unwrap();
    assert_exact(&report.stages);
    assert!(live > 0, "it was looked at while it ran");
    assert!(report.stages.iter().flat_map(|stage| &stage.workers).all(|worker| worker.wall > 0 && worker.wall <= report.wall));
}

/// Seconds of one stage in each state, and its wall-clock time.
fn seconds(report: &Report, stage: &str) -> [u64; 6] {
    assert_exact(&report.stages);
    let stage = report.stage(stage).unwrap();
    let time = stage.time();
    let [busy, starved, blocked, credit, weights] = State::ALL.map(|state| time.of(state));
    [busy, starved, blocked, credit, weights, time.wall].map(|nanos| {
        assert_eq!(nanos % 1_000_000_000, 0, "whole seconds");
        nanos / 1_000_000_000
    })
}

/// A line of stages on a simulated machine; each stage takes so many seconds for an item.
fn line(items: u64, services: &[u64], capacity: usize) -> Report {
    let simulation = Simulation::new(7);
    let mut flow = Flow::new("line");
    flow.capacity(Capacity::items(capacity));
    let mut port = flow.source("source", from_iter(0..items));
    for (index, seconds) in services.iter().copied().enumerate() {
        let name = format!("stage {index}");
        simulation.takes(&name, move |_| Duration::from_secs(seconds));
        port = flow.stage(&name, port, map(|n: u64| n));
    }
    flow.sink("sink", port, |_: u64| {});
    flow.simulate(&simulation, Until::finished()).unwrap()
}

/// States of the same line by arithmetic: busy, starved and blocked seconds of the source, each
/// stage and the sink.
///
/// An item leaves a stage once it is made and the edge has room, that is once the item `capacity`
/// places ahead of it was taken. It is taken once the stage has let go of the item before it and
/// the item has left the stage before.
fn expected(items: usize, services: &[u64], capacity: usize) -> Vec<[u64; 3]> {
    let stages = services.len() + 2;
    let service = |stage: usize| if stage == 0 || stage + 1 == stages { 0 } else { services[stage - 1] };
    let (mut taken, mut left) = (vec![vec![0; items]; stages], vec![vec![0; items]; stages]);
    let mut states = vec![[0; 3]; stages];
    for item in 0..items {
        for stage in 0..stages {
            let free = if item == 0 { 0 } else { left[stage][item - 1] };
            let arrived = if stage == 0 { 0 } else { left[stage - 1][item] };
            taken[stage][item] = free.max(arrived);
            let made = taken[stage][item] + service(stage);
            // Of an item `capacity` places ahead, the next stage's time is known already.
            let room = if stage + 1 == stages || item < capacity { 0 } else { taken[stage + 1][item - capacity] };
            left[stage][item] = made.max(room);
            let [busy, starved, blocked] = &mut states[stage];
            *busy += service(stage);
            *starved += taken[stage][item] - free;
            *blocked += left[stage][item] - made;
        }
    }
    states
}

proptest! {
    /// Every second of every stage is where the arithmetic of the queue puts it: no share leaks
    /// into another state.
    #[test]
    fn f4_the_shares_of_a_simulated_line_are_those_of_its_arithmetic(
        items in 1_u64..20, services in prop::collection::vec(0_u64..5, 1..4), capacity in 1_usize..4,
    ) {
        let report = line(items, &services, capacity);
        let names = ["source".to_owned()].into_iter();
        let names = names.chain((0..services.len()).map(|index| format!("stage {index}"))).chain(["sink".to_owned()]);
        for (name, [busy, starved, blocked]) in names.zip(expected(items as usize, &services, capacity)) {
            prop_assert_eq!(seconds(&report, &name), [busy, starved, blocked, 0, 0, busy + starved + blocked], "{}", name);
        }
    }
}

#[test]
fn who_computes_is_busy_who_waits_for_input_is_starved_who_waits_for_room_is_blocked() {
    let report = line(10, &[1, 3], 1);
    assert_eq!(seconds(&report, "source"), [0, 0, 19, 0, 0, 19]);
    assert_eq!(seconds(&report, "stage 0"), [10, 0, 15, 0, 0, 25]);
    assert_eq!(seconds(&report, "stage 1"), [30, 1, 0, 0, 0, 31]);
    assert_eq!(seconds(&report, "sink"), [0, 31, 0, 0, 0, 31]);
    assert!(report.bottleneck().starts_with("bottleneck: stage 1 (busy "), "{}", report.bottleneck());
    assert!(report.bottleneck().ends_with("give it more workers"), "{}", report.bottleneck());
}

#[test]
fn who_waits_for_admission_waits_in_credit() {
    let (simulation, window) = (Simulation::new(0), Window::new(1));
    simulation.takes("work", |_| Duration::from_secs(2));
    let mut flow = Flow::new("credit");
    let numbers = flow.source("numbers", from_iter(0..10u64).with(|spec| spec.window(window.clone())));
    let worked = flow.stage(
        "work",
        numbers,
        map(move |n: u64| {
            window.raise(1);
            n
        }),
    );
    flow.sink("sink", worked, |_: u64| {});
    let report = flow.simulate(&simulation, Until::finished()).unwrap();
    // The source learns that it has ended once it is admitted an eleventh time.
    assert_eq!(seconds(&report, "numbers"), [0, 0, 0, 20, 0, 20]);
    assert_eq!(seconds(&report, "work"), [20, 0, 0, 0, 0, 20]);
}

#[test]
fn admission_is_the_bottleneck_of_a_run_in_which_only_the_source_waits() {
    let window = Window::new(1);
    let mut flow = Flow::new("credit");
    let numbers = flow.source("numbers", from_iter(0..10u64).with(|spec| spec.window(window.clone())));
    // Raised by another thread, so that no stage is busy meanwhile.
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
    assert!(report.bottleneck().starts_with("bottleneck: admission (numbers waited "), "{}", report.bottleneck());
}

/// Held at its first item, as a trainer that the user pauses.
struct Held(Simulation);

impl Stage for Held {
    type In = u64;
    type Out = u64;

    fn run(&mut self, io: &mut Io<u64, u64>) -> Result<(), StageError> {
        while let Some(n) = io.recv()? {
            if n == 0 {
                let clock = self.0.clone();
                io.hold(async move { clock.pass(Duration::from_secs(90)) });
            }
            io.send(n)?;
        }
        Ok(())
    }
}

#[test]
fn f4_a_pause_is_no_bottleneck_and_neither_is_what_waits_for_its_end() {
    let (simulation, window) = (Simulation::new(0), Window::new(1));
    simulation.takes("train", |_| Duration::from_secs(1));
    let mut flow = Flow::new("pause");
    let numbers = flow.source("numbers", from_iter(0..4u64).with(|spec| spec.window(window.clone())));
    let trained = flow.stage("train", numbers, Held(simulation.clone()));
    flow.sink("sink", trained, move |_: u64| {
        window.raise(1);
    });
    let report = flow.simulate(&simulation, Until::finished()).unwrap();
    assert_eq!(seconds(&report, "train"), [4, 0, 0, 90, 0, 94]);
    assert_eq!(seconds(&report, "numbers"), [0, 0, 0, 94, 0, 94]);
    assert!(report.bottleneck().starts_with("bottleneck: train (busy "), "{}", report.bottleneck());
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
        StageSpec::default().subscribes(&self.0)
    }
}

#[test]
fn who_waits_for_weights_waits_in_weights() {
    let simulation = Simulation::new(0);
    simulation.takes("train", |_| Duration::from_secs(3));
    let (tx, rx) = weights::<u64>();
    tx.publish(0, Arc::new(0)).unwrap();
    let mut flow = Flow::new("weights");
    let numbers = flow.source("numbers", from_iter(0..10u64));
    let versions = flow.stage("generate", numbers, NeedsNewest(rx));
    let publish = move |version: u64| tx.publish(version + 1, Arc::new(version + 1)).map_err(StageError::from);
    let trained = flow.stage("train", versions, try_map(publish));
    flow.sink("sink", trained, |()| {});
    let report = flow.simulate(&simulation, Until::finished()).unwrap();
    assert_eq!(seconds(&report, "generate"), [0, 0, 0, 0, 27, 27]);
    assert_eq!(seconds(&report, "train"), [30, 0, 0, 0, 0, 30]);
}

#[test]
fn weights_are_the_bottleneck_of_a_run_in_which_only_the_generator_waits() {
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
    assert!(report.bottleneck().starts_with("bottleneck: weights (generate waited "), "{}", report.bottleneck());
}

#[test]
fn whoever_waits_for_its_turn_is_blocked() {
    let simulation = Simulation::new(0);
    let clock = simulation.clone();
    let mut flow = Flow::new("turn");
    let numbers = flow.source("numbers", from_iter(0..2u64));
    // The second item is made first, but may not overtake the first.
    let slow_first = move |n: u64| {
        clock.pass(Duration::from_secs(if n == 0 { 5 } else { 1 }));
        n
    };
    let out = flow.stage("workers", numbers, map(slow_first).workers(2).ordered());
    let mut last = None;
    flow.sink("sink", out, move |n: u64| assert!(last.replace(n) < Some(n)));
    let report = flow.simulate(&simulation, Until::finished()).unwrap();
    assert_eq!(seconds(&report, "workers"), [6, 0, 4, 0, 0, 10]);
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
    assert_eq!(lines.last(), Some(&&*report.bottleneck()));
}
