//! A recipe's values as the library's parts. Pure translation: what a key means is decided here, what it does in the library.

use std::path::PathBuf;

use anyhow::{Result, anyhow};
use rollflow::algo;
use rollflow::algo::{
    BinaryDivergence, Bound, BradleyTerry, Clip, Correction, Decay, Divergence, GapLimits, Importance, Level, OffPolicy, Over,
    PolicyLoss, Proximal, RatioLevel, Rejection, Surrogate, Vespo,
};
use rollflow::data::{DataBuffer, Pair, RankedPair, arithmetic, jsonl};
use rollflow::engine::{LocalEngine, TokenEngine};
use rollflow::flow::{Capacity, WeightsRx};
use rollflow::model::FrozenWeights;
use rollflow::prelude::*;
use rollflow::recipe::correction::{self, Reject};
use rollflow::recipe::loss::{self, Loss, Moved};
use rollflow::recipe::model::Model;
use rollflow::recipe::task::{Arithmetic, JsonlTask, RewardModel, Sft, TaskData};
use rollflow::recipe::train::{OnNonfinite, Optimization, ScheduleKind, Train};
use rollflow::recipe::{self, Plan};
use rollflow::train::{self, AdamW, NonFinitePolicy};

use crate::advantages;
use crate::rewards;

/// What a tiny model can spell.
const CHARACTERS: &str = "0123456789+-*/=() .,:;?!<>abcdefghijklmnopqrstuvwxyzABCD\n";

/// The model and its tokenizer.
pub fn policy(plan: &Plan) -> Result<Policy> {
    Ok(match &plan.model {
        Model::Tiny(tiny) => {
            let tokenizer = tokenizer(plan)?;
            let small = ModelConfig::small(&tokenizer, tiny.hidden, tiny.layers);
            let config = ModelConfig {
                intermediate_size: tiny.intermediate,
                heads: tiny.heads,
                kv_heads: tiny.kv_heads,
                head_dim: tiny.hidden / tiny.heads,
                ..small
            };
            Policy::random(config, tokenizer, plan.seed)?
        }
        Model::Folder(folder) => Policy::load(&folder.path)?,
    })
}

/// The model's tokenizer, without the model.
pub fn tokenizer(plan: &Plan) -> Result<Tokenizer> {
    Ok(match &plan.model {
        Model::Tiny(tiny) => Tokenizer::characters(CHARACTERS, tiny.vocab)?,
        Model::Folder(folder) => Tokenizer::from_dir(&folder.path)?,
    })
}

/// Bounds of every edge.
pub fn capacity(plan: &Plan) -> Capacity {
    Capacity::items(plan.flow.edge_items).tokens(plan.flow.edge_tokens)
}

/// What is asked.
pub fn prompts(plan: &Plan) -> Result<Prompts> {
    let buffer = match &plan.task.data {
        TaskData::Arithmetic(task) => DataBuffer::new(sums(task, plan.seed).iter().map(Prompt::from), plan.seed)?,
        TaskData::Jsonl(task) => {
            let answer = (!task.answer_key.is_empty()).then_some(task.answer_key.as_str());
            DataBuffer::new(jsonl::load_prompts(&task.path, &task.prompt_key, answer, task.limit)?, plan.seed)?
        }
    };
    Ok(Prompts::new(if plan.task.shuffle { buffer.shuffled() } else { buffer }))
}

fn sums(task: &Arithmetic, seed: u64) -> Vec<Pair> {
    match task.count {
        Some(count) => arithmetic::drawn_addition(task.digits, count, seed),
        None => arithmetic::addition(task.digits),
    }
}

/// What is imitated: the pairs of `[sft] data`, or the task's own.
pub fn supervised_samples(plan: &Plan, sft: &Sft, policy: &Policy) -> Result<Vec<Sample>> {
    let pairs = match (&sft.data, &plan.task.data) {
        (Some(file), _) => jsonl::load_pairs(file, &sft.prompt_key, &sft.completion_key, None)?,
        (None, TaskData::Arithmetic(task)) => sums(task, plan.seed),
        (None, TaskData::Jsonl(task)) => jsonl::load_pairs(&task.path, &task.prompt_key, &task.answer_key, task.limit)?,
    };
    Ok(policy.supervised(&arithmetic::share(&pairs, sft.fraction, plan.seed))?)
}

