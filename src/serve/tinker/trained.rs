//! A model under training: operations on a local backend.

use std::ffi::OsString;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rollflow_tinker::message::{AdamParams, LoraConfig};
use rollflow_tinker::proto;
use serde_json::json;

use super::journal::ModelRecord;
use super::losses::{TinkerLoss, batch, nth_targets};
use super::operation::{Answer, Operation};
use super::updates::Updates;
use crate::algo::{CrossEntropy, Schedule};
use crate::model::{Dtype, FrozenWeights, Lora, ModelConfig, ModelError, save_adapter, save_hf_as};
use crate::train::checkpoint::{self, CHECKPOINTS};
use crate::train::{AdamW, Algorithm, LocalBackend, LocalConfig, Policy, SaveCheckpoint, TrainError, TrainingBackend};
use crate::util::atomic_file;

/// What all models of a server have in common.
#[derive(Clone)]
pub(super) struct Ground {
    /// The loaded model, in its folder's format. Models without adapters train a copy of it.
    pub policy: Policy,
    /// The served model, on its device. All adapters share its numbers.
    pub served: Policy,
    pub threads: usize,
    pub context: usize,
    /// Folder of all models.
    pub models: PathBuf,
    /// Folder of all sampling sessions.
    pub samplers: PathBuf,
}

/// Sessions without a name that a model with adapters, and one without, has on disk; older ones are removed.
const KEPT_SESSIONS: [usize; 2] = [64, 8];

/// First part of the name of a session that its client gave no name. The session's number follows.
pub(super) const UNNAMED: &str = "session-";

/// Number of a session that its client gave no name.
pub(super) fn unnamed(name: &str) -> Option<u64> {
    name.strip_prefix(UNNAMED)?.parse().ok()
}

impl Ground {
    /// Removes the sessions without a name of a model, but for the `newest`.
    pub fn prune_sessions(&self, id: &str, newest: usize) -> io::Result<()> {
        let of = format!("{id}.");
        let number = |name: &OsString| unnamed(name.to_str()?.strip_prefix(&of)?);
        let names = std::fs::read_dir(&self.samplers)?.filter_map(|entry| Some(entry.ok()?.file_name()));
        let mut own: Vec<(u64, OsString)> = names.filter_map(|name| Some((number(&name)?, name))).collect();
        own.sort();
        own.truncate(own.len().saturating_sub(newest));
        own.into_iter().try_for_each(|(_, name)| atomic_file::remove(&self.samplers.join(name)))
    }
}

fn taken(name: &str) -> Answer {
    Answer::refused(format!("the name {name:?} is taken, and saved weights are never replaced; choose another"))
}

/// Gives weights to the engine that samples: name of the session, weights, and their folder.
pub(super) type Install = Arc<dyn Fn(&str, Arc<FrozenWeights>, &Path) + Send + Sync>;

pub(super) struct Trained {
    ground: Ground,
    id: String,
    policy: Policy,
    backend: LocalBackend,
    install: Install,
    updates: Updates,
    /// Path of the weights that it began with.
    begins: Option<String>,
    /// True between a pass and the next update.
    pub has_gradient: bool,
    /// Updates made.
    pub step: u64,
}

/// The projections of the adapters of a model, whose feed-forward layers may be experts.
fn targets(lora: LoraConfig, model: &ModelConfig) -> Vec<&'static str> {
    let (attention, mlp) = Lora::PROJECTIONS.split_at(4);
    let is_dense = model.experts.as_ref().is_none_or(|of| !of.dense_layers.is_empty() || of.shared.is_some());
    let (mlp, experts) = (if is_dense { mlp } else { &[] }, model.experts.as_ref().map(|_| Lora::EXPERTS));
    let chosen = [(lora.train_attn, attention), (lora.train_mlp, mlp), (lora.train_mlp, experts.as_slice())];
    chosen.into_iter().filter(|(on, _)| *on).flat_map(|(_, names)| names.iter().copied()).collect()
}

