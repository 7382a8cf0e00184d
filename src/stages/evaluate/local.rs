//! Evaluation in this process.

use super::stage::Evaluator;
use crate::engine::LocalEngine;
use crate::rollout::EvalSpec;
use crate::stages::generate::EngineSettings;
use crate::train::Policy;

impl Evaluator<LocalEngine> {
    /// Evaluates in this process, on the stage's thread.
    pub fn local(policy: &Policy, spec: EvalSpec, every: u64) -> Self {
        let (tokenizer, policy) = (policy.tokenizer().clone(), policy.clone());
        let make = move |settings: &EngineSettings| {
            tch::set_num_threads(settings.threads as i32);
            LocalEngine::new(policy.decoder(), policy.tokenizer().clone(), settings.slots, settings.seed)
        };
        Evaluator::by(make, &tokenizer, spec, every)
    }
}
