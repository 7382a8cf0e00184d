//! Demonstration environments: plug-ins on the public API of `rollflow::env`.
//!
//! The `rollflow` command offers them as `[environment] kind = "calculator"`, `"game"` and
//! `"search"`. Copy one to start an environment of your own; `examples/tools.rs` trains on one.

mod calculator;
mod guess;
mod search;

pub use calculator::{CalculatorEnvironment, calculate};
pub use guess::GuessEnvironment;
pub use search::{Corpus, SearchEnvironment};
