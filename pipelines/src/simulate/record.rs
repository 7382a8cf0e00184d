//! Records a profile of a recipe that runs for some steps on this machine.

use anyhow::{Context, Result, bail};
use rollflow::flow::{Ended, Interrupts, Until};
use rollflow::recipe::Plan;

use crate::assemble::policy;
use crate::components::Components;
use crate::grpo;
use crate::profile::{Profile, Profiler};
use crate::registry::Registry;
use crate::run::folder::Outputs;
use crate::sft;
use crate::sft::WarmUp;

/// Runs `steps` steps of the recipe, after its warm-up if it has one. Leaves no files.
pub fn record(plan: &Plan, registry: &Registry, steps: u64, interrupts: &Interrupts) -> Result<Profile> {
    let mut plan = plan.clone();
    (plan.train.steps, plan.train.target_reward) = (steps, None);
    let mut policy = policy::policy(&plan)?;
    if let Some(warm_up) = &plan.sft {
        policy = match sft::warm_up(&plan, warm_up, registry, &policy, interrupts)? {
            WarmUp::Learned(policy) => policy,
            WarmUp::Interrupted(_) => bail!("interrupted before anything was recorded"),
        };
    }
    let profiler = Profiler::default();
    let components = Components::observed(&plan, registry, &policy, &policy, None, |generator| profiler.observes(generator))?;
    let (mut outputs, looks) = (Outputs::in_memory(), profiler.clone());
    outputs.log = outputs.log.each(move |step| looks.look(step));
    let mut flow = grpo::declare(&plan, components, outputs, None)?;
    flow.interrupted_by(interrupts);
    let report = flow.run(Until::finished())?;
    if report.ended != Ended::Finished {
        bail!("interrupted while it was recorded; a profile of half a run would mislead");
    }
    profiler.profile(&report).context("nothing was sampled and trained, so there is nothing to simulate")
}
