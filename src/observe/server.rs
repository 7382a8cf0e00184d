//! Serves a run's metrics over HTTP: `/metrics` for Prometheus, `/healthz` for whoever asks whether the process answers.
//!
//! The server owns one named thread with its own small tokio runtime, so that a scrape is answered while every worker computes. It ends
//! when its owner drops it: connections are cut, the port is free and the thread is joined (law F3). A scrape costs one rendering.

use std::io::ErrorKind;
use std::net::{SocketAddr, TcpListener};
use std::thread::JoinHandle;

use axum::http::header::CONTENT_TYPE;
use axum::{Router, routing};
use tokio_util::sync::CancellationToken;

use super::Metrics;
use crate::net::guard;

const TEXT_FORMAT: &str = "text/plain; version=0.0.4; charset=utf-8";

/// Why metrics cannot be served.
#[derive(Debug, thiserror::Error)]
pub enum ServerError {
    /// Somebody else listens there.
    #[error(
        "the metrics address {address} is in use: stop the program that holds it, or choose another with --metrics HOST:PORT (port 0 takes a free one)"
    )]
    Busy {
        /// Where.
        address: SocketAddr,
    },
    /// The machine does not let us listen there.
    #[error("cannot serve metrics at {address}: {source}; choose another address with --metrics HOST:PORT")]
    Bind {
        /// Where.
        address: SocketAddr,
        /// What the machine said.
        source: std::io::Error,
    },
    /// The machine gave no thread or no event loop.
    #[error("cannot start the metrics server at {address}: {source}; the machine is out of threads or file handles")]
    Start {
        /// Where.
        address: SocketAddr,
        /// What the machine said.
        source: std::io::Error,
    },
}

/// A running server; dropping it ends it.
#[derive(Debug)]
pub struct MetricsServer {
    address: SocketAddr,
    stop: CancellationToken,
    thread: Option<JoinHandle<()>>,
}

impl MetricsServer {
    /// Listens at `address` and serves `metrics` to those who ask for `localhost` or for an address in
    /// numbers. When this returns, connections are accepted.
    pub fn start(address: SocketAddr, metrics: Metrics) -> Result<Self, ServerError> {
        MetricsServer::start_for(address, metrics, &[])
    }

    /// Listens like [`MetricsServer::start`], and answers to the host names in `allowed` too.
    pub fn start_for(address: SocketAddr, metrics: Metrics, allowed: &[String]) -> Result<Self, ServerError> {
        let listener = TcpListener::bind(address).map_err(|source| match source.kind() {
            ErrorKind::AddrInUse => ServerError::Busy { address },
            _ => ServerError::Bind { address, source },
        })?;
        let cannot_start = |source| ServerError::Start { address, source };
        let bound = listener.local_addr().map_err(cannot_start)?;
        listener.set_nonblocking(true).map_err(cannot_start)?;
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(cannot_start)?;
        let listener = {
            let _context = runtime.enter();
            tokio::net::TcpListener::from_std(listener).map_err(cannot_start)?
        };
        let stop = CancellationToken::new();
        let stopped = stop.clone();
        let routes = guard(routes(metrics), allowed);
        let serve = move || {
            // Returning drops the runtime and with it every connection, however slow its client is.
            runtime.block_on(async {
                tokio::select! {
                    () = stopped.cancelled() => {}
                    ended = axum::serve(listener, routes) => {
                        if let Err(error) = ended {
                            tracing::error!(%error, "the metrics server ended");
                        }
                    }
                }
            });
        };
        let thread = std::thread::Builder::new().name("metrics-server".into()).spawn(serve).map_err(cannot_start)?;
        Ok(MetricsServer { address: bound, stop, thread: Some(thread) })
    }

    /// Where it listens; with port 0 asked for, the port it got.
    pub fn address(&self) -> SocketAddr {
        self.address
    }
}

impl Drop for MetricsServer {
    fn drop(&mut self) {
        self.stop.cancel();
        // A panic of the server's thread was already printed, and a destructor has nobody to report it to.
        self.thread.take().map(JoinHandle::join);
    }
}

fn routes(metrics: Metrics) -> Router {
    let scrape = move || async move { ([(CONTENT_TYPE, TEXT_FORMAT)], metrics.render()) };
    Router::new().route("/metrics", routing::get(scrape)).route("/healthz", routing::get(async || "ok\n"))
}
