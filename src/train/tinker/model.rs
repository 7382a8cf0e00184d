//! A model on a server: its numbered operations.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use rollflow_tinker::message::{AdamParams, Datum, LoraConfig, Pass, PassOutput, Tensor};
use rollflow_tinker::{Connection, Effect, TinkerError};
use serde_json::{Value, json};

/// Most sequences of one request.
const CHUNK: usize = 1024;

/// Most numbers of one request, about 5 MB.
const CHUNK_NUMBERS: usize = 500_000;

/// Loss whose gradient is its weights: `−Σ weight · log_prob`.
pub(super) const CROSS_ENTROPY: &str = "cross_entropy";

/// Loss `−Σ exp(log_prob − logprobs) · advantage`.
pub(super) const IMPORTANCE_SAMPLING: &str = "importance_sampling";

/// A loss of the protocol with its settings.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Loss {
    pub name: String,
    pub config: BTreeMap<String, f64>,
}

impl Loss {
    /// A loss without settings.
    pub fn named(name: &str) -> Self {
        Loss { name: name.to_owned(), config: BTreeMap::new() }
    }
}

/// A model with adapters on a server. Operations run in the order in which they are submitted.
pub(super) struct RemoteModel {
    pub connection: Arc<Connection>,
    id: String,
    /// Number of the newest operation.
    sequence: AtomicU64,
    numbers: Arc<Numbers>,
}

/// Numbers of a session's models and samplers.
#[derive(Debug, Default)]
pub(super) struct Numbers {
    models: AtomicU64,
    samplers: AtomicU64,
}

impl Numbers {
    fn next(of: &AtomicU64) -> u64 {
        of.fetch_add(1, Ordering::Relaxed)
    }
}

impl RemoteModel {
    /// Creates a model over `base`. Asked for twice, a server that does not recognise it has a model
    /// more, which ends with the session.
    pub async fn create(
        connection: &Arc<Connection>,
        numbers: &Arc<Numbers>,
        base: &str,
        lora: LoraConfig,
    ) -> Result<Self, TinkerError> {
        let body = json!({
            "session_id": connection.session(), "model_seq_id": Numbers::next(&numbers.models), "base_model": base,
            "user_metadata": null, "lora_config": lora, "type": "create_model",
        });
        let request = connection.submit("create_model", "create_model", &body, Effect::Nothing).await?;
        let answer = connection.answer("create_model", &request).await?;
        let id = connection.text(&answer, "model_id", "create_model")?;
        Ok(RemoteModel { connection: connection.clone(), id, sequence: AtomicU64::new(0), numbers: numbers.clone() })
    }

    fn next(&self) -> u64 {
        self.sequence.fetch_add(1, Ordering::Relaxed) + 1
    }

    /// Log-probability of each target token of each sequence.
    pub async fn forward(&self, data: Vec<Datum>) -> Result<Vec<Vec<f32>>, TinkerError> {
        let lengths: Vec<usize> = data.iter().map(|datum| datum.loss_fn_inputs["target_tokens"].len()).collect();
        let requests = self.submit_passes("forward", data, &Loss::named(CROSS_ENTROPY), true).await?;
        self.scores("forward", &requests, &lengths).await
    }

    /// Waits for passes over sequences of these lengths, and returns the log-probability of each of
    /// their target tokens.
    pub async fn scores(&self, operation: &str, requests: &[String], lengths: &[usize]) -> Result<Vec<Vec<f32>>, TinkerError> {
        let outputs = self.outputs(operation, requests).await?;
        let outputs: Vec<_> = outputs.into_iter().flat_map(|output| output.loss_fn_outputs).collect();
        let counts = (outputs.len(), lengths.len());
        let scored = outputs
            .into_iter()
            .zip(lengths)
            .map(|(output, length)| output.get("logprobs").map(Tensor::floats).filter(|scores| scores.len() == *length));
        scored.collect::<Option<Vec<_>>>().filter(|_| counts.0 == counts.1).ok_or_else(|| TinkerError::Lacks {
            server: self.connection.name().to_owned(),
            lacks: format!(
                "answered `{operation}` over {} sequences with {} outputs, or with another number of `logprobs` than target tokens",
                counts.1, counts.0
            ),
        })
    }

    /// Submits passes over the data, in as many requests as are needed.
    pub async fn submit_passes(
        &self,
        operation: &str,
        data: Vec<Datum>,
        loss: &Loss,
        forward_only: bool,
    ) -> Result<Vec<String>, TinkerError> {
        let mut requests = Vec::new();
        for data in chunks(data) {
            let pass = Pass {
                model_id: self.id.clone(),
                seq_id: self.next(),
                data,
                loss_fn: loss.name.clone(),
                loss_fn_config: loss.config.clone(),
                forward_only,
            };
            requests.push(self.connection.submit_pass(operation, &pass).await?);
        }
        Ok(requests)
    }