/// Refuses adapters that a model can't have, and ranks above the width of its widest matrix. Beyond it,
/// adapters have more numbers than the weights.
///
/// # Errors
/// What is possible instead.
pub(super) fn check_adapters(lora: LoraConfig, model: &ModelConfig) -> Result<(), String> {
    if lora.rank == 0 {
        return Ok(());
    }
    let most = Lora::MOST_RANK.min(model.hidden_size.max(model.intermediate_size));
    if lora.rank > most {
        return Err(format!("`rank` is {}; give 1 to {most}, or 0 to train all weights", lora.rank));
    }
    let targets = targets(lora, model);
    if targets.is_empty() {
        return Err("there is nothing to train; set `train_attn` or `train_mlp`".to_owned());
    }
    let lora = Lora::new(lora.rank, LoraConfig::ALPHA, &targets).and_then(|lora| lora.on_model(model));
    lora.map(drop).map_err(|error| error.to_string())
}

impl Trained {
    /// The model of `record`, from its snapshot if it has one.
    ///
    /// # Errors
    /// Adapters that the model can't have, a snapshot that can't be read, no thread.
    pub fn begin(ground: Ground, record: &ModelRecord, install: Install) -> Result<Self, String> {
        let policy = trained_policy(&ground, record.lora).map_err(|error| error.to_string())?;
        let backend = backend(&ground, &policy)?;
        let (id, step) = (record.id.clone(), record.base.step);
        let updates = Updates::after(step, &ground.models.join(&id));
        let mut model = Trained { ground, id, policy, backend, install, updates, begins: None, has_gradient: false, step };
        match (&record.base.folder, &record.begins) {
            (Some(snapshot), _) => {
                let folder = model.folder().join(snapshot);
                model.backend.load_checkpoint(&folder).wait().map_err(|error| error.to_string())?;
            }
            (None, Some((path, optimizer))) => {
                if let Err(Answer::Failed { why, .. }) = model.load(path, *optimizer) {
                    return Err(why);
                }
                model.begins = Some(path.clone());
            }
            (None, None) => {}
        }
        Ok(model)
    }

    /// The answer to the creation of the model.
    pub fn created(&self) -> Answer {
        Answer::Json(match &self.begins {
            Some(path) => json!({"path": path, "model_id": self.id, "type": "load_weights"}),
            None => json!({"model_id": self.id, "type": "create_model"}),
        })
    }

    pub fn folder(&self) -> PathBuf {
        self.ground.models.join(&self.id)
    }

    /// Runs an operation. Repeated after a restart, it has the same effect and the same answer.
    pub fn run(&mut self, operation: &Operation, repeated: bool) -> Answer {
        let done = match operation {
            Operation::Pass(pass) => self.pass(pass),
            Operation::Update(adam) => self.update(*adam),
            Operation::Save(name) => self.save(name, repeated),
            Operation::Load { path, optimizer } => self.load(path, *optimizer),
            Operation::Sampler { session, name } => self.sampler(session, name.as_deref(), repeated),
            Operation::Refused(why) => Err(Answer::refused(why)),
            Operation::Failed { why, has_gradient } => {
                if !has_gradient {
                    self.drop_gradient();
                }
                Err(Answer::failed(why))
            }
        };
        done.unwrap_or_else(|failed| failed)
    }

    /// Drops the gradient since the last update.
    pub fn drop_gradient(&mut self) {
        self.has_gradient = false;
        self.updates.forget();
        // After a failed update the backend makes no further one.
        self.backend.drop_gradient().wait().ok();
    }

    fn pass(&mut self, pass: &[u8]) -> Result<Answer, Answer> {
        let pass = proto::decode_pass(pass).map_err(Answer::refused)?;
        let vocabulary = self.policy.config().vocab_size;
        let mut batch = batch(&pass.data, &pass.loss_fn, vocabulary, self.ground.context).map_err(Answer::refused)?;
        let loss = TinkerLoss::new(&pass.loss_fn, &pass.loss_fn_config, batch.batch_tokens).map_err(Answer::refused)?;
        let several = batch.sequences[0].teacher.as_ref().map_or(1, |targets| targets.k);
        let loss = Arc::new(loss.targets(several).map_err(Answer::refused)?);
        if pass.forward_only {
            // A pass for each target of a token.
            for nth in 0..several {
                let scores = self.backend.score(Arc::new(nth_targets(&batch, nth))).wait().map_err(Answer::failed)?;
                loss.keep(&batch, &scores, nth);
            }
        } else {
            batch.algorithm = Some(Arc::new(Algorithm { loss: loss.clone(), off_policy: Default::default(), key: None }));
            let done = self.backend.try_forward_backward(Arc::new(batch.clone())).wait();
            // A failed pass drops the gradient.
            self.has_gradient = done.is_ok();
            let done = done.inspect_err(|_| self.updates.forget()).map_err(not_finite)?;
            self.updates.pass(loss.counted(&batch, done));
        }
        Ok(Answer::Pass(loss.output(&batch)))
    }

