//! `rollflow top`: a run in a terminal.

use std::io::{IsTerminal, stdin, stdout};
use std::path::Path;

use anyhow::Result;
use clap::Args;
use ratatui::crossterm::terminal;

use super::listening::TokenArgs;
use super::{out, refused, require_run};
use crate::run::PAGE_TOKEN;
use crate::top::{Folder, Page, PageError, Pane, Theme, Viewer, Wanted};

/// Smallest frame that is printed.
const LEAST: (u16, u16) = (40, 10);

/// Show a run in the terminal, as it happens or afterwards: stages and edges, curves, engines, ledger
/// and samples. Keys switch panes and, with a token, pause, save and end the run.
#[derive(Args)]
#[command(after_help = "\
Examples:\n\
\x20 rollflow top runs/mine\n\
\x20 rollflow top http://127.0.0.1:7860 --run mine --token-env PAGE_TOKEN\n\
\x20 rollflow top runs/mine --once --width 120")]
pub struct Top {
    /// The run's folder, or the address of a live page, as `rollflow run --page` prints it.
    #[arg(value_name = "RUN|URL")]
    run: String,
    /// Name of the run on a page of several; a running one, or else the newest, unless given.
    #[arg(long = "run", value_name = "NAME")]
    name: Option<String>,
    /// Pane to begin with.
    #[arg(long, value_enum, default_value_t)]
    pane: Pane,
    /// Print one frame as text and end.
    #[arg(long)]
    once: bool,
    /// Columns of the printed frame; those of the terminal, or else 80, unless given.
    #[arg(long, requires = "once", value_name = "COLUMNS", value_parser = clap::value_parser!(u16).range(40..=500))]
    width: Option<u16>,
    /// Lines of the printed frame at most; those of the terminal, or else 24, unless given.
    #[arg(long, requires = "once", value_name = "LINES", value_parser = clap::value_parser!(u16).range(10..=500))]
    height: Option<u16>,
    #[command(flatten)]
    token: TokenArgs,
}

impl Top {
    pub fn run(self) -> Result<()> {
        let on_terminal = stdout().is_terminal();
        if !(self.once || on_terminal && stdin().is_terminal()) {
            return Err(refused("input and output are no terminal; --once prints one frame, and rollflow tail prints samples"));
        }
        let top = if self.run.contains("://") { self.of_page()? } else { self.of_folder(Path::new(&self.run))? };
        if !self.once {
            return top.watch(self.pane, Theme { colours: out::is_coloured(&stdout()) });
        }
        let (columns, lines) = terminal::size().ok().filter(|_| on_terminal).unwrap_or((80, 24));
        let (width, height) = (self.width.unwrap_or(columns.max(LEAST.0)), self.height.unwrap_or(lines.max(LEAST.1)));
        // Texts were escaped when they were read.
        out::escaped(&top.once(self.pane, width, height)?)
    }

    fn of_page(&self) -> Result<Viewer> {
        let wanted = self.name.clone().map_or(Wanted::Newest, Wanted::Named);
        let page = Page::open(self.token.endpoint(&self.run)?, wanted)?;
        page.find().map_err(|error| match error {
            PageError::Unknown { .. } | PageError::Token => refused(error.to_string()),
            _ => error.into(),
        })?;
        page.follow();
        Ok(Viewer::of_page(page))
    }

    fn of_folder(&self, path: &Path) -> Result<Viewer> {
        require_run(path)?;
        if self.name.is_some() {
            return Err(refused("--run selects a run of a live page; leave it out for a folder"));
        }
        let folder = Folder::open(path)?;
        let mut endpoint = self.token.endpoint("")?;
        if endpoint.token.is_none() {
            // The variable that the recipe names, or the usual one.
            let named = folder.planned().and_then(|planned| planned.token_env).unwrap_or_else(|| PAGE_TOKEN.to_owned());
            let token = std::env::var(named).ok();
            endpoint = token.and_then(|token| endpoint.clone().with_token(token.trim())).unwrap_or(endpoint);
        }
        Ok(Viewer::of_folder(folder, endpoint))
    }
}
