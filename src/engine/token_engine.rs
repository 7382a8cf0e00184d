//! Interface of engines that generate step by step on the caller's thread.

use crate::settings::declare::choices;
use std::sync::Arc;
use std::time::Duration;

use super::{EngineError, Finished, Request};
use crate::data::{Answer, SampledToken, Version};
use crate::observe::{Metric, Metrics};

choices! {
    /// Policy for samples in flight, and their keys and values, when new weights arrive (law V5).
    /// Each token keeps the version that sampled it (law D3).
    pub enum OnNewWeights {
        /// samples continue under the new weights with the KV cache of the old.
        "swap" => Swap,
        /// samples continue under the new weights after one prefill that recomputes their KV cache.
        "recompute" => Recompute,
        /// samples end under the weights they began with, alongside new ones. Each version in use
        /// costs a pass at every token and the memory of its weights; `max_staleness` + 1 versions
        /// at most.
        "finish" => Finish,
        /// samples stop, and continue from their tokens under the new weights before any other
        /// sample.
        "abort" => Abort,
    }
}

/// Work and duration of one step.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Load {
    /// Passes through the model.
    pub passes: usize,
    /// Rows of the passes: samples that got a token, and drafted tokens that were checked.
    pub rows: usize,
    /// Prefilled tokens, of prompts and of completions that continue.
    pub prefill: usize,
    /// Tokens of prompts that were not computed, because an earlier request began alike.
    pub reused: usize,
    /// Samples that went back to the queue because the cache of keys and values was full.
    pub preempted: usize,
    /// Tokens that were drafted from earlier ones.
    pub drafted: usize,
    /// Drafted tokens that are those of the sample.
    pub kept: usize,
    /// Duration of the step.
    pub time: Duration,
}

impl Load {
    /// Adds one pass.
    pub fn add(&mut self, rows: usize, prefill: usize) {
        *self = Load { passes: self.passes + 1, rows: self.rows + rows, prefill: self.prefill + prefill, ..*self };
    }

    /// Adds the tokens and samples that the cache and the drafts saved or cost.
    pub(crate) fn record(&self, metrics: &Metrics) {
        for (metric, labels, count) in [
            (Metric::ReusedTokens, &[][..], self.reused),
            (Metric::PreemptedSamples, &[], self.preempted),
            (Metric::DraftedTokens, &["kept"], self.kept),
            (Metric::DraftedTokens, &["dropped"], self.drafted - self.kept),
        ] {
            if count > 0 {
                metrics.add(metric, labels, count as f64);
            }
        }
    }
}

/// Versions before the newest that may sample (law V2).
pub trait OlderVersions: Send + Sync {
    /// Oldest version that may sample tokens of a prompt's group.
    fn oldest(&self, ordinal: u64) -> Version;

    /// Returns true if this version may sample tokens of the group. The group is then trained before
    /// they are too old.
    fn claim(&self, ordinal: u64, version: Version) -> bool;
}

/// Continuous batching: every step generates one token for every sample in flight, and a free slot
/// takes the next waiting sample. An engine stays on one thread.
pub trait TokenEngine: 'static {
    /// Source of weights.
    type Weights: Send + Sync + 'static;

    /// Queues a request. The next step returns partial completions that have ended already.
    fn submit(&mut self, request: Request) -> Result<(), EngineError>;

    /// Uses these weights from the next token on.
    fn set_weights(&mut self, version: Version, weights: &Self::Weights);

    /// Allows versions before the newest to sample. Engines that serve one version ignore it.
    fn allow_older(&mut self, _older: Arc<dyn OlderVersions>) {}

    /// Clears completions that are `expired`, in flight or waiting, and restarts them before all
    /// that wait. Returns their ordinals and indices.
    fn restart_expired(&mut self, expired: &dyn Fn(u64, &Answer) -> bool) -> Vec<(u64, u32)>;

    /// Removes a request's samples, in flight, waiting or ended since the newest step. Default: they stay,
    /// and a later step returns them.
    fn cancel(&mut self, _ordinal: u64) {}

    /// Newest policy version in use.
    fn version(&self) -> Option<Version>;

    /// Returns true if no sample is in flight or waiting.
    fn is_idle(&self) -> bool;

    /// Number of slots that no sample uses or waits for.
    fn free_slots(&self) -> usize;

    /// Number of samples in flight.
    fn active(&self) -> usize;

    /// Limits the slots in use from the next step on, at least one; samples in flight continue.
    fn limit_slots(&mut self, limit: usize);

    /// Admits waiting samples, then generates one token for every sample in flight. Returns
    /// finished completions.
    fn step(&mut self) -> Result<Vec<Finished>, EngineError>;

    /// Steps until all requests are finished. Returns completions in the order in which they end.
    fn run(&mut self) -> Result<Vec<Finished>, EngineError> {
        let mut all = Vec::new();
        while !self.is_idle() {
            all.extend(self.step()?);
        }
        Ok(all)
    }

    /// Tokens of the newest step, including those of finished samples.
    fn sampled(&self) -> &[SampledToken];

    /// Samples, by ordinal and index, whose earlier tokens the newest step discarded as invalid.
    /// They restart.
    fn discarded(&self) -> &[(u64, u32)] {
        &[]
    }

    /// Work of the newest step.
    fn load(&self) -> Load;
}