/// The model that a reward model starts from: the recipe's, with a head drawn by the seed unless it has one.
pub fn score_model(plan: &Plan) -> Result<ScoreModel> {
    Ok(match &plan.model {
        Model::Folder(folder) => ScoreModel::begin(&folder.path, plan.seed)?,
        Model::Tiny(_) => ScoreModel::from_policy(&policy(plan)?, Some(plan.seed)),
    })
}

/// Pairs of answers to train a reward model on, and those it is judged by in the end.
pub fn ranked_pairs(plan: &Plan, of: &RewardModel) -> Result<(Vec<RankedPair>, Vec<RankedPair>)> {
    const WRONG: usize = 64;
    let trained = 1.0 - of.held_out;
    Ok(match &plan.task.data {
        TaskData::Arithmetic(task) => {
            let (trained, held_out) = arithmetic::split(&sums(task, plan.seed), trained, plan.seed);
            (arithmetic::ranked(&trained, WRONG, plan.seed), arithmetic::ranked(&held_out, WRONG, plan.seed))
        }
        TaskData::Jsonl(task) => {
            let JsonlTask { path, prompt_key, limit, .. } = task;
            let pairs = jsonl::load_ranked_pairs(path, prompt_key, &of.chosen_key, &of.rejected_key, *limit)?;
            arithmetic::split(&pairs, trained, plan.seed)
        }
    })
}

/// How tokens are chosen.
pub fn sampling(plan: &Plan) -> SamplingParams {
    let generate = &plan.generate;
    SamplingParams {
        temperature: generate.temperature as f32,
        top_p: generate.top_p as f32,
        top_k: generate.top_k,
        min_p: generate.min_p as f32,
        max_new_tokens: generate.max_new_tokens,
        stop: generate.stop.clone(),
        ..SamplingParams::default()
    }
}

/// Who answers: an engine in this process.
pub fn generator(plan: &Plan, policy: &Policy, weights: WeightsRx<FrozenWeights>) -> Generator<LocalEngine> {
    generator_by(plan, Generator::local(policy, weights))
}

/// Who answers, by whatever engine.
pub fn generator_by<E: TokenEngine>(plan: &Plan, generator: Generator<E>) -> Generator<E> {
    let generate = &plan.generate;
    let on_new_weights = match generate.on_new_weights {
        recipe::generate::OnNewWeights::Swap => OnNewWeights::Swap,
        recipe::generate::OnNewWeights::Recompute => OnNewWeights::Recompute,
        recipe::generate::OnNewWeights::Finish => OnNewWeights::Finish,
        recipe::generate::OnNewWeights::Abort => OnNewWeights::Abort,
    };
    let generator = generator
        .on_new_weights(on_new_weights)
        .mask_older(generate.mask_older)
        .group_size(generate.group_size)
        .sampling(sampling(plan))
        .workers(generate.workers)
        .threads(generate.threads)
        .seed(plan.seed);
    if generate.slots == 0 { generator.adaptive_slots(plan.most_slots()) } else { generator.slots(generate.slots) }
}

/// The stage that scores.
pub fn reward(plan: &Plan) -> Result<Reward> {
    let on_failure = match plan.reward.on_failure {
        recipe::reward::OnFailure::DeadLetter => OnFailure::DeadLetter,
        recipe::reward::OnFailure::Drop => OnFailure::Drop,
        recipe::reward::OnFailure::Zero => OnFailure::Zero,
        recipe::reward::OnFailure::Fail => OnFailure::Fail,
    };
    let (rule, scorers) = rewards::earned(plan)?;
    Ok(Reward::each(rule)
        .ahead(move |group| scorers.iter().for_each(|scorer| scorer.announce(group)))
        .threads(plan.reward.rule.threads())
        .retries(plan.reward.retries)
        .on_failure(on_failure)
        .max_poisoned(plan.reward.max_poisoned))
}

