//! Generation in this process.

use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use tch::Device;

use super::by_hand::answer;
use super::generator::{EngineSettings, Generator};
use crate::data::{Group, Prompt, Sample};
use crate::engine::{EngineError, LocalEngine, SamplingParams};
use crate::model::Compute;
use crate::stages::Policy;

impl Generator<LocalEngine> {
    /// Generates in this process, under the newest weights of the flow. It starts with the first version (law V4).
    pub fn local(policy: &Policy) -> Self {
        Generator::local_on(policy, [policy.compute().device])
    }

    /// The same on these devices: its workers ([`Generator::workers`]) take them in turn, as they start. What comes of a prompt does not depend on which
    /// of them answers it, up to rounding.
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
    /// Answers each prompt `group_size` times and gives the groups in the order of the prompts: generation by hand, without a graph. It
    /// returns when the last answer has ended.
    pub fn answer(
        &mut self,
        prompts: Vec<Prompt>,
        group_size: usize,
        params: &SamplingParams,
    ) -> Result<Vec<Group>, EngineError> {
        let tokenizer = self.tokenizer().clone();
        answer(self, &tokenizer, prompts, group_size, params)
    }
}

impl Policy {
    /// An engine for up to `slots` samples at a time, with the weights that the policy starts from as version 0. It lives on the thread that
    /// made it.
    pub fn engine(&self, slots: usize, seed: u64) -> LocalEngine {
        let engine = LocalEngine::new(self.decoder(), self.tokenizer().clone(), slots, seed);
        let mut engine = engine.computing(self.compute());
        engine.set_weights(0, &self.weights());
        engine
    }

    /// One answer to `prompt` under the weights that it starts from: for a look before a run.
    pub fn sample(&self, prompt: Prompt, params: SamplingParams, seed: u64) -> Result<Sample, EngineError> {
        let group = self.engine(1, seed).answer(vec![prompt], 1, &params)?.pop();
        // It was asked for one answer, and ends with one unless it has no weights.
        group.and_then(|mut group| group.samples.pop()).ok_or(EngineError::NoWeights)
    }
}