    fn update(&mut self, adam: AdamParams) -> Result<Answer, Answer> {
        if !std::mem::take(&mut self.has_gradient) {
            return Err(Answer::refused("optim_step came before any forward_backward: there is no gradient"));
        }
        let AdamParams { learning_rate, beta1, beta2, eps, weight_decay, grad_clip_norm } = adam;
        let adamw = AdamW { beta1, beta2, epsilon: eps, weight_decay, ..AdamW::default() };
        let clip = (grad_clip_norm > 0.0).then_some(grad_clip_norm);
        self.backend.optimize_by(adamw, clip).wait().map_err(Answer::failed)?;
        let done = self.backend.try_update(1.0, Some(Schedule::constant(learning_rate))).wait();
        let done = done.inspect_err(|_| self.updates.forget()).map_err(not_finite)?;
        self.step += 1;
        self.updates.update(self.step, &done, &self.folder());
        Ok(Answer::Json(json!({"metrics": {"grad_norm": done.grad_norm, "learning_rate": done.lr}})))
    }

    /// Folder of the weights of this name.
    fn saved(&self, id: &str, name: &str) -> PathBuf {
        self.ground.models.join(id).join("weights").join(name)
    }

    fn save(&self, name: &str, repeated: bool) -> Result<Answer, Answer> {
        let folder = self.saved(&self.id, name);
        match checkpoint::latest(&folder.join(CHECKPOINTS)).map_err(Answer::failed)? {
            Some(_) if repeated => {}
            // Loaded by its name, it must be what it was.
            Some(_) => return Err(taken(name)),
            None => drop(self.write(&folder)?),
        }
        Ok(Answer::Json(json!({"path": format!("tinker://{}/weights/{name}", self.id), "type": "save_weights"})))
    }

    /// Writes a checkpoint of the present state.
    fn write(&self, folder: &Path) -> Result<PathBuf, Answer> {
        let request = SaveCheckpoint { run_folder: folder.to_owned(), step: self.step, ..SaveCheckpoint::default() };
        self.backend.save_checkpoint(request).wait().map_err(Answer::failed)
    }

    /// Writes a snapshot, and returns its path within the model's folder.
    pub fn snapshot(&self, number: u64) -> Result<PathBuf, String> {
        let name = PathBuf::from(format!("snapshot-{number:09}"));
        let written = self.write(&self.folder().join(&name));
        let written = written.map_err(|answer| format!("{answer:?}"))?;
        Ok(name.join(CHECKPOINTS).join(written.file_name().unwrap_or_default()))
    }

    fn load(&mut self, path: &str, optimizer: bool) -> Result<Answer, Answer> {
        let parts: Vec<&str> = path.strip_prefix("tinker://").unwrap_or_default().split('/').collect();
        let [id, "weights", name] = parts[..] else {
            return Err(Answer::refused(format!("{path:?} is no path of weights; expected tinker://MODEL/weights/NAME")));
        };
        if !(is_name(id) && is_name(name)) {
            return Err(Answer::refused(format!("{path:?} is no path of this server")));
        }
        let found = checkpoint::latest(&self.saved(id, name).join(CHECKPOINTS)).map_err(Answer::failed)?;
        let folder = found.ok_or_else(|| Answer::refused(format!("there are no weights at {path}")))?;
        // A new backend: an earlier failure does not matter any more.
        let backend = match optimizer {
            true => {
                let backend = backend(&self.ground, &self.policy).map_err(Answer::failed)?;
                backend.load_checkpoint(&folder).wait().map_err(Answer::refused)?;
                backend
            }
            false => {
                let policy = self.policy.with_weights_of(&folder).map_err(Answer::refused)?;
                backend(&self.ground, &policy).map_err(Answer::failed)?
            }
        };
        (self.backend, self.has_gradient) = (backend, false);
        self.updates.forget();
        Ok(Answer::Json(json!({"path": path, "model_id": self.id, "type": "load_weights"})))
    }

