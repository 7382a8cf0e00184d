//! Models with tokenizer and initial weights: policies, reward models, and critics before training;
//! and the samples that score models read.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::{LocalBackend, LocalConfig};
use crate::data::source::prepare_pair;
use crate::data::{ChatMessage, DataError, Pair, PromptText, RankedPair, Sample, Status, Tokenizer};
use crate::engine::LocalEngine;
use crate::hub::Hub;
use crate::model::{
    Compute, Decoder, FrozenWeights, Lora, ModelConfig, ModelError, Weights, base_of, load_adapter, load_hf, load_hf_for,
    load_hf_in_4_bits, load_weights, release_helpers,
};

/// Language model that trainer and generator start from.
pub type Policy = LoadedModel<false>;

/// Model with a score head: a reward model, or a critic before training.
pub type ScoreModel = LoadedModel<true>;

/// Model with its tokenizer: a language model, or, with `SCORES`, one with a score head. Clones
/// share the weights, which are read-only: the trainer copies them.
#[derive(Clone)]
pub struct LoadedModel<const SCORES: bool> {
    config: ModelConfig,
    tokenizer: Arc<Tokenizer>,
    weights: Arc<FrozenWeights>,
    compute: Compute,
    /// The model's folder, if it was loaded from one.
    folder: Option<PathBuf>,
}

impl<const SCORES: bool> LoadedModel<SCORES> {
    /// Loads a Hugging Face folder (`config.json`, safetensors, `tokenizer.json`), or a model in
    /// the hub's local cache by its id. A folder of adapters loads its base model with them, and
    /// the base's tokenizer if it has none. A score model is a sequence classifier with one label.
    pub fn load(dir: impl AsRef<Path>) -> Result<Self, ModelError> {
        Self::load_for(dir, Compute::default())
    }

    /// Loads a model that generates or scores on this device and in this format. A folder in that
    /// format takes no more memory than on disk. A trainer creates an f32 copy.
    pub fn load_for(dir: impl AsRef<Path>, compute: Compute) -> Result<Self, ModelError> {
        let dir = Hub::of_user().open(dir.as_ref())?;
        let tokenizer = Tokenizer::from_dir(&tokenizer_folder(dir.clone())?)?;
        Self::load_with(dir, tokenizer, compute)
    }

    /// Loads a folder's model with another tokenizer, such as one with a custom chat template.
    pub fn load_with(dir: impl AsRef<Path>, tokenizer: Tokenizer, compute: Compute) -> Result<Self, ModelError> {
        let (config, weights) = load_hf_for(dir.as_ref(), compute.dtype)?;
        Ok(Self::of_folder(dir.as_ref(), config, weights, tokenizer)?.computing(compute))
    }

    /// [`LoadedModel::load_with`] and [`LoadedModel::quantised`], without the whole matrices in memory. Experts that
    /// the folder has in MXFP4 stay so.
    pub fn load_in_4_bits(dir: impl AsRef<Path>, tokenizer: Tokenizer, compute: Compute) -> Result<Self, ModelError> {
        let (config, weights) = load_hf_in_4_bits(dir.as_ref(), compute.dtype)?;
        Ok(Self::of_folder(dir.as_ref(), config, weights, tokenizer)?.computing(compute))
    }

    fn of_folder(dir: &Path, config: ModelConfig, weights: Weights, tokenizer: Tokenizer) -> Result<Self, ModelError> {
        if let Some((key, rate)) = config.dropout() {
            tracing::warn!("{}: {key} is {rate}; rollflow trains without dropout", dir.display());
        }
        let base = weights.adapter.as_ref().and_then(|adapter| adapter.lora.base.clone());
        let folder = Some(base.unwrap_or_else(|| dir.to_owned()));
        Ok(LoadedModel { folder, ..Self::new(config, FrozenWeights::of_own(weights), tokenizer)? })
    }

    /// Creates a model from its parts.
    pub fn new(config: ModelConfig, weights: FrozenWeights, tokenizer: impl Into<Arc<Tokenizer>>) -> Result<Self, ModelError> {
        let tokenizer = tokenizer.into().of_model(config.vocab_size)?;
        match (config.scores, SCORES) {
            (true, false) => Err(ModelError::NotALanguageModel),
            (false, true) => Err(ModelError::NotAScoreModel),
            _ => {
                // The caller is often a thread that computes no more.
                release_helpers();
                let (weights, compute) = (Arc::new(weights), Compute::default());
                Ok(LoadedModel { config, tokenizer, weights, compute, folder: None })
            }
        }
    }

