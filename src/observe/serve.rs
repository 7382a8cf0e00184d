//! Exports a flow's metrics for Prometheus in one call.

use std::net::{SocketAddr, ToSocketAddrs};

use super::server::ServerError;
use super::stage_sampler::SamplerError;
use super::{Metrics, MetricsServer, StageSampler};
use crate::flow::Flow;

/// Metrics server of one flow. Dropping it frees the port and ends both threads, so keep it until
/// the run has ended.
#[derive(Debug)]
#[must_use = "the metrics are served until this is dropped"]
pub struct ServedMetrics {
    // Dropped first: its last export is still served.
    _sampler: StageSampler,
    server: MetricsServer,
}

impl ServedMetrics {
    /// The address that it listens at; with port 0 in the call, the port that it got.
    pub fn address(&self) -> SocketAddr {
        self.server.address()
    }
}

/// Errors of [`Metrics::serve`].
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    /// The text is not an address.
    #[error("{given:?} is not an address to serve metrics at: {source}; write HOST:PORT, for example 127.0.0.1:9464")]
    Address {
        /// The text.
        given: String,
        /// Error of the resolution.
        source: std::io::Error,
    },
    /// The server did not start.
    #[error(transparent)]
    Server(#[from] ServerError),
    /// The thread that samples the stages did not start.
    #[error(transparent)]
    Sampler(#[from] SamplerError),
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
    pub fn serve(&self, address: &str, flow: &Flow) -> Result<ServedMetrics, ServeError> {
        let unreadable = |source| ServeError::Address { given: address.to_owned(), source };
        let none = || std::io::Error::new(std::io::ErrorKind::NotFound, "it resolves to nothing");
        let address = address.to_socket_addrs().map_err(unreadable)?.next().ok_or_else(|| unreadable(none()))?;
        let server = MetricsServer::start(address, self.clone())?;
        let sampler = StageSampler::start(flow.stats(), self.clone(), None)?;
        Ok(ServedMetrics { _sampler: sampler, server })
    }
}
