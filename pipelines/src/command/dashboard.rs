//! `rollflow dashboard`: runs in a browser.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result};
use clap::Args;
use rollflow::flow::Interrupts;
use rollflow::observe::Console;
use rollflow::serve::BearerToken;
use rollflow::util::atomic_file;

use super::listening::{TokenArgs, address};
use super::{out, refused};
use crate::page::{PageError, PageServer, Powers, Starter};
use crate::registry::Registry;

/// Time between two looks at signals.
const LOOK: Duration = Duration::from_millis(50);

/// Serve the runs in a folder as a live page for a browser, until Ctrl-C: curves, samples, times, and
/// comparisons of runs. `rollflow run --page ADDRESS` serves one run with its graph in motion.
#[derive(Args)]
#[command(after_help = "\
Examples:\n\
\x20 rollflow dashboard\n\
\x20 rollflow dashboard runs --listen 0.0.0.0:7860 --token-file token.txt\n\
\x20 rollflow dashboard runs --start pipelines/recipes --token-file token.txt")]
pub struct Dashboard {
    /// Folder with runs, up to three levels deep, or one run.
    #[arg(default_value = "runs")]
    folder: PathBuf,
    /// Address to listen at; port 0 takes a free port. Other hosts can reach an address other than
    /// 127.0.0.1, so it needs a token.
    #[arg(long, value_name = "HOST:PORT", default_value = "127.0.0.1:7860")]
    listen: String,
    #[command(flatten)]
    token: TokenArgs,
    /// Let readers with the token start runs in the folder, from the recipes in this folder (or from
    /// this recipe) and from those of runs. A recipe may name programs: who has the token can run
    /// what you can.
    #[arg(long, value_name = "RECIPES")]
    start: Option<PathBuf>,
}

/// Serves the page of the runs in `folder`.
pub(super) fn serve_page(address: SocketAddr, folder: &Path, token: Option<BearerToken>, powers: Powers) -> Result<PageServer> {
    PageServer::start(address, folder, token, powers, &[]).map_err(|error| match error {
        PageError::NeedsToken { .. } => refused(error.to_string()),
        _ => error.into(),
    })
}

impl Dashboard {
    pub fn run(self, registry: &Registry) -> Result<()> {
        if self.start.is_some() {
            atomic_file::create_folder(&self.folder).with_context(|| format!("making {}", self.folder.display()))?;
        }
        if !self.folder.is_dir() {
            return Err(refused(format!("{} is no folder; give one that holds runs", self.folder.display())));
        }
        let interrupts = Interrupts::listen().context("listening for Ctrl-C")?;
        Console::default().install().context("showing events")?;
        let (address, token) = (address("--listen", &self.listen)?, self.token.token()?);
        if self.start.is_some() && token.is_none() {
            return Err(refused("--start needs a token: give --token-file FILE or --token-env NAME"));
        }
        let starter = self.start.as_ref().map(|recipes| Starter::new(recipes, &self.folder, registry));
        let powers = Powers { starter, token: self.token.text()? };
        let server = serve_page(address, &self.folder, token, powers)?;
        out::line(&format!("page: http://{}/", server.address()))?;
        while !interrupts.pressed() {
            std::thread::sleep(LOOK);
        }
        Ok(())
    }
}
