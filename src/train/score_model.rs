//! Score models: reward models, and critics before training.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::policy::adapted;
use super::{LoadError, LocalBackend, LocalConfig, Policy, tokenizer_folder};
use crate::data::{ChatMessage, DataError, PromptText, RankedPair, Sample, Status, Tokenizer};
use crate::hub::Hub;
use crate::model::{Compute, FrozenWeights, Head, Lora, ModelConfig, ModelError, Weights, load_hf};

/// A text without a score.
#[derive(Debug, thiserror::Error)]
pub enum TextError {
    /// The tokenizer or the chat template failed.
    #[error(transparent)]
    Data(#[from] DataError),
    /// The text is longer than the model's context.
    #[error(
        "prompt and answer are {tokens} tokens to the model that scores, which reads at most {most} (max_position_embeddings)"
    )]
    TooLong {
        /// Number of tokens.
        tokens: usize,
        /// Largest number of tokens.
        most: usize,
    },
    /// The text is empty.
    #[error("prompt and answer have no token to the model that scores")]
    Empty,
}

/// Model with a score head, and its tokenizer. Clones share the weights, which are read-only: the
/// trainer copies them.
#[derive(Clone)]
pub struct ScoreModel {
    config: ModelConfig,
    tokenizer: Arc<Tokenizer>,
    weights: Arc<FrozenWeights>,
    compute: Compute,
    /// The model's folder, if it was loaded from one.
    folder: Option<PathBuf>,
}

impl ScoreModel {
    /// Loads a Hugging Face folder of a sequence classifier with one label, or such a model in the
    /// hub's local cache by its id. A folder of adapters loads its base model with them.
    pub fn load(dir: impl AsRef<Path>) -> Result<Self, LoadError> {
        let dir = Hub::of_user().open(dir.as_ref()).map_err(ModelError::from)?;
        let (config, weights) = load_hf(&dir)?;
        let folder = base_folder(&weights, &dir);
        let tokenizer = Tokenizer::from_dir(&tokenizer_folder(dir))?;
        Ok(Self::new(config, FrozenWeights::of_own(weights), tokenizer)?.found_in(folder))
    }

    /// Loads the initial model of a training: a score model, or a language model, whose new score
    /// head is drawn by `seed`.
    pub fn begin(dir: impl AsRef<Path>, seed: u64) -> Result<Self, LoadError> {
        let dir = Hub::of_user().open(dir.as_ref()).map_err(ModelError::from)?;
        let tokenizer = Tokenizer::from_dir(&tokenizer_folder(dir.clone()))?;
        Self::begin_with(dir, tokenizer, seed)
    }

    /// [`ScoreModel::begin`] with another tokenizer, such as one with a custom chat template.
    pub fn begin_with(dir: impl AsRef<Path>, tokenizer: Tokenizer, seed: u64) -> Result<Self, LoadError> {
        let (config, weights) = load_hf(dir.as_ref())?;
        let folder = match (&weights.adapter, config.head) {
            // Merged adapters: no folder holds the weights.
            (Some(_), Head::LanguageModel) => None,
            _ => Some(base_folder(&weights, dir.as_ref())),
        };
        let (config, weights) = match config.head {
            Head::Score => (config, weights),
            Head::LanguageModel => (config.scoring(), weights.scoring(&config, Some(seed))),
        };
        Ok(ScoreModel { folder, ..Self::new(config, FrozenWeights::of_own(weights), tokenizer)? })
    }

    /// Replaces a language model's head by a score head: zero, or drawn by `seed`.
    pub fn from_policy(policy: &Policy, seed: Option<u64>) -> Self {
        let weights = Arc::new(policy.weights().scoring(policy.config(), seed).freeze());
        let compute = policy.compute();
        ScoreModel { config: policy.config().scoring(), tokenizer: policy.tokenizer().clone(), weights, compute, folder: None }
    }

    /// Sets device and format of scoring; default: f32 on the CPU. Training uses
    /// [`LocalConfig::compute`].
    pub fn computing(self, compute: Compute) -> Self {
        ScoreModel { compute, ..self }
    }

    /// Device and format of scoring.
    pub fn compute(&self) -> Compute {
        self.compute
    }

    /// Creates a score model from its parts.
    pub fn new(config: ModelConfig, weights: FrozenWeights, tokenizer: Tokenizer) -> Result<Self, LoadError> {
        tokenizer.check_model(config.vocab_size)?;
        if config.head != Head::Score {
            return Err(LoadError::NotAScoreModel);
        }
        let (tokenizer, weights) = (Arc::new(tokenizer), Arc::new(weights));
        Ok(ScoreModel { config, tokenizer, weights, compute: Compute::default(), folder: None })
    }

