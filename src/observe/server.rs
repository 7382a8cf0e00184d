//! HTTP server of a run's metrics: `/metrics` for Prometheus, in its text format or as OpenMetrics,
//! `/healthz` for health checks.
//!
//! The server runs on the process's HTTP runtime, so that a scrape is answered while every worker
//! computes. It ends when its owner drops it: connections are closed and the port is free (law F3).
//! A scrape costs one rendering.

use std::io::ErrorKind;
use std::net::{SocketAddr, TcpListener, ToSocketAddrs};

use axum::http::HeaderMap;
use axum::http::header::{ACCEPT, CONTENT_TYPE};
use axum::{Router, routing};

use super::stage_sampler::StageSampler;
use super::{Metrics, ObserveError};
use crate::flow::Flow;
use crate::net::{Server, guard};

const TEXT_FORMAT: &str = "text/plain; version=0.0.4; charset=utf-8";
const OPENMETRICS: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// A running server; dropping it frees the port.
#[derive(Debug)]
#[must_use = "the metrics are served until this is dropped"]
pub struct MetricsServer {
    /// Dropped first: its last export is still served.
    _sampler: Option<StageSampler>,
    server: Server,
}

impl MetricsServer {
    /// Listens at `address` and serves `metrics` to requests for `localhost`, an address in numbers or
    /// a host name in `allowed`. When this returns, connections are accepted.
    ///
    /// # Errors
    /// The address is in use or not allowed, or the machine gives no thread.
    pub fn start(address: SocketAddr, metrics: Metrics, allowed: &[String]) -> Result<Self, ObserveError> {
        let listener = TcpListener::bind(address).map_err(|source| match source.kind() {
            ErrorKind::AddrInUse => ObserveError::Busy { address },
            _ => ObserveError::Bind { address, source },
        })?;
        let scrape = move |headers: HeaderMap| async move {
            let accept = headers.get(ACCEPT).and_then(|accept| accept.to_str().ok()).unwrap_or_default();
            match accept.contains("application/openmetrics-text") {
                true => ([(CONTENT_TYPE, OPENMETRICS)], metrics.render_openmetrics()),
                false => ([(CONTENT_TYPE, TEXT_FORMAT)], metrics.render()),
            }
        };
        let routes = Router::new().route("/metrics", routing::get(scrape)).route("/healthz", routing::get(async || "ok\n"));
        let server = Server::start(listener, guard(routes, allowed));
        let what = || format!("the metrics server at {address}");
        let server = server.map_err(|source| ObserveError::Thread { what: what(), source })?;
        Ok(MetricsServer { _sampler: None, server })
    }

    /// Address of the server; the port that was taken, if port 0 was asked for.
    pub fn address(&self) -> SocketAddr {
        self.server.address()
    }
}

impl Metrics {
    /// Serves these metrics at `http://HOST:PORT/metrics`, with the time of each of the flow's
    /// stages by state. Port 0 takes a free port.
    ///
    /// Call it before the flow runs, and keep the result until the run has ended. Give the same
    /// metrics to [`RunLog::new`](crate::stages::sink::RunLog::new), and to each stage with a
    /// method `metrics` whose numbers you want.
    ///
    /// ```
    /// use rollflow::flow::from_iter;
    /// use rollflow::prelude::*;
    ///
    /// # fn main() -> anyhow::Result<()> {
    /// let mut flow = Flow::new("squares");
    /// let numbers = flow.source("numbers", from_iter(0..100_u64));
    /// flow.sink("sum", numbers, |_: u64| {});
    /// let served = Metrics::new().serve("127.0.0.1:0", &flow)?;
    /// println!("http://{}/metrics", served.address());
    /// flow.run(Until::finished())?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// The address can't be read or is in use, or the machine gives no thread.
    pub fn serve(&self, address: &str, flow: &Flow) -> Result<MetricsServer, ObserveError> {
        let unreadable = |source| ObserveError::Address { given: address.to_owned(), source };
        let none = || std::io::Error::new(ErrorKind::NotFound, "it resolves to nothing");
        let address = address.to_socket_addrs().map_err(unreadable)?.next().ok_or_else(|| unreadable(none()))?;
        let server = MetricsServer::start(address, self.clone(), &[])?;
        Ok(MetricsServer { _sampler: Some(StageSampler::start(flow.stats(), self.clone(), None, None)?), ..server })
    }
}
