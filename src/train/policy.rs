//! Policies: a language model with its tokenizer and initial weights.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::{LocalBackend, LocalConfig};
use crate::data::source::prepare_pair;
use crate::data::{DataError, Pair, Sample, Tokenizer};
use crate::engine::LocalEngine;
use crate::hub::Hub;
use crate::model::{
    Compute, Decoder, FrozenWeights, Head, Lora, ModelConfig, ModelError, Weights, base_of, load_adapter, load_hf_for, load_like,
};

/// A model that cannot be loaded as a policy or score model.
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    /// Error of the model's folder.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// Error of the tokenizer, or a tokenizer that does not fit the model.
    #[error(transparent)]
    Tokenizer(#[from] DataError),
    /// A reward model or critic.
    #[error(
        "this model gives one number and no words (it is a sequence classifier), so that it can't be a policy; name the folder of a \
         language model"
    )]
    NotALanguageModel,
    /// A language model without a score head.
    #[error(
        "this model gives words and no score (it is no sequence classifier); train a reward model from it first (pipeline = \"reward_model\")"
    )]
    NotAScoreModel,
}

/// Language model that trainer and generator start from. Clones share the weights, which are
/// read-only: the trainer copies them.
#[derive(Clone)]
pub struct Policy {
    config: ModelConfig,
    tokenizer: Arc<Tokenizer>,
    weights: Arc<FrozenWeights>,
    compute: Compute,
    /// The model's folder, if it was loaded from one.
    folder: Option<PathBuf>,
}

impl Policy {
    /// Loads a Hugging Face folder (`config.json`, safetensors, `tokenizer.json`), or a model in
    /// the hub's local cache by its id. A folder of adapters loads its base model with them, and
    /// the base's tokenizer if it has none.
    pub fn load(dir: impl AsRef<Path>) -> Result<Self, LoadError> {
        Self::load_for(dir, Compute::default())
    }

    /// Loads a model that generates on this device and in this format. A folder in that format
    /// takes no more memory than on disk. A trainer creates an f32 copy.
    pub fn load_for(dir: impl AsRef<Path>, compute: Compute) -> Result<Self, LoadError> {
        let dir = Hub::of_user().open(dir.as_ref()).map_err(ModelError::from)?;
        let tokenizer = Tokenizer::from_dir(&tokenizer_folder(dir.clone()))?;
        Self::load_with(dir, tokenizer, compute)
    }

    /// Loads a folder's model with another tokenizer, such as one with a custom chat template.
    pub fn load_with(dir: impl AsRef<Path>, tokenizer: Tokenizer, compute: Compute) -> Result<Self, LoadError> {
        let dir = dir.as_ref();
        let (config, weights) = load_hf_for(dir, compute.dtype)?;
        let base = weights.adapter.as_ref().and_then(|adapter| adapter.lora.base.clone());
        let policy = Self::new(config, FrozenWeights::of_own(weights), tokenizer)?;
        Ok(policy.found_in(base.as_deref().unwrap_or(dir)).computing(compute))
    }

    /// Creates a model with random weights.
    pub fn random(config: ModelConfig, tokenizer: Tokenizer, seed: u64) -> Result<Self, LoadError> {
        let weights = FrozenWeights::of_own(Weights::random(&config, seed));
        Self::new(config, weights, tokenizer)
    }

    /// Creates a policy from its parts.
    pub fn new(config: ModelConfig, weights: FrozenWeights, tokenizer: Tokenizer) -> Result<Self, LoadError> {
        tokenizer.check_model(config.vocab_size)?;
        if config.head != Head::LanguageModel {
            return Err(LoadError::NotALanguageModel);
        }
        let weights = Arc::new(weights);
        Ok(Policy { config, tokenizer: Arc::new(tokenizer), weights, compute: Compute::default(), folder: None })
    }

    /// Sets device and format of generation; default: f32 on the CPU. Training uses
    /// [`LocalConfig::compute`].
    pub fn computing(self, compute: Compute) -> Self {
        Policy { compute, ..self }
    }

    /// Device and format of generation.
    pub fn compute(&self) -> Compute {
        self.compute
    }

    /// Replaces the weights.
    pub fn with_weights(&self, weights: Arc<FrozenWeights>) -> Self {
        Policy { weights, ..self.clone() }
    }

    /// Sets the folder that holds these weights. Adapters trained over them name it.
    pub fn found_in(&self, dir: impl Into<PathBuf>) -> Self {
        Policy { folder: Some(dir.into()), ..self.clone() }
    }

