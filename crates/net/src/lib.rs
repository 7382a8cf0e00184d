//! HTTP to other processes: one client and one retry policy for engines, rewards, judges,
//! environments and the hub.
//!
//! [`Client`] is one server, on reqwest: HTTP/1.1 and 2, TLS by rustls, pooled connections, JSON
//! and server-sent events. [`RetryPolicy`] is exponential backoff with jitter, within a budget and
//! a deadline. [`Tasks`] are tasks of the process's one tokio runtime for HTTP, on which clients
//! send and the servers of this process listen.
//!
//! Proxies come from `HTTP_PROXY`, `HTTPS_PROXY` and `NO_PROXY`, except for loopback addresses,
//! which are always reached directly. Servers are trusted by the system's certificates, those of
//! `SSL_CERT_FILE`, and those of [`Endpoint::ca_file`].

mod client;
mod endpoint;
mod error;
mod events;
mod host;
mod pauses;
mod retry;
mod serve;
mod tasks;
mod tls;

#[cfg(test)]
mod tests;

pub use client::{Answer, Client, bare_client, message};
pub use endpoint::{Endpoint, check_url};
pub use error::{Fault, RemoteError};
pub use events::Events;
pub use host::{guard, guard_hosts};
pub use pauses::{RetryPauses, URL};
pub use retry::{Outcome, Retries, RetryPolicy, Retryable, backoff};
pub use rollflow_util::deadline;
pub use serve::{Server, most_connections};
pub use tasks::{Tasks, now};
pub use tls::config as tls_config;
