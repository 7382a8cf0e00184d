//! A recipe's values as the library's parts. Pure translation: what a key means is decided here, what it does in the library.

use std::sync::Arc;

use anyhow::{Context, Result, anyhow, bail};
use rollflow::data::{DataBuffer, Pair, RankedPair, arithmetic};
use rollflow::engine::{LocalEngine, TokenEngine};
use rollflow::flow::{Capacity, WeightsRx};
use rollflow::model::{Compute, Dtype, FrozenWeights};
use rollflow::prelude::*;
use rollflow::recipe::model::{DeviceName, ModelSource, TinyModel};
use rollflow::recipe::task::{Arithmetic, RewardModel, TaskData};
use rollflow::recipe::{self, Plan, Timeline};
use rollflow::stages::tokenizer_folder;
use rollflow::train::{self};

use crate::assemble::conversations;
use crate::assemble::losses::{self};
use crate::assemble::origin;
use crate::assemble::rewards::{Judge, Scoring};
use crate::assemble::{data, environments, lessons};
use crate::registry::Registry;

/// What a tiny model can spell.
const CHARACTERS: &str = "0123456789+-*/=() .,:;?!<>abcdefghijklmnopqrstuvwxyzABCD\n_";

/// Where and in which format all models of the run compute.
pub fn compute(plan: &Plan) -> Result<Compute> {
    compute_on(plan.model.device, plan.model.precision().into())
        .with_context(|| format!("model.device = {:?}", plan.model.device.word()))
}

/// On this device, which must be there, in this format.
pub fn compute_on(device: DeviceName, dtype: Dtype) -> Result<Compute> {
    let compute = match device {
        DeviceName::Cpu => Compute::cpu(dtype),
        DeviceName::Cuda(index) => Compute::cuda(index, dtype),
    };
    compute.check()?;
    Ok(compute)
}

/// On each of the devices that `key` names, which must be there.
pub fn computes(plan: &Plan, key: &str, names: &[DeviceName]) -> Result<Vec<Compute>> {
    let compute = |name: &DeviceName| {
        compute_on(*name, plan.model.precision().into()).with_context(|| format!("{key} names {:?}", name.word()))
    };
    names.iter().map(compute).collect()
}

/// What a run trains, away from any run: for graphs and forecasts.
pub fn policy(plan: &Plan) -> Result<Policy> {
    let base = base(plan)?;
    Ok(match &plan.lora {
        Some(lora) => base.adapted(origin::adapters(lora)?, plan.seed)?,
        None => base.merged(),
    })
}

/// The model and its tokenizer.
pub fn base(plan: &Plan) -> Result<Policy> {
    let compute = compute(plan)?;
    Ok(match &plan.model.source {
        ModelSource::Tiny(tiny) => {
            let tokenizer = tokenizer(plan)?;
            Policy::random(tiny_config(tiny, &tokenizer), tokenizer, plan.seed)?.computing(compute)
        }
        ModelSource::Folder(folder) => Policy::load_with(origin::model_folder(&folder.name())?, tokenizer(plan)?, compute)?,
    })
}

fn tiny_config(tiny: &TinyModel, tokenizer: &Tokenizer) -> ModelConfig {
    ModelConfig {
        intermediate_size: tiny.intermediate,
        heads: tiny.heads,
        kv_heads: tiny.kv_heads,
        head_dim: tiny.hidden / tiny.heads,
        ..ModelConfig::small(tokenizer, tiny.hidden, tiny.layers)
    }
}

/// How a model reads text: all of a policy but its weights.
#[derive(Clone)]
pub struct Reader {
    /// Text to tokens and back, with the recipe's chat template.
    pub tokenizer: Arc<Tokenizer>,
    /// The model's shape.
    pub config: ModelConfig,
}

impl Reader {
    /// The reader of the recipe's model. Loads no weights.
    pub fn of(plan: &Plan) -> Result<Self> {
        let tokenizer = tokenizer(plan)?;
        let config = match &plan.model.source {
            ModelSource::Tiny(tiny) => tiny_config(tiny, &tokenizer),
            ModelSource::Folder(folder) => rollflow::model::folder_config(&origin::model_folder(&folder.name())?)?,
        };
        Ok(Reader { tokenizer: Arc::new(tokenizer), config })
    }
}

impl From<&Policy> for Reader {
    fn from(policy: &Policy) -> Self {
        Reader { tokenizer: policy.tokenizer().clone(), config: policy.config().clone() }
    }
}

