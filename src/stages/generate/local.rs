//! Generation in this process.

use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use tch::Device;

use super::generator::{EngineSettings, Generator};
use crate::engine::LocalEngine;
use crate::model::Compute;
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
