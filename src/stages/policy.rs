//! A language model that is to be trained: its configuration, its tokenizer and the weights it starts from.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::data::chat::ChatError;
use crate::data::source::prepare_pair;
use crate::data::{Pair, Sample, Tokenizer, TokenizerError};
use crate::hub;
use crate::model::{
    Compute, Decoder, FrozenWeights, Head, Lora, ModelConfig, ModelError, Weights, base_of, load_adapter, load_hf_for, load_like,
};
use crate::train::{LocalBackend, LocalConfig};

/// A model or tokenizer that can't be used.
#[derive(Debug, thiserror::Error)]
pub enum PolicyError {
    /// The model's folder.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// The tokenizer, or that it does not fit the model.
    #[error(transparent)]
    Tokenizer(#[from] TokenizerError),
    /// A reward model or a critic.
    #[error(
        "this model gives one number and no words (it is a sequence classifier), so that it can't be a policy; name the folder of a \
         language model"
    )]
    NotALanguageModel,
}

/// What trainer and generator start from. Cloning shares the weights, which nobody writes to: the trainer copies them first.
#[derive(Clone)]
pub struct Policy {
    config: ModelConfig,
    tokenizer: Arc<Tokenizer>,
    weights: Arc<FrozenWeights>,
    compute: Compute,
    /// The model's folder, if it has one.
    folder: Option<PathBuf>,
}

impl Policy {
    /// A Hugging Face folder (`config.json`, safetensors, `tokenizer.json`), or a model in the hub's local cache by its id. Or a folder of adapters,
    /// which names such a one; its tokenizer is taken where it has none of its own.
    pub fn load(dir: impl AsRef<Path>) -> Result<Self, PolicyError> {
        Self::load_for(dir, Compute::default())
    }

    /// The same, generating on this device and in this format. A folder in that very format takes no more memory than on disk; a trainer takes its
    /// own f32 copy of it.
    pub fn load_for(dir: impl AsRef<Path>, compute: Compute) -> Result<Self, PolicyError> {
        let dir = hub::open(dir.as_ref()).map_err(ModelError::from)?;
        let tokenizer = Tokenizer::from_dir(&tokenizer_folder(dir.clone()))?;
        Self::load_with(dir, tokenizer, compute)
    }

    /// The model of such a folder with this tokenizer, such as its own with another chat template.
    pub fn load_with(dir: impl AsRef<Path>, tokenizer: Tokenizer, compute: Compute) -> Result<Self, PolicyError> {
        let dir = dir.as_ref();
        let (config, weights) = load_hf_for(dir, compute.dtype)?;
        let base = weights.adapter.as_ref().and_then(|adapter| adapter.lora.base.clone());
        let policy = Self::new(config, FrozenWeights::of_own(weights), tokenizer)?;
        Ok(policy.found_in(base.as_deref().unwrap_or(dir)).computing(compute))
    }

    /// A fresh model with random weights.
    pub fn random(config: ModelConfig, tokenizer: Tokenizer, seed: u64) -> Result<Self, PolicyError> {
        let weights = FrozenWeights::of_own(Weights::random(&config, seed));
        Self::new(config, weights, tokenizer)
    }

    /// From parts that belong together.
    pub fn new(config: ModelConfig, weights: FrozenWeights, tokenizer: Tokenizer) -> Result<Self, PolicyError> {
        tokenizer.check_model(config.vocab_size)?;
        if config.head != Head::LanguageModel {
            return Err(PolicyError::NotALanguageModel);
        }
        let weights = Arc::new(weights);
        Ok(Policy { config, tokenizer: Arc::new(tokenizer), weights, compute: Compute::default(), folder: None })
    }

    /// Generates on this device and in this format; in f32 on the CPU unless told otherwise. A trainer is told by its [`LocalConfig::compute`].
    pub fn computing(self, compute: Compute) -> Self {
        Policy { compute, ..self }
    }

