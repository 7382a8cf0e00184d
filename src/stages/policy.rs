//! A language model that is to be trained: its configuration, its tokenizer and the weights it starts from.

use std::path::Path;
use std::sync::Arc;

use crate::data::{Pair, Sample, Tokenizer, TokenizerError};
use crate::hub;
use crate::model::{Compute, Decoder, FrozenWeights, Head, ModelConfig, ModelError, Weights, load_hf};
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
    NoWords,
}

/// What trainer and generator start from. Cloning shares the weights, which nobody writes to: the trainer copies them first.
#[derive(Clone)]
pub struct Policy {
    config: ModelConfig,
    tokenizer: Arc<Tokenizer>,
    weights: Arc<FrozenWeights>,
    compute: Compute,
}

impl Policy {
    /// A Hugging Face folder (`config.json`, safetensors, `tokenizer.json`), or a model in the hub's local cache by its id.
    pub fn load(dir: impl AsRef<Path>) -> Result<Self, PolicyError> {
        let dir = hub::locate(dir.as_ref()).map_err(ModelError::from)?;
        let (config, weights) = load_hf(&dir)?;
        Self::new(config, FrozenWeights::of_own(weights), Tokenizer::from_dir(&dir)?)
    }

    /// A fresh model with random weights.
    pub fn random(config: ModelConfig, tokenizer: Tokenizer, seed: u64) -> Result<Self, PolicyError> {
        let weights = FrozenWeights::of_own(Weights::random(&config, seed));
        Self::new(config, weights, tokenizer)
    }

    /// From parts that belong together.
    pub fn new(config: ModelConfig, weights: FrozenWeights, tokenizer: Tokenizer) -> Result<Self, PolicyError> {
        tokenizer.check_model(config.vocab_size)?;
        if config.head != Head::Words {
            return Err(PolicyError::NoWords);
        }
        Ok(Policy { config, tokenizer: Arc::new(tokenizer), weights: Arc::new(weights), compute: Compute::default() })
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

    /// What supervised training imitates: each completion behind its prompt, ended by the end-of-text token.
    pub fn supervised(&self, pairs: &[Pair]) -> Result<Vec<Sample>, TokenizerError> {
        let sample = |pair: &Pair| {
            let mut completion = self.tokenizer.encode_bare(&pair.completion)?;
            completion.extend(self.tokenizer.eos_token_ids().first());
            let sample = Sample::supervised(&self.tokenizer.encode(&pair.prompt.render())?, &completion);
            Ok(Sample { prompt: pair.prompt.clone(), response: pair.completion.clone(), ..sample })
        };
        pairs.iter().map(sample).collect()
    }

    /// A decoder of this model for the calling thread.
    pub fn decoder(&self) -> Decoder {
        Decoder::new(&self.config, self.weights().layout)
    }
}
