//! Command `rollflow`, for the binary of that name and for programs with registered parts.
//!
//! A subcommand is a file in this folder, with a struct of its arguments and a function `run`, and
//! a line in each of the two lists below.
//!
//! Exit codes (docs/reference/command.md): 0 done, or drained by Ctrl-C; 1 failed or stopped; 2
//! nothing was started, because the recipe or the arguments are wrong.

pub(crate) mod check;
mod compare;
pub(crate) mod condition;
mod dashboard;
mod deploy;
mod diagnose;
mod diff;
mod engine;
mod eval;
mod export;
mod generate;
mod graph;
mod init;
mod launch;
mod listening;
mod models;
mod monitor;
pub(crate) mod out;
pub(crate) mod plans;
mod policies;
mod reference;
mod replay;
mod report;
mod resume;
mod rollouts;
mod run;
mod runs;
mod score;
mod serve;
mod simulate;
mod tail;
pub(crate) mod tokens;
mod top;
mod track;
mod weights;

use std::ffi::OsString;
use std::io::{self, ErrorKind, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::Result;
use clap::builder::{PossibleValuesParser, TypedValueParser};
use clap::{Parser, Subcommand};
use rollflow::recipe::RecipeErrors;
use rollflow::util::causes::full_message;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use crate::registry::Registry;
use crate::run::RECIPE;
use crate::run::record::Record;

/// RL post-training of language models as a pipelined dataflow.
#[derive(Parser)]
#[command(
    name = "rollflow",
    version,
    after_help = "To begin: rollflow init, rollflow check recipe.toml, rollflow run recipe.toml. Examples stand below the help of each subcommand.\n\n\
                  Exit codes: 0 done, or drained by Ctrl-C; 1 it failed or was stopped, or something in it did; 2 the recipe or the arguments are \
                  wrong, and nothing was started."
)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    Run(run::Run),
    Launch(launch::Launch),
    Resume(resume::Resume),
    Check(check::Check),
    Graph(graph::Graph),
    Simulate(simulate::Simulate),
    Rollouts(rollouts::Rollouts),
    Tail(tail::Tail),
    Top(top::Top),
    Replay(replay::Replay),
    Generate(generate::Generate),
    Score(score::Score),
    Serve(serve::Serve),
    Tokens(tokens::Tokens),
    Models(models::Models),
    Eval(eval::Eval),
    Engine(engine::Engine),
    Export(export::Export),
    Deploy(deploy::Deploy),
    Weights(weights::Weights),
    Runs(runs::Runs),
    Compare(compare::Compare),
    Diff(diff::Diff),
    Diagnose(diagnose::Diagnose),
    Report(report::Report),
    Monitor(monitor::Monitor),
    Track(track::Track),
    Dashboard(dashboard::Dashboard),
    Init(init::Init),
    Explain(reference::Explain),
    Schema(reference::Schema),
    Completions(reference::Completions),
    Man(reference::Man),
}

fn dispatch(command: Command, registry: &Registry) -> Result<()> {
    match command {
        Command::Run(of) => of.run(registry),
        Command::Launch(of) => of.run(registry),
        Command::Resume(of) => of.run(registry),
        Command::Check(of) => of.run(registry),
        Command::Graph(of) => of.run(registry),
        Command::Simulate(of) => of.run(registry),
        Command::Rollouts(of) => of.run(),
        Command::Tail(of) => of.run(),
        Command::Top(of) => of.run(),
        Command::Replay(of) => of.run(registry),
        Command::Generate(of) => of.run(),
        Command::Score(of) => of.run(),
        Command::Serve(of) => of.run(),
        Command::Tokens(of) => of.run(),
        Command::Models(of) => of.run(),
        Command::Eval(of) => of.run(registry),
        Command::Engine(of) => of.run(registry),
        Command::Export(of) => of.run(),
        Command::Deploy(of) => of.run(registry),
        Command::Weights(of) => of.run(),
        Command::Runs(of) => of.run(),
        Command::Compare(of) => of.run(),
        Command::Diff(of) => of.run(),
        Command::Diagnose(of) => of.run(registry),
        Command::Report(of) => of.run(),
        Command::Monitor(of) => of.run(),
        Command::Track(of) => of.run(),
        Command::Dashboard(of) => of.run(registry),
        Command::Init(of) => of.run(registry),
        Command::Explain(of) => of.run(),
        Command::Schema(of) => of.run(),
        Command::Completions(of) => of.run(),
        Command::Man(of) => of.run(),
    }
}

/// Ends of a command other than an error with exit code 1.
#[derive(Debug, thiserror::Error)]
pub(crate) enum End {
    /// The arguments are wrong, and nothing was started: exit code 2.
    #[error("{0}")]
    Refused(String),
    /// The recipe is wrong, and nothing was started: every error with its place, and exit code 2.
    #[error("{0}")]
    Recipe(RecipeErrors),
    /// The command has printed what is wrong, and ends with this code.
    #[error("exit code {0}")]
    Said(u8),
    /// Another rank of the run, which has its own code, failed or is gone: [`End::BY_ANOTHER`].
    #[error("{0}")]
    ByAnother(String),
    /// The reader of the output closed its end, as `head` does: exit code 0.
    #[error("standard output was closed")]
    Closed,
}

impl End {
    /// Exit code of a run that was drained before its last step: `EX_TEMPFAIL` of sysexits.h.
    pub(crate) const AGAIN: u8 = 75;

    /// Exit code of a rank that ends because of another: `EX_UNAVAILABLE` of sysexits.h.
    pub(crate) const BY_ANOTHER: u8 = 69;

