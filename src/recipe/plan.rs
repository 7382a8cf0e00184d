//! A whole recipe as plain data: what every part of a run needs to know, with all defaults filled in.

use crate::engine::settings::Engine;
use crate::stages::batch::OVERSAMPLING_FACTOR;
pub use crate::stages::filter::Fallback;
pub use crate::stages::reward::OnLostSample;
pub use crate::stages::train::OnStale;
use std::net::SocketAddr;
use std::path::PathBuf;

use super::chat::Chat;
use super::environment::Environment;
use super::eval::Eval;
use super::generate::{Filter, Generate};
use super::lora::Lora;
use super::model::Model;
use super::reference_policy::{Reference, ReferencePolicy, Teacher};
use super::reward::Reward;
use super::task::{RewardModel, Sft, Task, TaskData};
use super::timeline::{Change, Ramp};
use super::trackers::{Mlflow, Trackio, Wandb};
use super::train::{Critic, Train};
use super::trainer::TrainerPlace;
use crate::algo::Pairs;
use crate::model::Dtype;
use crate::ranks::Ranks;
use crate::rollout::CurriculumRule;
use crate::settings::declare::{choices, section};
use crate::settings::setting::{FROM_ONE, GIVEN, POSITIVE, SOME, SOME_IF_GIVEN, SOME_STEPS};
use crate::weights::StoreRule;

section! {
    /// A run: every section of a recipe, with all defaults filled in.
    pub struct Plan {
        /// Prebuilt pipeline to run.
        pipeline: Pipeline = Pipeline::default();
        /// Name of the run, in its folder and reports.
        name: String = "run".to_owned(), GIVEN;
        /// Seed of every random draw of the run.
        seed: u64 = 0;
        /// Policy for 64 batches' worth of groups in a row that `filter` rejects.
        filter_fallback: Fallback = Fallback::default();
        /// Source of the policy's first weights, and how models compute.
        model: Model = Model::default();
        /// Adapters that are trained instead of the weights.
        lora: Option<Lora> = None;
        /// Conversion of conversations into tokens.
        chat: Chat = Chat::default();
        /// Prompts.
        task: Task = Task::default();
        /// Choice of prompts by the pass rates of their earlier groups. Left out: every prompt in the
        /// order of the stream.
        curriculum: Option<CurriculumRule> = None;
        /// Supervised training.
        sft: Option<Sft> = None;
        /// Supervised training alongside reinforcement.
        mix: Option<Mix> = None;
        /// Training of a reward model.
        reward_model: Option<RewardModel> = None;
        /// Sampling of completions.
        generate: Generate = Generate::default();
        /// Engine that generates, and how servers get weights.
        engine: Engine = Engine::default();
        /// Environment of multi-turn rollouts.
        environment: Option<Environment> = None;
        /// Reward of a completion.
        reward: Reward = Reward::default();
        /// Conditions that a group must meet to be trained on.
        filter: Vec<Filter> = Vec::new();
        /// Selection of pairs among a group's completions.
        pairs: Option<Pairs> = None;
        /// Reference policy, which KL terms and losses of pairs are taken against.
        reference: Option<Reference> = None;
        /// Teacher, from which the policy is distilled.
        teacher: Option<Teacher> = None;
        /// Groups of one optimizer step.
        batch: Batching = Batching::default();
        /// The policy-gradient loss and the optimizer.
        train: Train = Train::default();
        /// Where the policy is trained.
        trainer: TrainerPlace = TrainerPlace::default();
        /// Critic: expected return of each token (PPO).
        critic: Option<Critic> = None;
        /// Phases: keys with other values from a step on; may be repeated.
        change: Vec<Change> = Vec::new();
        /// Schedules of other numbers; may be repeated.
        ramp: Vec<Ramp> = Vec::new();
        /// Weight sync.
        sync: Syncing = Syncing::default();
        /// Staleness, and limits of what is in flight.
        flow: FlowLimits = FlowLimits::default();
        /// Evaluation during the training.
        eval: Option<Eval> = None;
        /// Checkpoints.
        checkpoint: Checkpointing = Checkpointing::default();
        /// Object store for weights and checkpoints.
        store: StoreRule = StoreRule::default();
        /// Metrics, logs and progress.
        observe: Observe = Observe::default();
        /// Connections to servers, and the servers of this run.
        net: Net = Net::default();
        /// Processes that share the training of one model.
        ranks: Ranks = Ranks::default();
    }
}

choices! {
    /// Prebuilt pipeline.
    pub enum Pipeline {
        /// group-relative policy optimization, after a supervised warm-up if there is a section `[sft]`.
        "grpo" => Grpo,
        /// supervised training alone.
        "sft" => Sft,
        /// supervised training as a separate run, then `grpo` from its newest checkpoint.
        "sft_then_grpo" => SftThenGrpo,
        /// training of a reward model on pairs of completions.
        "reward_model" => RewardModel,
        /// on-policy distillation from a `[teacher]`: `grpo` without a reward, unless there is a
        /// section `[reward]`.
        "distill" => Distill,
        /// `grpo` on recorded rollouts, without a generator.
        "grpo_offline" => GrpoOffline,
        /// preference training on a data set of pairs, of which one completion is chosen and the
        /// other rejected (DPO and its family).
        "dpo" => Dpo,
    }
}

