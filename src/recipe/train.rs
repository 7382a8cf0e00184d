//! `[train]`: the policy-gradient loss and the optimizer.

use super::advantage::Advantage;
use super::correction::{Correction, Proximal, Reject};
use super::defaults::POLICY;
use super::kl::{KlLoss, KlReward};
use super::loss::Loss;
use super::model::{DeviceName, Precision};
pub use crate::algo::Decay;
use crate::settings::declare::{choices, section};
use crate::settings::error::RecipeErrors;
use crate::settings::setting::{
    FINITE, FINITE_IF_GIVEN, Limit, NOT_NEGATIVE, POSITIVE, POSITIVE_IF_GIVEN, SHARE, SOME, SOME_STEPS, UP_TO_ONE,
};
pub use crate::train::DecayScope;
pub use crate::train::NonFinitePolicy;

const BETAS: Limit<[f64; 2]> =
    Limit { text: "each 0 or more and below 1", holds: |betas| betas.iter().all(|beta| (0.0..1.0).contains(beta)) };

/// Infinity switches a bound off.
pub(crate) const BOUND: Limit<f64> = Limit { text: "above 0; inf is no bound", holds: |value| *value > 0.0 };

const BOUND_IF_GIVEN: Limit<Option<f64>> =
    Limit { text: "above 0; inf is no bound", holds: |value| value.is_none_or(|value| value > 0.0) };

section! {
    /// One optimizer step on every batch of groups.
    pub struct Train {
        /// Steps of the run, one for every batch.
        steps: u64 = 300, SOME_STEPS;
        /// Passes over the task's prompts, rollouts or pairs, instead of `steps`, which follow from them and are rounded up. Prompts that a
        /// filter drops are not counted: others take their places.
        epochs: Option<f64> = None, POSITIVE_IF_GIVEN;
        /// Ends the run sooner, once the mean reward of the last 20 steps reaches this; without it, all steps are taken.
        target_reward: Option<f64> = None;
        /// Passes over each batch, an update each, or as many as there are minibatches.
        updates: u64 = 1, SOME_STEPS;
        /// Parts that each pass is cut into, of groups drawn anew every time: an update each, with means over its own tokens.
        minibatches: usize = 1, SOME;
        /// Peak learning rate. Left out, it follows from the model: 1e-6 for a Hugging Face model (as TRL's `GRPOConfig` and `DPOConfig`, and
        /// verl), 1e-5 for its adapters, 3e-4 for a small random model.
        lr: f64 = POLICY.random, POSITIVE;
        /// What the policy learns from a probability ratio and an advantage.
        loss: Loss = Loss::default();
        /// A divergence from the reference policy in the loss.
        kl_loss: Option<KlLoss> = None;
        /// A divergence from the reference policy in the reward.
        kl_reward: Option<KlReward> = None;
        /// Weight of an entropy bonus, the mean over the step's trained tokens.
        entropy_coef: f64 = 0.0, FINITE;
        /// Share of the step's tokens that are trained, those of highest entropy; below 1 it costs a second forward pass where the batch is cut into
        /// parts.
        top_entropy: f64 = 1.0, SHARE;
        /// Answers of negative advantage are not trained on where their log-probabilities have fallen by more than this in the mean.
        off_policy_threshold: Option<f64> = None, FINITE_IF_GIVEN;
        /// What rewards are compared with.
        advantage: Advantage = Advantage::default();
        /// How tokens weigh in the loss.
        aggregation: Aggregation = Aggregation::default();
        /// What probability ratios are taken against. Left out: `recompute` where `correction` weighs tokens, else `behaviour`.
        proximal: Option<Proximal> = None;
        /// Importance weights for tokens of another policy.
        correction: Correction = Correction::default();
        /// What is not trained on because it is too far from the policy that sampled it.
        reject: Vec<Reject> = Vec::new();
        /// A mean gap between generator's and trainer's log-probabilities above this, in nats, is warned about. Left out: 1 in f32, 0.15 in 16 bits
        /// (`model.dtype`).
        gap_warn: Option<f64> = None, BOUND_IF_GIVEN;
        /// A mean gap above this ends the run before it is learned from. Left out: 3 in f32, 1 in 16 bits (`model.dtype`).
        gap_halt: Option<f64> = None, BOUND_IF_GIVEN;
        /// Whether the run refuses to start when generator and trainer disagree about the log-probabilities of a short answer.
        probe: bool = true;
        last optimization: Optimization;
    }
}

