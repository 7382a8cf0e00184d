//! Export of weights to folders for remote engines, with the scores that verify them.

use std::io;
use std::path::Path;
use std::sync::Arc;

use parking_lot::Mutex;
use tch::{Kind, Tensor};

use super::held::HeldTensors;
use super::links::Links;
use crate::algo::Disagreement;
use crate::data::{DataError, Version};
use crate::engine::remote::sync::{Carried, Releases, Update};
use crate::model::{
    Compute, Delta, Dtype, FrozenWeights, ModelConfig, ModelError, Packed, Weights, log_probs_and_entropy, save_adapter,
    save_hf_after,
};
use crate::train::Policy;
use crate::util::atomic_file;
use crate::weights::{Publisher, WeightsError};

/// Error of an export.
#[derive(Debug, thiserror::Error)]
pub enum ExportError {
    #[error("writing weights for engines: {0}; they need a folder that engines can read, with room for engine.keep versions")]
    Io(#[from] io::Error),
    #[error("writing weights for engines: {0}")]
    Model(#[from] ModelError),
    #[error("writing weights for engines: {0}")]
    Tokenizer(#[from] DataError),
    #[error("writing weights for engines: {0}")]
    Store(#[from] WeightsError),
}

/// Exporter of a policy's versions: whole models, or only adapters if the weights have adapters.
pub struct Exporter {
    policy: Policy,
    dtype: Dtype,
    untie: bool,
    texts: Vec<Vec<u32>>,
    tolerance: f64,
    releases: Mutex<Releases>,
    /// Weights that were written last. Unchanged tensors are not written again.
    last: Mutex<Option<Arc<Path>>>,
    store: Option<Publishing>,
    /// Servers take whole models out of this process's memory.
    links: Option<Arc<Links>>,
    /// Sum of the tensors that were sent last.
    last_sum: Mutex<Option<i64>>,
}

/// Way of versions to other hosts.
struct Publishing {
    publisher: Mutex<Publisher>,
    /// Addresses of engines that read the trainer's folders.
    here: Arc<[String]>,
}

/// Random tokens after the prompt in a probe text: likely tokens would distinguish versions poorly.
const DRAWN: usize = 12;

/// Longest beginning of a prompt in a probe text, in tokens.
const PROMPT: usize = 64;

/// Returns texts for engines to score: beginnings of prompts, each with tokens of a fixed random
/// draw.
pub fn probe_texts(prompts: &[Vec<u32>], vocabulary: usize) -> Vec<Vec<u32>> {
    let mut state = 0x9E37_79B9_7F4A_7C15u64;
    let mut draw = move || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        ((state >> 33) % vocabulary.max(1) as u64) as u32
    };
    prompts.iter().map(|prompt| prompt.iter().copied().take(PROMPT).chain((0..DRAWN).map(|_| draw())).collect()).collect()
}

impl Exporter {
    /// Returns an exporter of a policy, whose present weights the servers start with, in the format
    /// of the policy's folder. Versions are
    /// written to folders in `dir`, of which the newest `keep`, at least one, and those that are
    /// read are kept. Engines score `texts`, with a tolerance of `tolerance` nats on average.
    pub fn new(policy: &Policy, dir: &Path, keep: usize, texts: Vec<Vec<u32>>, tolerance: f64) -> io::Result<Self> {
        let (policy, releases) = (policy.clone(), Mutex::new(Releases::open(dir, keep)?));
        let dtype = policy.config().dtype;
        let (last, last_sum) = (Mutex::new(None), Mutex::new(None));
        Ok(Exporter { policy, dtype, untie: false, texts, tolerance, releases, last, store: None, links: None, last_sum })
    }

    /// Writes whole models in this format. Adapters are written in f32.
    pub fn dtype(self, dtype: Dtype) -> Self {
        Exporter { dtype, ..self }
    }

    /// Writes a separate head for a model whose head is its embedding: for servers that can't
    /// reload tied heads.
    pub fn untie(self, untie: bool) -> Self {
        Exporter { untie, ..self }
    }

    /// Also publishes each version to a store, from which other hosts bring it to their disks. Engines
    /// at the addresses `here` read the trainer's.
    pub fn through(self, publisher: Publisher, here: Vec<String>) -> Self {
        Exporter { store: Some(Publishing { publisher: Mutex::new(publisher), here: here.into() }), ..self }
    }

    /// Leaves whole models in this process's memory, out of which servers take them
    /// ([`Carry`](crate::engine::remote::sync::Carry)).
    pub fn from_memory(self) -> Self {
        let device = self.policy.compute().device;
        Exporter { links: Some(Arc::new(Links::new(device))), ..self }
    }

    /// Publishes a folder of a version to the store, if there is one.
    fn carry(&self, version: Version, folder: &Arc<Path>) -> Result<Option<Carried>, WeightsError> {
        let Some(store) = &self.store else { return Ok(None) };
        let mut publisher = store.publisher.lock();
        let published = publisher.publish(version, folder)?;
        let (kind, name) = (if published.delta { "a delta" } else { "whole" }, publisher.store().name().to_owned());
        tracing::debug!("version {version}: {} of {} bytes to {name}, {kind}", published.stored, published.raw);
        Ok(Some(Carried { store: publisher.store().clone(), id: published.id, here: store.here.clone() }))
    }

    fn config(&self) -> ModelConfig {
        if self.untie { self.policy.config().untied() } else { self.policy.config().clone() }
    }

    /// Writes the policy's present weights, without adapters, and its tokenizer into `folder`,
    /// which is replaced atomically. Servers start from it.
    pub fn launch_folder(&self, folder: &Path) -> Result<(), ExportError> {
        let writing = folder.with_extension("writing");
        atomic_file::remove(&writing)?;
        self.save(&writing, &self.policy.weights().without_adapter(), None)?;
        Ok(atomic_file::publish(&writing, folder)?)
    }

    fn save(&self, folder: &Path, weights: &Weights, before: Option<&Path>) -> Result<Delta, ExportError> {
        let (config, dtype) = (self.config(), self.dtype);
        let delta = match self.untie {
            true => save_hf_after(folder, &config, &weights.untied(self.policy.config(), weights), dtype, before)?,
            false => save_hf_after(folder, &config, weights, dtype, before)?,
        };
        self.policy.tokenizer().save(folder)?;
        Ok(delta)
    }

    /// Writes a version, or keeps it in memory, and computes the scores that engines must return. Costs a copy
    /// on disk of the changed tensors, or in memory if their format differs, and a forward pass over the probe
    /// texts.
    pub fn export(&self, version: Version, weights: &FrozenWeights) -> Result<Update, ExportError> {
        let weights = weights.read();
        let mut releases = self.releases.lock();
        if let Some(adapter) = &weights.adapter {
            let folder = releases.write(version, |folder| save_adapter(folder, adapter).map_err(ExportError::from))?;
            let carried = self.carry(version, &folder)?;
            return Ok(Update { carried, changed: true, adapter: true, ..self.probed(version, folder, &weights) });
        }
        if let Some(links) = &self.links {
            return Ok(self.held(version, &weights, links));
        }
        let mut last = self.last.lock();
        let (before, mut delta) = (last.take(), Delta::default());
        let folder = releases.write(version, |folder| {
            delta = self.save(folder, &weights, before.as_deref())?;
            Ok::<_, ExportError>(())
        })?;
        let Delta { changed, moved, shared } = delta;
        tracing::debug!(
            "version {version}: {changed} tensors changed, {shared} are shared with the version before, {moved} written again"
        );
        let changed = before.is_some() && changed > 0;
        *last = Some(folder.clone());
        let carried = self.carry(version, &folder)?;
        Ok(Update { carried, changed, ..self.probed(version, folder, &weights) })
    }

    /// The update to these weights in memory.
    fn held(&self, version: Version, weights: &Weights, links: &Arc<Links>) -> Update {
        let _guard = tch::no_grad_guard();
        let config = self.policy.config();
        let head = (self.untie && config.shares_embedding()).then(|| weights.layout.embedding_as_head());
        let tensors = HeldTensors::new(weights, self.dtype, head.as_slice(), links);
        let sum = tensors.sum();
        let changed = self.last_sum.lock().replace(sum).is_some_and(|before| before != sum);
        Update { tensors: Some(Arc::new(tensors)), changed, ..self.probed(version, Path::new("").into(), weights) }
    }

    /// The update to these weights, with a probe: texts and the scores that an engine must return.
    fn probed(&self, version: Version, folder: Arc<Path>, weights: &Weights) -> Update {
        let config = self.policy.config();
        // Under adapters, servers keep the folder's weights.
        let dtype = if weights.adapter.is_some() { config.dtype } else { self.dtype };
        let _guard = tch::no_grad_guard();
        let expected = score(config, &rounded(weights, dtype), &self.texts);
        let untied = config.untied();
        let old_head = (config.shares_embedding() && !self.untie && weights.adapter.is_none())
            .then(|| score(&untied, &rounded(&weights.untied(config, &self.policy.weights()), dtype), &self.texts));
        // Equal scores under the old and the new head can't show which one an engine uses.
        let apart = |old: &Vec<Vec<f64>>| -> Result<(), Disagreement> {
            crate::algo::compare_log_probs(&old.concat(), &expected.concat(), self.tolerance)
        };
        let old_head = old_head.filter(|old| apart(old).is_err());
        let (texts, tolerance) = (self.texts.clone(), self.tolerance);
        Update { texts, expected, old_head, tolerance, ..Update::unprobed(version, folder) }
    }
}

/// Rounds weights to the folder's number format; the result is f32.
fn rounded(weights: &Weights, dtype: Dtype) -> Weights {
    weights.on(Compute::cpu(dtype)).on(Compute::cpu(Dtype::F32))
}

/// Returns the log-probabilities of every token but the first, computed in f32.
fn score(config: &ModelConfig, weights: &Weights, texts: &[Vec<u32>]) -> Vec<Vec<f64>> {
    let decoder = crate::model::Decoder::new(config, Arc::clone(&weights.layout));
    let views = decoder.views_of(&weights.on(Compute::cpu(Dtype::F32)));
    let of = |text: &Vec<u32>| {
        if text.len() < 2 {
            return Vec::new();
        }
        let hidden = decoder.hidden(&views, &Packed::new([text.as_slice()]));
        let rows = hidden.narrow(0, 0, text.len() as i64 - 1);
        let targets: Vec<i64> = text[1..].iter().map(|&id| i64::from(id)).collect();
        let (log_probs, _) = log_probs_and_entropy(&decoder.logits(&views, &rows), &Tensor::from_slice(&targets), 1.0);
        let mut found = vec![0f64; targets.len()];
        log_probs.to_kind(Kind::Double).copy_data(&mut found, targets.len());
        found
    };
    texts.iter().map(of).collect()
}
