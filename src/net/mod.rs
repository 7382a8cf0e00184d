//! HTTP to other processes: one client and one retry policy for engines, rewards, judges, environments and the hub.
//!
//! [`Client`] is one server, on reqwest: HTTP/1.1 and 2, TLS by rustls, pooled connections, JSON and
//! server-sent events. [`RetryPolicy`] is exponential backoff with jitter, within a budget and a deadline.
//!
//! Proxies come from `HTTP_PROXY`, `HTTPS_PROXY` and `NO_PROXY`, except for loopback addresses, which
//! are always reached directly. Servers are trusted by the system's certificates, those of
//! `SSL_CERT_FILE`, and those of [`Endpoint::ca_file`].

mod client;
mod endpoint;
mod error;
mod events;
mod host;
mod retry;
mod tls;

#[cfg(test)]
mod tests;

pub use client::Client;
pub use endpoint::{Endpoint, Token, check_url};
pub use error::{Fault, RemoteError};
pub use events::Events;
pub use retry::{Outcome, Retries, RetryPolicy, Retryable, backoff, deadline};

pub(crate) use client::message;
pub(crate) use host::guard;
