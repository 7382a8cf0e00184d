//! The command `rollflow`, for the binary of that name and for those who have parts of their own to put into it.
//!
//! A subcommand is a file beside this one, with a struct of its arguments and a function `run`, and a line in each of the two lists below.
//!
//! Exit codes: 0 the run finished or was drained by Ctrl-C, or all that was asked for is there; 1 it failed or was stopped, or something
//! that was replayed still fails; 2 the recipe or the arguments are wrong.

mod check;
mod compare;
mod engine;
mod eval;
mod export;
mod generate;
mod graph;
mod init;
mod models;
mod out;
mod plans;
mod policies;
mod replay;
mod report;
mod resume;
mod run;
mod runs;
mod schema;
mod score;
mod shell;
mod simulate;
mod tokens;

use std::ffi::OsString;
use std::process::ExitCode;

use anyhow::Result;
use clap::{Parser, Subcommand};

use crate::registry::Registry;

/// RL post-training of language models as a pipelined dataflow.
#[derive(Parser)]
#[command(
    version,
    after_help = "Exit codes: 0 finished, or drained by Ctrl-C, or all that was replayed earns now; 1 failed or stopped, or something that \
                  was replayed still fails; 2 the recipe or the arguments are wrong."
)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    Run(run::Run),
    Resume(resume::Resume),
    Check(check::Check),
    Graph(graph::Graph),
    Simulate(simulate::Simulate),
    Replay(replay::Replay),
    Generate(generate::Generate),
    Score(score::Score),
    Tokens(tokens::Tokens),
    Models(models::Models),
    Eval(eval::Eval),
    Engine(engine::Engine),
    Export(export::Export),
    Runs(runs::Runs),
    Compare(compare::Compare),
    Report(report::Report),
    Init(init::Init),
    Schema(schema::Schema),
    Completions(shell::Completions),
    Man(shell::Man),
}

fn dispatch(command: Command, registry: &Registry) -> Result<ExitCode> {
    match command {
        Command::Run(of) => of.run(registry),
        Command::Resume(of) => of.run(registry),
        Command::Check(of) => of.run(registry),
        Command::Graph(of) => of.run(registry),
        Command::Simulate(of) => of.run(registry),
        Command::Replay(of) => of.run(registry),
        Command::Generate(of) => of.run(),
        Command::Score(of) => of.run(),
        Command::Tokens(of) => of.run(),
        Command::Models(of) => of.run(),
        Command::Eval(of) => of.run(registry),
        Command::Engine(of) => of.run(registry),
        Command::Export(of) => of.run(),
        Command::Runs(of) => of.run(),
        Command::Compare(of) => of.run(),
        Command::Report(of) => of.run(),
        Command::Init(of) => of.run(registry),
        Command::Schema(of) => of.run(),
        Command::Completions(of) => of.run(),
        Command::Man(of) => of.run(),
    }
}

/// The recipe or the arguments are wrong, which standard error says; nothing was started.
const REFUSED: u8 = 2;

/// The whole command on the arguments of this program, with `registry`'s parts beside the library's: `run`, `check`, `resume` and all others.
///
/// ```no_run
/// use rollflow::prelude::*;
/// use rollflow_pipelines::{Registry, command};
///
/// fn main() -> std::process::ExitCode {
///     // [reward] kind = "custom", name = "polite"
///     command(Registry::default().reward("polite", |sample: &Sample| f64::from(sample.response.contains("please"))))
/// }
/// ```
pub fn command(registry: Registry) -> ExitCode {
    command_with(registry, std::env::args_os())
}

/// [`command`] on other arguments, of which the first is the program's name.
pub fn command_with<A: Into<OsString> + Clone>(registry: Registry, args: impl IntoIterator<Item = A>) -> ExitCode {
    rollflow::model::keep_freed_memory();
    match dispatch(Cli::parse_from(args).command, &registry) {
        Ok(code) => code,
        Err(error) if out::was_closed(&error) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}