    /// Adds adapters, which are then the only trained parameters; the base is shared. Existing
    /// adapters are kept if their settings are equal, and rejected otherwise. New ones are drawn by
    /// `seed` and change no output.
    pub fn adapted(&self, lora: Lora, seed: u64) -> Result<Self, LoadError> {
        let weights = adapted(&self.config, self.weights(), self.folder.as_deref(), lora, seed)?;
        Ok(self.with_weights(Arc::new(FrozenWeights::of_own(weights))))
    }

    /// Merges adapters into the weights, so that all weights are trained.
    pub fn merged(&self) -> Self {
        match self.weights().adapter {
            Some(_) => self.with_weights(Arc::new(FrozenWeights::of_own(self.weights().merged()))),
            None => self.clone(),
        }
    }

    /// Folder that it was loaded from; with adapters, the base model's.
    pub fn folder(&self) -> Option<&Path> {
        self.folder.as_deref()
    }

    /// Loads the weights of one of its checkpoints: adapters over the same base, or all weights.
    /// The error names every tensor of another shape.
    pub fn with_weights_of(&self, dir: &Path) -> Result<Self, LoadError> {
        let weights = match &self.weights().adapter {
            Some(ours) => {
                let saved = load_adapter(dir, &self.config)?;
                saved.lora.check_is(&ours.lora, dir)?;
                self.weights().under(saved)
            }
            None => load_like(dir, &self.config)?,
        };
        Ok(self.with_weights(Arc::new(FrozenWeights::of_own(weights))))
    }

    /// Model configuration.
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// Tokenizer.
    pub fn tokenizer(&self) -> &Arc<Tokenizer> {
        &self.tokenizer
    }

    /// Initial weights, shared.
    pub fn frozen(&self) -> Arc<FrozenWeights> {
        self.weights.clone()
    }

    /// Initial weights, for reading.
    pub fn weights(&self) -> Weights {
        self.weights.read()
    }

    /// Starts a trainer in this process on a copy of the weights. Its checkpoints include the
    /// tokenizer's files and load as policies.
    pub fn backend(&self, mut config: LocalConfig) -> std::io::Result<LocalBackend> {
        let files = self.tokenizer.files().iter().map(|(name, content)| (name.to_string(), content.clone()));
        config.companions.extend(files);
        LocalBackend::new(config, self.config.clone(), self.weights())
    }

    /// Starts a critic in this process: a copy of this model with a zero score head. `config` holds
    /// its loss, [`ValueLoss`](crate::algo::ValueLoss).
    pub fn critic(&self, config: LocalConfig) -> std::io::Result<LocalBackend> {
        LocalBackend::new(config, self.config.scoring(), self.weights().scoring(&self.config, None))
    }

    /// Converts pairs to supervised samples: prompt, completion and end-of-text token. If the
    /// prompt is a conversation, the completion is its next turn.
    pub fn supervised(&self, pairs: &[Pair]) -> Result<Vec<Sample>, DataError> {
        pairs.iter().map(|pair| prepare_pair(pair, &self.tokenizer)).collect()
    }

    /// Creates a decoder for the calling thread.
    pub fn decoder(&self) -> Decoder {
        Decoder::new(&self.config, self.weights().layout)
    }

    /// Engine with `slots` slots and the initial weights as version 0, bound to the calling thread.
    pub fn engine(&self, slots: usize, seed: u64) -> LocalEngine {
        let engine = LocalEngine::new(self.decoder(), self.tokenizer().clone(), slots, seed);
        let mut engine = engine.computing(self.compute());
        engine.set_weights(0, &self.weights());
        engine
    }
}

/// Adds adapters to the weights of the model in `folder`. Existing adapters are kept if their
/// settings are equal, and rejected otherwise. New ones are drawn by `seed`.
pub(super) fn adapted(
    config: &ModelConfig,
    weights: Weights,
    folder: Option<&Path>,
    lora: Lora,
    seed: u64,
) -> Result<Weights, ModelError> {
    let lora = lora.on_model(config)?;
    if let Some(adapter) = &weights.adapter {
        adapter.lora.check_is(&lora, folder.unwrap_or(Path::new("the model")))?;
        return Ok(weights);
    }
    let base = folder.map(|folder| std::path::absolute(folder).unwrap_or_else(|_| folder.to_owned()));
    Ok(weights.adapted(config, lora.of_model(base), seed))
}

/// Folder of the tokenizer of a model in `dir`: the same, or the base model's for adapters without
/// one.
pub fn tokenizer_folder(dir: PathBuf) -> PathBuf {
    if dir.join("tokenizer.json").exists() {
        return dir;
    }
    base_of(&dir).unwrap_or(dir)
}
