//! Records a profile: the recipe runs for some steps on this machine, and everything is timed.

use std::sync::mpsc::channel;

use anyhow::{Context, Result, bail};
use rollflow::flow::{Ended, Interrupts, State, Until};
use rollflow::model::FrozenWeights;
use rollflow::prelude::*;
use rollflow::recipe::Plan;
use rollflow::stages::train::Trained;

use super::profile::{Answers, ItemTimes, Profile, Recorded, fit_decode};
use crate::assemble::policy;
use crate::assemble::sections::Start;
use crate::components::Components;
use crate::grpo;
use crate::registry::Registry;
use crate::run::folder::Outputs;
use crate::sft;
use crate::sft::WarmUp;

/// The stages that take a message at a time and are timed as a whole.
const OTHERS: [&str; 8] = ["reward", "filter", "pairs", "reference", "teacher", "batch", "sync", "log"];

/// Runs `steps` steps of the recipe, after its warm-up if it has one. Leaves no files.
pub fn record(plan: &Plan, registry: &Registry, steps: u64) -> Result<Profile> {
    let mut plan = plan.clone();
    (plan.train.steps, plan.train.target_reward) = (steps, None);
    let mut policy = policy::policy(Start::of(&plan))?;
    let interrupts = Interrupts::listen().context("listening for Ctrl-C")?;
    if let Some(warm_up) = &plan.sft {
        policy = match sft::warm_up(&plan, warm_up, registry, &policy, &interrupts)? {
            WarmUp::Learned(policy) => policy,
            WarmUp::Interrupted(_) => bail!("interrupted before anything was recorded"),
        };
    }
    // The receiving ends outlive the flow, so that no send fails.
    let ((decoded, loads), (trained, times), (answered, answers)) = (channel(), channel(), channel());
    let components = Components::observed(&plan, registry, &policy, &policy, |generator| {
        generator.each_step(move |load| decoded.send(load).unwrap_or_default())
    })?;
    let mut outputs = Outputs::in_memory();
    outputs.log = outputs.log.each(move |step: &Trained<FrozenWeights>| {
        trained.send((step.batch.tokens(), step.seconds - step.update_seconds, step.update_seconds)).ok();
        for group in &step.batch.groups {
            let answer = |sample: &Sample| (sample.generated(), sample.reward.unwrap_or(0.0));
            answered.send((group.id(), group.samples.iter().map(answer).collect())).ok();
        }
        for dropped in &step.batch.dropped {
            let rewards = dropped.rewards.iter().copied().chain(std::iter::repeat(0.0));
            answered.send((dropped.id, dropped.lengths.iter().copied().zip(rewards).collect())).ok();
        }
    });
    let mut flow = grpo::declare(&plan, components, outputs, None)?;
    flow.interrupted_by(&interrupts);
    let report = flow.run(Until::finished())?;
    if report.ended != Ended::Finished {
        bail!("interrupted while it was recorded; a profile of half a run would mislead");
    }
    let per_item = |name: &&str| {
        let stage = report.stage(name)?;
        let busy = stage.time().of(State::Busy);
        let item = busy as f64 / 1e9 / stage.items_in.max(1) as f64;
        Some(((*name).to_owned(), ItemTimes { item, token: 0.0 }))
    };
    let mut stages: std::collections::BTreeMap<_, _> = OTHERS.iter().filter_map(per_item).collect();
    stages.insert("train".to_owned(), trainer_times(&times.try_iter().collect::<Vec<_>>()));
    let mut answers: Vec<(u64, Vec<(usize, f64)>)> = answers.try_iter().collect();
    answers.sort_by_key(|(ordinal, _)| *ordinal);
    Ok(Profile {
        decode: fit_decode(&loads.try_iter().collect::<Vec<_>>()),
        stages,
        answers: Answers::Recorded(answers.into_iter().map(|(_, group)| group).collect()),
        recorded: Some(Recorded { steps, seconds: report.wall as f64 / 1e9 }),
    })
}

/// Fits the trainer's times to (tokens, seconds in passes, seconds of the update) of each step.
fn trainer_times(steps: &[(usize, f64, f64)]) -> ItemTimes {
    let sum = |of: fn(&(usize, f64, f64)) -> f64| steps.iter().map(of).sum::<f64>();
    ItemTimes {
        item: sum(|step| step.2) / steps.len().max(1) as f64,
        token: sum(|step| step.1) / sum(|step| step.0 as f64).max(1.0),
    }
}
