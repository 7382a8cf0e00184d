//! Checks of the window of groups in flight against the bound on staleness.

use super::Note;
use crate::recipe::plan::{OnStale, Plan};

pub(super) fn pace(plan: &Plan, note: Note) {
    window(plan, note);
    over_sampling(plan, note);
    if plan.generate.max_num_seqs == 0 && plan.flow.max_staleness == 0 && !plan.engine.is_remote() {
        let message =
            "`generate.max_num_seqs` is 0, which follows measured speeds, but a synchronous run depends on no timing".to_owned();
        note("generate.max_num_seqs", &["flow.max_staleness"], message, "say how many, or raise flow.max_staleness");
    }
}

fn window(plan: &Plan, note: Note) {
    let Some(window) = plan.flow.window else { return };
    let from = ["flow.max_staleness", "sync.every", "batch.groups"];
    let (least, most) = (plan.groups_per_publish(), plan.widest_window());
    if window < least {
        let message = format!(
            "`flow.window` is {window}, but {least} groups are trained from one publish to the next: it would wait for ever"
        );
        note("flow.window", &from, message, "make it at least sync.every × batch.groups, or leave it out");
    } else if window > most && plan.flow.on_stale == OnStale::Wait {
        let message = format!(
            "`flow.window` is {window}: groups would lag by floor(({window} - 1) / {least} groups per version) = {} versions, and \
             flow.max_staleness is {}",
            plan.worst_lag_in_turn(),
            plan.flow.max_staleness
        );
        let help = format!("lower it to {most}, leave it out, raise flow.max_staleness, or choose flow.on_stale");
        note("flow.window", &from, message, &help);
    }
}

fn over_sampling(plan: &Plan, note: Note) {
    if !plan.over_samples() || plan.batch.groups == 0 {
        return;
    }
    let (factor, chosen_from) = (plan.batch.oversampling_factor, plan.groups_chosen_from());
    let (needed, most) = (plan.choice_window(), plan.widest_window());
    let from = ["flow.max_staleness", "sync.every", "batch.groups", "flow.window"];
    if needed > most && plan.flow.on_stale == OnStale::Wait {
        let message = format!(
            "`batch.oversampling_factor` is {factor}: with {chosen_from} groups for a step, {needed} would be under way, and above {most} they \
             would become staler than flow.max_staleness allows"
        );
        note("batch.oversampling_factor", &from, message, "lower it, raise flow.max_staleness, or choose flow.on_stale");
    } else if plan.flow.window.is_some_and(|window| window < needed) {
        let message = format!(
            "`batch.oversampling_factor` is {factor}: a step chooses from {chosen_from} groups, for which {needed} must be under way, and \
             flow.window lets in fewer"
        );
        note("batch.oversampling_factor", &from, message, "widen flow.window, or leave it out");
    }
}
