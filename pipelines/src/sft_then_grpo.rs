//! Supervised training, then reinforcement from its newest checkpoint: one command, two runs.
//!
//! The supervised part is a run of its own in the folder `sft` of the other's, with checkpoints, metrics and a report, and goes on where it was
//! interrupted. The folder around it is the reinforced part's, as [`grpo`](crate::grpo) leaves it, and says in `lineage.json` which checkpoint it
//! began from. Both parts have one tokenizer, that of the recipe's model.

use anyhow::{Context, Result};
use rollflow::flow::Ended;
use rollflow::prelude::*;
use rollflow::recipe::plan::Observe;
use rollflow::recipe::{Pipeline, Plan};

use crate::assemble::models::Lineage;
use crate::assemble::models::model_folder;
use crate::registry::Registry;
use crate::run::files::SFT;
use crate::run::folder::RunFolder;
use crate::run::resume::rewind_to_checkpoint;
use crate::sft::{self, WarmUp};

/// The policy that reinforcement begins with: that of the checkpoint which the run wrote down, or else of the newest that the supervised part leaves.
pub fn learned(plan: &Plan, registry: &Registry, run: &RunFolder, policy: &Policy, interrupts: &Interrupts) -> Result<WarmUp> {
    let lineage = match Lineage::read(run.path())? {
        Some(lineage) => lineage,
        None => {
            let begun = run.path().join(SFT).exists();
            let part = run.part(SFT, &supervised(plan))?;
            // Also where it has its last checkpoint: its report may be missing.
            let from = if begun { rewind_to_checkpoint(part.path(), |line| part.say(line))? } else { None };
            let report = sft::run_of(&supervised(plan), registry, policy, &part, from.as_ref(), interrupts)?;
            if report.ended != Ended::Finished {
                return Ok(WarmUp::Interrupted(report));
            }
            let checkpoint = model_folder(part.path())?;
            let lineage = Lineage::of(run.path(), &checkpoint).context("the supervised part left no checkpoint")?;
            lineage.write(run.path())?;
            lineage
        }
    };
    let folder = lineage.found(run.path())?;
    run.say(&format!("reinforcement begins from {}", folder.display()));
    let learned = policy.with_weights_of(&folder).with_context(|| format!("beginning from {}", folder.display()))?;
    Ok(WarmUp::Learned(learned))
}

/// The recipe of the supervised part.
fn supervised(plan: &Plan) -> Plan {
    Plan {
        pipeline: Pipeline::Sft,
        name: format!("{}-sft", plan.name),
        seed: plan.seed,
        model: plan.model.clone(),
        lora: plan.lora.clone(),
        chat: plan.chat.clone(),
        task: plan.task.clone(),
        sft: plan.sft.clone(),
        // Its tasks are what is imitated.
        environment: plan.environment.clone(),
        checkpoint: plan.checkpoint.clone(),
        observe: Observe { metrics: None, ..plan.observe.clone() },
        ..Plan::default()
    }
}