    /// Waits for passes.
    pub async fn outputs(&self, operation: &str, requests: &[String]) -> Result<Vec<PassOutput>, TinkerError> {
        let mut outputs = Vec::with_capacity(requests.len());
        for request in requests {
            outputs.push(self.connection.pass_output(operation, request).await?);
        }
        Ok(outputs)
    }

    /// Submits the same forward pass under the number of the last operation again.
    pub async fn repeat_forward(&self, data: Vec<Datum>) -> Result<String, TinkerError> {
        let (seq_id, loss_fn) = (self.sequence.load(Ordering::Relaxed), CROSS_ENTROPY.to_owned());
        let pass =
            Pass { model_id: self.id.clone(), seq_id, data, loss_fn, loss_fn_config: Default::default(), forward_only: true };
        self.connection.submit_pass("forward", &pass).await
    }

    /// Submits an update.
    pub async fn submit_update(&self, adam: AdamParams) -> Result<String, TinkerError> {
        let body = json!({"model_id": self.id, "seq_id": self.next(), "adam_params": adam, "type": "optim_step"});
        self.connection.submit("optim_step", "optim_step", &body, Effect::Changes).await
    }

    /// Waits for an update, and returns the norm of its gradient, if the server reports it.
    pub async fn updated(&self, request: &str) -> Result<Option<f64>, TinkerError> {
        let answer = self.connection.answer("optim_step", request).await?;
        let metrics = answer.get("metrics").and_then(Value::as_object);
        let named =
            |name: &&String| name.split(':').next().is_some_and(|name| name == "grad_norm" || name.ends_with("/grad_norm"));
        let found = metrics.and_then(|metrics| metrics.iter().find(|(name, _)| named(name)));
        Ok(found.and_then(|(_, value)| value.as_f64()))
    }

    async fn weights(&self, operation: &str, mut body: Value, effect: Effect) -> Result<Value, TinkerError> {
        body["model_id"] = self.id.clone().into();
        body["seq_id"] = self.next().into();
        body["type"] = operation.into();
        let request = self.connection.submit(operation, operation, &body, effect).await?;
        self.connection.answer(operation, &request).await
    }

    /// Saves adapters and optimizer, and returns their path.
    pub async fn save(&self, name: &str) -> Result<String, TinkerError> {
        // Saved again under the same name, it is refused.
        let answer = self.weights("save_weights", json!({"path": name}), Effect::Changes).await?;
        self.connection.text(&answer, "path", "save_weights")
    }

    /// Loads adapters and optimizer.
    pub async fn load(&self, path: &str) -> Result<(), TinkerError> {
        self.weights("load_weights", json!({"path": path, "optimizer": true}), Effect::Changes).await.map(drop)
    }

    /// Makes the present weights ready for sampling, and returns the name of their session.
    pub async fn sampler(&self) -> Result<String, TinkerError> {
        let body = json!({"sampling_session_seq_id": Numbers::next(&self.numbers.samplers)});
        let answer = self.weights("save_weights_for_sampler", body, Effect::Changes).await?;
        self.connection.text(&answer, "sampling_session_id", "save_weights_for_sampler")
    }

    /// Saves the present weights for sampling under a name, and returns their path.
    pub async fn save_for_sampler(&self, name: &str) -> Result<String, TinkerError> {
        let answer = self.weights("save_weights_for_sampler", json!({"path": name}), Effect::Changes).await?;
        self.connection.text(&answer, "path", "save_weights_for_sampler")
    }

    /// Unloads the model.
    pub async fn unload(&self) -> Result<(), TinkerError> {
        let body = json!({"model_id": self.id, "type": "unload_model"});
        let request = self.connection.submit("unload_model", "unload_model", &body, Effect::Nothing).await?;
        self.connection.answer("unload_model", &request).await.map(drop)
    }
}

fn chunks(data: Vec<Datum>) -> Vec<Vec<Datum>> {
    let mut chunks: Vec<Vec<Datum>> = Vec::new();
    let mut numbers = 0;
    for datum in data {
        let own = datum.loss_fn_inputs.values().map(Tensor::len).sum::<usize>() * 2;
        match chunks.last_mut().filter(|chunk| chunk.len() < CHUNK && numbers + own <= CHUNK_NUMBERS) {
            Some(chunk) => {
                chunk.push(datum);
                numbers += own;
            }
            None => {
                chunks.push(vec![datum]);
                numbers = own;
            }
        }
    }
    chunks
}
