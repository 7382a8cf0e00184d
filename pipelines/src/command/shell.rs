//! `rollflow completions` and `rollflow man`, generated from the declaration of the command.

use std::process::ExitCode;

use anyhow::{Context, Result};
use clap::{Args, CommandFactory};
use clap_complete::Shell;

use super::{Cli, Refused, out};

/// Print completions for a shell, as in: rollflow completions bash >
/// ~/.local/share/bash-completion/completions/rollflow
#[derive(Args)]
pub struct Completions {
    /// The shell.
    #[arg(value_enum)]
    shell: Shell,
}

impl Completions {
    pub fn run(self) -> Result<ExitCode> {
        let mut text = Vec::new();
        clap_complete::generate(self.shell, &mut Cli::command(), "rollflow", &mut text);
        out::text(&String::from_utf8_lossy(&text))?;
        Ok(ExitCode::SUCCESS)
    }
}

/// Print the man page, as in: rollflow man > ~/.local/share/man/man1/rollflow.1; or that of one subcommand.
#[derive(Args)]
pub struct Man {
    /// A subcommand.
    subcommand: Option<String>,
}

impl Man {
    pub fn run(self) -> Result<ExitCode> {
        let mut command = Cli::command();
        command.build();
        let command = match &self.subcommand {
            None => command,
            Some(name) => {
                let found = command.find_subcommand(name);
                let unknown = || Refused::because(format!("there is no subcommand {name}; rollflow help lists them"));
                found.ok_or_else(unknown)?.clone()
            }
        };
        let mut text = Vec::new();
        clap_mangen::Man::new(command).render(&mut text).context("writing the man page")?;
        out::text(&String::from_utf8_lossy(&text))?;
        Ok(ExitCode::SUCCESS)
    }
}