    /// Sets the folder that holds these weights, with or without the head. Adapters trained over
    /// them name it.
    pub fn found_in(self, dir: impl Into<PathBuf>) -> Self {
        ScoreModel { folder: Some(dir.into()), ..self }
    }

    /// Folder that it was loaded from; with adapters, the base model's.
    pub fn folder(&self) -> Option<&Path> {
        self.folder.as_deref()
    }

    /// Adds adapters, which are then trained with the head only. Existing adapters are kept if
    /// their settings are equal, and rejected otherwise. New ones are drawn by `seed` and change no
    /// score.
    pub fn adapted(&self, lora: Lora, seed: u64) -> Result<Self, LoadError> {
        let weights = adapted(&self.config, self.weights(), self.folder(), lora, seed)?;
        Ok(ScoreModel { weights: Arc::new(FrozenWeights::of_own(weights)), ..self.clone() })
    }

    /// Merges adapters into the weights, so that all weights are trained.
    pub fn merged(&self) -> Self {
        match self.weights().adapter {
            Some(_) => ScoreModel { weights: Arc::new(FrozenWeights::of_own(self.weights().merged())), ..self.clone() },
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

    /// Weights, for reading.
    pub fn weights(&self) -> Weights {
        self.weights.read()
    }

    /// Starts a trainer in this process on a copy of the weights. Its checkpoints include the
    /// tokenizer's files and load as score models.
    pub fn backend(&self, mut config: LocalConfig) -> std::io::Result<LocalBackend> {
        let files = self.tokenizer.files().iter().map(|(name, content)| (name.to_string(), content.clone()));
        config.companions.extend(files);
        LocalBackend::new(config, self.config.clone(), self.weights())
    }

    /// Conversion of texts to samples, without the weights.
    pub fn reader(&self) -> TextReader {
        TextReader::new(self.tokenizer.clone(), &self.config)
    }
}

/// Folder of the base model, or of a model without adapters.
fn base_folder(weights: &Weights, dir: &Path) -> PathBuf {
    weights.adapter.as_ref().and_then(|adapter| adapter.lora.base.clone()).unwrap_or_else(|| dir.to_owned())
}

/// Converts texts to samples that a score model reads.
#[derive(Clone)]
pub struct TextReader {
    tokenizer: Arc<Tokenizer>,
    pad: Option<u32>,
    /// Largest number of tokens.
    most: usize,
}

impl TextReader {
    /// Creates a reader for a model with any head.
    pub fn new(tokenizer: Arc<Tokenizer>, config: &ModelConfig) -> Self {
        TextReader { tokenizer, pad: config.pad_token_id, most: config.max_positions }
    }

    /// Sample with one trained row, the last token's, whose score is the text's, as in
    /// transformers.
    ///
    /// The text is prompt, completion and end-of-text token, or the conversation with the
    /// completion as its last turn. It is tokenized by this model's tokenizer and chat template.
    /// Padding tokens at the end are removed.
    pub fn asking(&self, prompt: &PromptText, answer: &str) -> Result<Sample, TextError> {
        let mut tokens = match prompt {
            PromptText::Text(text) => {
                let mut tokens = self.tokenizer.encode(text)?;
                tokens.extend(self.tokenizer.encode_bare(answer)?);
                tokens.extend(self.tokenizer.eos_token_ids().first());
                tokens
            }
            PromptText::Chat(asked) => {
                let turns: Vec<ChatMessage> = asked.iter().cloned().chain([ChatMessage::new("assistant", answer)]).collect();
                self.tokenizer.encode_bare(&self.tokenizer.chat()?.render(&turns, &[], false)?)?
            }
        };
        while tokens.last().is_some_and(|last| Some(*last) == self.pad) {
            tokens.pop();
        }
        match (tokens.len(), self.most) {
            (0, _) => return Err(TextError::Empty),
            (tokens, most) if tokens > most => return Err(TextError::TooLong { tokens, most }),
            _ => {}
        }
        let mut loss_mask = vec![0.0; tokens.len()];
        // The loss mask refers to the token after a row; its value is never read.
        tokens.push(0);
        loss_mask.push(1.0);
        let (prompt, response) = (prompt.clone(), answer.to_owned());
        Ok(Sample { prompt, response, tokens, loss_mask, status: Status::Completed, ..Sample::default() })
    }

    /// Samples of a pair, as its loss expects them: the chosen completion, then the rejected one.
    pub fn pair(&self, pair: &RankedPair) -> Result<Vec<Sample>, TextError> {
        let rejected = self.asking(&pair.prompt, &pair.rejected)?;
        Ok(vec![self.asking(&pair.prompt, &pair.chosen)?, Sample { index: 1, ..rejected }])
    }
}
