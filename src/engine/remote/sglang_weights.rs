//! Weights of an SGLang server (tested with 0.5.23).

use std::collections::BTreeMap;
use std::path::Path;

use serde_json::{Value, json};

use super::control_client::{ControlClient, unload_namesake};
use super::{Fault, PauseMode, Pending, RemoteError, WeightControl};
use crate::net::Client;

const ROUTES: &str =
    "this SGLang has no such route: it is older or newer than 0.5, or it was started with an admin token that it was not given";

/// Weight control of an SGLang server.
#[derive(Clone, Debug)]
pub(super) struct SglangWeights {
    server: ControlClient,
}

impl SglangWeights {
    pub(super) fn new(client: &Client) -> Self {
        SglangWeights { server: ControlClient::new(client.clone(), ROUTES) }
    }
}

impl WeightControl for SglangWeights {
    fn pause_modes(&self) -> &'static [PauseMode] {
        &[PauseMode::Recompute, PauseMode::Keep, PauseMode::Abort]
    }

    fn pause(&self, mode: PauseMode) -> Pending<'_, ()> {
        Box::pin(async move {
            let mode = match mode {
                PauseMode::Keep => "in_place",
                PauseMode::Recompute => "retract",
                PauseMode::Abort => "abort",
                PauseMode::Finish => {
                    let what = "finishing what is in flight; set engine.pause to \"keep\", \"recompute\" or \"abort\"";
                    return Err(RemoteError::new(self.server.name(), Fault::Unsupported { what }));
                }
            };
            self.server.post("/pause_generation", &json!({"mode": mode})).await.map(drop)
        })
    }

    fn load<'a>(&'a self, folder: &'a Path, label: &'a str) -> Pending<'a, ()> {
        Box::pin(async move {
            // The sync flushes separately: a flush fails while requests are paused in place.
            let body = json!({"model_path": folder, "weight_version": label, "flush_cache": false, "abort_all_requests": false});
            self.server.post_success("/update_weights_from_disk", &body).await
        })
    }

    fn load_adapter<'a>(&'a self, name: &'a str, folder: &'a Path) -> Pending<'a, ()> {
        Box::pin(async move {
            unload_namesake(self, name).await?;
            self.server.post_success("/load_lora_adapter", &json!({"lora_name": name, "lora_path": folder})).await
        })
    }

    fn unload_adapter<'a>(&'a self, name: &'a str) -> Pending<'a, ()> {
        Box::pin(async move { self.server.post_success("/unload_lora_adapter", &json!({"lora_name": name})).await })
    }

    fn adapters(&self) -> Pending<'_, Vec<String>> {
        Box::pin(self.server.adapters())
    }

    fn label<'a>(&'a self, label: &'a str) -> Pending<'a, ()> {
        Box::pin(async move {
            // The server's default aborts all requests.
            let body = json!({"new_version": label, "abort_all_requests": false});
            self.server.post_success("/update_weight_version", &body).await
        })
    }

    fn served(&self) -> Pending<'_, Option<String>> {
        Box::pin(self.server.version("/model_info"))
    }

    fn checksums(&self) -> Pending<'_, Option<BTreeMap<String, String>>> {
        let keys = &["per_engine_checksum", "ranks"];
        Box::pin(async { self.server.checksums("/weights_checker", &json!({"action": "checksum"}), keys, true).await })
    }

    fn flush_cache(&self) -> Pending<'_, ()> {
        Box::pin(async { self.server.post("/flush_cache", &Value::Null).await.map(drop) })
    }

    fn resume(&self) -> Pending<'_, ()> {
        Box::pin(async { self.server.post("/continue_generation", &json!({})).await.map(drop) })
    }
}
