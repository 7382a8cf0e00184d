//! Evaluation in this process.

use super::evaluation::Exam;
use super::stage::Evaluator;
use crate::engine::LocalEngine;
use crate::stages::Policy;

impl Evaluator<LocalEngine> {
    /// Asks published weights of a model of the policy's shape, on this stage's thread.
    pub fn local(policy: &Policy, exam: Exam, every: u64) -> Self {
        let (tokenizer, policy) = (policy.tokenizer().clone(), policy.clone());
        let make = move |settings: &crate::stages::generate::EngineSettings| {
            tch::set_num_threads(settings.threads as i32);
            LocalEngine::new(policy.decoder(), policy.tokenizer().clone(), settings.slots, settings.seed)
        };
        Evaluator::by(make, &tokenizer, exam, every)
    }
}
