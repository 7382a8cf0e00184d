//! Messages of a pipeline: prompts, samples, groups, batches, and the weight versions that made
//! them.
//!
//! Laws held here: D1 (tokens in, tokens out), D2 (a prompt's samples are one [`Group`]), D3 (every
//! generated token carries its log-probability and version), D7 (a prompt that re-enters carries
//! its partial completions).

mod answer;
pub mod arithmetic;
mod batch;
mod buffer;
pub mod chat;
mod conversation;
mod error;
mod group;
pub mod jsonl;
pub(crate) mod number;
pub mod packing;
mod prompt;
mod routes;
mod sample;
mod scored;
pub(crate) mod shuffle;
pub mod source;
mod spans;
mod tokenizer;
mod top_tokens;

pub use answer::{Answer, Partial, SampledToken};
pub use batch::{Batch, RolloutBatch};
pub use buffer::{BufferState, DataBuffer};
pub use conversation::{conversation_to_markdown, conversation_to_text, count_turns, last_message};
pub use error::DataError;
pub use group::{DroppedSample, Group};
pub use prompt::{ChatMessage, Pair, Prompt, PromptText, RankedPair};
pub use routes::{ANY_EXPERT, RouteShape, Routes};
pub(crate) use sample::scoring_temperature;
pub use sample::{Sample, Status};
pub use scored::{Dropped, POISONED, REWARD_LIMIT, Scored, is_reward};
pub use shuffle::permutation;
pub use spans::Spans;
pub use tokenizer::Tokenizer;
pub use top_tokens::{TopK, TopTokens};

/// Free-form JSON that a prompt carries to rewards, batches and logs.
pub(crate) type Metadata = serde_json::Map<String, serde_json::Value>;

/// Named parts of a reward, each a finite number of at most [`REWARD_LIMIT`] either way.
pub(crate) type RewardParts = std::collections::BTreeMap<String, f64>;

/// Counts publishes of the weights (law V1): written by the trainer alone, never reused.
pub type Version = u64;
