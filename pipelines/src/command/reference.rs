//! `rollflow explain` and `rollflow schema`, of recipes; `rollflow completions` and `rollflow man`, of
//! the command.

use anyhow::{Context, Result};
use clap::{Args, CommandFactory};
use clap_complete::Shell;
use rollflow::observe::catalog;
use rollflow::recipe;

use super::{Cli, out, refused};

/// Print the page of a recipe key: type, range, default, meaning, pipelines and related keys; or the
/// list of all metrics.
#[derive(Args)]
#[command(after_help = "Examples:\n  rollflow explain train.lr\n  rollflow explain flow\n  rollflow explain metrics")]
pub struct Explain {
    /// A key or a section, as in train.lr or train; or metrics.
    key: String,
}

impl Explain {
    pub fn run(self) -> Result<()> {
        let page = if self.key == "metrics" { catalog::markdown() } else { recipe::explain(&self.key).map_err(refused)? };
        out::line(page.trim_end())
    }
}

/// Print the JSON schema of recipes, which tells an editor every key with its meaning.
#[derive(Args)]
pub struct Schema {}

impl Schema {
    pub fn run(self) -> Result<()> {
        out::line(&format!("{:#}", recipe::schema()))
    }
}

/// Print completions for a shell, as in: rollflow completions bash >
/// ~/.local/share/bash-completion/completions/rollflow
#[derive(Args)]
pub struct Completions {
    /// The shell.
    #[arg(value_enum)]
    shell: Shell,
}

impl Completions {
    pub fn run(self) -> Result<()> {
        let mut text = Vec::new();
        clap_complete::generate(self.shell, &mut Cli::command(), "rollflow", &mut text);
        out::text(&String::from_utf8_lossy(&text))
    }
}

/// Print the man page, as in: rollflow man > ~/.local/share/man/man1/rollflow.1; or that of one subcommand.
#[derive(Args)]
pub struct Man {
    /// A subcommand.
    subcommand: Option<String>,
}

impl Man {
    pub fn run(self) -> Result<()> {
        let mut command = Cli::command();
        command.build();
        if let Some(name) = &self.subcommand {
            let unknown = || refused(format!("there is no subcommand {name}; rollflow help lists them"));
            command = command.find_subcommand(name).ok_or_else(unknown)?.clone();
        }
        let mut text = Vec::new();
        clap_mangen::Man::new(command).render(&mut text).context("writing the man page")?;
        out::text(&String::from_utf8_lossy(&text))
    }
}
