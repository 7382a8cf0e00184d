//! Message after a step.

use std::collections::BTreeMap;

use super::critic::CriticStep;
use super::kl_reward::KlCost;
use crate::data::{Batch, Version};
use crate::flow::Message;
use crate::rollout::Totals;
use crate::train::{ForwardBackward, OptimStep, Snapshot};

/// A batch after its step. A run's first message has step 0, an empty batch and the initial
/// weights.
#[derive(Debug)]
pub struct Trained<W> {
    /// Steps taken in this run, this one included.
    pub step: u64,
    /// The version whose weights were trained: the newest published before the step.
    pub version: Version,
    /// The trained batch, with rewards and advantages.
    pub batch: Batch,
    /// Result of the forward pass. With several updates: the first pass, with the loss's counts of
    /// all.
    pub forward: ForwardBackward,
    /// Result of the last update.
    pub optim: OptimStep,
    /// PPO epochs: passes over the batch.
    pub ppo_epochs: u64,
    /// Updates of the policy, the last one and skipped ones included.
    pub updates: u64,
    /// Updates of policy and critic that were skipped, because a loss or gradient was not finite.
    pub updates_skipped: u64,
    /// KL penalty in the rewards, if there is one.
    pub kl_cost: Option<KlCost>,
    /// Changing settings of this step, by metric.
    pub settings: BTreeMap<String, f64>,
    /// Metrics of the critic, if there is one.
    pub critic: Option<CriticStep>,
    /// Fates of all prompts and tokens so far (law D4), if the trainer has an admission.
    pub totals: Option<Totals>,
    /// New weights, on steps that publish.
    pub publish: Option<Snapshot<W>>,
    /// Results of evaluations that have ended since the last step.
    pub evaluated: BTreeMap<String, f64>,
    /// Duration of the step in seconds, without waiting for parts of its batch.
    pub seconds: f64,
    /// Part of `seconds` after the last pass: update and copy for the publish.
    pub update_seconds: f64,
}

/// Step 0 without weights.
impl<W> Default for Trained<W> {
    fn default() -> Self {
        Trained {
            step: 0,
            version: 0,
            batch: Batch::default(),
            forward: ForwardBackward::default(),
            optim: OptimStep::default(),
            ppo_epochs: 1,
            updates: 1,
            updates_skipped: 0,
            kl_cost: None,
            settings: BTreeMap::new(),
            critic: None,
            totals: None,
            publish: None,
            evaluated: BTreeMap::new(),
            seconds: 0.0,
            update_seconds: 0.0,
        }
    }
}

impl<W: Send + Sync + 'static> Message for Trained<W> {
    fn tokens(&self) -> usize {
        self.batch.tokens()
    }
}