/// The model's tokenizer, without the model.
pub fn tokenizer(plan: &Plan) -> Result<Tokenizer> {
    let tokenizer = match &plan.model.source {
        ModelSource::Tiny(tiny) => Tokenizer::characters(CHARACTERS, tiny.vocab)?,
        ModelSource::Folder(folder) => Tokenizer::from_dir(&tokenizer_folder(origin::model_folder(&folder.name())?))?,
    };
    conversations::tokenizer(plan, tokenizer)
}

/// Bounds of every edge.
pub fn capacity(plan: &Plan) -> Capacity {
    Capacity::items(plan.flow.edge_items).tokens(plan.flow.edge_tokens)
}

/// What is asked, as `[chat]` has it; of data, only what `reader` can read, where it is known.
pub fn prompts(plan: &Plan, reader: Option<&Reader>) -> Result<Prompts> {
    let chat = conversations::chat(plan);
    let asked = move |prompt: Prompt| Prompt { text: conversations::asked(&chat, prompt.text), ..prompt };
    let buffer = match &plan.task.data {
        TaskData::Data(task) => return Ok(data::prompts(plan, &task.sources(), reader)?.map(asked)),
        TaskData::Rollouts(_) => bail!("rollouts that were recorded are answered already: there is nothing to ask"),
        TaskData::Arithmetic(task) => DataBuffer::new(sums(task, plan.seed).iter().map(Prompt::from), plan.seed)?,
    };
    Ok(Prompts::new(if plan.task.shuffle { buffer.shuffled() } else { buffer }).map(asked))
}

/// The sums of an arithmetic task.
pub(crate) fn sums(task: &Arithmetic, seed: u64) -> Vec<Pair> {
    match task.count {
        Some(count) => arithmetic::drawn_addition(task.digits, count, seed),
        None => arithmetic::addition(task.digits),
    }
}

/// The reward model that a run trains, away from any run: for graphs.
pub fn score_model(plan: &Plan) -> Result<ScoreModel> {
    let base = score_base(plan)?;
    Ok(match &plan.lora {
        Some(lora) => base.adapted(origin::adapters(lora)?, plan.seed)?,
        None => base.merged(),
    })
}

/// The model that a reward model starts from: the recipe's, with a head drawn by the seed unless it has one.
pub fn score_base(plan: &Plan) -> Result<ScoreModel> {
    Ok(match &plan.model.source {
        ModelSource::Folder(folder) => {
            let folder = origin::model_folder(&folder.name())?;
            ScoreModel::begin_with(folder, tokenizer(plan)?, plan.seed)?.computing(compute(plan)?)
        }
        ModelSource::Tiny(_) => ScoreModel::from_policy(&base(plan)?, Some(plan.seed)),
    })
}

/// Pairs of answers to train a reward model on, and those it is judged by in the end.
pub fn ranked_pairs(plan: &Plan, of: &RewardModel) -> Result<(Vec<RankedPair>, Vec<RankedPair>)> {
    const WRONG: usize = 64;
    let (trained, chat) = (1.0 - of.held_out, conversations::chat(plan));
    let asked = |pairs: Vec<RankedPair>| -> Vec<RankedPair> {
        let asked = |pair: RankedPair| RankedPair { prompt: conversations::asked(&chat, pair.prompt), ..pair };
        pairs.into_iter().map(asked).collect()
    };
    let (trained, held_out) = match &plan.task.data {
        TaskData::Arithmetic(task) => {
            let (trained, held_out) = arithmetic::split(&sums(task, plan.seed), trained, plan.seed);
            (arithmetic::ranked(&trained, WRONG, plan.seed), arithmetic::ranked(&held_out, WRONG, plan.seed))
        }
        TaskData::Data(task) => arithmetic::split(&data::all(&task.sources())?, trained, plan.seed),
        TaskData::Rollouts(_) => bail!("recorded rollouts are no pairs of answers"),
    };
    Ok((asked(trained), asked(held_out)))
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
        ignore_eos: generate.ignore_eos,
        ..SamplingParams::default()
    }
}

/// Who answers: an engine in this process.
pub fn generator(plan: &Plan, policy: &Policy, weights: WeightsRx<FrozenWeights>) -> Result<Generator<LocalEngine>> {
    let generator = match &plan.generate.devices[..] {
        [] => Generator::local(policy, weights),
        names => {
            let computes = computes(plan, "generate.devices", names)?;
            Generator::local_on(policy, weights, computes.iter().map(|compute| compute.device))
        }
    };
    in_environment(plan, &policy.into(), generator_by(plan, generator)?)
}

