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
mod upload;
mod vllm;

use std::sync::Arc;

use crate::engine::settings::EngineKind;
use crate::net::Endpoint;

pub use crate::net::{Fault, RemoteError};
pub use async_trait::async_trait;
pub use engine::{Attempt, Capabilities, Ending, InferenceEngine, PauseMode, WeightControl};
pub use fleet::{Fleet, FleetConfig};
pub use handle::FleetHandle;
pub use members::{MemberList, Members};

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
        EngineKind::Sglang => Arc::new(sglang::SglangEngine::new("SGLang", endpoint, model)?),
        EngineKind::Rollflow => Arc::new(sglang::SglangEngine::new("rollflow serve", endpoint, model)?),
        EngineKind::OpenAi => Arc::new(openai::OpenAiEngine::new(endpoint, model)?),
        EngineKind::Local => {
            let what = "answering at a URL";
            return Err(RemoteError::new("an engine in this process", Fault::Unsupported(what)));
        }
    })
}
