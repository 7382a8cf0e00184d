//! Critic of PPO (Schulman et al., 2017): a second backend, whose model has a score head.
//!
//! `V(s_t)`, the value before token `t`, is the score at the row that predicts `t`, so that policy
//! and critic share one collated batch. A token's reward is its [`RewardKl`] penalty, plus the
//! completion's reward at the last token, as in verl's `apply_kl_penalty`.
//!
//! Generalised advantage estimation gives advantages and returns, and advantages are whitened over
//! the whole batch (law N1). The value after a truncated completion is 0, as in verl. The critic
//! learns the returns in the policy's minibatches, in turn with it, so that both never need more
//! cores than the larger one.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::kl_reward::{KlCost, RewardKl};
use crate::algo::{LossMetrics, Schedule, masked_mean, masked_variance, whiten};
use crate::data::Batch;
use crate::flow::StageError;
use crate::rollout::mean;
use crate::train::{
    OptimStep, SaveCheckpoint, TokenColumn, TrainBatch, TrainError, TrainFuture, TrainingBackend, token_advantages, token_rewards,
};
use crate::util::atomic_file;

/// Folder in a checkpoint.
const FOLDER: &str = "critic";
/// Folder in the run folder before the checkpoint includes it.
const STAGING: &str = ".critic.writing";

/// Critic, and settings of advantage estimation.
pub struct Critic<B> {
    /// Backend with a score head and [`ValueLoss`](crate::algo::ValueLoss).
    pub backend: B,
    /// Discount factor γ per token; 1 by default.
    pub gamma: f64,
    /// GAE's λ: 0 looks one token ahead, 1 (the default) to the end.
    pub lambda: f64,
    /// If true (the default), advantages are normalised to mean 0 and deviation 1 over the batch's
    /// tokens.
    pub whiten: bool,
    /// Number of first steps that train only the critic; 0 by default. The policy stays unchanged and
    /// is published as usual.
    pub warm_up: u64,
}

/// Metrics of a critic's step.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct CriticStep {
    /// Mean value of the step's trained tokens, before the first update.
    pub value: f64,
    /// Mean return.
    pub returns: f64,
    /// Explained variance, `1 − Var(returns − values) / Var(returns)`: at most 1; a constant has 0.
    /// `None` if all returns are equal.
    pub explained: Option<f64>,
    /// Mean loss over the step's updates.
    pub loss: f64,
    /// Counts of the loss over these updates.
    pub metrics: LossMetrics,
    /// Result of the last update.
    pub optim: OptimStep,
    /// Number of updates.
    pub updates: u32,
    /// Number of updates that were skipped, because a loss or gradient was not finite.
    pub updates_skipped: u64,
}

/// A batch with values.
pub(super) struct Valued {
    /// Batch with advantages, for the policy.
    pub policy: TrainBatch,
    /// Batch with returns as advantages, and the values before the update, for the critic.
    pub critic: TrainBatch,
    /// KL penalty in the rewards.
    pub kl_cost: Option<KlCost>,
    pub step: CriticStep,
}

impl<B: TrainingBackend> Critic<B> {
    /// Critic on `backend` with the default settings.
    pub fn new(backend: B) -> Self {
        Critic { backend, gamma: 1.0, lambda: 1.0, whiten: true, warm_up: 0 }
    }

    pub(super) fn warms_up(&self, step: u64) -> bool {
        step <= self.warm_up
    }

