//! A language model that is to be trained: its configuration, its tokenizer and the weights it starts from.

use std::path::Path;
use std::sync::Arc;

use crate::data::chat::{ChatError, ChatInput, TokenizedConversation, tokenize_conversation, tokenize_last_turn};
use crate::data::{ChatMessage, Conversation, Pair, PromptText, Sample, Tokenizer, TokenizerError};
use crate::model::{Decoder, FrozenWeights, Head, ModelConfig, ModelError, Weights, load_hf};
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

/// A conversation of several that can't become a sample.
#[derive(Debug, thiserror::Error)]
#[error("conversation {number}: {error}")]
pub struct ConversationError {
    /// Which, from 1.
    pub number: usize,
    /// What is wrong with it.
    pub error: ChatError,
}

type Tokenize = fn(&ChatInput, &Tokenizer) -> Result<TokenizedConversation, ChatError>;

/// What trainer and generator start from. Cloning shares the weights, which nobody writes to: the trainer copies them first.
#[derive(Clone)]
pub struct Policy {
    config: ModelConfig,
    tokenizer: Arc<Tokenizer>,
    weights: Arc<FrozenWeights>,
}

impl Policy {
    /// A Hugging Face folder: `config.json`, safetensors, `tokenizer.json`.
    pub fn load(dir: impl AsRef<Path>) -> Result<Self, PolicyError> {
        let tokenizer = Tokenizer::from_dir(dir.as_ref())?;
        Self::load_with(dir, tokenizer)
    }

    /// The model of such a folder with this tokenizer, such as its own with another chat template.
    pub fn load_with(dir: impl AsRef<Path>, tokenizer: Tokenizer) -> Result<Self, PolicyError> {
        let (config, weights) = load_hf(dir.as_ref())?;
        Self::new(config, weights.freeze(), tokenizer)
    }

    /// A fresh model with random weights.
    pub fn random(config: ModelConfig, tokenizer: Tokenizer, seed: u64) -> Result<Self, PolicyError> {
        let weights = Weights::random(&config, seed).freeze();
        Self::new(config, weights, tokenizer)
    }

    /// From parts that belong together.
    pub fn new(config: ModelConfig, weights: FrozenWeights, tokenizer: Tokenizer) -> Result<Self, PolicyError> {
        tokenizer.check_model(config.vocab_size)?;
        if config.head != Head::Words {
            return Err(PolicyError::NoWords);
        }
        Ok(Policy { config, tokenizer: Arc::new(tokenizer), weights: Arc::new(weights) })
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

    /// What supervised training imitates: each completion behind its prompt, ended by the end-of-text token. Where the prompt is a conversation, the
    /// completion is its next turn.
    pub fn supervised(&self, pairs: &[Pair]) -> Result<Vec<Sample>, ChatError> {
        let sample = |pair: &Pair| {
            let text = match &pair.prompt {
                PromptText::Text(text) => text,
                PromptText::Chat(asked) => {
                    let answer = ChatMessage::new("assistant", &pair.completion);
                    let turns: Vec<ChatMessage> = asked.iter().cloned().chain([answer]).collect();
                    return Ok(tokenize_last_turn(&ChatInput::new(&turns), &self.tokenizer)?.sample(&turns));
                }
            };
            let sample = Sample::supervised(&self.tokenizer.encode(text)?, &self.tokenizer.completion(&pair.completion)?);
            Ok(Sample { prompt: pair.prompt.clone(), response: pair.completion.clone(), ..sample })
        };
        pairs.iter().map(sample).collect()
    }

    /// What supervised training imitates of whole conversations: all that the assistant says in one sample, or with `apart`, each turn of the assistant
    /// in a sample of its own behind what the model was shown before it.
    pub fn supervised_conversations(
        &self,
        conversations: &[Conversation],
        apart: bool,
    ) -> Result<Vec<Sample>, ConversationError> {
        let samples = |(number, conversation): (usize, &Conversation)| {
            let of = |turns: &[ChatMessage], tokenize: Tokenize| {
                let input = ChatInput::new(turns).tools(&conversation.tools);
                let tokens =
                    tokenize(&input, &self.tokenizer).map_err(|error| ConversationError { number: number + 1, error })?;
                Ok(tokens.sample(turns))
            };
            if apart {
                return conversation.beginnings().map(|turns| of(turns, tokenize_last_turn)).collect::<Result<Vec<_>, _>>();
            }
            Ok(vec![of(&conversation.turns, tokenize_conversation)?])
        };
        Ok(conversations.iter().enumerate().map(samples).collect::<Result<Vec<_>, _>>()?.concat())
    }

    /// A decoder of this model for the calling thread.
    pub fn decoder(&self) -> Decoder {
        Decoder::new(&self.config, self.weights().layout)
    }
}
