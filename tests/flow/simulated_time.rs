//! A run on a simulated machine: the same stages, in a time that passes only where all wait. What
//! it takes is arithmetic, the same seed gives the same run, and who waits for each other for ever
//! is found out.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use proptest::prelude::*;
use rollflow::flow::{
    AsyncIo, AsyncStage, Capacity, Ended, Flow, Io, Report, RunError, Simulation, Stage, StageError, StageSpec, State, Until,
    from_iter, map, weights,
};

const SECOND: Duration = Duration::from_secs(1);

/// A line of two stages that take so many seconds for an item.
fn line(items: u64, first: u64, second: u64, capacity: usize) -> Report {
    let simulation = Simulation::new(3);
    simulation.takes("first", move |_| first as u32 * SECOND).takes("second", move |_| second as u32 * SECOND);
    let mut flow = Flow::new("line");
    flow.capacity(Capacity::items(capacity));
    let numbers = flow.source("numbers", from_iter(0..items));
    let once = flow.stage("first", numbers, map(|number: u64| number));
    let twice = flow.stage("second", once, map(|number: u64| number));
    flow.sink("count", twice, |_: u64| {});
    flow.simulate(&simulation, Until::finished()).unwrap()
}

proptest! {
    /// A pipeline takes what its slowest stage takes for all items, and the other for one.
    #[test]
    fn a_line_takes_what_its_slowest_stage_takes(
        items in 1_u64..40, first in 0_u64..5, second in 0_u64..5, capacity in 1_usize..4,
    ) {
        let report = line(items, first, second, capacity);
        let expected = items * first.max(second) + first.min(second);
        prop_assert_eq!(report.wall, expected * 1_000_000_000);
        for (name, each) in [("first", first), ("second", second)] {
            let stage = report.stage(name).unwrap();
            prop_assert_eq!(stage.time().of(State::Busy), items * each * 1_000_000_000, "{} was busy for its items, and waited else", name);
            // Law F4, in simulated time.
            prop_assert!(stage.workers.iter().all(|worker| worker.total() == worker.wall));
        }
    }
}

#[test]
fn ten_hours_take_no_time_and_the_report_is_in_hours() {
    let report = line(3600, 10, 1, 8);
    assert_eq!(report.wall, (36_000 + 1) * 1_000_000_000);
    assert!(report.bottleneck().contains("first"), "{}", report.bottleneck());
    assert!(report.stage("second").unwrap().share(State::Starved) > 0.8);
}

/// Gives each item on after a time of its own, and remembers when it did.
struct Noting {
    simulation: Simulation,
    notes: Arc<Mutex<Vec<(u64, Duration)>>>,
}

impl Stage for Noting {
    type In = u64;
    type Out = u64;

    fn run(&mut self, io: &mut Io<u64, u64>) -> Result<(), StageError> {
        while let Some(item) = io.recv()? {
            self.simulation.pass(Duration::from_millis(item * 7919 % 13));
            self.notes.lock().unwrap().push((item, self.simulation.now()));
            io.send(item)?;
        }
        Ok(())
    }

    fn spec(&self) -> StageSpec {
        StageSpec::default().workers(3)
    }

    fn replica(&self) -> Option<Self> {
        Some(Noting { simulation: self.simulation.clone(), notes: self.notes.clone() })
    }
}

fn notes(seed: u64) -> Vec<(u64, Duration)> {
    let (simulation, notes) = (Simulation::new(seed), Arc::default());
    let mut flow = Flow::new("notes");
    let numbers = flow.source("numbers", from_iter(0..200_u64));
    let noted = flow.stage("note", numbers, Noting { simulation: simulation.clone(), notes: Arc::clone(&notes) });
    let halves = flow.tee("halves", noted, 2);
    let joined = flow.merge("join", halves);
    flow.sink("end", joined, |_: u64| {});
    flow.simulate(&simulation, Until::finished()).unwrap();
    notes.lock().unwrap().clone()
}

#[test]
fn the_same_seed_gives_the_same_run_and_another_seed_another() {
    assert_eq!(notes(1), notes(1));
    assert_ne!(notes(1), notes(2), "three workers race for the items");
}

/// Waits for weights that nobody publishes.
struct Waiting(rollflow::flow::WeightsRx<()>);

impl AsyncStage for Waiting {
    type In = u64;
    type Out = u64;

    async fn run(&mut self, io: &mut AsyncIo<u64, u64>) -> Result<(), StageError> {
        io.wait_weights(&mut self.0, 1).await?;
        while let Some(item) = io.recv().await? {
            io.send(item).await?;
        }
        Ok(())
    }
}

#[test]
fn who_waits_for_each_other_for_ever_is_named() {
    let (_publisher, published) = weights::<()>();
    let mut flow = Flow::new("stuck");
    let numbers = flow.source("numbers", from_iter(0..99_u64));
    let waited = flow.stage("patient", numbers, Waiting(published));
    flow.sink("end", waited, |_: u64| {});
    let ended = flow.simulate(&Simulation::new(0), Until::finished());
    let Err(RunError::Stalled { waits, report, .. }) = ended else { panic!("it ended: {ended:?}") };
    assert_eq!(report.ended, Ended::Failed);
    let waits: Vec<String> = waits.iter().map(ToString::to_string).collect();
    let expected = [
        "\"numbers\" waits for room on its edge to patient",
        "\"patient\" waits for weights of version 1 or newer, which no stage of the graph publishes",
        "\"end\" waits for input from patient",
    ];
    assert_eq!(waits, expected);
}
