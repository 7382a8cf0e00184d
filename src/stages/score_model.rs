//! A model that gives a text one number: a reward model, or a critic before it learns.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::policy::adapted;
use super::{Policy, tokenizer_folder};
use crate::data::chat::{ChatError, ChatInput};
use crate::data::{ChatMessage, PromptText, RankedPair, Sample, Status, Tokenizer, TokenizerError};
use crate::hub;
use crate::model::{Compute, FrozenWeights, Head, Lora, ModelConfig, ModelError, Weights, load_hf};
use crate::train::{LocalBackend, LocalConfig};

/// A score model that can't be used.
#[derive(Debug, thiserror::Error)]
pub enum ScoreModelError {
    /// The model's folder.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// The tokenizer, or that it does not fit the model.
    #[error(transparent)]
    Tokenizer(#[from] TokenizerError),
    /// A language model.
    #[error(
        "this model gives words and no score (it is no sequence classifier); train a reward model from it first (pipeline = \"reward_model\")"
    )]
    NoScore,
}

/// A text that has no score.
#[derive(Debug, thiserror::Error)]
pub enum TextError {
    /// It can't be tokenized.
    #[error(transparent)]
    Tokenizer(#[from] TokenizerError),
    /// The model's chat template can't write it.
    #[error(transparent)]
    Chat(#[from] ChatError),
    /// It is longer than the model reads.
    #[error(
        "prompt and answer are {tokens} tokens to the model that scores, which reads at most {most} (max_position_embeddings)"
    )]
    TooLong {
        /// Its tokens.
        tokens: usize,
        /// The model's positions.
        most: usize,
    },
    /// There is nothing to score.
    #[error("prompt and answer have no token to the model that scores")]
    Empty,
}

/// What scores are computed with. Cloning shares the weights, which nobody writes to: whoever trains them copies them first.
#[derive(Clone)]
pub struct ScoreModel {
    config: ModelConfig,
    tokenizer: Arc<Tokenizer>,
    weights: Arc<FrozenWeights>,
    compute: Compute,
    /// The model's folder, if it has one.
    folder: Option<PathBuf>,
}

impl ScoreModel {
    /// A Hugging Face folder of a sequence classifier with one label, or such a model in the hub's local cache by its id. Or a folder of adapters of
    /// one, which names the model that they adapt.
    pub fn load(dir: impl AsRef<Path>) -> Result<Self, ScoreModelError> {
        let dir = hub::open(dir.as_ref()).map_err(ModelError::from)?;
        let (config, weights) = load_hf(&dir)?;
        let folder = base_folder(&weights, &dir);
        let tokenizer = Tokenizer::from_dir(&tokenizer_folder(dir))?;
        Ok(Self::new(config, FrozenWeights::of_own(weights), tokenizer)?.found_in(folder))
    }

    /// What training starts from: such a folder, or one of a language model, which gets a head drawn by `seed`.
    pub fn begin(dir: impl AsRef<Path>, seed: u64) -> Result<Self, ScoreModelError> {
        let dir = hub::open(dir.as_ref()).map_err(ModelError::from)?;
        let tokenizer = Tokenizer::from_dir(&tokenizer_folder(dir.clone()))?;
        Self::begin_with(dir, tokenizer, seed)
    }

    /// The same with this tokenizer, such as the model's own with another chat template.
    pub fn begin_with(dir: impl AsRef<Path>, tokenizer: Tokenizer, seed: u64) -> Result<Self, ScoreModelError> {
        let (config, weights) = load_hf(dir.as_ref())?;
        let folder = match (&weights.adapter, config.head) {
            // They are merged, so that what is under the head lies in no folder.
            (Some(_), Head::LanguageModel) => None,
            _ => Some(base_folder(&weights, dir.as_ref())),
        };
        let (config, weights) = match config.head {
            Head::Score => (config, weights),
            Head::LanguageModel => (config.scoring(), weights.scoring(&config, Some(seed))),
        };
        Ok(ScoreModel { folder, ..Self::new(config, FrozenWeights::of_own(weights), tokenizer)? })
    }

    /// A language model's body and tokenizer under a new head: zero, so that every score is 0 at first, or drawn by a seed.
    pub fn from_policy(policy: &Policy, seed: Option<u64>) -> Self {
        let weights = Arc::new(policy.weights().scoring(policy.config(), seed).freeze());
        let compute = policy.compute();
        ScoreModel { config: policy.config().scoring(), tokenizer: policy.tokenizer().clone(), weights, compute, folder: None }
    }

    /// Scores on this device and in this format; in f32 on the CPU unless told otherwise. A trainer is told by its
    /// [`LocalConfig::compute`].
    pub fn computing(self, compute: Compute) -> Self {
        ScoreModel { compute, ..self }
    }

