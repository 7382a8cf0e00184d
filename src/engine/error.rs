//! Errors of generation.

use super::remote::RemoteError;
use super::remote::sync::IsolatedEngine;
use crate::data::{DataError, Version};

/// Error of a request, of an engine or of a weight sync.
#[derive(Debug, thiserror::Error)]
pub enum EngineError {
    /// A sampling parameter out of range.
    #[error("sampling parameter {0}")]
    Params(String),
    /// A prompt that no model can continue.
    #[error("prompt {ordinal}: {problem}")]
    Prompt {
        /// Ordinal of the prompt.
        ordinal: u64,
        /// Reason.
        problem: String,
    },
    /// A prompt and a completion that exceed the context of a local engine.
    #[error(
        "prompt {ordinal}: {tokens} tokens and max_new_tokens {new} exceed the model's {most} positions; shorten one of them"
    )]
    TooLong {
        /// Ordinal of the prompt.
        ordinal: u64,
        /// Number of present tokens.
        tokens: usize,
        /// Most new tokens.
        new: usize,
        /// Positions of the model.
        most: usize,
    },
    /// Step before any weights arrived (law V4).
    #[error("no weights yet: publish a version to the engine before the first step")]
    NoWeights,
    /// Logits of a model that are not finite (law N4).
    #[error(
        "sample {index} of prompt {ordinal}: the model's logits for token {position} are not finite under weights version {version}"
    )]
    NonFinite {
        /// Ordinal of the prompt.
        ordinal: u64,
        /// Index of the sample in its group.
        index: u32,
        /// Index of the generated token, from 0.
        position: usize,
        /// Policy version of the logits.
        version: u64,
    },
    /// Refusal of many samples in a row by remote engines.
    #[error("engines refused {in_a_row} samples in a row; the last: {last}")]
    Refused {
        /// Number of refused samples.
        in_a_row: usize,
        /// Last refusal.
        last: Box<RemoteError>,
    },
    /// No token from any remote engine for too long (law F7).
    #[error("no engine made a token for {seconds:.0} s; {report}; `rollflow engine status` asks every server")]
    Stuck {
        /// Seconds without a token.
        seconds: f64,
        /// Waiting samples, where and since when, and the state of each engine.
        report: String,
    },
    /// End of a generator that ran by itself, with the reason.
    #[error("the generator {0}")]
    Generator(String),
    /// Weight sync of a fleet without engines.
    #[error("there is no engine to give weights to; name one in engine.urls or engine.members, or let engine.launch start one")]
    NoEngines,
    /// Weight sync that failed on all engines.
    #[error("no engine holds version {version} of the weights:{}", failures.iter().map(|failure| format!("\n  {failure}")).collect::<String>())]
    NoneHolds {
        /// Version of the weights.
        version: Version,
        /// Failures, in the order of the engines.
        failures: Vec<IsolatedEngine>,
    },
    /// No threads for requests to remote engines.
    #[error("the machine gives no threads to talk to engines: {0}")]
    Threads(#[from] std::io::Error),
    /// Error of the tokenizer or the chat template.
    #[error(transparent)]
    Data(#[from] DataError),
}

impl EngineError {
    /// Two prompts in flight have the same ordinal, which keys their randomness (law N2).
    pub(crate) fn same_ordinal(ordinal: u64) -> Self {
        let problem = "another prompt has the same ordinal: take prompts from a `DataBuffer`, or set `Prompt::ordinal`";
        EngineError::Prompt { ordinal, problem: problem.to_owned() }
    }
}
