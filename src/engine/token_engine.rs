//! What a generator drives: an engine that makes tokens step by step on the caller's thread.

use std::time::Duration;

use super::{EngineError, Finished, Request};
use crate::data::{Answer, SampledToken, Version};

/// What becomes of samples under way, and of the keys and values computed for them, when new weights arrive (law V5). Whatever it is, the
/// version that sampled each token stands in its spans (law D3).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum OnNewWeights {
    /// They go on under the new weights with the keys and values of the old: nothing is computed twice, and what the next tokens are
    /// conditioned on is slightly off the new weights.
    #[default]
    Swap,
    /// They go on under the new weights, and their keys and values are computed anew: one prefill of all that is there.
    Recompute,
    /// They end under the weights they began with, and new ones start under the new: no sample mixes versions. Until then each version
    /// in use costs a pass of its own at every token, and the memory of its weights. There are as many as a sample outlives: no more than
    /// `max_staleness` + 1 where admission bounds that (law V2).
    Finish,
    /// They stop at once and enter again before all that wait, the oldest first, under the new weights: one prefill of all that is
    /// there, as for [`OnNewWeights::Recompute`]. It is what an engine must do that can't change weights under a running sample.
    Abort,
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
    fn begin_anew(&mut self, expired: &dyn Fn(u64, &Answer) -> bool) -> Vec<(u64, u32)>;

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
