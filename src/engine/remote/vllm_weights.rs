//! Weights of a vLLM server, over the routes of its developer mode (seen on 0.32 and 0.33).

use std::collections::BTreeMap;
use std::path::Path;
use std::time::Duration;

use serde_json::{Value, json};

use super::control_reply::{self as reply, Checksums};
use super::{Fault, PauseMode, Pending, RemoteError, WeightControl};
use crate::net::Client;

/// Longest that one request may take. A sync has limits of its own, which are shorter.
const LIMIT: Duration = Duration::from_secs(3600);

const DEV_MODE: &str = "vLLM has its routes for weights only in developer mode: start it with VLLM_SERVER_DEV_MODE=1 \
                        (`rollflow engine launch` does), on a network that nobody else reaches, for they ask for no token";

const ADAPTERS: &str = "vLLM takes adapters while it runs only with VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 and --enable-lora (max-lora-rank: at least theirs)";

/// vLLM's steps of a sync.
#[derive(Clone, Debug)]
pub struct VllmWeights {
    client: Client,
}

impl VllmWeights {
    /// Of the server that this client asks.
    pub fn new(client: Client) -> Self {
        VllmWeights { client }
    }

    async fn post(&self, path: &str, body: &Value) -> Result<Value, RemoteError> {
        self.client.post(path, body, LIMIT).await.map_err(|error| reply::explain(error, &[404, 405], DEV_MODE))
    }

    /// Whether it stands still.
    pub async fn is_paused(&self) -> Result<bool, RemoteError> {
        let said = self.client.get("/is_paused", LIMIT).await.map_err(|error| reply::explain(error, &[404, 405], DEV_MODE))?;
        said["is_paused"]
            .as_bool()
            .ok_or_else(|| self.client.nonsense("GET /is_paused", "no `is_paused`".into(), &said.to_string()))
    }
}

impl WeightControl for VllmWeights {
    fn pause_modes(&self) -> &'static [PauseMode] {
        &[PauseMode::Keep, PauseMode::Finish, PauseMode::Abort]
    }

    fn pause(&self, mode: PauseMode) -> Pending<'_, ()> {
        Box::pin(async move {
            let mode = match mode {
                PauseMode::Keep => "keep",
                PauseMode::Finish => "wait",
                PauseMode::Abort => "abort",
                PauseMode::Recompute => {
                    let what =
                        "reading keys and values anew under new weights; set engine.pause to \"keep\", \"finish\" or \"abort\"";
                    return Err(RemoteError::new(self.client.name(), Fault::Unsupported { what }));
                }
            };
            // Else 0.32 forgets the keys and values of what stands still, and reads all of it again; a sync says itself what is to be forgotten.
            self.post(&format!("/pause?mode={mode}&clear_cache=false"), &Value::Null).await.map(drop)
        })
    }

    fn load<'a>(&'a self, folder: &'a Path, _label: &'a str) -> Pending<'a, ()> {
        Box::pin(async move {
            let body = json!({"method": "reload_weights", "args": [], "kwargs": {"weights_path": folder}});
            let said = self.post("/collective_rpc", &body).await?;
            // An answer without one from each worker says that nobody loaded anything.
            match said["results"].as_array() {
                Some(results) if !results.is_empty() => Ok(()),
                _ => Err(self.client.nonsense("POST /collective_rpc", "no results".into(), &said.to_string())),
            }
        })
    }

    fn load_adapter<'a>(&'a self, name: &'a str, folder: &'a Path) -> Pending<'a, ()> {
        Box::pin(async move {
            reply::forget_namesake(self, name).await?;
            // Not in place: the server would read the folder again with every request.
            let body = json!({"lora_name": name, "lora_path": folder});
            let loaded = self.client.post("/v1/load_lora_adapter", &body, LIMIT).await;
            loaded.map(drop).map_err(|error| reply::explain(error, &[404, 405], ADAPTERS))
        })
    }

    fn unload_adapter<'a>(&'a self, name: &'a str) -> Pending<'a, ()> {
        Box::pin(async move {
            let unloaded = self.client.post("/v1/unload_lora_adapter", &json!({"lora_name": name}), LIMIT).await;
            unloaded.map(drop).map_err(|error| reply::explain(error, &[404, 405], ADAPTERS))
        })
    }

    fn adapters(&self) -> Pending<'_, Vec<String>> {
        Box::pin(reply::adapters(&self.client, LIMIT))
    }

    fn label<'a>(&'a self, label: &'a str) -> Pending<'a, ()> {
        Box::pin(async move {
            let what = "/update_weight_version";
            let said = self.post(what, &json!({"new_version": label})).await?;
            reply::succeeded(&self.client, what, &said)
        })
    }

    fn served(&self) -> Pending<'_, Option<String>> {
        Box::pin(async {
            let said = self.client.get("/weight_info", LIMIT).await;
            let said = said.map_err(|error| reply::explain(error, &[404, 405], DEV_MODE))?;
            Ok(reply::version(&said))
        })
    }

    fn checksums(&self) -> Pending<'_, Option<BTreeMap<String, String>>> {
        Box::pin(async {
            let what = "/weight_checker";
            match self.client.post(what, &json!({"action": "checksum"}), LIMIT).await {
                Ok(said) => Checksums::of(&said["checksums"])
                    .map(Some)
                    .ok_or_else(|| self.client.nonsense(what, "no checksums".into(), &said.to_string())),
                Err(error) => reply::none_where_missing(error),
            }
        })
    }

    fn flush_cache(&self) -> Pending<'_, ()> {
        Box::pin(async {
            let what = "/reset_prefix_cache";
            let said = self.post(what, &Value::Null).await?;
            reply::succeeded(&self.client, what, &said)
        })
    }

    fn resume(&self) -> Pending<'_, ()> {
        Box::pin(async { self.post("/resume", &Value::Null).await.map(drop) })
    }
}