    /// Sets device and format of generation or scoring; default: f32 on the CPU. Training uses
    /// [`LocalConfig::compute`].
    pub fn computing(self, compute: Compute) -> Self {
        LoadedModel { compute, ..self }
    }

    /// Chooses the longest sequence, in tokens, if one is given, and with it LongRoPE's factors.
    ///
    /// # Errors
    /// Those of [`ModelConfig::within`].
    pub fn within(self, context: Option<usize>) -> Result<Self, ModelError> {
        Ok(LoadedModel { config: self.config.within(context)?, ..self })
    }

    /// Device and format of generation or scoring.
    pub fn compute(&self) -> Compute {
        self.compute
    }

    /// Replaces the weights.
    pub fn with_weights(&self, weights: Arc<FrozenWeights>) -> Self {
        LoadedModel { weights, ..self.clone() }
    }

    fn with_own(&self, weights: Weights) -> Self {
        release_helpers();
        self.with_weights(Arc::new(FrozenWeights::of_own(weights)))
    }

    /// Sets the folder that holds these weights, with or without a score head. Adapters trained
    /// over them name it.
    pub fn found_in(&self, dir: impl Into<PathBuf>) -> Self {
        LoadedModel { folder: Some(dir.into()), ..self.clone() }
    }

    /// Folder that it was loaded from; with adapters, the base model's.
    pub fn folder(&self) -> Option<&Path> {
        self.folder.as_deref()
    }

    /// Adds adapters, which are then the only trained parameters, with the score head if there is
    /// one; the base is shared. Existing adapters are kept if their settings are equal, and
    /// rejected otherwise. New ones are drawn by `seed` and change no output.
    pub fn adapted(&self, lora: Lora, seed: u64) -> Result<Self, ModelError> {
        let (mut lora, weights) = (lora.on_model(&self.config)?, self.weights());
        if let Some(adapter) = &weights.adapter {
            adapter.lora.check_is(&lora, self.folder().unwrap_or(Path::new("the model")))?;
            return Ok(self.with_own(weights));
        }
        lora.base = self.folder().map(|folder| std::path::absolute(folder).unwrap_or_else(|_| folder.to_owned()));
        Ok(self.with_own(weights.adapted(&self.config, lora, seed)))
    }

    /// Stores the matrices of the layers in 4 bits (NF4 with double quantisation, as bitsandbytes does), so
    /// that they take an eighth of f32; adapters stay. A layer's numbers are computed whenever it is used.
    /// A folder that bitsandbytes quantised is so already.
    pub fn quantised(&self) -> Self {
        self.with_own(self.weights().quantised())
    }

    /// Merges adapters into the weights, so that all weights are trained.
    pub fn merged(&self) -> Self {
        match self.weights().adapter {
            Some(_) => self.with_own(self.weights().merged()),
            None => self.clone(),
        }
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
    /// tokenizer's files and load as models of the same kind.
    pub fn backend(&self, mut config: LocalConfig) -> std::io::Result<LocalBackend> {
        config.companions.extend(self.tokenizer.files().iter().cloned());
        LocalBackend::new(config, self.config.clone(), self.weights())
    }
}

impl Policy {
    /// Creates a model with random weights.
    pub fn random(config: ModelConfig, tokenizer: Tokenizer, seed: u64) -> Result<Self, ModelError> {
        let weights = FrozenWeights::of_own(Weights::random(&config, seed));
        Self::new(config, weights, tokenizer)
    }