/// Keys of `[eval]` that say how completions are sampled and judged: held-out pairs need neither.
const SAMPLED_EVALUATION: &str = "samples greedy temperature top_p max_new_tokens success max_num_seqs";

/// Sections that some pipelines do not read, and the pipelines that read them.
const READ_BY: [(&str, &str); 8] = [
    ("sft", "grpo sft sft_then_grpo distill grpo_offline"),
    ("reward_model", "reward_model"),
    ("mix generate filter teacher", "grpo sft_then_grpo distill grpo_offline"),
    ("critic", "grpo sft_then_grpo grpo_offline"),
    ("reference batch train", "grpo sft_then_grpo distill grpo_offline dpo"),
    ("trainer", "grpo distill"),
    ("curriculum engine environment reward filter_fallback sync flow", "grpo sft_then_grpo distill"),
    ("pairs", "grpo sft_then_grpo"),
];

impl Plan {
    /// Returns true if servers load adapters instead of all weights.
    pub fn syncs_adapters(&self) -> bool {
        self.engine.is_remote() && self.lora.as_ref().is_some_and(|lora| !lora.merges())
    }

    /// Returns true if `[reward]` replaces recorded rewards.
    pub fn rescores(&self) -> bool {
        self.pipeline == Pipeline::GrpoOffline && matches!(self.task.data, TaskData::Rollouts { rescore: true, .. })
    }

    /// Returns true if `[reward]` judges completions: in training, in an evaluation, or recorded ones.
    pub(crate) fn judges(&self) -> bool {
        let evaluates = self.eval.is_some() && !self.pipeline.evaluates_pairs();
        self.pipeline.reinforces() || self.rescores() || evaluates
    }

    /// Returns true if completions for a data set's prompts are judged, in training or in an
    /// evaluation.
    pub(crate) fn judges_data(&self) -> bool {
        let is_data = |task: &Task| matches!(task.data, TaskData::Data(_));
        let asked = self.eval.as_ref().map(|eval| eval.task.as_ref().unwrap_or(&self.task));
        let asked = asked.filter(|_| !self.pipeline.evaluates_pairs());
        self.pipeline.reinforces() && is_data(&self.task) || self.rescores() || asked.is_some_and(is_data)
    }

    /// The policies that score the trained one's completions, each with its section.
    pub fn scoring_policies(&self) -> impl Iterator<Item = (&'static str, &ReferencePolicy)> {
        let reference = self.reference.iter().map(|of| ("reference", &of.policy));
        reference.chain(self.teacher.iter().map(|of| ("teacher", &of.policy)))
    }

    /// Sections without effect in this plan's pipeline. An evaluation samples and judges
    /// completions in every pipeline.
    pub(crate) fn unused_sections(&self) -> Vec<&'static str> {
        let sampled = self.eval.is_some() && !self.pipeline.evaluates_pairs();
        let evaluated = |section: &str| sampled && ["generate", "reward"].contains(&section);
        let unread = |pipelines: &str| pipelines.split(' ').all(|word| word != self.pipeline.word());
        let sections = READ_BY.iter().filter(|(_, by)| unread(by)).flat_map(|(sections, _)| sections.split(' '));
        sections.filter(|section| !evaluated(section) && (*section != "reward" || !self.rescores())).collect()
    }

    /// Keys, each with its section, that mean nothing to this plan's pipeline.
    pub(crate) fn unused_keys(&self) -> impl Iterator<Item = (&'static str, &'static str)> {
        let keys = if self.pipeline.evaluates_pairs() { SAMPLED_EVALUATION } else { "" };
        keys.split_whitespace().map(|key| ("eval", key))
    }
}

impl Pipeline {
    /// Returns true if `[eval]` judges held-out pairs, and samples nothing.
    pub(crate) fn evaluates_pairs(self) -> bool {
        matches!(self, Pipeline::Dpo | Pipeline::RewardModel)
    }

    /// Returns true if `[train]` configures the training.
    pub(crate) fn trains_by_train(self) -> bool {
        !matches!(self, Pipeline::Sft | Pipeline::RewardModel)
    }

    /// Returns true if the policy is reinforced.
    pub fn reinforces(self) -> bool {
        matches!(self, Pipeline::Grpo | Pipeline::SftThenGrpo | Pipeline::Distill)
    }
}

section! {
    /// Supervised training alongside reinforcement, on the pairs of `[sft]`: its gradient is added
    /// to that of the step.
    pub struct Mix {
        /// Weight of its loss, the mean over its tokens, relative to the policy's.
        weight: f64 = 0.1, POSITIVE;
        /// Interval in steps; 1 mixes into every step.
        every: u64 = 1, SOME_STEPS;
        /// Pairs per mixed step.
        batch: usize = 16, SOME;
    }
}