/// Which groups are trained on: all conditions hold.
pub fn filter(plan: &Plan) -> Result<impl GroupFilter> {
    type Condition = Box<dyn Fn(&Group) -> Verdict + Send + Sync>;
    let mut all: Vec<Condition> = Vec::new();
    for filter in &plan.filter {
        all.push(match filter {
            recipe::generate::Filter::NonzeroStd(of) => Box::new(filters::std_above(of.threshold.max(filters::NONZERO_STD))),
            recipe::generate::Filter::MinReward(of) => Box::new(filters::min_reward(of.threshold)?),
            recipe::generate::Filter::Diversity(of) => Box::new(filters::diversity(of.min_unique_ratio)?),
            recipe::generate::Filter::Length(of) => Box::new(filters::length(of.min, of.max)?),
            recipe::generate::Filter::AnySuccess(_) => Box::new(filters::any_completed),
        });
    }
    Ok(move |group: &Group| all.iter().map(|condition| condition(group)).find(|verdict| !verdict.kept()).unwrap_or(Verdict::Keep))
}

/// What becomes of tokens that are too old.
pub fn on_stale(plan: &Plan) -> OnStale {
    match plan.flow.on_stale {
        recipe::plan::OnStale::Wait => OnStale::Wait,
        recipe::plan::OnStale::Drop => OnStale::Drop,
        recipe::plan::OnStale::Mask => OnStale::Mask,
    }
}

/// What happens when nothing passes the filter.
pub fn fallback(plan: &Plan) -> Fallback {
    match plan.filter_fallback {
        recipe::plan::FilterFallback::Error => Fallback::Error,
        recipe::plan::FilterFallback::Keep => Fallback::Keep,
    }
}

/// The trainer of `[train]`.
pub fn backend(plan: &Plan, policy: &Policy) -> Result<LocalBackend> {
    let train = &plan.train;
    let loss = policy_loss(train);
    loss.check()?;
    let config = local_config(loss, &train.optimization, train.lr, train.steps, train.updates)?;
    Ok(policy.backend(LocalConfig { temperature: plan.generate.temperature, off_policy: off_policy(train), ..config })?)
}

/// The policy loss of `[train]`.
pub fn policy_loss(train: &Train) -> PolicyLoss {
    let ratio = |of| match of {
        correction::Level::Token => RatioLevel::Token,
        correction::Level::Sequence => RatioLevel::Sequence,
        correction::Level::Geometric => RatioLevel::Geometric,
    };
    let clip = |low, high| Clip { low, high, ..Clip::default() };
    let (surrogate, level) = match &train.loss {
        Loss::Grpo(of) => {
            let clip = Clip { delta: of.delta, dual: of.dual_clip, ..clip(of.clip_low, of.clip_high) };
            (Surrogate::Clip(clip), ratio(of.level))
        }
        Loss::Dapo(of) => (Surrogate::Clip(clip(of.clip_low, of.clip_high)), RatioLevel::Token),
        Loss::Gspo(of) => {
            let level = if of.by_token { RatioLevel::GeometricToken } else { RatioLevel::Geometric };
            (Surrogate::Clip(clip(of.clip_low, of.clip_high)), level)
        }
        Loss::Cispo(of) => (Surrogate::Cispo { low: of.clip_low, high: of.clip_high }, ratio(of.level)),
        Loss::Sapo(of) => (Surrogate::Sapo { tau_pos: of.tau_pos, tau_neg: of.tau_neg }, ratio(of.level)),
        Loss::Gpg(_) => (Surrogate::Gpg, RatioLevel::Token),
        Loss::Dro(of) => (Surrogate::Dro { beta: of.beta }, RatioLevel::Token),
        Loss::Dppo(of) => {
            let divergence = match of.divergence {
                Moved::TotalVariation => BinaryDivergence::TotalVariation,
                Moved::Kl => BinaryDivergence::Kl,
            };
            (Surrogate::Dppo { divergence, low: of.clip_low, high: of.clip_high, max_ratio: of.max_ratio }, RatioLevel::Token)
        }
        Loss::Vespo(of) => {
            let loss::Vespo { k_pos, lambda_pos, k_neg, lambda_neg } = *of;
            (Surrogate::Vespo(Vespo { k_pos, lambda_pos, k_neg, lambda_neg }), RatioLevel::Token)
        }
        Loss::GeoMean(of) => (Surrogate::GeoMean { low: of.clip_low, high: of.clip_high }, RatioLevel::Geometric),
        Loss::ClipCov(of) => {
            let clip = clip(of.clip_low, of.clip_high);
            (Surrogate::ClipCov { clip, share: of.share, min: of.min, max: of.max }, RatioLevel::Token)
        }
        Loss::KlCov(of) => (Surrogate::KlCov { share: of.share, coef: of.coef }, RatioLevel::Token),
    };
    PolicyLoss {
        level,
        surrogate,
        entropy_coef: train.entropy_coef,
        top_entropy: train.top_entropy,
        off_policy_threshold: train.off_policy_threshold,
        ..PolicyLoss::default()
    }
}