choices! {
    /// How tokens weigh in the loss.
    pub enum Aggregation {
        /// all trained tokens of the step weigh the same.
        "token_mean" => TokenMean,
        /// all answers weigh the same, and the tokens within one.
        "seq_mean_token_mean" => SeqMeanTokenMean,
        /// an answer weighs by its length: each token 1 / answers.
        "seq_mean_token_sum" => SeqMeanTokenSum,
        /// each token weighs 1 / (answers × `max_new_tokens`).
        "dr_grpo" => DrGrpo,
        /// each token weighs 1; the step's size grows with its tokens.
        "token_sum" => TokenSum,
    }
}

section! {
    /// How gradients become new weights: AdamW, and what surrounds it.
    pub struct Optimization {
        /// How the learning rate moves over the steps.
        schedule: Schedule = Schedule::default();
        /// AdamW's decay rates of the first and second moment.
        betas: [f64; 2] = [0.9, 0.95], BETAS;
        /// AdamW's guard against division by zero.
        eps: f64 = 1e-8, POSITIVE;
        /// AdamW's decoupled weight decay.
        weight_decay: f64 = 0.0, NOT_NEGATIVE;
        /// Tensors that `weight_decay` shrinks.
        decay: DecayScope = DecayScope::default();
        /// Factors of the learning rate for parts of the model.
        lr_scale: LrScale = LrScale::default();
        /// Longer gradients are scaled down to this norm.
        max_grad_norm: f64 = 1.0, POSITIVE;
        /// Tokens of one forward and backward pass; the result does not depend on it, memory does.
        micro_batch_tokens: usize = 8192, SOME;
        /// Whether each layer is computed once more in the backward pass, so that activations of one layer are held rather than of all. The
        /// result is the same.
        gradient_checkpointing: bool = false;
        /// Threads of the trainer.
        threads: usize = 1, SOME;
        /// Devices that take parts of each batch beside `model.device`, each with a copy of the model. The result does not depend on them, but for rounding.
        beside: Vec<DeviceName> = Vec::new();
        /// What happens when a loss or gradient is not finite.
        on_nonfinite: NonFinitePolicy = NonFinitePolicy::default();
    }
}

section! {
    /// Factors of the learning rate for parts of the model; at 0 a part is not trained. A factor for a part that the model does not have is an error.
    pub struct LrScale {
        /// Of the token embeddings, and of the output head where it is tied to them.
        embeddings: f64 = 1.0, NOT_NEGATIVE;
        /// Of an output head of its own.
        head: f64 = 1.0, NOT_NEGATIVE;
        /// Of adapters (`[lora]`).
        adapters: f64 = 1.0, NOT_NEGATIVE;
        /// Of a score head: reward models and critics.
        score_head: f64 = 1.0, NOT_NEGATIVE;
    }
}

section! {
    /// The learning rate over the steps.
    pub struct Schedule {
        /// Its shape after the warm-up.
        kind: Decay = Decay::default();
        /// Steps of linear rise from 0 to the peak.
        warmup: u64 = 0;
        /// Where it ends, as a share of the peak.
        floor: f64 = 0.0, UP_TO_ONE;
    }
}

impl Train {
    /// Bounds on the gap between generator and trainer where they compute in `precision`: to warn, and to end the run. A bound that is left out never
    /// contradicts one that is given.
    pub fn gap_limits(&self, precision: Precision) -> [f64; 2] {
        let [warn, halt] = precision.gap_limits();
        match (self.gap_warn, self.gap_halt) {
            (Some(own_warn), Some(own_halt)) => [own_warn, own_halt],
            (Some(own), None) => [own, halt.max(own)],
            (None, Some(own)) => [warn.min(own), own],
            (None, None) => [warn, halt],
        }
    }

    /// Optimizer steps in a step.
    pub fn updates_a_step(&self) -> u64 {
        self.updates.saturating_mul(self.minibatches as u64)
    }

    /// What ratios are taken against, by default or by choice.
    pub fn centre(&self) -> Proximal {
        let default = if self.correction.is_some() { Proximal::Recompute } else { Proximal::Behaviour };
        self.proximal.unwrap_or(default)
    }

    /// Whether anything looks at a reference policy.
    pub fn uses_reference(&self) -> bool {
        let pairs = matches!(&self.loss, Loss::Dpo(of) if of.needs_reference());
        pairs || self.kl_loss.is_some() || self.kl_reward.is_some()
    }

    /// Policy training with defaults for all but the essentials, checked.
    pub fn new(steps: u64, lr: f64) -> Result<Self, RecipeErrors> {
        super::checks::validated(Train { steps, lr, ..Train::default() })
    }
}
