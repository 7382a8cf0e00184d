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
//! Laws held here:
//! - F1: every edge is bounded in items and tokens ([`Capacity`]); a full edge blocks its producer.
//! - F2: data flows one way; the one feedback is a [`weights`] edge, where the newest version wins
//!   and nothing blocks.
//! - F3: a failing stage stops the others; all are joined; the root cause comes first in
//!   [`RunError`].
//! - F4: the runner owns every wait, so each worker's time is the exact sum of its [`State`]s.
//! - F5: *end*, *drain* and *stop* travel in band. See [`Control`] for why no wait outlives them.
//! - F7: a run that can't make progress ends with [`RunError::Stalled`], which names what each
//!   stage waits for.

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
mod port;
mod render;
mod report;
mod runner;
mod simulation;
mod stage;
mod stall;
mod stats;
mod sync;
mod until;
mod verdict;
mod wait;
mod weights;
mod window;

pub use check::GraphError;
pub use clock::{State, Times};
pub use closures::{PerItem, batch, filter, filter_map, flat_map, from_iter, map, map_async, try_map};
pub use context::RunContext;
pub use control::{Control, Signal};
pub use edge::Capacity;
pub use graph::Flow;
pub use interrupts::Interrupts;
pub use io::{AsyncIo, Io};
pub(crate) use launch::{caught, panic_message};
pub use message::Message;
pub use nodes::BoxedStage;
pub use plan::Graph;
pub use port::Port;
pub use report::{EdgeReport, Ended, Report, StageReport};
pub use runner::{RunError, StageFailure};
pub use simulation::Simulation;
pub use stage::{AsyncStage, Sink, Source, Stage, StageError, StageSpec};
pub use stall::StageWait;
pub use stats::Stats;
pub use until::Until;
pub use weights::{OutdatedVersion, WeightsRx, WeightsTx, weights};
pub use window::Window;