/// What is done about tokens of another policy.
pub fn off_policy(train: &Train) -> OffPolicy {
    let proximal = match train.centre() {
        correction::Proximal::Behaviour => Proximal::Behaviour,
        correction::Proximal::Recompute => Proximal::Recompute,
        correction::Proximal::LogLinear => Proximal::LogLinear,
    };
    let level = |level| match level {
        correction::Level::Token => Level::Token,
        correction::Level::Sequence => Level::Sequence,
        correction::Level::Geometric => Level::Geometric,
    };
    let weigh = match &train.correction {
        correction::Correction::None(_) => None,
        correction::Correction::TruncatedIs(of) => {
            let bound = Bound::Truncate { min: of.min, max: of.max };
            Some(Importance { level: level(of.level), bound, normalize: of.normalize })
        }
        correction::Correction::MaskedIs(of) => {
            Some(Importance { normalize: of.normalize, ..Importance::masked(level(of.level), of.min, of.max) })
        }
        correction::Correction::IcePop(of) => Some(Importance::icepop(of.alpha, of.beta)),
    };
    let reject = train.reject.iter().map(rejection).collect();
    OffPolicy { proximal, correction: Correction { weigh, reject } }
}

fn rejection(reject: &Reject) -> Rejection {
    let divergence = match reject.divergence {
        correction::Divergence::K1 => Divergence::K1,
        correction::Divergence::K2 => Divergence::K2,
        correction::Divergence::K3 => Divergence::K3,
    };
    let over = match reject.over {
        correction::Over::Token => Over::Token,
        correction::Over::Sum => Over::Sum,
        correction::Over::Mean => Over::Mean,
        correction::Over::Max => Over::Max,
    };
    Rejection { divergence, over, min: reject.min, max: reject.max }
}

/// Refuses to begin when the trainer finds the tokens of a few short answers more or less likely than the generator that sampled them. Both
/// hold the same weights then, in single precision, where 1e-5 is much.
pub fn probe(plan: &Plan, policy: &Policy, backend: &LocalBackend) -> Result<()> {
    const ANSWERS: u64 = 4;
    const TOKENS: usize = 16;
    const TOLERANCE: f64 = 0.02;
    let mut params = sampling(plan);
    params.max_new_tokens = params.max_new_tokens.min(TOKENS);
    let mut prompts = prompts(plan)?.limited(ANSWERS);
    let mut samples = Vec::new();
    while let Some(prompt) = prompts.next().map_err(|error| anyhow!("{error}"))? {
        samples.push(policy.sample(prompt, params.clone(), plan.seed)?);
    }
    train::probe(backend, &samples, TOLERANCE)
        .map_err(|error| anyhow!("{error}. (train.probe = false starts the run all the same.)"))
}

/// The trainer of `[sft]`.
pub fn supervised_backend(sft: &Sft, policy: &Policy) -> Result<LocalBackend> {
    Ok(policy.backend(local_config(CrossEntropy, &sft.optimization, sft.lr, sft.steps, 1)?)?)
}

/// The trainer of `[reward_model]`.
pub fn reward_model_backend(of: &RewardModel, model: &ScoreModel) -> Result<LocalBackend> {
    let loss = BradleyTerry { center: of.center };
    Ok(model.backend(local_config(loss, &of.optimization, of.lr, of.steps, 1)?)?)
}

