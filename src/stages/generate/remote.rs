//! Generation on servers.

use std::sync::Arc;

use super::generator::{EngineSettings, Generator};
use crate::data::{Group, Prompt, Tokenizer};
use crate::engine::remote::{Fleet, FleetConfig, FleetHandle, Synced};
use crate::engine::{EngineError, SamplingParams, TokenEngine};
use crate::rollout::complete;

impl Generator<Fleet> {
    /// Generates on the engines of `handle`, from the first synced version of the flow (law V4). One
    /// worker is enough: it computes nothing.
    pub fn remote(handle: &FleetHandle, config: FleetConfig, tokenizer: &Arc<Tokenizer>) -> Self {
        let (handle, reads) = (handle.clone(), tokenizer.clone());
        let make = move |settings: &EngineSettings| Fleet::new(&handle, config.clone(), &reads, settings.slots, settings.seed);
        Generator::by(make, tokenizer)
    }
}

impl Fleet {
    /// Samples `group_size` completions for each prompt, without a graph ([`complete`]). The served
    /// weights are version 0 unless others were set.
    pub fn answer(
        &mut self,
        prompts: Vec<Prompt>,
        group_size: usize,
        params: &SamplingParams,
    ) -> Result<Vec<Group>, EngineError> {
        if self.version().is_none() {
            self.set_weights(0, &Synced { version: 0 });
        }
        let tokenizer = self.tokenizer().clone();
        complete(self, &tokenizer, prompts, group_size, params)
    }
}
