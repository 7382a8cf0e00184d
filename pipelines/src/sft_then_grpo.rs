//! Supervised training, then reinforcement from its newest checkpoint: one command, two runs.
//!
//! The supervised part is a separate run in the folder `sft`, with checkpoints, metrics and a
//! report; an interrupted one resumes. The outer folder is a [`grpo`](crate::grpo) run whose
//! `lineage.json` names the checkpoint it started from. Both parts use the model's tokenizer.

use anyhow::{Context, Result};
use rollflow::flow::{Ended, Interrupts};
use rollflow::prelude::*;
use rollflow::recipe::{Pipeline, Plan, Task, TaskData};

use crate::assemble::models::{Lineage, model_folder};
use crate::assemble::supervised::is_laid_out;
use crate::registry::Registry;
use crate::run::SFT;
use crate::run::folder::RunFolder;
use crate::run::resume::{cut, rewind_to};
use crate::sft::{self, WarmUp};

/// Returns the policy that reinforcement starts from: of the recorded checkpoint, or of the newest that
/// the supervised part saves.
pub fn learned(plan: &Plan, registry: &Registry, run: &RunFolder, policy: &Policy, interrupts: &Interrupts) -> Result<WarmUp> {
    let lineage = match Lineage::read(run.path())? {
        Some(lineage) => lineage,
        None => {
            let begun = run.path().join(SFT).exists();
            let part = run.part(SFT, &supervised(plan))?;
            // Also where it has its last checkpoint: its report may be missing.
            let say = |line: &str| part.say(line);
            let from = if begun { rewind_to(part.path(), cut(part.path(), false, say)?, say)? } else { None };
            run.uploading_part();
            let report = part.end(sft::run_of(&supervised(plan), registry, policy, &part, from.as_ref(), interrupts))?;
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

/// The recipe of the supervised part. Leaves out keys that `check` refuses in a run of pipeline = "sft".
fn supervised(plan: &Plan) -> Plan {
    let mut part = Plan {
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
        observe: plan.observe.clone(),
        ranks: plan.ranks.clone(),
        ..Plan::default()
    };
    part.observe.metrics = None;
    if let Some(lora) = &mut part.lora {
        // No generator is given adapters, which are saved in f32.
        lora.sync = None;
        part.checkpoint.dtype = None;
    }
    part.task.shuffle = true;
    let rows = part.sft.as_ref().is_some_and(|sft| is_laid_out(sft) && sft.sources().is_empty());
    match &mut part.task.data {
        // The pairs are those of [sft].
        TaskData::Environment { .. } => part.task = Task::default(),
        TaskData::Data(of) if rows => of.sources.iter_mut().for_each(|source| source.weight = None),
        _ => {}
    }
    part
}

#[cfg(test)]
mod tests {
    use rollflow::recipe::parse;

    use super::supervised;

    #[test]
    fn the_recipe_of_the_supervised_part_is_accepted() {
        for keys in [
            "task = { kind = 'arithmetic', shuffle = false }\nsft = {}\nlora.sync = 'adapter'",
            "task.kind = 'arithmetic'\nsft = {}\nlora = { base = 'nf4', sync = 'adapter' }\n\
             critic = {}\ncheckpoint.dtype = 'bf16'",
            "task.kind = 'environment'\nenvironment = { kind = 'verifiers', name = 'x' }\nsft.data = 'a.jsonl'",
            "task.sources = [{ data = 'a.jsonl', weight = 1.0 }]\nsft = { max_length = 64, packing = 'best_fit' }",
        ] {
            let text = format!("pipeline = 'sft_then_grpo'\nmodel.kind = 'tiny'\nreward.kind = 'exact'\n{keys}");
            let part = supervised(&parse("recipe.toml", &text, &[]).unwrap());
            let again = parse("part.toml", &part.to_toml(), &[]).unwrap_or_else(|errors| panic!("{keys}: {errors}"));
            assert!(again.lora.is_none_or(|lora| lora.sync.is_none()) && again.checkpoint.dtype.is_none());
        }
    }
}
