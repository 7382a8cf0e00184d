//! `[train]`: the policy-gradient loss and the optimizer. `[critic]`: the critic of PPO.

use std::path::PathBuf;
use std::sync::Arc;

use super::defaults::{CRITIC, POLICY};
use super::model::DeviceName;
use super::plan::{Pipeline, Plan};
use crate::algo::{
    Advantage, Aggregation, Decay, ImportanceChoice, KlLoss, KlReward, Loss, LossChoice, LossError, OffPolicy, PolicyLoss,
    Proximal, Rejection, Select, all_pairs, best_against_worst, first_against_second, random_pair,
};
use crate::model::Dtype;
use crate::settings::declare::section;
use crate::settings::error::RecipeErrors;
use crate::settings::setting::{
    FINITE, FINITE_IF_GIVEN, Limit, NOT_NEGATIVE, POSITIVE, POSITIVE_IF_GIVEN, SOME, SOME_IF_GIVEN, SOME_STEPS, UP_TO_ONE,
};
use crate::stages::pairs::Pairing;
use crate::stages::train::RewardKl;
use crate::train::{DecayScope, LrScale, MasterFormat, MomentFormat, NonFinitePolicy, RouterReplay};

const BETAS: Limit<[f64; 2]> =
    Limit { text: "each 0 or more and below 1", holds: |betas| betas.iter().all(|beta| (0.0..1.0).contains(beta)) };

/// Infinity switches a bound off.
const BOUND: Limit<f64> = Limit { text: "above 0; inf is no bound", holds: |value| *value > 0.0 };

const BOUND_IF_GIVEN: Limit<Option<f64>> =
    Limit { text: "above 0; inf is no bound", holds: |value| value.is_none_or(|value| value > 0.0) };

section! {
    /// Policy-gradient loss and optimizer.
    pub struct Train {
        /// Optimizer steps of the run, one per batch.
        steps: u64 = 300, SOME_STEPS;
        /// Passes over the prompts, rollouts or pairs of the task, instead of `steps`, which follow
        /// from them, rounded up. Prompts that a filter drops are not counted: others replace them.
        epochs: Option<f64> = None, POSITIVE_IF_GIVEN;
        /// Mean reward of the last 20 steps that ends the run early. Left out: all steps are taken.
        target_reward: Option<f64> = None, FINITE_IF_GIVEN;
        /// PPO epochs: passes over each batch, with an optimizer step per minibatch.
        #[formerly(updates)]
        ppo_epochs: u64 = 1, SOME_STEPS;
        /// Minibatches of each pass, of groups drawn for every pass. Each is an optimizer
        /// step, with means over its own tokens.
        minibatches: usize = 1, SOME;
        /// Peak learning rate. Left out, it follows from the model: 1e-6 for a Hugging Face model
        /// (as TRL's `GRPOConfig` and `DPOConfig`, and verl), 1e-5 for its adapters, 3e-4 for a
        /// small random model.
        lr: f64 = POLICY.random, POSITIVE;
        /// Policy loss.
        loss: LossChoice = LossChoice::default();
        /// KL divergence from the reference policy, in the loss.
        kl_loss: Option<KlLoss> = None;
        /// KL divergence from the reference policy, in the reward.
        kl_reward: Option<KlReward> = None;
        /// Coefficient of the entropy bonus, the mean over the step's trained tokens.
        entropy_coef: f64 = 0.0, FINITE;
        /// Share of the step's tokens that are trained on, those of highest entropy; 0 leaves the
        /// highest alone. Below 1 it costs a second forward pass if the batch is cut into
        /// micro-batches.
        top_entropy: f64 = 1.0, UP_TO_ONE;
        /// Completions of negative advantage are not trained on if their mean log-probability has
        /// fallen by more than this, in nats.
        off_policy_threshold: Option<f64> = None, FINITE_IF_GIVEN;
        /// If true, truncated completions are not trained on (DAPO's overlong filtering). Their rewards are
        /// compared with those of their groups; a group with nothing else is dropped.
        mask_truncated: bool = false;
        /// Advantage estimator.
        advantage: Advantage = Advantage::default();
        /// Weights of tokens in the loss.
        #[formerly(aggregation)]
        loss_aggregation: Aggregation = Aggregation::default();
        /// Policy that probability ratios are taken against. Left out: `recompute` if `correction`
        /// weighs tokens, else `behaviour`.
        proximal: Option<Proximal> = None;
        /// Importance weights for off-policy tokens.
        correction: ImportanceChoice = ImportanceChoice::default();
        /// Conditions under which off-policy tokens or sequences are not trained on.
        reject: Vec<Rejection> = Vec::new();
        /// Use of the experts that computed a sample's tokens in the generator, for a mixture of experts.
        router_replay: RouterReplay = RouterReplay::default();
        /// Mean gap between the generator's and the trainer's log-probabilities, in nats, above
        /// which a step warns. Left out: 1 in f32, 0.15 in 16 bits (`model.dtype`).
        gap_warn: Option<f64> = None, BOUND_IF_GIVEN;
        /// Mean gap above which the run ends before it trains on the step. Left out: 3 in f32, 1 in
        /// 16 bits (`model.dtype`).
        gap_halt: Option<f64> = None, BOUND_IF_GIVEN;
        /// If true, the run does not start when generator and trainer disagree about the
        /// log-probabilities of short completions.
        probe: bool = true;
        last optimization: Optimization;
    }
}

