//! Generation on engines elsewhere.

use std::sync::Arc;

use super::by_hand::answer;
use super::generator::{EngineSettings, Generator};
use crate::data::{Group, Prompt, Tokenizer};
use crate::engine::remote::{Fleet, FleetConfig, FleetHandle, Synced};
use crate::engine::{EngineError, SamplingParams, TokenEngine};

impl Generator<Fleet> {
    /// Generates on the engines of `handle`, from the first synced version of the flow (law V4). One worker is enough: it computes nothing.
    pub fn remote(handle: &FleetHandle, config: FleetConfig, tokenizer: &Arc<Tokenizer>) -> Self {
        let (handle, reads) = (handle.clone(), tokenizer.clone());
        let make = move |settings: &EngineSettings| Fleet::new(&handle, config.clone(), &reads, settings.slots, settings.seed);
        Generator::by(make, tokenizer)
    }
}

impl Fleet {
    /// Answers each prompt `group_size` times and gives the groups in the order of the prompts: generation by hand, without a graph. It returns
    /// when the last answer has ended. What the engines serve is version 0 unless they were given weights.
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
        answer(self, &tokenizer, prompts, group_size, params)
    }
}
