//! Rollouts: admission of prompts, the ledger of their tokens, sampling in one turn or several, and
//! evaluation.
//!
//! `Rollouts` is the interface between rollouts in flight and the loop that drives an engine. The
//! [`Generator`](crate::stages::generate::Generator), an [`Evaluation`] and the calls by hand
//! ([`complete`], [`roll_out`]) share its two implementations: `SingleTurn` and `MultiTurn`.

mod admission;
mod agent;
mod by_hand;
mod curriculum;
mod evaluation;
mod multi_turn;
mod single_turn;

use std::sync::Arc;
use std::time::Duration;

pub(crate) use admission::PaceRule;
pub use admission::{
    Admission, Fate, LOST, Ledger, OpenGroup, Pace, Progress, STALE, SURPLUS, TRUNCATED, TokensMissing, Totals, TrainingFlow,
};
pub use agent::{Agent, AgentLimits, Turn};
pub use by_hand::{agent_rollout_to_sample, complete, create_multiturn_rollout, generate_conversation_turn, roll_out};
pub use curriculum::{Census, Curriculum, CurriculumRule, CurriculumState, Prefer, RANGES, SourceShare};
pub(crate) use evaluation::passes;
pub use evaluation::{EvalSpec, Evaluation, EvaluationError};
use multi_turn::MultiTurn;
use single_turn::SingleTurn;

use crate::data::{DataError, Group, Prompt, Sample, Status, Tokenizer, Version};
use crate::engine::{EngineError, Finished, SamplingParams, TokenEngine};
use crate::observe::{Metric, Metrics};

/// Longest wait for environments when the engine is idle. A loop reads its signals that often.
pub(crate) const POLL: Duration = Duration::from_millis(10);

/// Rollouts in flight on an engine: they submit requests to it and assemble its completions into
/// groups (law D2).
pub(crate) trait Rollouts<E: TokenEngine> {
    /// Admits a prompt for a group of `size` rollouts, and continues its partial completions (law D7).
    fn admit(&mut self, engine: &mut E, prompt: Prompt, size: u32, params: SamplingParams) -> Result<(), EngineError>;

    /// Returns true if no rollout is in flight.
    fn is_idle(&self, engine: &E) -> bool;

    /// Number of rollouts that may be admitted now. A single group may exceed it.
    fn room(&self, engine: &E) -> usize;

    /// Restarts the samples that would be too old when they are trained after `version` (law V2).
    /// Called before the engine gets these weights.
    fn expire(&mut self, engine: &mut E, version: Version);

    /// Submits the turns that are ready.
    fn submit(&mut self, _: &mut E) -> Result<(), EngineError> {
        Ok(())
    }

    /// Returns true if an environment works or waits for a retry.
    fn awaits_environments(&self) -> bool {
        false
    }

    /// Processes what environments returned. Waits for the first at most `wait`.
    fn poll(&mut self, _wait: Duration) -> Result<(), EngineError> {
        Ok(())
    }

    /// Records the engine's newest step in the ledger, and takes the samples that ended with it.
    fn record(&mut self, engine: &E, finished: Vec<Finished>) -> Result<(), EngineError>;

    /// Takes the groups whose rollouts have all ended.
    fn take_groups(&mut self) -> Vec<Group>;
}

/// Dependencies and settings that all rollouts of one loop share.
#[derive(Clone)]
pub(crate) struct RolloutContext {
    /// Tokenizer of the model.
    pub tokenizer: Arc<Tokenizer>,
    /// If true, only tokens of the newest version in a sample are trained.
    pub mask_older: bool,
    /// If true, turns are computed together once all environments have returned (law V3).
    pub lockstep: bool,
    /// Ledger of sampled tokens; none outside a training loop.
    pub admission: Option<Admission>,
    /// Metrics of the run.
    pub metrics: Option<Metrics>,
}

impl RolloutContext {
    /// Context outside a training loop: in lockstep, without ledger and metrics.
    pub fn detached(tokenizer: &Arc<Tokenizer>) -> Self {
        RolloutContext { tokenizer: tokenizer.clone(), mask_older: false, lockstep: true, admission: None, metrics: None }
    }

    /// Rollouts on `engine`: with several turns if there is an `agent`.
    pub fn rollouts<E: TokenEngine>(self, agent: Option<&Agent>, engine: &E) -> Box<dyn Rollouts<E>> {
        match agent {
            None => Box::new(SingleTurn::new(self)),
            Some(agent) => Box::new(MultiTurn::new(self, agent.clone(), engine.free_slots())),
        }
    }

    /// Discards a completion from the ledger; its tokens count as truncated.
    fn discard(&self, ordinal: u64, index: u32) {
        let tokens = self.admission.as_ref().map_or(0, |admission| admission.discard(ordinal, index));
        self.count(Metric::Tokens, &[Fate::Truncated.label()], tokens as f64);
    }

    fn count(&self, metric: Metric, labels: &[&str], value: f64) {
        if let Some(metrics) = self.metrics.as_ref().filter(|_| value > 0.0) {
            metrics.add(metric, labels, value);
        }
    }
}

/// Returns true if the chat template rejects this conversation and may render others.
fn rejects_conversation(error: &DataError) -> bool {
    matches!(error, DataError::Refused { .. } | DataError::Invalid { .. } | DataError::Limit { .. })
}

/// Metadata key of the reason why an engine refused a sample.
pub const REFUSED: &str = "refused";

/// Metadata key of the reason why a rollout's environment failed.
pub const ENVIRONMENT_FAILURE: &str = "environment_failure";

/// Returns the reason why an engine or an environment lost a sample. A lost sample is incomplete
/// and earns no reward.
pub fn why_lost(sample: &Sample) -> Option<&str> {
    let reason = |key| sample.metadata.get(key).and_then(|reason| reason.as_str());
    let refused = reason(REFUSED).filter(|_| sample.status == Status::Aborted);
    refused.or_else(|| reason(ENVIRONMENT_FAILURE))
}

/// Mean; `None` if there are no values.
pub(crate) fn mean(values: impl Iterator<Item = f64>) -> Option<f64> {
    let (count, sum) = values.fold((0_u64, 0.0), |(count, sum), value| (count + 1, sum + value));
    (count > 0).then(|| sum / count as f64)
}

/// Computes one token of every sample in flight, or polls environments if the engine is idle.
pub(crate) fn advance<E: TokenEngine>(rollouts: &mut dyn Rollouts<E>, engine: &mut E) -> Result<(), EngineError> {
    rollouts.submit(engine)?;
    if engine.is_idle() {
        return rollouts.poll(POLL);
    }
    let finished = engine.step()?;
    rollouts.record(engine, finished)
}
