//! `[generate]` and `[[filter]]`: how prompts are sampled, and which groups are trained on.

use anyhow::{Result, anyhow};
use rollflow::algo::filters::{GroupFilter, Verdict};
use rollflow::engine::{LocalEngine, TokenEngine};
use rollflow::prelude::*;
use rollflow::recipe::{Batching, Filter as Condition, FlowLimits, Generate, Plan, Timeline};
use rollflow::rollout::{Admission, complete};
use rollflow::train::{self, RouterReplay};

use crate::assemble::policy;
use crate::registry::Registry;

/// Admission of the run: as many prompts as its steps train, within the staleness window.
pub fn admission(plan: &Plan) -> Admission {
    let all = plan.train.steps.saturating_mul(plan.batch.groups as u64);
    let (per_version, window) = (plan.groups_per_publish() as u64, plan.admission_window() as u64);
    Admission::new(per_version, window, Some(all)).bounded(plan.flow.max_staleness)
}

/// Collects groups into batches by `[batch]`. Synchronous runs are equal to the bit, so they train
/// whole batches. Others train a batch in parts as it arrives.
pub fn batcher(batch: &Batching, flow: &FlowLimits) -> Batcher {
    /// Largest number of parts: more would cost more passes than they save waiting.
    const PARTS: usize = 8;
    let batcher = Batcher::groups(batch.groups).over_sample(batch.oversampling_factor).on_stale(flow.on_stale);
    if flow.max_staleness == 0 { batcher } else { batcher.in_parts(batch.groups.div_ceil(PARTS)) }
}

/// Builds a generator with engines in this process, on the devices of `[generate]`.
pub fn local_generator(plan: &Plan, policy: &Policy) -> Result<Generator<LocalEngine>> {
    let (generate, model) = (&plan.generate, &plan.model);
    let generator = match &generate.devices[..] {
        [] => Generator::local(policy),
        names => {
            let computes = policy::computes(model, "generate.devices", names)?;
            Generator::local_on(policy, computes.iter().map(|compute| compute.device))
        }
    };
    let generator = generator.prefix_cache(plan.remembered()).cache_tokens(generate.cache_tokens);
    let generator = generator.draft_tokens(generate.draft_tokens);
    Ok(generator.recording_routes(plan.train.router_replay != RouterReplay::Off))
}

/// Applies `[generate]` to a generator of any engine. `most_slots` bounds slots that are chosen by
/// measuring. Prompts of a version are sampled at the temperature of the first step that trains it.
pub fn configured<E: TokenEngine>(
    generator: Generator<E>,
    generate: &Generate,
    seed: u64,
    most_slots: usize,
    timeline: Timeline,
    sync_every: u64,
) -> Generator<E> {
    let generator = generator
        .on_new_weights(generate.on_new_weights)
        .mask_older(generate.mask_older_versions)
        .group_size(generate.group_size)
        .sampling(generate.sampling())
        .workers(generate.workers)
        .seed(seed);
    let generator = match generate.threads {
        Some(threads) => generator.threads(threads),
        None => generator,
    };
    let generator = match generate.max_num_seqs {
        0 => generator.adaptive_slots(most_slots),
        slots => generator.slots(slots),
    };
    generator.temperature_by(move |version| {
        let step = version.saturating_sub(1) * sync_every + 1;
        // An invalid plan ends the run at the trainer, with its reason.
        timeline.sampling_at(step).map_or(1.0, |plan| plan.generate.temperature as f32)
    })
}

/// Builds the group filter: a group is kept if all conditions of `[[filter]]` hold, if it has a pair once
/// some phase of the `timeline` learns from pairs, and if something of it is trained where truncated
/// completions are not.
pub fn filter(conditions: &[Condition], timeline: &Timeline, registry: &Registry) -> Result<impl GroupFilter + use<>> {
    type BoxedFilter = Box<dyn Fn(&Group) -> Verdict + Send + Sync>;
    let mut all: Vec<BoxedFilter> = Vec::new();
    for filter in conditions {
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
    if let Some(pairing) = timeline.plans().iter().find_map(|plan| plan.pairing()) {
        all.push(Box::new(pairing.filter()));
    }
    if timeline.plans().iter().any(|plan| plan.train.mask_truncated) {
        all.push(Box::new(filters::any_completed));
    }
    Ok(move |group: &Group| all.iter().map(|condition| condition(group)).find(|verdict| !verdict.kept()).unwrap_or(Verdict::Keep))
}

/// Prompts that [`probe`] compares completions of.
pub const PROBED: usize = 4;

/// Compares the log-probabilities of trainer and generator on a few short completions, and fails if
/// they differ by more than the number format explains.
pub fn probe(prompts: Vec<Prompt>, plan: &Plan, policy: &Policy, backend: &LocalBackend) -> Result<()> {
    const TOKENS: usize = 16;
    let (mut params, seed, replays) = (plan.generate.sampling(), plan.seed, plan.train.router_replay != RouterReplay::Off);
    params.max_new_tokens = params.max_new_tokens.min(TOKENS);
    let mut samples = Vec::new();
    for prompt in prompts {
        let mut engine = policy.engine(1, seed).recording_routes(replays);
        let groups = complete(&mut engine, policy.tokenizer(), vec![prompt], 1, &params)?;
        samples.extend(groups.into_iter().flat_map(|group| group.samples));
    }
    train::probe(backend, &samples, policy.compute().dtype.agreement())
        .map_err(|error| anyhow!("{error}. (train.probe = false starts the run all the same.)"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_groups_of_a_run_of_very_many_steps_are_counted_without_overflow() {
        let mut plan = Plan::default();
        plan.train.steps = u64::MAX;
        assert_eq!(admission(&plan).pace().total, Some(u64::MAX));
    }
}