    /// Writes weights for sampling: a PEFT folder, or a model's whole folder in f32.
    fn export(&self, folder: &Path, weights: &FrozenWeights) -> Result<(), ModelError> {
        let weights = weights.read();
        if let Some(adapter) = &weights.adapter {
            return save_adapter(folder, adapter);
        }
        save_hf_as(folder, self.policy.config(), &weights, Dtype::F32, None)?;
        Ok(self.policy.tokenizer().save(folder)?)
    }

    fn sampler(&self, session: &str, name: Option<&str>, repeated: bool) -> Result<Answer, Answer> {
        let folder = self.ground.samplers.join(session);
        if folder.exists() && !repeated {
            return Err(taken(name.unwrap_or(session)));
        }
        let weights = self.backend.snapshot().wait().map_err(Answer::failed)?.weights;
        if !folder.exists() {
            let writing = self.ground.samplers.join(format!(".{session}.writing"));
            self.export(&writing, &weights).map_err(Answer::failed)?;
            atomic_file::publish(&writing, &folder).map_err(Answer::failed)?;
            // A folder that was there is read when it is asked for: later weights are not in it.
            (self.install)(session, weights, &folder);
        }
        if name.is_none() {
            let kept = KEPT_SESSIONS[usize::from(self.policy.weights().adapter.is_none())];
            self.ground.prune_sessions(&self.id, kept).map_err(Answer::failed)?;
        }
        Ok(Answer::Json(match name {
            Some(name) => {
                json!({"path": format!("tinker://{}/sampler_weights/{name}", self.id), "type": "save_weights_for_sampler"})
            }
            None => json!({"sampling_session_id": session, "type": "save_weights_for_sampler"}),
        }))
    }
}

/// The base model with the adapters of `lora`, or itself at rank 0.
fn trained_policy(ground: &Ground, lora: LoraConfig) -> Result<Policy, ModelError> {
    let Ground { policy, served, .. } = ground;
    match lora.rank {
        0 => Ok(policy.clone()),
        rank => served.adapted(Lora::new(rank, LoraConfig::ALPHA, &targets(lora, served.config()))?, lora.seed.unwrap_or(0)),
    }
}

/// Numbers that are not finite are the request's fault.
fn not_finite(error: TrainError) -> Answer {
    match error {
        TrainError::NonFinite(..) => Answer::refused(error),
        _ => Answer::failed(error),
    }
}

/// A name that is a single part of a path.
pub(super) fn is_name(name: &str) -> bool {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.:".contains(&byte);
    !name.is_empty() && name.len() <= 200 && !name.starts_with('.') && name.bytes().all(plain)
}

fn backend(ground: &Ground, policy: &Policy) -> Result<LocalBackend, String> {
    let config = LocalConfig {
        merge: false,
        save_dtype: Some(Dtype::F32),
        max_grad_norm: None,
        threads: Some(ground.threads),
        compute: policy.compute(),
        ..LocalConfig::new(CrossEntropy, Schedule::constant(0.0))
    };
    policy.backend(config).map_err(|error| error.to_string())
}

#[cfg(test)]
pub(super) mod tests {
    use rollflow_tinker::message::{Datum, Pass, Tensor};

    use super::*;
    use crate::serve::tests::policy;
    use crate::serve::tinker::journal::tests::new_record;

    /// A small model's, with its files in `state`.
    pub(in super::super) fn ground(state: &Path) -> Ground {
        let (policy, [models, samplers]) = (policy(), ["models", "samplers"].map(|name| state.join(name)));
        Ground { policy: policy.clone(), served: policy, threads: 1, context: 16, models, samplers }
    }

    pub(in super::super) fn pass() -> Operation {
        let data = vec![Datum::new(vec![1, 2], vec![("target_tokens", Tensor::Ints(vec![2, 3]))])];
        let (model_id, loss_fn, loss_fn_config) = ("m".to_owned(), "cross_entropy".to_owned(), Default::default());
        Operation::Pass(proto::encode_pass(&Pass { model_id, seq_id: 1, data, loss_fn, loss_fn_config, forward_only: false }))
    }

