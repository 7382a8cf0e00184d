//! Weights of a vLLM server, over the routes of its developer mode (tested with 0.32 and 0.33).

use std::collections::BTreeMap;
use std::path::Path;

use serde_json::{Value, json};

use super::control_client::{ControlClient, unload_namesake};
use super::{Fault, PauseMode, Pending, RemoteError, WeightControl};
use crate::net::Client;

const DEV_MODE: &str = "vLLM has its routes for weights only in developer mode: start it with VLLM_SERVER_DEV_MODE=1 \
                        (`rollflow engine launch` does), on a private network, because these routes ask for no token";

const ADAPTERS: &str = "vLLM loads adapters at run time only with VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 and --enable-lora (max-lora-rank: at least theirs)";

/// Weight control of a vLLM server.
#[derive(Clone, Debug)]
pub(super) struct VllmWeights {
    server: ControlClient,
    adapters: ControlClient,
}

impl VllmWeights {
    pub(super) fn new(client: &Client) -> Self {
        VllmWeights {
            server: ControlClient::new(client.clone(), DEV_MODE),
            adapters: ControlClient::new(client.clone(), ADAPTERS),
        }
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
                        "recomputing keys and values under new weights; set engine.pause to \"keep\", \"finish\" or \"abort\"";
                    return Err(RemoteError::new(self.server.name(), Fault::Unsupported { what }));
                }
            };
            // By default 0.32 clears the keys and values of paused requests. A sync flushes by
            // itself.
            self.server.post(&format!("/pause?mode={mode}&clear_cache=false"), &Value::Null).await.map(drop)
        })
    }

    fn load<'a>(&'a self, folder: &'a Path, _label: &'a str) -> Pending<'a, ()> {
        Box::pin(async move {
            let body = json!({"method": "reload_weights", "args": [], "kwargs": {"weights_path": folder}});
            let reply = self.server.post("/collective_rpc", &body).await?;
            // Without a result from a worker, nothing was loaded.
            match reply["results"].as_array() {
                Some(results) if !results.is_empty() => Ok(()),
                _ => Err(self.server.nonsense("POST /collective_rpc", "no results", &reply)),
            }
        })
    }

    fn load_adapter<'a>(&'a self, name: &'a str, folder: &'a Path) -> Pending<'a, ()> {
        Box::pin(async move {
            unload_namesake(self, name).await?;
            // Not in place: the server would read the folder again with every request.
            let body = json!({"lora_name": name, "lora_path": folder});
            self.adapters.post("/v1/load_lora_adapter", &body).await.map(drop)
        })
    }

    fn unload_adapter<'a>(&'a self, name: &'a str) -> Pending<'a, ()> {
        Box::pin(async move { self.adapters.post("/v1/unload_lora_adapter", &json!({"lora_name": name})).await.map(drop) })
    }

    fn adapters(&self) -> Pending<'_, Vec<String>> {
        Box::pin(self.server.adapters())
    }

    fn label<'a>(&'a self, label: &'a str) -> Pending<'a, ()> {
        Box::pin(async move { self.server.post_success("/update_weight_version", &json!({"new_version": label})).await })
    }

    fn served(&self) -> Pending<'_, Option<String>> {
        Box::pin(self.server.version("/weight_info"))
    }

    fn checksums(&self) -> Pending<'_, Option<BTreeMap<String, String>>> {
        Box::pin(async { self.server.checksums("/weight_checker", &json!({"action": "checksum"}), &["checksums"], false).await })
    }

    fn flush_cache(&self) -> Pending<'_, ()> {
        Box::pin(async { self.server.post_success("/reset_prefix_cache", &Value::Null).await })
    }

    fn resume(&self) -> Pending<'_, ()> {
        Box::pin(async { self.server.post("/resume", &Value::Null).await.map(drop) })
    }
}
