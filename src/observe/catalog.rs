//! Every metric there is, declared once: name, unit, kind, labels and one sentence.
//!
//! The table is the only place with metric names: `docs/reference/metrics.md` is generated from it,
//! Prometheus gets [`Metric::name`], and the rows of `metrics.jsonl` use [`Metric::key`]. Names
//! follow the Prometheus conventions (prefix, base units, `_total` on counters).

/// Prefix of every Prometheus name.
const PREFIX: &str = "rollflow_";

/// Type of a metric.
#[derive(Clone, Copy)]
enum Kind {
    /// Only grows.
    Counter,
    /// Takes the newest value.
    Gauge,
    /// Counts observations in buckets with these ascending upper bounds, and a last one without
    /// bound.
    Histogram(&'static [f64]),
}

/// A label's name and all its values; no values where the run decides, as for stage names.
type Label = (&'static str, &'static [&'static str]);

/// Declaration of one metric.
struct Spec {
    name: &'static str,
    unit: &'static str,
    kind: Kind,
    labels: &'static [Label],
    help: &'static str,
}

const COUNT: Kind = Kind::Counter;
const GAUGE: Kind = Kind::Gauge;
/// From a tiny model's step on a laptop to a large model's sync over a network.
const LATENCY: Kind = Kind::Histogram(&[
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0,
]);
/// Small whole lags matter one by one; from 8 on only their order does.
const LAG: Kind = Kind::Histogram(&[0.0, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 16.0, 32.0, 64.0]);
const TURNS: Kind = Kind::Histogram(&[1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0, 24.0, 32.0, 64.0, 128.0]);
const LENGTH: Kind = Kind::Histogram(&[
    1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0, 4096.0, 8192.0, 16384.0, 32768.0, 65536.0,
]);
/// Most rewards are in [-1, 1], and 0 and 1 are frequent exact values.
const REWARD: Kind =
    Kind::Histogram(&[-10.0, -1.0, -0.5, 0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.999, 1.0, 2.0, 5.0, 10.0]);

const STATE: Label = ("state", &["busy", "starved", "blocked", "credit", "weights"]);
const FATE: Label = ("fate", &["trained", "masked", "filtered", "stale", "truncated", "poisoned", "surplus", "lost"]);
const BOOK: Label =
    ("fate", &["generated", "trained", "masked", "filtered", "stale", "truncated", "poisoned", "surplus", "lost", "in_flight"]);
const PROMPT: Label = ("state", &["entered", "trained", "filtered", "stale", "truncated", "poisoned", "surplus", "lost", "open"]);
const WHAT: Label = ("what", &["tokens", "prompts"]);
const STATUS: Label = ("status", &["completed", "truncated", "aborted"]);
const STOP: Label = (
    "reason",
    &[
        "environment_done",
        "answered",
        "stop_condition",
        "max_turns",
        "max_tokens",
        "max_tool_calls",
        "max_time",
        "step_timeout",
        "environment_failed",
        "engine_failed",
    ],
);
const ENGINE_STATE: Label = ("state", &["serving", "behind", "lost", "leaving"]);
const SYNC_PHASE: Label =
    ("phase", &["sleep", "fetch", "send", "wake", "prepare", "pause", "load", "label", "check", "flush", "resume", "probe"]);
const FAULT: Label =
    ("kind", &["url", "tls", "unreachable", "broke", "late", "busy", "refused", "failed", "nonsense", "unsupported"]);
const SERVED: Label = ("outcome", &["ok", "busy", "refused", "failed"]);
const DRAFT: Label = ("outcome", &["kept", "dropped"]);
const OUTCOME: Label = ("outcome", &["succeeded", "failed", "malformed"]);
const ROLE: Label = ("role", &["trainer", "generator"]);

/// Declares the metrics, one row each; a label in quotes takes any value. The sentence is the
/// variant's documentation, the help text in Prometheus and the line in `docs/reference/metrics.md`.
macro_rules! catalog {
    ($($variant:ident: $kind:ident $name:literal [$($label:tt),*] in $unit:literal, $help:literal;)*) => {
        /// Every metric of a run.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
        pub enum Metric {
            $(#[doc = $help] $variant,)*
        }

        impl Metric {
            /// All of them, in the catalogue's order.
            pub const ALL: &'static [Metric] = &[$(Metric::$variant),*];

            const fn spec(self) -> &'static Spec {
                match self {
                    $(Metric::$variant => &Spec {
                        name: concat!("rollflow_", $name),
                        unit: $unit,
                        kind: $kind,
                        labels: &[$(label!($label)),*],
                        help: $help,
                    },)*
                }
            }
        }
    };
}

macro_rules! label {
    ($any:literal) => {
        ($any, &[])
    };
    ($known:ident) => {
        $known
    };
}

catalog! {
    StageTime: COUNT "stage_time_seconds_total" ["stage", STATE] in "seconds",
        "Time that a stage's workers spent in each state; the states sum to their wall-clock time.";
    StageItemsIn: COUNT "stage_items_in_total" ["stage"] in "items", "Messages that a stage took from its edges.";
    StageItemsOut: COUNT "stage_items_out_total" ["stage"] in "items", "Messages that a stage gave to its edges.";
    EdgeItems: GAUGE "edge_items" ["from", "to"] in "items", "Messages that wait on the edge between two stages.";
    EdgeTokens: GAUGE "edge_tokens" ["from", "to"] in "tokens", "Tokens of the messages that wait on the edge between two stages.";
    EdgeCapacityItems: GAUGE "edge_capacity_items" ["from", "to"] in "items", "Messages that an edge holds at most.";
    EdgeCapacityTokens: GAUGE "edge_capacity_tokens" ["from", "to"] in "tokens", "Tokens that an edge holds at most.";

    DataRecords: GAUGE "data_records" ["source"] in "records", "Records of a data set that are used.";
    DataSkipped: GAUGE "data_records_skipped" ["source", "reason"] in "records", "Records of a data set that were left out, by reason.";
    SourceGroups: COUNT "source_groups_total" ["source"] in "groups",
        "Groups, or examples of supervised training, that were trained, by the data set they are from; in rows of `metrics.jsonl` those of the step, as `source_groups_` and its name.";
    SourceTokens: COUNT "source_tokens_total" ["source"] in "tokens",
        "Tokens that were trained, by the data set they are from; in rows of `metrics.jsonl` those of the step, as `source_tokens_` and its name.";

    GeneratedTokens: COUNT "generated_tokens_total" [] in "tokens", "Tokens that the generators sampled.";
    ReusedTokens: COUNT "reused_tokens_total" [] in "tokens",
        "Tokens of prompts and earlier turns that a generator of this process did not compute, because its prefix cache had them.";
    PreemptedSamples: COUNT "preempted_samples_total" [] in "samples",
        "Samples that went back to the queue of a generator of this process, because its cache was full (generate.cache_tokens); they continue from their tokens.";
    DraftedTokens: COUNT "drafted_tokens_total" [DRAFT] in "tokens",
        "Tokens that a generator of this process drafted from a completion's own text, by whether they were what it sampled.";
    Tokens: COUNT "tokens_total" [FATE] in "tokens",
        "Generated tokens by what became of them; with those in flight they sum to the generated ones.";
    TokensInFlight: GAUGE "tokens_in_flight" [] in "tokens", "Generated tokens whose fate is open.";
    LedgerTokens: GAUGE "ledger_tokens" [BOOK] in "tokens",
        "The token ledger of the whole run, resumes included: every generated token has one of the other fates.";
    LedgerPrompts: GAUGE "ledger_prompts" [PROMPT] in "prompts",
        "The prompt ledger of the whole run, resumes included: every prompt that entered is in one of the other states.";
    LedgerImbalance: GAUGE "ledger_imbalance" [WHAT] in "items", "What the ledger cannot account for, or counts twice; anything but 0 is a bug.";
    Samples: COUNT "samples_total" [STATUS] in "samples", "Samples that left the generators, by how their generation ended.";
    GeneratorSlots: GAUGE "generator_slots" [] in "samples", "Samples that a generator which adapts their number computes at the same time.";
    EngineState: GAUGE "engine_state" ["engine", ENGINE_STATE] in "1",
        "How each server that generates stands, 1 for the state that it is in: it gets work, waits for weights, can't be reached, or finishes its work to leave.";
    Engines: GAUGE "engines" [ENGINE_STATE] in "servers", "Servers that generate, by how they stand.";
    EnginesUseful: GAUGE "engines_useful" [] in "servers",
        "Estimate of the servers that would keep both trainer and generator at work: those present, times the share of the last five minutes that the generator had work, over the share that the trainer worked. Above the servers present, more would help; below, fewer would do.";
    TrainQueue: GAUGE "train_queue_seconds" [] in "seconds",
        "Mean time that a batch waited for the trainer over the last five minutes, in runs with servers; 0 if the trainer waits for batches.";
    EngineVersion: GAUGE "engine_weight_version" ["engine"] in "versions", "Newest weights that the server was verified to hold.";
    EngineRequests: COUNT "engine_requests_total" ["engine"] in "requests", "Requests that were sent to the server: attempts at samples.";
    EngineInFlight: GAUGE "engine_requests_in_flight" ["engine"] in "requests", "Requests that the server has now.";
    EngineLimit: GAUGE "engine_requests_limit" ["engine"] in "requests",
        "Requests that it may have at a time: fewer where it says that it is busy, or makes as much of fewer.";
    EngineTokens: COUNT "engine_tokens_total" ["engine"] in "tokens", "Tokens that the server made; by the second, its speed.";
    EngineFirstToken: LATENCY "engine_first_token_seconds" ["engine"] in "seconds",
        "Time from a request to its first token: the wait in the server's queue, and the reading of what is there.";
    EngineErrors: COUNT "engine_errors_total" ["engine", FAULT] in "requests", "Requests to the server that failed, by how; `busy` is flow control.";
    EngineDuplicates: COUNT "engine_duplicates_total" ["engine"] in "samples",
        "Completions of the server that came after another attempt had replaced it; they are not used.";
    EngineMoved: COUNT "engine_moved_total" ["engine"] in "samples",
        "Samples that continued elsewhere because the server was slow (`engine.hedge_after`).";
    EngineSync: LATENCY "engine_sync_seconds" ["engine", SYNC_PHASE] in "seconds",
        "Time of each phase of a weight sync to the server; it stands still from `pause` to `resume`. `sleep` is before a step, with `engine.sleep`.";
    ServedRequests: COUNT "served_requests_total" [SERVED] in "requests",
        "Requests to `rollflow serve` by their response: `busy` is status 429 or 503, `refused` another status of 400 to 499, `failed` of 500 and above.";
    ServedSamples: COUNT "served_samples_total" [STATUS] in "samples", "Completions of `rollflow serve` by how they ended.";
    ServedTokens: COUNT "served_tokens_total" [] in "tokens", "Tokens that `rollflow serve` sampled.";
    ServedPrefill: COUNT "served_prefill_tokens_total" [] in "tokens", "Tokens of prompts that it computed; remembered ones are not.";
    ServedActive: GAUGE "served_samples_active" [] in "samples", "Completions that it computes now.";
    ServedOpen: GAUGE "served_samples_open" [] in "samples", "Completions that it computes now or that wait for a slot.";
    ServedPaused: GAUGE "served_paused" [] in "1", "1 while it is paused.";
    ServedSleeps: COUNT "served_sleeps_total" [] in "1", "Times that it gave its memory away, until it was woken.";
    ServedFirstToken: LATENCY "served_first_token_seconds" [] in "seconds", "Time from a request to its first token, its wait for a slot included.";
    ServedVersion: GAUGE "served_weight_version" [] in "versions", "Label of the served weights, if it is a number.";
    ResponseLength: LENGTH "response_length_tokens" [] in "tokens", "Length of finished responses.";
    RolloutTurns: TURNS "rollout_turns" [] in "turns", "Turns of the model in a rollout with an environment.";
    RolloutStops: COUNT "rollout_stops_total" [STOP] in "rollouts", "Rollouts with an environment, by why they ended.";
    EnvironmentRetries: COUNT "environment_retries_total" [] in "rollouts", "Rollouts that were played again because their environment failed.";
    RolloutForks: COUNT "rollout_forks_total" [] in "samples",
        "Samples that a rollout had to start again, because the next input did not continue the tokens before it: the chat template rewrote them, or an environment or agent changed them. Each is trained as a part of its rollout.";
    ToolCalls: COUNT "tool_calls_total" [OUTCOME] in "calls", "Calls of tools by what came of them; malformed ones could not be made.";
    SamplesDropped: COUNT "samples_dropped_total" ["reason"] in "samples", "Samples that were dropped from their groups, by reason; the rest of the group stays.";
    GroupsDropped: COUNT "groups_dropped_total" ["reason"] in "groups", "Groups that were dropped, by the filter's reason, `poisoned` where the reward failed, `lost` where too many samples were lost, or `surplus`.";

    CurriculumPrompts: GAUGE "curriculum_prompts" ["pass_rate"] in "prompts",
        "Prompts by their pass rate in percent, as of the newest step, if there is a curriculum; `retired` are those that are not asked again. In rows of `metrics.jsonl`, `curriculum_prompts_0`, `curriculum_prompts_0_20` and so on.";
    CurriculumSkipped: GAUGE "curriculum_skipped" [] in "prompts", "Prompts of the stream that the curriculum skipped so far.";
    CurriculumReplayed: GAUGE "curriculum_replayed" [] in "prompts", "Prompts so far that repeated a hard one.";
    SparedGroups: GAUGE "spared_groups" [] in "groups",
        "Groups of the newest step that a filter had rejected and that are trained all the same, because it rejects everything.";
    LengthTrainedMean: GAUGE "length_trained_mean_tokens" [] in "tokens", "Mean length of the responses that the newest step trains on.";
    LengthTrainedMedian: GAUGE "length_trained_median_tokens" [] in "tokens", "Median of the same lengths.";
    LengthTrainedUpperDecile: GAUGE "length_trained_upper_decile_tokens" [] in "tokens", "Nine in ten of the same lengths are at most this.";
    LengthFinishedMean: GAUGE "length_finished_mean_tokens" [] in "tokens",
        "Mean length of all responses that were finished for the newest step, those of dropped groups included.";
    LengthFinishedMedian: GAUGE "length_finished_median_tokens" [] in "tokens", "Median of the same lengths.";
    LengthFinishedUpperDecile: GAUGE "length_finished_upper_decile_tokens" [] in "tokens", "Nine in ten of the same lengths are at most this.";
    LengthBias: GAUGE "length_bias_ratio" [] in "ratio",
        "Mean length of the responses trained so far over that of all finished so far; below 1, long answers are lost to filters or staleness.";

    WeightVersion: GAUGE "weight_version" [ROLE] in "versions", "Newest weights that the trainer published and that the generator serves.";
    SampleStaleness: LAG "sample_staleness_versions" [] in "versions",
        "Largest lag of any token of a sample, when the sample is trained.";
    StalenessMax: GAUGE "sample_staleness_max_versions" [] in "versions", "Largest sample staleness in the newest step.";
    TokenLag: GAUGE "token_lag_mean_versions" [] in "versions",
        "Mean over the newest step's tokens of the version trained less the version that sampled them.";
    PublishLag: GAUGE "publish_lag_steps" [] in "steps", "Optimizer steps since weights were last published.";

    SampleReward: REWARD "sample_reward" [] in "reward", "Rewards of single samples, before any filter.";
    RewardFailures: COUNT "reward_failures_total" [] in "calls",
        "Calls of the reward that panicked, erred or gave no finite number, those that a retry made good included.";
    DeadLetters: COUNT "dead_letters_total" ["stage"] in "groups", "Groups that a stage gave up and wrote to `dead_letters.jsonl`.";
    PoisonedGroups: GAUGE "poisoned_groups" [] in "groups", "Groups that were dropped on the way to the newest step because their reward failed or too many of their samples were lost.";
    RewardMean: GAUGE "reward_mean" [] in "reward", "Mean reward of the newest step's rollouts.";
    RewardMin: GAUGE "reward_min" [] in "reward", "Smallest reward of the newest step's rollouts.";
    RewardMax: GAUGE "reward_max" [] in "reward", "Largest reward of the newest step's rollouts.";
    RewardStd: GAUGE "reward_std" [] in "reward", "Standard deviation of the newest step's rewards.";
    RewardPart: GAUGE "reward_part_mean" ["part"] in "reward",
        "Mean of a part of the reward over the newest step's rollouts, by the part's name; in rows of `metrics.jsonl`, `reward_part_` and the name.";
    PassRate: GAUGE "group_pass_ratio" [] in "ratio", "Share of the newest step's groups in which any sample succeeded (pass@k, k being the group's size).";

    EvalStep: GAUGE "eval_step" [] in "steps", "The step after which the newest evaluation's weights were published.";
    EvalVersion: GAUGE "eval_version" [] in "versions", "The weights that the newest evaluation asked, and no others.";
    EvalGreedyAccuracy: GAUGE "eval_greedy_accuracy_ratio" [] in "ratio",
        "Share of the newest evaluation's prompts whose greedy answer is right: earns `eval.success` or more.";
    EvalGreedyAccuracyError: GAUGE "eval_greedy_accuracy_stderr_ratio" [] in "ratio", "Standard error of eval_greedy_accuracy_ratio over prompts.";
    EvalGreedyReward: GAUGE "eval_greedy_reward_mean" [] in "reward", "Mean reward of its greedy answers.";
    EvalAccuracy: GAUGE "eval_accuracy_ratio" [] in "ratio", "Share of its sampled answers that are right, mean over prompts.";
    EvalAccuracyError: GAUGE "eval_accuracy_stderr_ratio" [] in "ratio",
        "Standard error of eval_accuracy_ratio over prompts: 1.96 of it either way are a 95 % confidence interval.";
    EvalReward: GAUGE "eval_reward_mean" [] in "reward", "Mean reward of its sampled answers.";
    EvalPassAt: GAUGE "eval_pass_at_k_ratio" ["k"] in "ratio",
        "Probability that one of k sampled answers is right, by the unbiased estimate; in rows of `metrics.jsonl`, `eval_pass_at_1` and so on.";
    EvalLength: GAUGE "eval_length_mean_tokens" [] in "tokens", "Mean length of its answers.";
    EvalTruncated: GAUGE "eval_truncated_ratio" [] in "ratio", "Share of its answers that the length limit cut off.";
    EvalPairAccuracy: GAUGE "eval_pair_accuracy_ratio" [] in "ratio", "Share of the newest evaluation's held-out pairs whose chosen completion scored higher than the rejected one.";
    EvalPairMargin: GAUGE "eval_pair_margin_mean" [] in "score", "Mean score of its chosen completions less that of the rejected ones.";
    EvalLoss: GAUGE "eval_loss" [] in "loss", "Loss over its held-out pairs.";
    EvalErrors: GAUGE "eval_errors" [] in "answers", "Answers of it that have no reward, because the prompt could not be asked or the reward failed.";

    Loss: GAUGE "loss" [] in "nats", "Loss of the newest step.";
    MixedLoss: GAUGE "mixed_loss" [] in "nats", "Loss of the samples that were mixed into the newest step, times their weight.";
    RouterLoss: GAUGE "router_loss" [] in "loss", "Part of the newest step's loss that spreads tokens over experts, times its weight.";
    RouterMismatch: GAUGE "router_mismatch_ratio" [] in "ratio", "Share of the experts that computed the newest step's tokens in the generator, over all sparse layers, that the trainer's routers do not choose.";
    GradNorm: GAUGE "grad_norm" [] in "norm", "Global gradient norm of the newest step before clipping.";
    GradNormClipped: GAUGE "grad_norm_clipped" [] in "norm", "Global gradient norm of the newest step after clipping.";
    UpdatesSkipped: GAUGE "updates_skipped" [] in "updates",
        "Updates of the newest step that were not made, because a loss or gradient was not finite (`train.on_nonfinite = \"skip\"`).";
    SavedTokens: GAUGE "saved_tokens" [] in "tokens",
        "Tokens of the newest step, prompts included, that took no forward or backward pass because their advantages are all zero and the loss has no other term; entropy, clip ratio, KL and gap are over the others.";
    PairAccuracy: GAUGE "pair_accuracy_ratio" [] in "ratio", "Share of the newest step's pairs whose chosen answer scored higher than the rejected one: by a reward model, or by beta times the log-ratio of policy over reference.";
    PairMargin: GAUGE "pair_margin_mean" [] in "score", "Mean score of chosen answers less that of the rejected ones, over the newest step's pairs.";
    Perplexity: GAUGE "perplexity_tokens" [] in "tokens", "How many tokens the model hesitates between where it imitates: e to the mean negative log-likelihood of the newest step's trained tokens.";
    Entropy: GAUGE "entropy_nats" [] in "nats", "Mean entropy of the policy over the newest step's trained tokens.";
    ClipFraction: GAUGE "clip_ratio" [] in "ratio", "Share of the newest step's trained tokens whose probability ratio was clipped.";
    ApproxKl: GAUGE "approx_kl_nats" [] in "nats", "Estimated KL divergence of the trained policy from the one that sampled, in the newest step.";
    KlLoss: GAUGE "kl_loss_mean_nats" [] in "nats", "Mean divergence from the reference policy over the newest step's trained tokens, as `train.kl_loss` estimates it.";
    KlLossCoef: GAUGE "kl_loss_coefficient" [] in "1", "Weight of that divergence in the newest step's loss.";
    KlReward: GAUGE "kl_reward_mean_nats" [] in "nats",
        "Divergence of the policy that sampled from the reference, as `train.kl_reward` estimates it: mean over the newest step's answers of the mean over their tokens.";
    TeacherKl: GAUGE "teacher_kl_mean_nats" [] in "nats",
        "With `[teacher]`: mean over the newest step's tokens of the policy's log-probability when it sampled them less the teacher's, an estimate of their divergence.";
    TeacherDivergence: GAUGE "teacher_divergence_mean_nats" [] in "nats",
        "With `teacher.top_k`: mean over the newest step's tokens of the divergence of the policy's distribution from the teacher's.";
    KlRewardCoef: GAUGE "kl_reward_coefficient" [] in "1", "Weight of that divergence's sum over an answer in the newest step's rewards.";
    LogProbGapMean: GAUGE "log_prob_gap_mean_nats" [] in "nats",
        "Mean absolute gap between the generator's log-probability of a token and the trainer's; with stale tokens it includes what the policy has learned since.";
    LogProbGapMax: GAUGE "log_prob_gap_max_nats" [] in "nats", "Largest such gap in the newest step.";
    ImportanceRatio: GAUGE "importance_ratio_by_lag" ["lag"] in "ratio",
        "Mean probability ratio of the trainer to the policy that sampled, by token lag, in the newest step with tokens of that lag; in rows of `metrics.jsonl`, `importance_ratio_lag_0` and so on.";
    ImportanceSamples: GAUGE "importance_effective_sample_ratio" [] in "ratio",
        "Effective sample size of those ratios, cut at 10, as a share of the newest step's tokens; 1 is on policy.";
    ImportanceChi2: GAUGE "importance_chi_squared" [] in "1", "Variance of those ratios around 1 over the newest step's tokens: the chi-square divergence of the trainer from the policy that sampled.";
    SequenceChi2: GAUGE "importance_sequence_chi_squared" [] in "1", "The same of whole sequences' ratios, the products of their tokens'.";
    PerplexityRatio: GAUGE "perplexity_ratio_mean" [] in "ratio", "Perplexity of a sequence under the trainer over that under the policy that sampled, mean over the newest step.";
    CorrectionWeight: GAUGE "correction_weight_mean" [] in "ratio", "Mean importance weight of the newest step's tokens, where `train.correction` weighs them.";
    CorrectionWeightMax: GAUGE "correction_weight_max" [] in "ratio",
        "Largest importance weight of a token, or largest ratio of a sequence where those are weighed, in the newest step.";
    CorrectionSamples: GAUGE "correction_effective_sample_ratio" [] in "ratio", "Effective sample size of those weights as a share of the newest step's tokens.";
    CorrectionDropped: GAUGE "correction_dropped_token_ratio" [] in "ratio",
        "Share of the newest step's trained tokens that `train.correction` or `train.reject` takes out of the policy term; the token ledger counts them as trained.";
    CorrectionSequences: GAUGE "correction_dropped_sequence_ratio" [] in "ratio", "Share of the newest step's sequences with such a token.";
    CriticLoss: GAUGE "critic_loss" [] in "1", "Mean value loss over the newest step's updates, where there is a critic.";
    CriticExplained: GAUGE "critic_explained_variance_ratio" [] in "ratio",
        "Share of the variance of the newest step's returns that the critic foresaw: 1 is all of it, 0 no more than a constant would.";
    CriticClipFraction: GAUGE "critic_clip_ratio" [] in "ratio", "Share of tokens whose value had moved beyond the clip, over the newest step's updates.";
    CriticValue: GAUGE "critic_value_mean" [] in "reward", "Mean value over the newest step's trained tokens, before its first update.";
    CriticReturn: GAUGE "critic_return_mean" [] in "reward", "Mean return over the same tokens: what the critic learns.";
    CriticGradNorm: GAUGE "critic_grad_norm" [] in "norm", "Global norm of the critic's gradient before clipping, in the newest step's last update.";
    CriticLearningRate: GAUGE "critic_learning_rate" [] in "1", "The critic's learning rate in that update.";
    LearningRate: GAUGE "learning_rate" [] in "1", "Learning rate of the newest step.";

    Steps: COUNT "steps_total" [] in "steps", "Optimizer steps that this process took.";
    Step: GAUGE "step" [] in "steps", "Newest optimizer step of the run, those before a resume included.";
    StepTime: LATENCY "step_duration_seconds" [] in "seconds", "Time of one optimizer step, forward and backward included.";
    SyncTime: LATENCY "weight_sync_duration_seconds" [] in "seconds", "Time that publishing weights to the generators took.";
    RewardTime: LATENCY "reward_duration_seconds" [] in "seconds", "Time that the rewards of a group took, all retries included.";
    EnvironmentTime: LATENCY "environment_step_duration_seconds" [] in "seconds", "Time of one step of an environment.";
    CheckpointTime: LATENCY "checkpoint_duration_seconds" [] in "seconds", "Time from the end of a step to its checkpoint on disk; training continues meanwhile.";
    CheckpointStep: GAUGE "checkpoint_step" [] in "steps", "Step of the newest checkpoint.";
    CheckpointSaved: GAUGE "checkpoint_timestamp_seconds" [] in "seconds", "Time at which it was on disk, since 1970.";

    BuildInfo: GAUGE "build_info" ["version"] in "1", "1, with the version of the program.";
    RunInfo: GAUGE "run_info" ["name", "pipeline"] in "1", "1, with the name of the run and its pipeline.";
    PlannedSteps: GAUGE "planned_steps" [] in "steps", "Steps that the run takes if nothing ends it before.";
    CheckpointInterval: GAUGE "checkpoint_interval_steps" [] in "steps", "Steps between two checkpoints; 0 if only the last is saved.";
    StalenessBound: GAUGE "staleness_bound_versions" [] in "versions", "Largest sample staleness that the run allows.";
    GapWarning: GAUGE "log_prob_gap_warning_nats" [] in "nats", "Mean log-probability gap above which the run warns.";
    DiskFree: GAUGE "disk_free_bytes" [] in "bytes", "Free bytes of the disk that the run's folder is on.";
    GpuMemory: GAUGE "gpu_memory_used_bytes" ["gpu"] in "bytes", "Used memory of a GPU, by all processes.";
    GpuMemoryTotal: GAUGE "gpu_memory_bytes" ["gpu"] in "bytes", "Memory of a GPU.";
    GpuUse: GAUGE "gpu_utilization_ratio" ["gpu"] in "ratio", "Share of the last moments in which a GPU computed.";
    ProcessCpu: COUNT "process_cpu_seconds_total" [] in "seconds", "Processor time of this process.";
    ProcessMemory: GAUGE "process_resident_memory_bytes" [] in "bytes", "Memory of this process that is in RAM.";
    ProcessThreads: GAUGE "process_threads" [] in "threads", "Threads of this process.";
    ProcessFiles: GAUGE "process_open_fds" [] in "files", "Open files and connections of this process.";
    ProcessFilesLimit: GAUGE "process_max_fds" [] in "files", "Most open files and connections that it may have.";
    ProcessStart: GAUGE "process_start_time_seconds" [] in "seconds", "Time at which this process began, since 1970.";
}

impl Metric {
    /// The Prometheus name.
    pub fn name(self) -> &'static str {
        let name = self.spec().name;
        match name.strip_prefix(PREFIX) {
            // Every program that Prometheus asks has these.
            Some(plain) if plain.starts_with("process_") => plain,
            _ => name,
        }
    }

    /// The name in log rows: the Prometheus name without prefix.
    pub fn key(self) -> &'static str {
        self.name().strip_prefix(PREFIX).unwrap_or(self.name())
    }

    /// The metric whose [`key`](Metric::key) this is.
    pub fn from_key(key: &str) -> Option<Metric> {
        Metric::ALL.iter().copied().find(|metric| metric.key() == key)
    }

    /// One sentence about it.
    pub const fn help(self) -> &'static str {
        self.spec().help
    }