    /// Where and in which format it generates.
    pub fn compute(&self) -> Compute {
        self.compute
    }

    /// The same model with other weights.
    pub fn with_weights(&self, weights: Arc<FrozenWeights>) -> Self {
        Policy { weights, ..self.clone() }
    }

    /// The same, whose weights lie in this folder too: adapters that are trained over them name it.
    pub fn found_in(&self, dir: impl Into<PathBuf>) -> Self {
        Policy { folder: Some(dir.into()), ..self.clone() }
    }

    /// The same under adapters, which are all that is trained then; the weights under them are shared. Adapters that it has already are kept if they
    /// are of this kind, and refused otherwise. Fresh ones are drawn by `seed` and change nothing yet.
    pub fn adapted(&self, lora: Lora, seed: u64) -> Result<Self, PolicyError> {
        let weights = adapted(&self.config, self.weights(), self.folder.as_deref(), lora, seed)?;
        Ok(self.with_weights(Arc::new(FrozenWeights::of_own(weights))))
    }

    /// The same with its adapters merged into the weights, so that all of them are trained.
    pub fn merged(&self) -> Self {
        match self.weights().adapter {
            Some(_) => self.with_weights(Arc::new(FrozenWeights::of_own(self.weights().merged()))),
            None => self.clone(),
        }
    }

    /// The folder that it was found in, that of the model under adapters.
    pub fn folder(&self) -> Option<&Path> {
        self.folder.as_deref()
    }

    /// The same with the weights of a checkpoint of it in `dir`: adapters over the weights that it has, or all of them. Every tensor of another shape
    /// is named.
    pub fn with_weights_of(&self, dir: &Path) -> Result<Self, PolicyError> {
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

    /// The model's shape.
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// Text to tokens and back.
    pub fn tokenizer(&self) -> &Arc<Tokenizer> {
        &self.tokenizer
    }

    /// The weights themselves, not copied.
    pub fn frozen(&self) -> Arc<FrozenWeights> {
        self.weights.clone()
    }

    /// The weights, for reading.
    pub fn weights(&self) -> Weights {
        self.weights.read()
    }

    /// Starts a trainer in this process on a copy of the weights. Its checkpoints hold the tokenizer's files too, so that they load as
    /// policies.
    pub fn backend(&self, mut config: LocalConfig) -> std::io::Result<LocalBackend> {
        let files = self.tokenizer.files().iter().map(|(name, content)| (name.to_string(), content.clone()));
        config.companions.extend(files);
        LocalBackend::new(config, self.config.clone(), self.weights())
    }

    /// Starts a critic in this process, as [`Policy::backend`] starts a trainer: a copy of this model under a head that gives one number, 0 at first.
    /// `config` holds its loss, [`ValueLoss`](crate::algo::ValueLoss).
    pub fn critic(&self, config: LocalConfig) -> std::io::Result<LocalBackend> {
        LocalBackend::new(config, self.config.scoring(), self.weights().scoring(&self.config, None))
    }

    /// What supervised training imitates: each completion behind its prompt, ended by the end-of-text token. Where the prompt is a conversation, the
    /// completion is its next turn.
    pub fn supervised(&self, pairs: &[Pair]) -> Result<Vec<Sample>, ChatError> {
        pairs.iter().map(|pair| prepare_pair(pair, &self.tokenizer)).collect()
    }

    /// A decoder of this model for the calling thread.
    pub fn decoder(&self) -> Decoder {
        Decoder::new(&self.config, self.weights().layout)
    }
}

/// Weights of the model in `folder` under adapters: those that they have if they are of this kind, or else fresh ones, drawn by `seed`. Adapters of
/// another kind are refused.
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

/// Where the tokenizer of a model in `dir` is: there, or, of adapters that have none, in the folder of the model that they name.
pub fn tokenizer_folder(dir: PathBuf) -> PathBuf {
    if dir.join("tokenizer.json").exists() {
        return dir;
    }
    base_of(&dir).unwrap_or(dir)
}