section! {
    /// AdamW and the settings of an optimizer step.
    pub struct Optimization {
        /// Learning rate over the steps.
        schedule: Schedule = Schedule::default();
        /// AdamW's decay rates of the first and second moment.
        betas: [f64; 2] = [0.9, 0.95], BETAS;
        /// AdamW's ε, against division by zero.
        eps: f64 = 1e-8, POSITIVE;
        /// AdamW's decoupled weight decay.
        weight_decay: f64 = 0.0, NOT_NEGATIVE;
        /// Tensors that `weight_decay` shrinks.
        decay: DecayScope = DecayScope::default();
        /// Factors of the learning rate for parts of the model.
        lr_scale: LrScale = LrScale::default();
        /// Largest norm of the gradient; longer ones are scaled down. `inf` scales none.
        max_grad_norm: f64 = 1.0, BOUND;
        /// Weight of the loss that spreads tokens over a mixture's experts, over all layers and the tokens of a
        /// micro-batch: `router_aux_loss_coef` of transformers and TRL, which is 0.001 in most models. 0: none.
        router_aux_loss: f64 = 0.0, NOT_NEGATIVE;
        /// Tokens of one forward and backward pass. The result does not depend on it; memory does.
        micro_batch_tokens: usize = 8192, SOME;
        /// If true, each layer is computed again in the backward pass, so that activations of one
        /// layer are held instead of all. The result is the same. In f16 a pass holds a second f32
        /// gradient of the trained parameters.
        gradient_checkpointing: bool = false;
        /// If true, the inputs of layers that `gradient_checkpointing` keeps wait for the backward pass in the
        /// host's memory: `layers · tokens · hidden` numbers less on a GPU.
        activations_on_host: bool = false;
        /// Format of the parameters that AdamW updates.
        masters: MasterFormat = MasterFormat::default();
        /// Format of AdamW's moments.
        moments: MomentFormat = MomentFormat::default();
        /// Threads of the trainer. Left out: all of the machine's, which it shares with the other
        /// stages.
        threads: Option<usize> = None, SOME_IF_GIVEN;
        /// Replica devices: further devices that take parts of each batch, each with a copy of the
        /// model. The result does not depend on them, up to rounding.
        #[formerly(beside)]
        replica_devices: Vec<DeviceName> = Vec::new();
        /// Policy for a loss or gradient that is not finite.
        on_nonfinite: NonFinitePolicy = NonFinitePolicy::default();
    }
}

section! {
    /// Learning rate over the steps.
    pub struct Schedule {
        /// Shape after the warm-up.
        kind: Decay = Decay::default();
        /// Steps of linear rise from 0 to the peak.
        warmup: u64 = 0;
        /// Last value, as a share of the peak.
        #[formerly(floor)]
        min_lr_ratio: f64 = 0.0, UP_TO_ONE;
    }
}

