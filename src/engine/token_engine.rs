//! What a generator drives: an engine that makes tokens step by step on the caller's thread.

use crate::settings::declare::choices;
use std::time::Duration;

use super::{EngineError, Finished, Request};
use crate::data::{Answer, SampledToken, Version};

choices! {
    /// Policy for samples in flight, and their keys and values, when new weights arrive (law V5). Each token keeps the version that sampled it (law D3).
    pub enum OnNewWeights {
        /// samples continue under the new weights with the KV cache of the old.
        "swap" => Swap,
        /// samples continue under the new weights after one prefill that recomputes their KV cache.
        "recompute" => Recompute,
        /// samples end under the weights they began with, alongside new ones. Each version in use costs a pass at every token and the memory of its weights; `max_staleness` + 1 versions at most.
        "finish" => Finish,
        /// samples stop, and continue from their tokens under the new weights before any other sample.
        "abort" => Abort,
    }
}

/// What a step computed, and how long that took.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Load {
    /// Passes through the model.
    pub passes: usize,
    /// Samples that got a token from the one before.
    pub rows: usize,
    /// Tokens of prompts, and of answers that go on, that were read.
    pub prefill: usize,
    /// All of it, on whatever machine the engine runs.
    pub time: Duration,
}

impl Load {
    /// One more pass.
    pub fn add(&mut self, rows: usize, prefill: usize) {
        *self = Load { passes: self.passes + 1, rows: self.rows + rows, prefill: self.prefill + prefill, ..*self };
    }
}

/// Continuous batching: every step makes one token for every sample under way, and a slot that comes free takes the next one that waits. It
/// lives on one thread.
pub trait TokenEngine: 'static {
    /// What it reads weights from.
    type Weights: Send + Sync + 'static;

    /// Lets a prompt wait for slots. Answers that it brings along and that have ended are given back by the next step.
    fn submit(&mut self, request: Request) -> Result<(), EngineError>;

    /// New weights from the next token on.
    fn set_weights(&mut self, version: Version, weights: &Self::Weights);

    /// Forgets what is there of answers that have `expired`, under way or waiting, and begins them anew before all that wait. Tells which
    /// they were, by ordinal and index.
    fn restart_expired(&mut self, expired: &dyn Fn(u64, &Answer) -> bool) -> Vec<(u64, u32)>;

    /// The newest version in use.
    fn version(&self) -> Option<Version>;

    /// Whether nothing is under way or waiting.
    fn is_idle(&self) -> bool;

    /// Slots that no sample uses or waits for.
    fn free_slots(&self) -> usize;

    /// Samples under way.
    fn active(&self) -> usize;

    /// Uses at most that many slots from the next step on, at least one; what is under way goes on.
    fn limit_slots(&mut self, limit: usize);

    /// One more token for every sample under way, after letting waiting ones in. Returns the samples that ended.
    fn step(&mut self) -> Result<Vec<Finished>, EngineError>;

    /// The tokens that the newest step sampled, those of finished samples included.
    fn sampled(&self) -> &[SampledToken];

    /// Answers, by ordinal and index, of which the newest step forgot what earlier ones sampled, because it turned out to be worthless; they begin
    /// anew.
    fn discarded(&self) -> &[(u64, u32)] {
        &[]
    }

    /// What the newest step computed.
    fn load(&self) -> Load;
}
