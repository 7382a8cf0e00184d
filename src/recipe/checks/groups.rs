//! Checks that groups can be compared, and that a filter can keep one.

use super::Note;
use crate::recipe::generate::Filter;
use crate::recipe::plan::Plan;

pub(super) fn groups(plan: &Plan, note: Note) {
    size(plan, note);
    lengths(plan, note);
}

fn size(plan: &Plan, note: Note) {
    let dropped = plan.filter.iter().any(|filter| matches!(filter, Filter::NonzeroStd(_)));
    if plan.generate.group_size == 1 && (plan.critic.is_some() || !plan.train.advantage.needs_siblings()) {
        if dropped {
            let message = "`generate.group_size` is 1: the filter nonzero_std would drop every group".to_owned();
            note("generate.group_size", &["filter"], message, "leave the filter out, or make it 2 or more");
        }
    } else if plan.generate.group_size == 1 {
        let so = if dropped { "and the filter nonzero_std would drop every group" } else { "so nothing would be learnt" };
        let message = format!("`generate.group_size` is 1: a single answer is its own mean, its advantage is always 0, {so}");
        let help =
            "make it 2 or more; 8 is common; or set train.advantage = { kind = \"constant\", baseline = 0.5 }, or add [critic]";
        note("generate.group_size", &["pipeline", "filter"], message, help);
    } else if plan.generate.temperature == 0.0 {
        let message = "`generate.temperature` is 0: all answers of a group would be the same".to_owned();
        note("generate.temperature", &["pipeline"], message, "make it above 0; 1 samples from the model itself");
    }
}

fn lengths(plan: &Plan, note: Note) {
    for (at, filter) in plan.filter.iter().enumerate() {
        let Filter::Length(length) = filter else { continue };
        let (min, max, longest) = (length.min, length.max, plan.generate.max_new_tokens);
        if min > max {
            let message = format!("`filter[{at}].min` is {min}, above its max of {max}: every group would be dropped");
            note(&format!("filter[{at}].min"), &[], message, "exchange them");
        } else if min > longest {
            let message =
                format!("`filter[{at}].min` is {min}, but answers end at {longest} tokens: every group would be dropped");
            note(
                &format!("filter[{at}].min"),
                &["generate.max_new_tokens"],
                message,
                "lower it, or raise generate.max_new_tokens",
            );
        }
    }
}