section! {
    /// A second model that learns the expected return after each token. With it, advantages are
    /// PPO's (GAE) instead of `train.advantage`, and `train.kl_reward` is applied token by token.
    /// It is updated in turn with the policy, on the same batches.
    pub struct Critic {
        /// A Hugging Face folder of a model with the same vocabulary, with a score head or a
        /// language-model head. Left out: the policy at the start of reinforcement. A new score
        /// head starts at 0.
        path: Option<PathBuf> = None;
        /// Peak learning rate of the critic. Left out, it follows from the model: 1e-5 for a
        /// Hugging Face model (as verl), 5e-4 for a small random model.
        lr: f64 = CRITIC.random, POSITIVE;
        /// Clip range of values: a value gains nothing by moving further than this in a step.
        value_clip: f64 = 0.5, BOUND;
        /// Discount factor per token.
        gamma: f64 = 1.0, UP_TO_ONE;
        /// GAE λ: 0 looks ahead to the next value, 1 to the end of the completion.
        lambda: f64 = 1.0, UP_TO_ONE;
        /// If true, advantages are normalised to mean 0 and deviation 1 over the step's tokens.
        whiten: bool = true;
        /// First steps, in which the critic learns and the policy does not change.
        warmup_steps: u64 = 0;
        last optimization: Optimization;
    }
}

impl Train {
    /// Largest gaps between generator and trainer in `precision`: to warn, and to end the run. A
    /// default never contradicts a given bound.
    pub fn gap_limits(&self, precision: Dtype) -> [f64; 2] {
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
        self.ppo_epochs.saturating_mul(self.minibatches as u64)
    }

    /// Centre of the trust region, by default or by choice.
    pub fn centre(&self) -> Proximal {
        let default = if self.correction.is_some() { Proximal::Recompute } else { Proximal::Behaviour };
        self.proximal.unwrap_or(default)
    }

    /// Returns true if a loss or reward needs a reference policy.
    pub fn uses_reference(&self) -> bool {
        let pairs = matches!(&self.loss, LossChoice::Dpo(of) if of.needs_reference());
        pairs || self.kl_loss.is_some() || self.kl_reward.is_some()
    }

    /// Policy training with defaults for all but the essentials, checked.
    pub fn new(steps: u64, lr: f64) -> Result<Self, RecipeErrors> {
        super::checks::validated(Train { steps, lr, ..Train::default() })
    }

    /// Loss with these settings; `None` for a registered one.
    pub fn library_loss(&self) -> Option<Result<Arc<dyn Loss>, LossError>> {
        match &self.loss {
            LossChoice::Custom(_) => None,
            LossChoice::Dpo(of) => {
                let pairs = of.loss();
                Some(pairs.check().map(|()| Arc::new(pairs) as Arc<dyn Loss>))
            }
            _ => {
                let policy = self.policy_loss();
                Some(policy.check().map(|()| Arc::new(policy) as Arc<dyn Loss>))
            }
        }
    }

    /// Policy loss with these settings.
    pub fn policy_loss(&self) -> PolicyLoss {
        PolicyLoss {
            surrogate: self.loss.clone(),
            kl_loss: self.kl_loss.clone(),
            top_entropy: self.top_entropy,
            off_policy_threshold: self.off_policy_threshold,
            entropy_coef: self.entropy_coef,
            ..PolicyLoss::default()
        }
    }

    /// Correction of off-policy tokens.
    pub fn off_policy(&self) -> OffPolicy {
        OffPolicy { proximal: self.centre(), weigh: self.correction.importance(), reject: self.reject.clone() }
    }

    /// KL penalty in the reward, if any.
    pub fn reward_kl(&self) -> Option<RewardKl> {
        self.kl_reward.clone().map(RewardKl::from)
    }
}

impl Plan {
    /// Weights of tokens in the loss; those of `dr_grpo` follow from `generate.max_new_tokens`.
    pub fn aggregation(&self) -> Aggregation {
        match self.train.loss_aggregation {
            Aggregation::DrGrpo { max_len: 0 } => Aggregation::DrGrpo { max_len: self.generate.max_new_tokens },
            other => other,
        }
    }

    /// Pairs of `[pairs]`, or those of the data set with `pipeline = "dpo"`.
    pub fn pairing(&self) -> Option<Pairing> {
        if self.pipeline == Pipeline::Dpo {
            return Some(Pairing::by(first_against_second));
        }
        self.pairs.as_ref().map(|of| match of.select {
            Select::BestWorst => Pairing::by(best_against_worst),
            Select::Random => Pairing::by(random_pair(self.seed)),
            Select::All => Pairing::by(all_pairs),
        })
    }
}
