//! `[eval]`: what would find nothing out.

use super::Note;
use crate::recipe::Plan;
use crate::recipe::task::TaskData;

/// Checks the prompts of an evaluation, the evaluated weights, and that completions can be judged.
pub(super) fn evaluation(plan: &Plan, note: Note) {
    let Some(eval) = &plan.eval else { return };
    if eval.samples == 0 && !eval.greedy {
        let message = "`eval.samples` is 0 and `eval.greedy` is false: nothing would be asked".to_owned();
        note("eval.samples", &["eval.greedy"], message, "make one of them otherwise, or remove [eval]");
    }
    if plan.pipeline.reinforces() && !eval.every.is_multiple_of(plan.sync.every.max(1)) {
        let message = format!(
            "`eval.every` is {}, but weights are published every {} steps: others can't be evaluated",
            eval.every, plan.sync.every
        );
        note("eval.every", &["sync.every"], message, "make it a multiple of sync.every");
    }
    let task = eval.task.as_ref().unwrap_or(&plan.task);
    if let TaskData::Rollouts(_) = task.data {
        let message = "rollouts that were recorded are answered already: an evaluation has nothing to ask".to_owned();
        note(
            "eval.task",
            &["task.kind"],
            message,
            "name a task of its own, for example eval.task = { kind = \"data\", data = \"held_out.jsonl\" }",
        );
    }
}