section! {
    /// Groups of one optimizer step.
    pub struct Batching {
        /// Groups per step.
        groups: usize = 32, SOME;
        /// Over-sampling factor: this many times `groups`, rounded up, are in flight for a step,
        /// which takes the first that finish; the others stay for the next step. 1 takes groups
        /// strictly in the order of their prompts. A synchronous run (`flow.max_staleness = 0`)
        /// waits for all of them, takes the oldest that the filter kept and drops the rest as
        /// *surplus*. That saves a second round when a filter drops groups, and no time for long
        /// completions.
        #[formerly(over_sample)]
        oversampling_factor: f64 = OVERSAMPLING_FACTOR, FROM_ONE;
    }
}

section! {
    /// Weight sync.
    pub struct Syncing {
        /// Optimizer steps between publishes.
        every: u64 = 1, SOME_STEPS;
    }
}

section! {
    /// Staleness, and limits of what is in flight.
    pub struct FlowLimits {
        /// Largest lag, in published versions, between the weights that sampled a token and those
        /// that train on it. 0 is the synchronous run: bit for bit repeatable on the local engine,
        /// and the same algorithm with servers.
        max_staleness: u64 = 1;
        /// Policy for groups that would be older than `max_staleness`.
        on_stale: OnStale = OnStale::default();
        /// Policy for a group that lost samples to an engine, an environment, a sandbox or a
        /// service, after all retries. A completion that is truncated or judged too slowly is not
        /// lost, because it has a verdict.
        on_lost_sample: OnLostSample = OnLostSample::default();
        /// Groups between admission and training. Left out: as many as the staleness allows,
        /// (`max_staleness` + 1) × `sync.every` × `batch.groups`; with over-sampling
        /// (`batch.oversampling_factor` + `sync.every` − 1) × `batch.groups`.
        window: Option<usize> = None, SOME_IF_GIVEN;
        /// Most messages that wait between two stages.
        edge_items: usize = 64, SOME;
        /// Most tokens that wait between two stages. A single larger message still passes.
        edge_tokens: usize = 262_144, SOME;
    }
}

section! {
    /// Checkpoints. The last step is always saved.
    pub struct Checkpointing {
        /// Optimizer steps between checkpoints; 0 saves only the last step. With `sync.every` above 1, a
        /// checkpoint is taken at the first step from there that publishes weights.
        every: u64 = 100;
        /// Newest checkpoints that are kept, at least two: a resume may need the second newest.
        keep: usize = 3, SOME;
        /// Format of the weights in checkpoints. Left out: that of the model's folder. If it is not
        /// f32, the f32 parameters that a resume needs are saved with the optimizer's state.
        dtype: Option<Dtype> = None;
    }
}

section! {
    /// Metrics, logs and progress.
    pub struct Observe {
        /// Address of the Prometheus endpoint; port 0 takes a free port. Left out, metrics are not
        /// served.
        metrics: Option<SocketAddr> = None;
        /// Address of the run's live page; port 0 takes a free port. Left out, no page is served. An
        /// address that other hosts can reach needs `page_token_env`.
        page: Option<SocketAddr> = None;
        /// Environment variable with the token that the live page asks its readers for. Left out, it is
        /// `ROLLFLOW_PAGE_TOKEN`, if that is set.
        page_token_env: Option<String> = None;
        /// Optimizer steps between steps whose rollouts are written to `rollouts.jsonl`; 0 writes
        /// none.
        rollouts_every: u64 = 10;
        /// If true, metrics are also written as TensorBoard events.
        tensorboard: bool = false;
        /// Address of an OpenTelemetry collector, such as "http://127.0.0.1:4318", that gets traces of groups
        /// and the run's metrics over HTTP. Needs a build with the feature `otlp`.
        otlp: Option<String> = None;
        /// Groups between groups whose way from prompt to optimizer is traced.
        otlp_every: u64 = 16, SOME_STEPS;
        /// Weights & Biases, to which the run is logged while it lasts.
        wandb: Option<Wandb> = None;
        /// trackio, to which the run is logged while it lasts.
        trackio: Option<Trackio> = None;
        /// MLflow, to which the run is logged while it lasts.
        mlflow: Option<Mlflow> = None;
        /// Optimizer steps between printed lines such as `Step 20: reward=0.43 loss=0.0214
        /// grad_norm=0.81 lr=2e-4`.
        log_every: u64 = 10, SOME_STEPS;
        /// If true, a progress line is shown: redrawn on a terminal, a plain line every few seconds
        /// elsewhere.
        progress: bool = true;
    }
}

section! {
    /// Connections to servers, and the servers of this run.
    pub struct Net {
        /// PEM file of certificate authorities that are trusted in addition to the system's, for
        /// every `https://` address of the recipe and for downloads. The environment variable
        /// SSL_CERT_FILE replaces the system's.
        ca_file: Option<PathBuf> = None;
        /// Host names for this run's own servers (metrics, agents), in addition to `localhost` and
        /// numeric addresses. Requests with other host names are rejected, so that no web page can
        /// read them under its own domain name.
        allowed_hosts: Vec<String> = Vec::new();
    }
}