    /// Prometheus type: `counter`, `gauge` or `histogram`.
    pub const fn kind(self) -> &'static str {
        match self.spec().kind {
            Kind::Counter => "counter",
            Kind::Gauge => "gauge",
            Kind::Histogram(_) => "histogram",
        }
    }

    /// Ascending upper bounds of its buckets, if it is a histogram; one more bucket has no bound.
    pub const fn buckets(self) -> &'static [f64] {
        if let Kind::Histogram(bounds) = self.spec().kind { bounds } else { &[] }
    }

    /// Names of its labels, in the order in which values are given, each with all its values; no
    /// values where the run decides, as for stage names.
    pub const fn labels(self) -> &'static [(&'static str, &'static [&'static str])] {
        self.spec().labels
    }
}

/// The whole catalogue as `docs/reference/metrics.md`.
pub fn markdown() -> String {
    let mut page = String::from(
        "# Metrics\n\n\
         Generated from `src/observe/catalog.rs`; the test `docs_list_the_catalogue` holds the two equal.\n\n\
         `--metrics 127.0.0.1:9464` serves them at `http://127.0.0.1:9464/metrics`. In `metrics.jsonl` a step's values have the same\n\
         names without `rollflow_`; values that JSON lacks are the strings `\"NaN\"`, `\"inf\"` and `\"-inf\"`.\n\n\
         | metric | kind | unit | labels | what it says |\n| --- | --- | --- | --- | --- |\n",
    );
    let label = |(name, values): &Label| match values {
        [] => format!("`{name}`"),
        values => format!("`{name}`: {}", values.join(" \\| ")),
    };
    for metric in Metric::ALL {
        let (name, Spec { unit, labels, help, .. }) = (metric.name(), metric.spec());
        let labels: Vec<String> = labels.iter().map(label).collect();
        page += &format!("| `{name}` | {} | {unit} | {} | {help} |\n", metric.kind(), labels.join(", "));
    }
    page += "\n## Buckets\n\nUpper bounds; every histogram ends with a bucket for the rest.\n\n";
    for metric in Metric::ALL.iter().filter(|metric| !metric.buckets().is_empty()) {
        let bounds: Vec<String> = metric.buckets().iter().map(f64::to_string).collect();
        page += &format!("- `{}`: {}\n", metric.name(), bounds.join(", "));
    }
    page
}
