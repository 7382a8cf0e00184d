//! Why generation failed.

use super::remote::RemoteError;
use crate::data::TokenizerError;
use crate::data::chat::ChatError;

/// A request that can't be served, or a model that answers nonsense.
#[derive(Debug, thiserror::Error)]
pub enum EngineError {
    /// A sampling parameter out of range.
    #[error("sampling parameter `{field}` is {found}; expected {expected}")]
    Params {
        /// Which.
        field: &'static str,
        /// Its value.
        found: String,
        /// What would be right.
        expected: &'static str,
    },
    /// A prompt that no model can continue.
    #[error("prompt {ordinal}: {problem}")]
    Prompt {
        /// Its place in the stream.
        ordinal: u64,
        /// What is wrong with it.
        problem: String,
    },
    /// A step before any weights came (law V4).
    #[error("no weights yet: publish a version to the engine before the first step")]
    NoWeights,
    /// A model whose logits are no numbers (law N4).
    #[error(
        "sample {index} of prompt {ordinal}: the model's logits for token {position} are not finite under weights version {version}"
    )]
    NonFinite {
        /// The prompt's place in the stream.
        ordinal: u64,
        /// The sample's place in its group.
        index: u32,
        /// Which generated token, from 0.
        position: usize,
        /// The weights that computed them.
        version: u64,
    },
    /// Engines elsewhere refuse one sample after the other: it is not the samples.
    #[error("engines refused {in_a_row} samples in a row; the last: {last}")]
    Refused {
        /// How many.
        in_a_row: usize,
        /// The last refusal.
        last: Box<RemoteError>,
    },
    /// No engine elsewhere makes any token.
    #[error("no engine made a token for {seconds:.0} s; {report}; `rollflow engine status` asks every server")]
    Stuck {
        /// For how long.
        seconds: f64,
        /// What waits, where and since when, and how the engines stand.
        report: String,
    },
    /// Work for engines elsewhere can't be started.
    #[error("the machine gives no threads to talk to engines: {0}")]
    Threads(#[from] std::io::Error),
    /// The tokenizer failed, at a stop string or at the text around the tokens.
    #[error(transparent)]
    Tokenizer(#[from] TokenizerError),
    /// The model's chat template can't write the prompt.
    #[error(transparent)]
    Chat(#[from] ChatError),
}
