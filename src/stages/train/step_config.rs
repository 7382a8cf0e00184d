//! Settings of one step. Plain data and pure functions of the step's number, so that a run may
//! change them from step to step and a resumed run repeats them (law C2).

use std::collections::BTreeMap;
use std::sync::Arc;

use super::distill::Distill;
use super::kl_reward::RewardKl;
use crate::algo::{Aggregation, Estimator, Schedule};
use crate::stages::pairs::Pairing;
use crate::train::{Algorithm, TrainBatch};

/// Settings of one step: from a batch to one or more updates. `None` means the backend's own.
#[derive(Clone, Default)]
pub struct StepConfig {
    /// Advantage estimator; `None`: samples keep their advantages. A critic replaces it.
    pub advantages: Option<Arc<dyn Estimator>>,
    /// KL penalty, subtracted from rewards before advantages are estimated; with a critic, token by
    /// token.
    pub reward_kl: Option<Arc<RewardKl>>,
    /// On-policy distillation from a teacher, after advantages are estimated.
    pub distill: Option<Distill>,
    /// Pairing of samples: chosen and rejected alternate, for a
    /// [`Preference`](crate::algo::Preference). Each pair weighs the same, and `aggregation` is
    /// ignored.
    pub pairs: Option<Pairing>,
    /// Weights of tokens in the loss.
    pub aggregation: Aggregation,
    /// Loss and off-policy correction.
    pub algorithm: Option<Arc<Algorithm>>,
    /// Learning rate over updates, [`StepConfig::optimizer_steps`] of which belong to each step, the steps
    /// before this one included. Updates that are skipped count.
    pub schedule: Option<Schedule>,
    /// The same for the critic.
    pub critic_schedule: Option<Schedule>,
    /// PPO epochs (μ in GRPO): passes over the batch, with an update per minibatch. 0 means 1.
    pub ppo_epochs: u64,
    /// Minibatches of groups in each pass, with one update each; 0 means 1.
    pub minibatches: usize,
    /// Seed of the draw of minibatches, which differs between passes.
    pub minibatch_seed: u64,
    /// If true, and there are several updates, the batch is scored before the first, for a loss
    /// whose trust region is centred there (`Proximal::Recompute`). With a single update, its
    /// forward pass is that score.
    pub score_first: bool,
    /// Samples with a loss of their own whose gradient is added to every update, such as supervised
    /// ones.
    pub mixed: Option<Arc<TrainBatch>>,
    /// If true, the log-probability and the entropy of every token are kept, for the log of rollouts.
    pub scored: bool,
    /// Values of this step's changing settings, for its log row.
    pub settings: BTreeMap<String, f64>,
}

impl StepConfig {
    /// Returns true if parts of a batch may be trained on as they arrive, with the same gradient.
    /// `backend`: the same property of the backend with this step's algorithm.
    pub fn takes_parts(&self, backend: bool) -> bool {
        // A plain sum has no denominator.
        let has_denominator = self.aggregation != Aggregation::TokenSum;
        let by_group = self.reward_kl.is_none()
            && self.distill.is_none()
            && self.pairs.is_none()
            && self.advantages.as_ref().is_none_or(|advantages| advantages.is_by_group());
        self.optimizer_steps() == 1 && has_denominator && by_group && backend
    }

    /// Rate of update `at` of a step, from 0, after `steps` steps: by their number, because steps before
    /// may have had more updates or fewer.
    pub(super) fn rate(&self, schedule: Option<Schedule>, steps: u64, at: u64) -> Option<Schedule> {
        let update = steps.saturating_mul(self.optimizer_steps()).saturating_add(at);
        schedule.map(|schedule| Schedule::constant(schedule.at(update)))
    }

    /// Largest number of optimizer steps.
    pub fn optimizer_steps(&self) -> u64 {
        self.ppo_epochs.max(1).saturating_mul(self.minibatches.max(1) as u64)
    }
}