/// `steps` of so many updates each; schedules count updates.
fn local_config(loss: impl algo::Loss + 'static, of: &Optimization, lr: f64, steps: u64, updates: u64) -> Result<LocalConfig> {
    let decay = match of.schedule.kind {
        ScheduleKind::Constant => Decay::Constant,
        ScheduleKind::Linear => Decay::Linear,
        ScheduleKind::Cosine => Decay::Cosine,
    };
    let (warmup_steps, total_steps) = (of.schedule.warmup.saturating_mul(updates), steps.saturating_mul(updates));
    let schedule = Schedule { lr, decay, warmup_steps, total_steps, floor: of.schedule.floor };
    schedule.validate()?;
    Ok(LocalConfig {
        adamw: AdamW {
            beta1: of.betas[0],
            beta2: of.betas[1],
            epsilon: of.eps,
            weight_decay: of.weight_decay,
            ..AdamW::default()
        },
        max_grad_norm: Some(of.max_grad_norm),
        micro_batch_tokens: of.micro_batch_tokens,
        non_finite: match of.on_nonfinite {
            OnNonfinite::Stop => NonFinitePolicy::Stop,
            OnNonfinite::Skip => NonFinitePolicy::Skip,
        },
        threads: Some(of.threads),
        ..LocalConfig::new(loss, schedule)
    })
}

/// The training stage of `grpo`.
pub fn trainer<B: TrainingBackend>(plan: &Plan, backend: B, checkpoints: Option<PathBuf>) -> Trainer<B> {
    let aggregation = match plan.train.aggregation {
        recipe::train::Aggregation::TokenMean => Aggregation::TokenMean,
        recipe::train::Aggregation::SeqMeanTokenMean => Aggregation::SeqMeanTokenMean,
        recipe::train::Aggregation::SeqMeanTokenSum => Aggregation::SeqMeanTokenSum,
        recipe::train::Aggregation::TokenSum => Aggregation::TokenSum,
        recipe::train::Aggregation::DrGrpo => Aggregation::DrGrpo { max_len: plan.generate.max_new_tokens },
    };
    let trainer = Trainer::new(backend)
        .advantages(advantages::estimator(&plan.train))
        .aggregation(aggregation)
        .steps(plan.train.steps)
        .sync_every(plan.sync.every)
        .updates(plan.train.updates)
        .score_first(plan.train.centre() == correction::Proximal::Recompute)
        .gap_limits(GapLimits { warn: plan.train.gap_warn, halt: plan.train.gap_halt })
        .on_stale(on_stale(plan))
        .threads(plan.train.optimization.threads);
    let trainer = match plan.train.target_reward {
        Some(reward) => trainer.target_reward(reward),
        None => trainer,
    };
    checkpointed(trainer, plan, checkpoints)
}

/// With the recipe's checkpoints, if there is a folder for them. The end is always saved.
pub fn checkpointed<B: TrainingBackend>(trainer: Trainer<B>, plan: &Plan, folder: Option<PathBuf>) -> Trainer<B> {
    match folder {
        Some(folder) => {
            let every = (plan.checkpoint.every > 0).then_some(plan.checkpoint.every);
            trainer.checkpoints(folder, every).keep(plan.checkpoint.keep)
        }
        None => trainer,
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use rollflow::algo::Loss;

    use super::policy_loss;

    /// Every kind of `[train.loss]`, and what the library calls it.
    const KINDS: [(&str, &str); 12] = [
        ("grpo", "grpo"),
        ("dapo", "grpo"),
        ("gspo", "gspo"),
        ("cispo", "cispo"),
        ("sapo", "sapo"),
        ("gpg", "gpg"),
        ("dro", "dro"),
        ("dppo", "dppo"),
        ("vespo", "vespo"),
        ("geo_mean", "geo_mean"),
        ("clip_cov", "clip_cov"),
        ("kl_cov", "kl_cov"),
    ];

    #[test]
    fn every_kind_of_loss_can_be_had_from_a_recipe_with_defaults_that_go_together() {
        for (kind, name) in KINDS {
            let recipe = format!(
                "pipeline = 'grpo'\nmodel.kind = 'tiny'\ntask.kind = 'arithmetic'\ntrain.entropy_coef = 0.01\ntrain.loss.kind = '{kind}'"
            );
            let plan = rollflow::recipe::parse("recipe.toml", &recipe, &[]).unwrap();
            let loss = policy_loss(&plan.train);
            loss.check().unwrap();
            assert_eq!((loss.name(), loss.entropy_coef), (name, 0.01));
        }
    }
}
