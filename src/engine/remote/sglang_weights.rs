//! Weights of an SGLang server (seen on 0.5.23).

use std::collections::BTreeMap;
use std::path::Path;
use std::time::Duration;

use serde_json::{Value, json};

use super::control_reply::{self as reply, Checksums};
use super::{Fault, PauseMode, Pending, RemoteError, WeightControl};
use crate::net::Client;

/// Longest that one request may take. A sync has limits of its own, which are shorter.
const LIMIT: Duration = Duration::from_secs(3600);

const ROUTES: &str =
    "this SGLang has no such route: it is older or newer than 0.5, or it was started with an admin token that it was not given";

/// SGLang's steps of a sync.
#[derive(Clone, Debug)]
pub struct SglangWeights {
    client: Client,
}

impl SglangWeights {
    /// Of the server that this client asks.
    pub fn new(client: Client) -> Self {
        SglangWeights { client }
    }

    async fn post(&self, path: &str, body: &Value) -> Result<Value, RemoteError> {
        self.client.post(path, body, LIMIT).await.map_err(|error| reply::explain(error, &[404, 405], ROUTES))
    }

    /// Posts what is answered with `success`, which says more than the status.
    async fn ask(&self, path: &str, body: &Value) -> Result<(), RemoteError> {
        let said = self.post(path, body).await?;
        reply::succeeded(&self.client, path, &said)
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
                    let what = "finishing what is under way; set engine.pause to \"keep\", \"recompute\" or \"abort\"";
                    return Err(RemoteError::new(self.client.name(), Fault::Unsupported { what }));
                }
            };
            self.post("/pause_generation", &json!({"mode": mode})).await.map(drop)
        })
    }

    fn load<'a>(&'a self, folder: &'a Path, label: &'a str) -> Pending<'a, ()> {
        Box::pin(async move {
            // The cache is a step of its own: a flush fails while requests stand still in place.
            let body = json!({"model_path": folder, "weight_version": label, "flush_cache": false, "abort_all_requests": false});
            self.ask("/update_weights_from_disk", &body).await
        })
    }

    fn load_adapter<'a>(&'a self, name: &'a str, folder: &'a Path) -> Pending<'a, ()> {
        Box::pin(async move {
            reply::forget_namesake(self, name).await?;
            self.ask("/load_lora_adapter", &json!({"lora_name": name, "lora_path": folder})).await
        })
    }

    fn unload_adapter<'a>(&'a self, name: &'a str) -> Pending<'a, ()> {
        Box::pin(async move { self.ask("/unload_lora_adapter", &json!({"lora_name": name})).await })
    }

    fn adapters(&self) -> Pending<'_, Vec<String>> {
        Box::pin(reply::adapters(&self.client, LIMIT))
    }

    fn label<'a>(&'a self, label: &'a str) -> Pending<'a, ()> {
        Box::pin(async move {
            // Left to itself it aborts everything.
            self.ask("/update_weight_version", &json!({"new_version": label, "abort_all_requests": false})).await
        })
    }

    fn served(&self) -> Pending<'_, Option<String>> {
        Box::pin(async {
            let said = self.client.get("/model_info", LIMIT).await.map_err(|error| reply::explain(error, &[404, 405], ROUTES))?;
            Ok(reply::version(&said))
        })
    }

    fn checksums(&self) -> Pending<'_, Option<BTreeMap<String, String>>> {
        Box::pin(async {
            let what = "/weights_checker";
            match self.client.post(what, &json!({"action": "checksum"}), LIMIT).await {
                Ok(said) => {
                    reply::succeeded(&self.client, what, &said)?;
                    let whole = Checksums::of(&said["per_engine_checksum"]).or_else(|| Checksums::of(&said["ranks"]));
                    whole.map(Some).ok_or_else(|| self.client.nonsense(what, "no checksums".into(), &said.to_string()))
                }
                Err(error) => reply::none_where_missing(error),
            }
        })
    }

    fn flush_cache(&self) -> Pending<'_, ()> {
        Box::pin(async { self.post("/flush_cache", &Value::Null).await.map(drop) })
    }

    fn resume(&self) -> Pending<'_, ()> {
        Box::pin(async { self.post("/continue_generation", &json!({})).await.map(drop) })
    }
}
