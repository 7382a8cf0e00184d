//! Conversion of `train.epochs`, `sft.epochs` and `reward_model.epochs` into steps.
//!
//! The run's `recipe.toml` holds the steps, so a resumed run has the same schedule (law C2).

use anyhow::{Error, Result, ensure};
use rollflow::recipe::{Derived, Pipeline, Plan, Problem, Source, TaskData};
use rollflow::util::causes::full_message;

use crate::assemble::policy::Reader;
use crate::assemble::supervised::{Imitation, is_laid_out};
use crate::assemble::{data, environments, preferences};
use crate::grpo_offline;
use crate::registry::Registry;

/// One pass over the data.
struct Epoch {
    /// Description, such as `7473 prompts, 32 a step`.
    what: String,
    /// Length in steps. A last step may belong in part to the next epoch.
    steps: f64,
}

impl Epoch {
    fn of(count: usize, what: &str, each: usize) -> Self {
        Epoch { what: format!("{count} {what}, {each} a step"), steps: count as f64 / each as f64 }
    }
}

/// Replaces the epochs of a plan by steps, and returns them with their reasons. Reads the data to count
/// it, if the plan has epochs.
pub fn settle(plan: &mut Plan, registry: &Registry) -> Result<Vec<Derived>> {
    let mut derived = Vec::new();
    let mut steps = |section: &str, epochs: f64, Epoch { what, steps }: Epoch| {
        // A product that is a whole number but for rounding is that number.
        let steps = (epochs * steps - 1e-9).ceil().max(1.0) as u64;
        let reason = format!("{section}.epochs = {epochs:?} of {what}");
        derived.push(Derived::of(format!("{section}.steps"), steps, reason));
        steps
    };
    if let Some((sft, epochs)) = plan.sft.as_ref().and_then(|sft| Some((sft, sft.epochs?))) {
        let imitation = Imitation::of(plan, sft);
        // Rows that are laid out have every record once, whatever its weight.
        if !is_laid_out(sft) {
            unweighted("sft", &imitation.sources())?;
        }
        let (batches, _) = imitation.batches(&Reader::of_plan(plan)?)?;
        let length = batches.batches_per_epoch();
        let steps = steps("sft", epochs, Epoch { what: format!("{length} steps"), steps: length });
        plan.sft.iter_mut().for_each(|sft| (sft.steps, sft.epochs) = (steps, None));
    }
    if let Some((of, epochs)) = plan.reward_model.as_ref().and_then(|of| Some((of, of.epochs?))) {
        let [pairs, _] = preferences::divided(&plan.task, &plan.chat, plan.seed, of.held_out)?;
        let steps = steps("reward_model", epochs, Epoch::of(pairs.len(), "pairs", of.batch));
        plan.reward_model.iter_mut().for_each(|of| (of.steps, of.epochs) = (steps, None));
    }
    if let Some(epochs) = plan.train.epochs {
        plan.train.steps = steps("train", epochs, epoch(plan, registry)?);
        plan.train.epochs = None;
    }
    Ok(derived)
}

/// Rejects a mixture by weights, of which no pass is complete.
fn unweighted(section: &str, sources: &[Source]) -> Result<()> {
    let weighted = sources.iter().any(|source| source.weight.is_some());
    ensure!(!weighted, "sources with weights have different epochs; give repeats instead, or set {section}.steps");
    Ok(())
}

/// Epoch of `[train]`.
fn epoch(plan: &Plan, registry: &Registry) -> Result<Epoch> {
    let (each, task, seed) = (plan.batch.groups, &plan.task, plan.seed);
    unweighted("train", &task.data.sources())?;
    let reader = || Reader::of_plan(plan);
    if plan.pipeline == Pipeline::Dpo {
        let steps = preferences::batches(task, &plan.chat, seed, each, plan.train.steps, &reader()?)?.0.batches_per_epoch();
        return Ok(Epoch { what: format!("{} pairs, {each} a step", (steps * each as f64).round()), steps });
    }
    Ok(match &task.data {
        TaskData::Arithmetic { digits, count } => Epoch::of(data::sums(*digits, *count, seed).len(), "prompts", each),
        TaskData::Data(_) => {
            let (environment, most) = (plan.environment.as_ref(), plan.generate.max_new_tokens);
            let fits = data::fits(&plan.chat, environment, Some(&reader()?), most);
            Epoch::of(data::prompt_dataset(task, seed, plan.reward.rule.compares(), fits)?.len(), "prompts", each)
        }
        TaskData::Environment { limit } => {
            Epoch::of(environments::tasks(plan.environment.as_ref(), *limit)?.len(), "prompts", each)
        }
        TaskData::Rollouts { .. } => {
            Epoch::of(grpo_offline::groups(plan, registry, &reader()?.tokenizer)?.len(), "recorded groups", each)
        }
    })
}

/// Error of a plan whose epochs cannot become steps.
pub fn complaint(plan: &Plan, error: &Error) -> Problem {
    let of = |section: &str, given: bool| given.then(|| format!("{section}.epochs"));
    let sft = of("sft", plan.sft.as_ref().is_some_and(|sft| sft.epochs.is_some()));
    let reward_model = of("reward_model", plan.reward_model.as_ref().is_some_and(|of| of.epochs.is_some()));
    let key = sft.or(reward_model).unwrap_or_else(|| "train.epochs".to_owned());
    let message = format!("`{key}` can't become steps: {}", full_message(error.as_ref()));
    Problem::of(key, message, "correct the data, or set a number of steps")
}
