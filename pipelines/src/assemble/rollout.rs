//! `[generate]` and `[[filter]]`: how prompts are sampled, and which groups are trained on.

use anyhow::{Result, anyhow};
use rollflow::algo::filters::{GroupFilter, Verdict};
use rollflow::engine::{LocalEngine, TokenEngine};
use rollflow::flow::WeightsRx;
use rollflow::model::FrozenWeights;
use rollflow::prelude::*;
use rollflow::recipe::generate::{Filter as Condition, Generate};
use rollflow::recipe::{Batching, FlowLimits, Plan, Timeline};
use rollflow::rollout::{Admission, complete};
use rollflow::train;

use crate::assemble::policy::{self, Reader};
use crate::assemble::{data, environments, steps};
use crate::registry::Registry;

/// Admission of the run: as many prompts as its steps train, within the staleness window.
pub fn admission(plan: &Plan) -> Admission {
    let groups_per_version = plan.groups_per_publish() as u64;
    let all_groups = plan.train.steps * plan.batch.groups as u64;
    let window = plan.admission_window() as u64;
    Admission::new(groups_per_version, window, Some(all_groups)).bounded(plan.flow.max_staleness)
}

/// Collects groups into batches by `[batch]`. Synchronous runs are equal to the bit, so they train
/// whole batches. Others train a batch in parts as it arrives.
pub fn batcher(batch: &Batching, flow: &FlowLimits) -> Batcher {
    /// Largest number of parts: more would cost more passes than they save waiting.
    const PARTS: usize = 8;
    let batcher = Batcher::groups(batch.groups).over_sample(batch.oversampling_factor).on_stale(flow.on_stale);
    if flow.max_staleness == 0 { batcher } else { batcher.in_parts(batch.groups.div_ceil(PARTS)) }
}

/// Sampling parameters of `[generate]`.
pub fn sampling(generate: &Generate) -> SamplingParams {
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

/// Builds a generator with an engine in this process.
pub fn generator(plan: &Plan, policy: &Policy, weights: WeightsRx<FrozenWeights>) -> Result<Generator<LocalEngine>> {
    let generator = match &plan.generate.devices[..] {
        [] => Generator::local(policy),
        names => {
            let computes = policy::computes(&plan.model, "generate.devices", names)?;
            Generator::local_on(policy, computes.iter().map(|compute| compute.device))
        }
    };
    in_environment(plan, &policy.into(), generator_by(plan, generator.weights(weights))?)
}

/// With the recipe's environment, if it has one.
pub fn in_environment<E: TokenEngine>(plan: &Plan, reader: &Reader, generator: Generator<E>) -> Result<Generator<E>> {
    let Some(of) = &plan.environment else { return Ok(generator) };
    Ok(generator.environment(environments::agent(of, &plan.net, plan.seed, reader.config.max_positions)?))
}

/// Applies `[generate]` to a generator of any engine.
pub fn generator_by<E: TokenEngine>(plan: &Plan, generator: Generator<E>) -> Result<Generator<E>> {
    let generate = &plan.generate;
    let generator = generator
        .on_new_weights(generate.on_new_weights)
        .mask_older(generate.mask_older_versions)
        .group_size(generate.group_size)
        .sampling(sampling(generate))
        .workers(generate.workers)
        .threads(generate.threads)
        .seed(plan.seed);
    let generator = match generate.max_num_seqs {
        0 => generator.adaptive_slots(plan.most_slots()),
        slots => generator.slots(slots),
    };
    let (timeline, every) = (Timeline::of(plan)?, plan.sync.every);
    Ok(match timeline.is_constant() {
        true => generator,
        false => generator.temperature_by(move |version| steps::temperature(&timeline, every, version)),
    })
}

/// Builds the group filter: a group is kept if all conditions of `[[filter]]` hold.
pub fn filter(plan: &Plan, registry: &Registry) -> Result<impl GroupFilter> {
    type BoxedFilter = Box<dyn Fn(&Group) -> Verdict + Send + Sync>;
    let mut all: Vec<BoxedFilter> = Vec::new();
    for filter in &plan.filter {
        all.push(match filter {
            Condition::NonzeroStd { threshold } => Box::new(filters::std_above(threshold.max(filters::NONZERO_STD))),
            Condition::MinReward { threshold } => Box::new(filters::min_reward(*threshold)?),
            Condition::Diversity { min_unique_ratio } => Box::new(filters::diversity(*min_unique_ratio)?),
            Condition::Length { min, max } => Box::new(filters::length(*min, *max)?),
            Condition::AnySuccess => Box::new(filters::any_completed),
            Condition::Custom(of) => {
                let filter = registry.filter_of(&of.name, &of.params)?;
                Box::new(move |group| filter(group))
            }
        });
    }
    // A run that comes to pairs later drops groups without one before, too: answers that all earned the
    // same teach no group-relative loss either.
    if let Some(pairing) = Timeline::of(plan)?.plans().find_map(Plan::pairing) {
        all.push(Box::new(pairing.filter()));
    }
    Ok(move |group: &Group| all.iter().map(|condition| condition(group)).find(|verdict| !verdict.kept()).unwrap_or(Verdict::Keep))
}

/// Compares the log-probabilities of trainer and generator on a few short completions, and fails if
/// they differ by more than the number format explains.
pub fn probe(plan: &Plan, policy: &Policy, backend: &LocalBackend) -> Result<()> {
    const ANSWERS: usize = 4;
    const TOKENS: usize = 16;
    let mut params = sampling(&plan.generate);
    params.max_new_tokens = params.max_new_tokens.min(TOKENS);
    let mut samples = Vec::new();
    for prompt in data::first_prompts(plan, ANSWERS, &policy.into())? {
        let groups = complete(&mut policy.engine(1, plan.seed), policy.tokenizer(), vec![prompt], 1, &params)?;
        samples.extend(groups.into_iter().flat_map(|group| group.samples));
    }
    train::probe(backend, &samples, plan.model.precision().agreement())
        .map_err(|error| anyhow!("{error}. (train.probe = false starts the run all the same.)"))
}