    /// Exit code of a command that ends with this error.
    pub(crate) fn code(error: &anyhow::Error) -> u8 {
        match error.downcast_ref() {
            Some(End::Refused(_) | End::Recipe(_)) => 2,
            Some(End::Said(code)) => *code,
            Some(End::ByAnother(_)) => End::BY_ANOTHER,
            Some(End::Closed) => 0,
            None => 1,
        }
    }
}

/// Makes the error of a command whose arguments are wrong.
fn refused(why: impl Into<String>) -> anyhow::Error {
    End::Refused(why.into()).into()
}

/// Refuses a folder that holds no run.
fn require_run(folder: &Path) -> Result<()> {
    match folder.join(RECIPE).exists() {
        true => Ok(()),
        false => Err(refused(format!("{} holds no run; give the folder of one, as in runs/mine", folder.display()))),
    }
}

/// Records of the runs in these folders. Folders without a run are refused together.
fn read_runs(folders: &[PathBuf]) -> Result<Vec<Record>> {
    let no_run: Vec<String> =
        folders.iter().filter(|run| !run.join(RECIPE).exists()).map(|run| run.display().to_string()).collect();
    if !no_run.is_empty() {
        return Err(refused(format!("no run is in {}; give folders that hold a recipe.toml", no_run.join(", "))));
    }
    folders.iter().map(|run| Record::read(run)).collect()
}

/// Parser of a choice of the library by the word that recipes use. Help and completions list them.
fn choice<T: Copy + Send + Sync>(all: &'static [T], word: fn(T) -> &'static str) -> impl TypedValueParser<Value = T> {
    let words = PossibleValuesParser::new(all.iter().map(|choice| word(*choice)));
    words.try_map(move |given| all.iter().copied().find(|choice| word(*choice) == given).ok_or("it is not listed"))
}

/// Runs the whole command on the arguments of this program, with `registry`'s parts in addition to
/// the library's: `run`, `check`, `resume` and all others.
///
/// ```no_run
/// use rollflow::prelude::*;
/// use rollflow_pipelines::{Registry, command};
///
/// fn main() -> std::process::ExitCode {
///     // [reward] kind = "custom", name = "polite"
///     let polite = |sample: &Sample| f64::from(sample.response.contains("please"));
///     command(Registry::default().reward("polite", polite))
/// }
/// ```
pub fn command(registry: Registry) -> ExitCode {
    command_with(registry, std::env::args_os())
}

/// [`command`] on other arguments, of which the first is the program's name.
pub fn command_with<A: Into<OsString> + Clone>(registry: Registry, args: impl IntoIterator<Item = A>) -> ExitCode {
    let command = match Cli::try_parse_from(args) {
        Ok(cli) => cli.command,
        Err(error) => return said(&error),
    };
    allow_open_files();
    let Err(error) = dispatch(command, &registry) else { return ExitCode::SUCCESS };
    match error.downcast_ref() {
        Some(End::Recipe(errors)) => plans::show(errors),
        Some(End::Said(_) | End::Closed) => {}
        _ => out::complain(&format!("error: {}", full_message(error.as_ref()))),
    }
    ExitCode::from(End::code(&error))
}

/// Raises the number of files that this process may open to what the system allows it: each sample that a
/// server computes takes a connection, and shells often allow 1024.
fn allow_open_files() {
    let limit = getrlimit(Resource::Nofile);
    // Where it stays, errors of connections say so.
    setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit }).ok();
}

/// Prints help, the version or what is wrong with the arguments.
fn said(error: &clap::Error) -> ExitCode {
    match error.print().and_then(|()| io::stdout().flush()) {
        Ok(()) => ExitCode::from(u8::try_from(error.exit_code()).unwrap_or(2)),
        // Who closes its end has seen enough.
        Err(problem) if problem.kind() == ErrorKind::BrokenPipe => ExitCode::SUCCESS,
        Err(problem) => {
            out::complain(&format!("error: writing to standard output: {problem}"));
            ExitCode::FAILURE
        }
    }
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    /// The call of rollflow in a line, without other programs before or after it, and without remarks.
    fn call(line: &str) -> Option<&str> {
        let at = line.find("rollflow ").filter(|at| *at == 0 || line[..*at].ends_with("| "))?;
        ["    (", "  #", " | ", " > "].iter().try_fold(&line[at..], |line, end| line.split(end).next())
    }

    fn assert_understood(line: &str) {
        Cli::try_parse_from(shlex::split(line).unwrap()).map(drop).unwrap_or_else(|error| panic!("{line}: {error}"));
    }

    #[test]
    fn every_example_in_the_help_is_understood() {
        let mut seen = 0;
        for subcommand in Cli::command().get_subcommands() {
            let help = subcommand.get_after_help().map(ToString::to_string).unwrap_or_default();
            for line in help.lines().filter_map(|line| line.strip_prefix("  ")) {
                assert_understood(call(line).unwrap_or(line));
                seen += 1;
            }
        }
        assert!(seen >= 15, "{seen} examples");
    }

    #[test]
    fn every_command_in_the_documents_is_understood() {
        let root = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
        let folders = ["start", "how_to", "reference", "explain", "rust", "develop"].map(|name| root.join("docs").join(name));
        let docs = folders.iter().flat_map(|folder| std::fs::read_dir(folder).unwrap()).map(|entry| entry.unwrap().path());
        let mut seen = 0;
        for page in docs.filter(|path| path.extension().is_some_and(|end| end == "md")).chain([root.join("README.md")]) {
            let mut shell = false;
            // A command may continue on the next line.
            for line in std::fs::read_to_string(page).unwrap().replace("\\\n", "").lines() {
                if line.starts_with("```") {
                    shell = line == "```sh";
                } else if let Some(call) = call(line).filter(|_| shell) {
                    assert_understood(call);
                    seen += 1;
                }
            }
        }
        assert!(seen >= 20, "{seen} commands");
    }
}
