//! Routes that free a GPU's memory for others, and take it again, in SGLang's form.
//!
//! Weights, adapters included, move to the host's memory, and keys and values are dropped. Requests are
//! refused with status 503 meanwhile; weights may be replaced.

use std::sync::Arc;

use axum::body::Bytes;
use axum::extract::State;
use serde::Deserialize;
use serde_json::Value;

use super::control::{Sums, adapters_over, blocking};
use super::reply::{self, Refusal, Reply};
use super::shared::{Served, Shared};
use super::worker::{Command, Installed};
use crate::model::{Compute, FrozenWeights, stream};
use crate::util::untrusted;

/// What sleeps.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Asleep {
    pub weights: bool,
    pub cache: bool,
}

impl Asleep {
    /// Rejects work on a server that sleeps.
    pub fn check(self) -> Result<(), Refusal> {
        match self {
            Asleep { weights: false, cache: false } => Ok(()),
            _ => Err(Refusal::new(503, "the server sleeps; wake it with /resume_memory_occupation")),
        }
    }
}

#[derive(Default, Deserialize)]
struct Parts {
    tags: Option<Vec<String>>,
}

impl Parts {
    /// The parts that a request names: all if it names none.
    fn read(body: &Bytes) -> Result<Asleep, Refusal> {
        let named = if body.is_empty() { Parts::default() } else { reply::read::<Parts>(body)? };
        let tags = named.tags.filter(|tags| !tags.is_empty());
        let known = ["weights", "kv_cache", "cuda_graph"];
        if let Some(other) = tags.iter().flatten().find(|tag| !known.contains(&tag.as_str())) {
            let other = untrusted::line_of(other, 60);
            return Err(Refusal::bad(format!("the tag {other} is unknown; use \"weights\" and \"kv_cache\"")));
        }
        let names = |tag: &str| tags.as_ref().is_none_or(|tags| tags.iter().any(|named| named == tag));
        Ok(Asleep { weights: names(known[0]), cache: names(known[1]) })
    }
}

/// Frees the memory of a server without work; idempotent.
pub(super) async fn release(State(shared): State<Arc<Shared>>, body: Bytes) -> Reply {
    let both = Asleep { weights: true, cache: true };
    if Parts::read(&body)? != both {
        return Err(Refusal::bad("this server sleeps as a whole: name both \"weights\" and \"kv_cache\", or none"));
    }
    if shared.config.tinker.is_some() {
        return Err(Refusal::bad(
            "models of the Tinker API are trained over the served weights; a server that shall sleep serves without --tinker",
        ));
    }
    let _order = shared.changing.lock().await;
    shared.prepared.lock().take();
    let before = shared.served.lock().asleep;
    if before == both {
        return Ok(reply::page(&Value::Null));
    }
    // New requests are refused from here on.
    shared.served.lock().asleep.cache = true;
    if let Err(refusal) = fall_asleep(&shared).await {
        shared.served.lock().asleep = before;
        return Err(refusal);
    }
    let device = shared.compute.device;
    blocking(move || {
        stream::give_back_memory(device);
        Ok(())
    })
    .await?;
    tracing::info!("asleep until /resume_memory_occupation");
    Ok(reply::page(&Value::Null))
}

/// Moves the served weights to the host's memory, and frees the engine's.
async fn fall_asleep(shared: &Arc<Shared>) -> Result<(), Refusal> {
    let host = move_weights(shared, Compute::cpu(shared.compute.dtype)).await?;
    shared.call(|reply| Command::Sleep { what: host.installed(), reply }).await?.map_err(Refusal::bad)?;
    let mut served = shared.served.lock();
    host.serve(&mut served);
    served.asleep = Asleep { weights: true, cache: true };
    Ok(())
}

/// Takes memory again; idempotent.
pub(super) async fn resume(State(shared): State<Arc<Shared>>, body: Bytes) -> Reply {
    let wanted = Parts::read(&body)?;
    let _order = shared.changing.lock().await;
    let asleep = shared.served.lock().asleep;
    if wanted.weights && asleep.weights {
        let here = move_weights(&shared, shared.compute).await?;
        shared.call(|reply| Command::Install { what: here.installed(), reply }).await?;
        let mut served = shared.served.lock();
        here.serve(&mut served);
        served.asleep.weights = false;
    }
    if wanted.cache {
        // Keys and values take memory as requests come.
        shared.served.lock().asleep.cache = false;
    }
    Ok(reply::page(&Value::Null))
}

/// The served weights on another device.
struct Moved {
    label: Arc<str>,
    weights: Arc<FrozenWeights>,
    sums: Sums,
    adapters: super::control::Adapters,
}

async fn move_weights(shared: &Arc<Shared>, to: Compute) -> Result<Moved, Refusal> {
    let shared = shared.clone();
    blocking(move || {
        let _guard = tch::no_grad_guard();
        let (label, weights, sums) = {
            let served = shared.served.lock();
            (served.label.clone(), served.weights.clone(), served.sums.clone())
        };
        let weights = Arc::new(FrozenWeights::of_own(weights.read().on(to)));
        let adapters = adapters_over(&shared, &weights);
        Ok(Moved { label, weights, sums, adapters })
    })
    .await
}

impl Moved {
    fn installed(&self) -> Installed {
        let adapters = self.adapters.iter().map(|(name, adapter)| (name.clone(), adapter.weights.clone())).collect();
        Installed { label: self.label.clone(), weights: self.weights.clone(), adapters }
    }

    fn serve(self, served: &mut Served) {
        (served.weights, served.sums, served.adapters) = (self.weights, self.sums, self.adapters);
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::{config, policy};
    use super::*;
    use crate::observe::Metrics;

    #[test]
    fn a_server_that_fails_to_sleep_is_awake() {
        let state = tempfile::tempdir().unwrap();
        let (shared, engine) = Shared::new(&policy(), config(state.path()), Metrics::new()).unwrap();
        let shared = Arc::new(shared);
        drop(engine);
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        assert!(runtime.block_on(release(State(shared.clone()), Bytes::new())).is_err());
        assert_eq!(shared.served.lock().asleep, Asleep::default());
    }

    #[test]
    fn a_request_names_parts_or_means_all() {
        let read = |body: &'static str| Parts::read(&Bytes::from_static(body.as_bytes())).ok();
        let of = |weights, cache| Some(Asleep { weights, cache });
        assert_eq!([read(""), read("{}"), read(r#"{"tags": []}"#), read(r#"{"tags": null}"#)], [of(true, true); 4]);
        assert_eq!(read(r#"{"tags": ["weights"]}"#), of(true, false));
        assert_eq!(read(r#"{"tags": ["kv_cache", "cuda_graph"]}"#), of(false, true));
        assert_eq!([read(r#"{"tags": ["dreams"]}"#), read("[")], [None; 2]);
    }
}