    #[test]
    fn a_gradient_that_a_failure_dropped_is_dropped_again_after_a_restart() {
        let state = tempfile::tempdir().unwrap();
        let norm_of = |operations: &[Operation]| {
            let mut model = Trained::begin(ground(state.path()), &new_record(), Arc::new(|_, _, _| ())).unwrap();
            operations.iter().for_each(|operation| drop(model.run(operation, true)));
            match model.run(&Operation::Update(AdamParams::default()), true) {
                Answer::Json(page) => page["metrics"]["grad_norm"].as_f64().unwrap(),
                other => panic!("{other:?}"),
            }
        };
        let failed = |has_gradient| Operation::Failed { why: "no memory".to_owned(), has_gradient };
        let one = norm_of(&[pass()]);
        for (between, passes) in [(failed(false), 1.0), (failed(true), 2.0), (Operation::Refused("no".to_owned()), 2.0)] {
            let norm = norm_of(&[pass(), between.clone(), pass()]);
            assert!((norm / one - passes).abs() < 1e-6, "{between:?}: {norm}, of one pass {one}");
        }
    }

    #[test]
    fn a_row_of_metrics_leaves_out_tokens_of_prompts_and_those_without_a_weight() {
        let floats = |values: [f32; 3]| Tensor::Floats(values.to_vec());
        let sampled = vec![("logprobs", floats([0.0, -2.0, -2.0])), ("advantages", floats([0.0, 1.0, 0.0]))];
        let given = vec![("weights", floats([0.0, 1.0, 1.0]))];
        for (loss, mut columns) in [("importance_sampling", sampled), ("cross_entropy", given)] {
            let state = tempfile::tempdir().unwrap();
            let ground = ground(state.path());
            let folder = ground.models.join("m");
            std::fs::create_dir_all(&folder).unwrap();
            let mut model = Trained::begin(ground, &new_record(), Arc::new(|_, _, _| ())).unwrap();
            columns.push(("target_tokens", Tensor::Ints(vec![2, 3, 4])));
            let (model_id, loss_fn, loss_fn_config) = ("m".to_owned(), loss.to_owned(), Default::default());
            let data = vec![Datum::new(vec![1, 2, 3], columns)];
            let pass = Pass { model_id, seq_id: 1, data, loss_fn, loss_fn_config, forward_only: false };
            let output = match model.run(&Operation::Pass(proto::encode_pass(&pass)), false) {
                Answer::Pass(output) => output,
                other => panic!("{other:?}"),
            };
            let column = |name: &str| output.loss_fn_outputs[0][name].floats();
            let (theta, losses) = (column("logprobs"), column("elementwise_loss"));
            assert_eq!(theta.len(), 3, "a client gets every token");
            model.run(&Operation::Update(AdamParams::default()), false);
            let row = std::fs::read_to_string(folder.join("metrics.jsonl")).unwrap();
            let row: serde_json::Value = serde_json::from_str(&row).unwrap();
            let is = |key: &str, value: f32| {
                let found = row[key].as_f64().unwrap();
                assert!((found - f64::from(value)).abs() < 1e-4, "{key}: {found}, not {value}");
            };
            is("trained_tokens", 2.0);
            is("loss", (losses[1] + losses[2]) / 2.0);
            if loss == "importance_sampling" {
                is("log_prob_gap_mean_nats", ((theta[1] + 2.0).abs() + (theta[2] + 2.0).abs()) / 2.0);
            }
        }
    }

    #[test]
    fn feed_forward_layers_are_adapted_whether_or_not_they_are_experts() {
        for (folder, expected) in [("qwen3_moe", true), ("qwen3_tied", false)] {
            let model = ModelConfig::from_dir(&Path::new("tests/golden/models").join(folder)).unwrap();
            let lora = LoraConfig { rank: 2, seed: None, train_unembed: false, train_mlp: true, train_attn: false };
            let lora = Lora::new(2, 4.0, &targets(lora, &model)).unwrap().on_model(&model).unwrap();
            assert_eq!(lora.adapts_experts(), expected, "{folder}");
            assert!(lora.layout(&model).total() > 0);
        }
    }
}
