//! Remote engines: servers over HTTP, and engines of users.
//!
//! [`InferenceEngine`] is the interface for generation, [`WeightControl`] the interface for weight
//! sync. [`connect`] makes the engines of this project.

mod attempt;
mod budget;
mod control;
mod engine;
mod fleet;
mod group_request;
mod handle;
mod in_flight;
mod members;
mod meter;
mod openai;
mod router;
mod server;
mod sglang;
pub mod sync;
pub mod transfer;
mod upload;
mod vllm;
pub(crate) mod wire_routes;

use std::sync::Arc;

use crate::engine::settings::EngineKind;
use crate::net::{Endpoint, check_url};

pub use crate::net::{Fault, RemoteError};
pub use async_trait::async_trait;
pub use engine::{Attempt, Capabilities, Ending, EngineMemory, InferenceEngine, PauseMode, WeightControl};
pub use fleet::{Fleet, FleetConfig};
pub use handle::FleetHandle;
pub use members::{MemberList, Members};

/// Splits an address such as `vllm+http://host:port` into the server's kind and its URL. An address
/// without a kind is that of a server of the kind `usual`.
///
/// # Errors
///
/// The reason, which does not repeat a password.
pub fn parse_address(address: &str, usual: EngineKind) -> Result<(EngineKind, &str), String> {
    let before = address.split("://").next().unwrap_or_default();
    let (kind, url) = match before.split_once('+') {
        None => (usual, address),
        Some((word, _)) => {
            let servers = EngineKind::ALL.iter().copied().filter(|kind| *kind != EngineKind::Local);
            let kind = servers.clone().find(|kind| kind.word() == word).ok_or_else(|| {
                let known: Vec<_> = servers.map(EngineKind::word).collect();
                format!("{word:?} is no kind of server; use one of {}", known.join(", "))
            })?;
            (kind, &address[word.len() + 1..])
        }
    };
    check_url(url).map(|()| (kind, url))
}

/// Client of a server of this kind, at an address such as `http://host:port`. Connects with the
/// first request. `model` is the name in requests; without it, the first that the server lists.
///
/// # Errors
///
/// Those of [`Client::new`](crate::net::Client::new), and [`Fault::Unsupported`] for
/// [`EngineKind::Local`].
pub fn connect(
    kind: EngineKind,
    endpoint: impl Into<Endpoint>,
    model: Option<String>,
) -> Result<Arc<dyn InferenceEngine>, RemoteError> {
    let endpoint = endpoint.into();
    Ok(match kind {
        EngineKind::Vllm => Arc::new(vllm::VllmEngine::new(endpoint, model)?),
        EngineKind::Sglang => Arc::new(sglang::SglangEngine::new(sglang::SGLANG, endpoint, model)?),
        EngineKind::Rollflow => Arc::new(sglang::SglangEngine::new("rollflow serve", endpoint, model)?),
        EngineKind::OpenAi => Arc::new(openai::OpenAiEngine::new(endpoint, model)?),
        EngineKind::Local => {
            let what = "answering at a URL";
            return Err(RemoteError::new("an engine in this process", Fault::Unsupported(what)));
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_may_name_the_kind_of_its_server() {
        let of = |address| parse_address(address, EngineKind::Rollflow);
        assert_eq!(of("http://a:1"), Ok((EngineKind::Rollflow, "http://a:1")));
        assert_eq!(of("vllm+https://a/x+y"), Ok((EngineKind::Vllm, "https://a/x+y")));
        assert_eq!(of("http://a/x+y"), Ok((EngineKind::Rollflow, "http://a/x+y")));
        for wrong in ["local+http://a", "trt+http://a:1", "vllm+ftp://a", "vllm+a:1", "+http://a", ""] {
            assert!(of(wrong).is_err(), "{wrong}");
        }
    }
}