    /// Where and in which format it scores.
    pub fn compute(&self) -> Compute {
        self.compute
    }

    /// From parts that belong together, however they were loaded.
    pub fn new(config: ModelConfig, weights: FrozenWeights, tokenizer: Tokenizer) -> Result<Self, ScoreModelError> {
        tokenizer.check_model(config.vocab_size)?;
        if config.head != Head::Score {
            return Err(ScoreModelError::NoScore);
        }
        let (tokenizer, weights) = (Arc::new(tokenizer), Arc::new(weights));
        Ok(ScoreModel { config, tokenizer, weights, compute: Compute::default(), folder: None })
    }

    /// The same, whose weights lie in this folder too, or all but the head: adapters that are trained over them name it.
    pub fn found_in(self, dir: impl Into<PathBuf>) -> Self {
        ScoreModel { folder: Some(dir.into()), ..self }
    }

    /// The folder that it was found in, that of the model under adapters.
    pub fn folder(&self) -> Option<&Path> {
        self.folder.as_deref()
    }

    /// The same under adapters, which are all that is trained then beside the head. Adapters that it has already are kept if they are of this kind,
    /// and refused otherwise. Fresh ones are drawn by `seed` and change nothing yet.
    pub fn adapted(&self, lora: Lora, seed: u64) -> Result<Self, ScoreModelError> {
        let weights = adapted(&self.config, self.weights(), self.folder(), lora, seed)?;
        Ok(ScoreModel { weights: Arc::new(FrozenWeights::of_own(weights)), ..self.clone() })
    }

    /// The same with its adapters merged into the weights, so that all of them are trained.
    pub fn merged(&self) -> Self {
        match self.weights().adapter {
            Some(_) => ScoreModel { weights: Arc::new(FrozenWeights::of_own(self.weights().merged())), ..self.clone() },
            None => self.clone(),
        }
    }

    /// The model's shape.
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// Text to tokens.
    pub fn tokenizer(&self) -> &Arc<Tokenizer> {
        &self.tokenizer
    }

    /// The weights, for reading.
    pub fn weights(&self) -> Weights {
        self.weights.read()
    }

    /// Starts a trainer in this process on a copy of the weights. Its checkpoints hold the tokenizer's files too, so that they load as
    /// score models.
    pub fn backend(&self, mut config: LocalConfig) -> std::io::Result<LocalBackend> {
        let files = self.tokenizer.files().iter().map(|(name, content)| (name.to_string(), content.clone()));
        config.companions.extend(files);
        LocalBackend::new(config, self.config.clone(), self.weights())
    }

    /// How it reads texts, without its weights.
    pub fn reader(&self) -> TextReader {
        TextReader::new(self.tokenizer.clone(), &self.config)
    }
}

/// The folder of what adapters adapt, or of a model without them.
fn base_folder(weights: &Weights, dir: &Path) -> PathBuf {
    weights.adapter.as_ref().and_then(|adapter| adapter.lora.base.clone()).unwrap_or_else(|| dir.to_owned())
}

/// Turns texts into what a score model reads.
#[derive(Clone)]
pub struct TextReader {
    tokenizer: Arc<Tokenizer>,
    pad: Option<u32>,
    /// The model's positions.
    most: usize,
}

impl TextReader {
    /// For a model of this shape, whatever its head.
    pub fn new(tokenizer: Arc<Tokenizer>, config: &ModelConfig) -> Self {
        TextReader { tokenizer, pad: config.pad_token_id, most: config.max_positions }
    }

    /// The sample whose one trained row gives the text's score: that of its last token, as transformers reads it. The text is the prompt, the
    /// answer and the end-of-text token, or a conversation with the answer as its last turn as this model's chat template writes it; in this model's
    /// own tokens, whatever the policy's are. A padding token at its end does not count.
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
                self.tokenizer.encode_bare(&self.tokenizer.chat()?.render(&ChatInput::new(&turns))?)?
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
        // A row is named by the token after it. Which one that is, nobody reads.
        tokens.push(0);
        loss_mask.push(1.0);
        let (prompt, response) = (prompt.clone(), answer.to_owned());
        Ok(Sample { prompt, response, tokens, loss_mask, status: Status::Completed, ..Sample::default() })
    }

    /// A pair as its loss takes it: the chosen answer, then the rejected.
    pub fn pair(&self, pair: &RankedPair) -> Result<Vec<Sample>, TextError> {
        let rejected = self.asking(&pair.prompt, &pair.rejected)?;
        Ok(vec![self.asking(&pair.prompt, &pair.chosen)?, Sample { index: 1, ..rejected }])
    }
}
