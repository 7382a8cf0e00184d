//! HTTP server of a run's metrics: `/metrics` for Prometheus, `/healthz` for health checks.
//!
//! The server runs on the process's HTTP runtime, so that a scrape is answered while every worker
//! computes. It ends when its owner drops it: connections are closed and the port is free (law F3).
//! A scrape costs one rendering.

use std::io::ErrorKind;
use std::net::{SocketAddr, TcpListener};

use axum::http::header::CONTENT_TYPE;
use axum::{Router, routing};

use super::Metrics;
use crate::net::{Server, guard};

const TEXT_FORMAT: &str = "text/plain; version=0.0.4; charset=utf-8";

/// Why metrics cannot be served.
#[derive(Debug, thiserror::Error)]
pub enum ServerError {
    /// Another program listens there.
    #[error(
        "the metrics address {address} is in use: stop the program that holds it, or choose another with --metrics HOST:PORT (port 0 takes a free one)"
    )]
    Busy {
        /// Address.
        address: SocketAddr,
    },
    /// The machine does not let us listen there.
    #[error("cannot serve metrics at {address}: {source}; choose another address with --metrics HOST:PORT")]
    Bind {
        /// Address.
        address: SocketAddr,
        /// Error of the system.
        source: std::io::Error,
    },
    /// The machine gave no thread or no event loop.
    #[error("cannot start the metrics server at {address}: {source}; the machine is out of threads or file handles")]
    Start {
        /// Address.
        address: SocketAddr,
        /// Error of the system.
        source: std::io::Error,
    },
}

/// A running server; dropping it ends it.
#[derive(Debug)]
pub struct MetricsServer(Server);

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
        let server = Server::start(listener, guard(routes(metrics), allowed));
        server.map(MetricsServer).map_err(|source| ServerError::Start { address, source })
    }

    /// Address of the server; the port that was taken, if port 0 was asked for.
    pub fn address(&self) -> SocketAddr {
        self.0.address()
    }
}

fn routes(metrics: Metrics) -> Router {
    let scrape = move || async move { ([(CONTENT_TYPE, TEXT_FORMAT)], metrics.render()) };
    Router::new().route("/metrics", routing::get(scrape)).route("/healthz", routing::get(async || "ok\n"))
}
