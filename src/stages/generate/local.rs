//! Generation in this process.

use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use tch::Device;

use super::generator::{EngineSettings, Generator};
use crate::data::{Group, Prompt, Sample};
use crate::engine::{EngineError, LocalEngine, SamplingParams};
use crate::model::Compute;
use crate::rollout::complete;
use crate::train::Policy;

impl Generator<LocalEngine> {
    /// Generates in this process, under the newest weights of the flow. It starts with the first version
    /// (law V4).
    pub fn local(policy: &Policy) -> Self {
        Generator::local_on(policy, [policy.compute().device])
    }

    /// Generates on these devices, which the workers ([`Generator::workers`]) take in turn. Completions
    /// do not depend on the device, up to rounding.
    pub fn local_on(policy: &Policy, devices: impl IntoIterator<Item = Device>) -> Self {
        let tokenizer = policy.tokenizer().clone();
        let policy = policy.clone();
        let (devices, started) = (devices.into_iter().collect::<Vec<_>>(), AtomicUsize::new(0));
        let make = move |settings: &EngineSettings| {
            tch::set_num_threads(settings.threads as i32);
            let engine = LocalEngine::new(policy.decoder(), policy.tokenizer().clone(), settings.slots, settings.seed);
            let turn = started.fetch_add(1, Relaxed) % devices.len().max(1);
            let compute = policy.compute();
            let device = devices.get(turn).copied().unwrap_or(compute.device);
            engine.computing(Compute { device, ..compute }).on_new_weights(settings.on_new_weights)
        };
        Generator::by(make, &tokenizer)
    }
}

impl LocalEngine {
    /// Samples `group_size` completions for each prompt, without a graph ([`complete`]).
    pub fn answer(
        &mut self,
        prompts: Vec<Prompt>,
        group_size: usize,
        params: &SamplingParams,
    ) -> Result<Vec<Group>, EngineError> {
        let tokenizer = self.tokenizer().clone();
        complete(self, &tokenizer, prompts, group_size, params)
    }
}

impl Policy {
    /// Engine with `slots` slots and the policy's initial weights as version 0. It is bound to the
    /// calling thread.
    pub fn engine(&self, slots: usize, seed: u64) -> LocalEngine {
        let engine = LocalEngine::new(self.decoder(), self.tokenizer().clone(), slots, seed);
        let mut engine = engine.computing(self.compute());
        engine.set_weights(0, &self.weights());
        engine
    }

    /// One completion of `prompt` under the initial weights.
    pub fn sample(&self, prompt: Prompt, params: SamplingParams, seed: u64) -> Result<Sample, EngineError> {
        let group = self.engine(1, seed).answer(vec![prompt], 1, &params)?.pop();
        group.and_then(|mut group| group.samples.pop()).ok_or(EngineError::NoWeights)
    }
}
