//! What a step is learned by. Plain data and pure functions, so that a run may change it from step to step, and a resumed run knows it from the
//! number of the step alone (law C2).

use std::collections::BTreeMap;
use std::sync::Arc;

use super::kl_reward::RewardKl;
use crate::algo::{Aggregation, Estimator, Schedule};
use crate::stages::pairs::Pairing;
use crate::train::{Algorithm, TrainBatch};

/// How a batch becomes an update, or several. What is left out is the backend's own.
#[derive(Clone, Default)]
pub struct StepConfig {
    /// What rewards are compared with; samples keep the advantages they have without.
    pub advantages: Option<Arc<dyn Estimator>>,
    /// What distance from the reference policy costs in the reward.
    pub reward_kl: Option<Arc<RewardKl>>,
    /// What is laid out as pairs, chosen and rejected one behind the other, for a loss that reads them so; all pairs of a step count alike, whatever
    /// the aggregation.
    pub pairs: Option<Pairing>,
    /// How tokens weigh against each other.
    pub aggregation: Aggregation,
    /// The loss.
    pub algorithm: Option<Arc<Algorithm>>,
    /// The learning rate over updates.
    pub schedule: Option<Schedule>,
    /// Passes over the batch, an update each, or as many as there are minibatches; 0 is taken for 1.
    pub ppo_epochs: u64,
    /// How each pass is cut.
    pub minibatches: Minibatches,
    /// Whether it is scored before the first of several.
    pub score_first: bool,
    /// Samples of another kind whose gradient is added to that of every update, by a loss that they bring: supervised ones beside reinforced ones.
    pub mixed: Option<Arc<TrainBatch>>,
    /// Numbers of this step to be written down beside what was measured, by name.
    pub settings: BTreeMap<String, f64>,
}

impl StepConfig {
    /// Whether a part of a batch may be learned from before the rest is there, `backend` telling it of the backend's own loss: whether its gradient
    /// is the same with and without the others.
    pub fn takes_parts(&self, backend: bool) -> bool {
        // A sum knows no denominator that could come later.
        let has_denominator = self.aggregation != Aggregation::TokenSum;
        let by_group = self.reward_kl.is_none()
            && self.pairs.is_none()
            && self.advantages.as_ref().is_none_or(|advantages| advantages.is_by_group());
        let loss = self.algorithm.as_ref().map_or(backend, |algorithm| algorithm.takes_parts());
        self.optimizer_steps() == 1 && has_denominator && by_group && loss
    }

    /// Optimizer steps in a step, at most.
    pub fn optimizer_steps(&self) -> u64 {
        self.ppo_epochs.max(1).saturating_mul(self.minibatches.count.max(1) as u64)
    }
}

/// How a pass over a batch is cut: an update for every minibatch.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Minibatches {
    /// How many; 0 is taken for 1.
    pub count: usize,
    /// Draws which groups meet.
    pub seed: u64,
}

/// Why a step has no config.
pub type StepConfigError = Box<dyn std::error::Error + Send + Sync>;

/// The config of every step.
pub(super) enum StepConfigs {
    Same(Box<StepConfig>),
    ByStep(Box<dyn Fn(u64) -> Result<StepConfig, StepConfigError> + Send>),
}

impl StepConfigs {
    /// That of a step, which counts from 1.
    pub fn of(&self, step: u64) -> Result<StepConfig, StepConfigError> {
        match self {
            StepConfigs::Same(config) => Ok(StepConfig::clone(config)),
            StepConfigs::ByStep(config) => config(step),
        }
    }
}
