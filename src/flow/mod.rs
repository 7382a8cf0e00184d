//! Dataflow engine: a typed graph of stages joined by bounded edges, without concepts of language
//! models.
//!
//! A [`Flow`] is declared from top to bottom: sources, stages, tees, merges and sinks, each on the
//! typed [`Port`]s of the nodes before it. Stages take what they share from the flow's
//! [`RunContext`]. [`Flow::run`] checks the graph, runs every stage on a named OS thread or a tokio
//! task, joins all of them and returns a [`Report`].
//!
//! ```
//! use rollflow::flow::{Flow, Until, from_iter, map};
//!
//! let mut flow = Flow::new("squares");
//! let numbers = flow.source("numbers", from_iter(0..4u64));
//! let squares = flow.stage("square", numbers, map(|x: u64| x * x));
//! flow.sink("print", squares, |x: u64| println!("{x}"));
//! let report = flow.run(Until::finished())?;
//! assert_eq!(report.stage("print").map(|stage| stage.items_in), Some(4));
//! # Ok::<(), rollflow::flow::RunError>(())
//! ```
//!
//! Laws F1 to F5 and F7 are held here; ARCHITECTURE.md names the file of each. [`Control`] says why
//! no wait outlives a stop.

mod check;
mod clock;
mod closures;
mod context;
mod control;
mod crew;
mod edge;
mod graph;
mod interrupts;
mod io;
mod launch;
mod message;
mod nodes;
mod order;
mod plan;
mod render;
mod report;
mod runner;
mod simulation;
mod stage;
mod stall;
mod stats;
mod sync;
mod verdict;
mod wait;
mod weights;
mod window;

pub use check::GraphError;
pub use clock::{State, Times};
pub use closures::{PerItem, batch, filter, filter_map, flat_map, from_iter, map, map_async, try_map};
pub use context::RunContext;
pub use control::{Control, Signal};
pub use edge::{Capacity, Port};
pub use graph::{Flow, Until};
pub use interrupts::Interrupts;
pub use io::{AsyncIo, Io};
pub(crate) use launch::{caught, panic_message};
pub use message::Message;
pub use nodes::BoxedStage;
pub use plan::Graph;
pub(crate) use render::count;
pub use report::{EdgeReport, Ended, Report, StageReport};
pub use runner::{RunError, StageFailure};
pub use simulation::Simulation;
pub use stage::{AsyncStage, Sink, Source, Stage, StageError, StageSpec};
pub use stall::StageWait;
pub use stats::Stats;
pub(crate) use wait::block_on;
pub use weights::{OutdatedVersion, WeightsRx, WeightsTx, weights};
pub use window::Window;