    /// Loads the weights of one of its checkpoints: adapters over the same base, or all weights.
    /// The error names every tensor of another shape.
    pub fn with_weights_of(&self, dir: &Path) -> Result<Self, ModelError> {
        Ok(self.with_own(match &self.weights().adapter {
            Some(ours) => {
                let saved = load_adapter(dir, &self.config)?;
                saved.lora.check_is(&ours.lora, dir)?;
                self.weights().under(saved)
            }
            None => load_weights(&self.config, dir)?,
        }))
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

impl ScoreModel {
    /// Loads the initial model of a training: a score model, or a language model, whose new score
    /// head is drawn by `seed`.
    pub fn begin(dir: impl AsRef<Path>, tokenizer: Tokenizer, seed: u64) -> Result<Self, ModelError> {
        let (config, weights) = load_hf(dir.as_ref())?;
        if config.scores {
            return Self::of_folder(dir.as_ref(), config, weights, tokenizer);
        }
        // No folder holds merged adapters.
        let folder = weights.adapter.is_none().then(|| dir.as_ref().to_owned());
        let scoring = FrozenWeights::of_own(weights.scoring(&config, Some(seed)));
        Ok(LoadedModel { folder, ..Self::new(config.scoring(), scoring, tokenizer)? })
    }

    /// Replaces a language model's head by a score head: zero, or drawn by `seed`.
    pub fn from_policy(policy: &Policy, seed: Option<u64>) -> Self {
        let weights = Arc::new(FrozenWeights::of_own(policy.weights().scoring(policy.config(), seed)));
        let (config, tokenizer) = (policy.config().scoring(), policy.tokenizer().clone());
        LoadedModel { config, tokenizer, weights, compute: policy.compute(), folder: None }
    }
}

/// Folder of the tokenizer of a model in `dir`: the same, or the base model's for adapters without
/// one.
///
/// # Errors
/// That of [`base_of`].
pub fn tokenizer_folder(dir: PathBuf) -> Result<PathBuf, ModelError> {
    if dir.join("tokenizer.json").exists() {
        return Ok(dir);
    }
    Ok(base_of(&dir)?.unwrap_or(dir))
}

/// Sample with one trained row, the last token's, whose score is the text's, as in transformers.
/// `tokenizer` and `config` are those of the model that scores, with any head.
///
/// The text is prompt, completion and end-of-text token, or the conversation with the completion
/// as its last turn. Padding tokens at the end are removed.
///
/// # Errors
/// An empty text, one longer than the model's context, or an error of tokenizer or chat template.
pub fn score_sample(
    tokenizer: &Tokenizer,
    config: &ModelConfig,
    prompt: &PromptText,
    answer: &str,
) -> Result<Sample, ModelError> {
    let mut tokens = match prompt {
        PromptText::Text(text) => {
            let mut tokens = tokenizer.encode(text)?;
            tokens.extend(tokenizer.encode_bare(answer)?);
            tokens.extend(tokenizer.eos_token_ids().first());
            tokens
        }
        PromptText::Chat(asked) => {
            let turns: Vec<ChatMessage> = asked.iter().cloned().chain([ChatMessage::new("assistant", answer)]).collect();
            tokenizer.encode_bare(&tokenizer.chat()?.render(&turns, &[], false)?)?
        }
    };
    while tokens.last().is_some_and(|last| Some(*last) == config.pad_token_id) {
        tokens.pop();
    }
    if tokens.is_empty() || tokens.len() > config.max_positions {
        return Err(ModelError::TextLength(tokens.len(), config.max_positions));
    }
    let mut loss_mask = vec![0.0; tokens.len()];
    // The loss mask refers to the token after a row; its value is never read.
    tokens.push(0);
    loss_mask.push(1.0);
    let (prompt, response) = (prompt.clone(), answer.to_owned());
    Ok(Sample { prompt, response, tokens, loss_mask, status: Status::Completed, ..Sample::default() })
}

/// Samples of a pair, as its loss expects them: the chosen completion, whose advantage is the pair's
/// margin unless that is 0, then the rejected one. See [`score_sample`].
pub fn score_pair(tokenizer: &Tokenizer, config: &ModelConfig, pair: &RankedPair) -> Result<Vec<Sample>, ModelError> {
    let sample = |answer| score_sample(tokenizer, config, &pair.prompt, answer);
    let rejected = Sample { index: 1, ..sample(&pair.rejected)? };
    // Sequences with an advantage of 0 are computed in separate passes.
    let advantage = pair.margin.filter(|margin| *margin != 0.0);
    Ok(vec![Sample { advantage, ..sample(&pair.chosen)? }, rejected])
}
