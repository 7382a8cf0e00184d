//! Generation in this process.

use std::sync::Arc;

use super::assembly;
use super::generator::{EngineSettings, Generator};
use crate::data::{Prompt, Sample};
use crate::engine::{EngineError, LocalEngine, Request, SamplingParams};
use crate::flow::WeightsRx;
use crate::model::FrozenWeights;
use crate::stages::Policy;

impl Generator<LocalEngine> {
    /// Generates in this process with the newest of `weights`; it starts when the first arrive (law V4).
    pub fn local(policy: &Policy, weights: WeightsRx<FrozenWeights>) -> Self {
        let tokenizer = policy.tokenizer().clone();
        let policy = policy.clone();
        let make = move |settings: &EngineSettings| {
            tch::set_num_threads(settings.threads as i32);
            let engine = LocalEngine::new(policy.decoder(), policy.tokenizer().clone(), settings.slots, settings.seed);
            engine.on_new_weights(settings.on_new_weights)
        };
        Generator::by(make, &tokenizer, weights)
    }
}

impl Policy {
    /// One answer to `prompt` under the weights that it starts from: for a look before a run.
    pub fn sample(&self, prompt: Prompt, params: SamplingParams, seed: u64) -> Result<Sample, EngineError> {
        let mut engine = LocalEngine::new(self.decoder(), self.tokenizer().clone(), 1, seed);
        engine.set_weights(0, &self.weights());
        let tokens: Arc<[u32]> = self.tokenizer().encode(&prompt.text.render())?.into();
        let (ordinal, params) = (prompt.ordinal, Arc::new(params));
        engine.submit(Request { ordinal, tokens: tokens.clone(), samples: 1, params, answers: Vec::new() })?;
        // It was asked for one answer, and ends with one unless it has no weights.
        let finished = engine.run()?.pop().ok_or(EngineError::NoWeights)?;
        Ok(assembly::sample(&prompt, &tokens, finished, self.tokenizer())?)
    }
}