/// With the recipe's environment, if it has one.
pub fn in_environment<E: TokenEngine>(plan: &Plan, reader: &Reader, generator: Generator<E>) -> Result<Generator<E>> {
    Ok(match environments::agent(plan, reader.config.max_positions)? {
        Some(agent) => generator.environment(agent),
        None => generator,
    })
}

/// Who answers, by whatever engine.
pub fn generator_by<E: TokenEngine>(plan: &Plan, generator: Generator<E>) -> Result<Generator<E>> {
    let generate = &plan.generate;
    let generator = generator
        .on_new_weights(generate.on_new_weights)
        .mask_older(generate.mask_older)
        .group_size(generate.group_size)
        .sampling(sampling(plan))
        .workers(generate.workers)
        .threads(generate.threads)
        .seed(plan.seed);
    let generator = match generate.slots {
        0 => generator.adaptive_slots(plan.most_slots()),
        slots => generator.slots(slots),
    };
    let (timeline, every) = (Timeline::of(plan)?, plan.sync.every);
    Ok(match timeline.is_constant() {
        true => generator,
        false => generator.temperature_by(move |version| lessons::temperature(&timeline, every, version)),
    })
}

/// The stage that scores.
pub fn reward(plan: &Plan, registry: &Registry) -> Result<Judge> {
    let judge = Scoring::of(plan, registry)?.judge(plan);
    let judge = judge.on_failure(plan.reward.on_failure).on_lost_sample(plan.flow.on_lost_sample);
    Ok(judge.max_poisoned(plan.reward.max_poisoned))
}

/// Which groups are trained on: all conditions hold.
pub fn filter(plan: &Plan, registry: &Registry) -> Result<impl GroupFilter> {
    type Condition = Box<dyn Fn(&Group) -> Verdict + Send + Sync>;
    let mut all: Vec<Condition> = Vec::new();
    for filter in &plan.filter {
        all.push(match filter {
            recipe::generate::Filter::NonzeroStd(of) => Box::new(filters::std_above(of.threshold.max(filters::NONZERO_STD))),
            recipe::generate::Filter::MinReward(of) => Box::new(filters::min_reward(of.threshold)?),
            recipe::generate::Filter::Diversity(of) => Box::new(filters::diversity(of.min_unique_ratio)?),
            recipe::generate::Filter::Length(of) => Box::new(filters::length(of.min, of.max)?),
            recipe::generate::Filter::AnySuccess(_) => Box::new(filters::any_completed),
            recipe::generate::Filter::Custom(of) => {
                let filter = registry.filter_of(&of.name, &of.params)?;
                Box::new(move |group| filter(group))
            }
        });
    }
    // A run that comes to pairs later drops groups without one before, too: answers that all earned the same teach no group-relative loss either.
    if let Some(pairing) = Timeline::of(plan)?.plans().find_map(losses::pairing) {
        all.push(Box::new(pairing.filter()));
    }
    Ok(move |group: &Group| all.iter().map(|condition| condition(group)).find(|verdict| !verdict.kept()).unwrap_or(Verdict::Keep))
}

/// Refuses to begin when the trainer finds the tokens of a few short answers more or less likely than the generator that sampled them. Both hold the
/// same weights then; by how much they may differ depends on the format that they compute in.
pub fn probe(plan: &Plan, policy: &Policy, backend: &LocalBackend) -> Result<()> {
    const ANSWERS: u64 = 4;
    const TOKENS: usize = 16;
    let mut params = sampling(plan);
    params.max_new_tokens = params.max_new_tokens.min(TOKENS);
    let mut prompts = match &plan.task.data {
        TaskData::Data(task) => data::first_prompts(plan, &task.sources(), ANSWERS as usize, &policy.into())?,
        _ => prompts(plan, Some(&policy.into()))?,
    }
    .limited(ANSWERS);
    let mut samples = Vec::new();
    while let Some(prompt) = prompts.next().map_err(|error| anyhow!("{error}"))? {
        samples.push(policy.sample(prompt, params.clone(), plan.seed)?);
    }
    train::probe(backend, &samples, plan.model.precision().agreement())
        .map_err(|error| anyhow!("{error}. (train.probe = false starts the run all the same.)"))
}
