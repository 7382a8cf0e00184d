//! The live page: runs of a folder in a browser, as they happen. `rollflow dashboard` serves a folder
//! of runs, and a run with `observe.page` serves itself, with its graph.
//!
//! The page is that of `report.html`, with a script that fetches its data from the routes in
//! `routes.rs`. With a token, a run's own page also gives it orders. It ends when its owner drops it
//! (law F3).

mod cache;
mod events;
mod live;
mod relay;
mod routes;
mod runs;
mod samples;
mod start;

use std::io;
use std::net::{SocketAddr, TcpListener};
use std::path::Path;
use std::sync::Arc;

use rollflow::net::{Server, guard, guard_hosts};
use rollflow::serve::BearerToken;

use crate::run::observed::Observed;
pub(crate) use live::{EngineActivity, LiveEvent};
pub(crate) use relay::as_part;
use runs::Runs;
pub(crate) use start::Starter;

/// Errors of the live page's server.
#[derive(Debug, thiserror::Error)]
pub(crate) enum PageError {
    /// The address needs a token.
    #[error(
        "other hosts can reach the page's address {address}, and read prompts and completions: ask for a token (rollflow dashboard: --token-file FILE \
         or --token-env NAME; a run: observe.page_token_env), or listen at 127.0.0.1"
    )]
    NeedsToken {
        /// Address.
        address: SocketAddr,
    },
    /// The machine does not let it listen there.
    #[error("cannot serve the page at {address}: {source}; choose another address (port 0 takes a free one)")]
    Bind {
        /// Address.
        address: SocketAddr,
        /// Error of the system.
        source: io::Error,
    },
    /// The machine gave no thread or no event loop.
    #[error("cannot start the page's server: {0}; the machine is out of threads or file handles")]
    Start(io::Error),
}

/// Powers of a dashboard's readers with the token, beyond the page of one run.
#[derive(Default)]
pub(crate) struct Powers {
    /// Starts runs.
    pub starter: Option<Starter>,
    /// The token itself, for pages of runs on this machine.
    pub token: Option<String>,
}

/// A running server of the live page; dropping it frees the port and ends its streams.
pub(crate) struct PageServer {
    server: Server,
    runs: Arc<Runs>,
}

impl PageServer {
    /// Serves the runs in `folder`, or the run that `folder` is, at `address`: to readers with `token`, who
    /// have `powers`, or to all if there is no token; and to requests for `localhost`, an address
    /// in numbers or a host name in `allowed`.
    pub fn start(
        address: SocketAddr,
        folder: &Path,
        token: Option<BearerToken>,
        powers: Powers,
        allowed: &[String],
    ) -> Result<Self, PageError> {
        if token.is_none() && !address.ip().is_loopback() {
            return Err(PageError::NeedsToken { address });
        }
        let listener = TcpListener::bind(address).map_err(|source| PageError::Bind { address, source })?;
        let runs = Arc::new(Runs::of(folder, token.is_some(), powers));
        let guard = if token.is_some() { guard_hosts } else { guard };
        let server = Server::start(listener, guard(routes::router(&runs, token), allowed)).map_err(PageError::Start)?;
        Ok(PageServer { server, runs })
    }

    /// Address of the server; with port 0 requested, the assigned port.
    pub fn address(&self) -> SocketAddr {
        self.server.address()
    }

    /// Shows a run of this process as it happens.
    pub fn show(&self, run: &Arc<Observed>) {
        self.runs.show(run);
    }
}
