//! Laws F1, F2, F5, V1 and D6 under a model checker: whatever the order in which the engine's threads and tasks take their steps, no
//! item is lost or repeated, all credit comes back, and no wake-up is missed.
//!
//! The files of `src/flow` through which workers share state are compiled here once more, over this folder's `sync` in place of
//! theirs: each operation is a step, and shuttle decides who takes the next. A scenario runs under as many schedules as
//! `MODEL_CHECK_SCHEDULES` says (500), first drawn at random, then by probabilistic concurrency testing, which finds what takes a few
//! well-placed switches. A missed wake-up leaves everyone waiting, which is reported as a deadlock; a schedule that fails is
//! printed, and `shuttle::replay` plays it again.
//!
//! What it does not see: the insides of tokio's and flume's primitives, which take one step each, and orderings weaker than `SeqCst`.
#![allow(clippy::unwrap_used)]

mod edges;
mod graphs;
mod signals;
mod sync;

/// The engine's files use more of each other than the scenarios do.
macro_rules! engine {
    ($($name:ident = $path:literal)*) => { $(#[path = $path] #[allow(dead_code)] mod $name;)* };
}
engine! {
    clock = "../../src/flow/clock.rs"
    context = "../../src/flow/context.rs"
    control = "../../src/flow/control.rs"
    crew = "../../src/flow/crew.rs"
    edge = "../../src/flow/edge.rs"
    io = "../../src/flow/io.rs"
    message = "../../src/flow/message.rs"
    order = "../../src/flow/order.rs"
    rng = "../../crates/util/src/rng.rs"
    simulation = "../../src/flow/simulation.rs"
    stage = "../../src/flow/stage.rs"
    wait = "../../src/flow/wait.rs"
    weights = "../../src/flow/weights.rs"
    window = "../../src/flow/window.rs"
}
mod util {
    pub(crate) use crate::rng;
}
use context::RunContext;
use io::{AsyncIo, Io};
use message::Message;
use simulation::Simulation;
use stage::StageError;
use weights::{WeightsRx, WeightsTx};
use window::Window;

use shuttle::scheduler::{PctScheduler, RandomScheduler};
use shuttle::{Config, Runner};

/// Runs `scenario` under many schedules. It must end under each, with every thread that it started.
fn explore(scenario: impl Fn() + Copy + Send + Sync + 'static) {
    let schedules = std::env::var("MODEL_CHECK_SCHEDULES").map_or(500, |number| number.parse().expect("a number of schedules"));
    let mut config = Config::new();
    config.silence_warnings = true; // of orderings, see above
    Runner::new(RandomScheduler::new(schedules), config.clone()).run(scenario);
    Runner::new(PctScheduler::new(3, schedules), config).run(scenario);
}

/// A message that weighs something.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Item {
    from: usize,
    number: usize,
    tokens: usize,
}

impl Message for Item {
    fn tokens(&self) -> usize {
        self.tokens
    }
}