    /// Computes values, advantages and returns. A sample's advantage becomes the mean over its
    /// tokens, for logs.
    pub(super) fn value(
        &self,
        batch: &mut Batch,
        collated: TrainBatch,
        kl: Option<&RewardKl>,
        coef: Option<f64>,
    ) -> Result<Valued, StageError> {
        let mut rewards = token_rewards(batch.samples())?;
        let costs = kl.map(|kl| kl.costs(batch, coef)).transpose()?;
        let kl_cost = costs.map(|(costs, cost)| {
            // The KL penalty of every token is subtracted from its reward.
            rewards.iter_mut().flatten().zip(costs.iter().flatten()).for_each(|(reward, kl)| *reward -= cost.coef * kl);
            cost
        });
        let collated = Arc::new(collated);
        let values = self.backend.score(collated.clone()).wait()?;
        for (sequence, values) in collated.sequences.iter().zip(&values) {
            if let Some(value) = values.iter().find(|value| !value.is_finite()) {
                return Err(TrainError::BadSample(sequence.name(), "critic's value", *value).into());
            }
        }
        let (advantages, returns) = token_advantages(&rewards, &values, self.gamma, self.lambda)?;
        let advantages = if self.whiten { whitened(&advantages) } else { advantages };
        let samples = batch.groups.iter_mut().flat_map(|group| &mut group.samples);
        samples.zip(&advantages).for_each(|(sample, advantages)| sample.advantage = mean(advantages.iter().copied()));
        let step = CriticStep::before(&values.concat(), &returns.concat());
        // The critic has its own loss.
        let mut critic = TrainBatch { algorithm: None, ..TrainBatch::clone(&collated) };
        for ((sequence, returns), values) in critic.sequences.iter_mut().zip(returns).zip(values) {
            sequence.advantages = returns;
            // Losses clip around behaviour or proximal values.
            (sequence.behaviour, sequence.proximal) = (Some(values.clone()), Some(values));
        }
        let mut policy = Arc::unwrap_or_clone(collated);
        policy.sequences.iter_mut().zip(advantages).for_each(|(sequence, advantages)| sequence.advantages = advantages);
        Ok(Valued { policy, critic, kl_cost, step })
    }

    pub(super) fn learn(
        &self,
        minibatch: Arc<TrainBatch>,
        rate: Option<Schedule>,
        step: &mut CriticStep,
    ) -> Result<(), TrainError> {
        let seen = self.backend.forward_backward(minibatch).wait()?;
        step.optim = self.backend.update(1.0, rate).wait()?;
        if step.optim.skipped.is_none() {
            step.metrics.merge(&seen.metrics);
            step.updates += 1;
            step.loss += (seen.loss - step.loss) / f64::from(step.updates);
        } else {
            step.updates_skipped += 1;
        }
        Ok(())
    }

    /// Saves the critic's state in the run folder. Returns its name in the checkpoint of `step`, and its
    /// folder when it is written.
    pub(super) fn save(&self, run_folder: &Path, step: u64) -> Result<(String, TrainFuture<PathBuf>), TrainError> {
        let request = SaveCheckpoint { run_folder: run_folder.join(STAGING), step, ..SaveCheckpoint::default() };
        let saved = self.backend.save_checkpoint(request);
        saved.copied.wait()?;
        Ok((FOLDER.to_owned(), saved.written))
    }

    pub(super) fn load(&self, checkpoint: &Path) -> Result<(), TrainError> {
        self.backend.load_checkpoint(&checkpoint.join(FOLDER)).wait().map(drop)
    }
}

/// Removes the folder that [`Critic::save`] wrote.
pub(super) fn clear(run_folder: &Path) -> Result<(), TrainError> {
    let staging = run_folder.join(STAGING);
    atomic_file::remove(&staging).map_err(TrainError::io(&staging))
}

fn whitened(advantages: &TokenColumn) -> TokenColumn {
    let all = advantages.concat();
    let mut white = whiten(&all, &vec![1.0; all.len()], true).into_iter();
    advantages.iter().map(|tokens| white.by_ref().take(tokens.len()).collect()).collect()
}

impl CriticStep {
    /// Metrics of values before the first update.
    fn before(values: &[f64], returns: &[f64]) -> Self {
        let all = vec![1.0; values.len()];
        let variance = |of: &[f64]| masked_variance(of, &all, false);
        let errors: Vec<f64> = returns.iter().zip(values).map(|(returned, value)| returned - value).collect();
        let differ = returns.iter().any(|value| *value != returns[0]);
        CriticStep {
            value: masked_mean(values, &all),
            returns: masked_mean(returns, &all),
            explained: differ.then(|| 1.0 - variance(&errors) / variance(returns)),
            ..CriticStep::default()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_critic_explains_is_1_of_everything_0_of_a_constant_and_nothing_of_equal_returns() {
        let explained = |values: &[f64], returns: &[f64]| CriticStep::before(values, returns).explained;
        assert_eq!(explained(&[0.0, 1.0, 0.5], &[0.0, 1.0, 0.5]), Some(1.0));
        assert!(explained(&[0.3; 3], &[0.0, 1.0, 0.5]).unwrap().abs() < 1e-9);
        assert!(explained(&[1.0, 0.0, 0.5], &[0.0, 1.0, 0.5]).unwrap() < 0.0);
        assert_eq!((explained(&[0.1, 0.2], &[1.0; 2]), explained(&[], &[])), (None, None));
    }
}
