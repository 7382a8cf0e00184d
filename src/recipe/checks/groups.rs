//! Checks that groups can be rewarded and compared, that a filter can keep one, and that as many are in
//! flight as the staleness allows.

use super::{Note, scorers};
use crate::algo::Advantage;
use crate::algo::rewards::Combine;
use crate::recipe::generate::Filter;
use crate::recipe::plan::{OnStale, Plan};
use crate::recipe::reward::{Composition, PartRule, RewardRule};

pub(super) fn groups(plan: &Plan, note: Note) {
    size(plan, note);
    lengths(plan, note);
    window(plan, note);
    over_sampling(plan, note);
    if plan.generate.max_num_seqs == 0 && plan.flow.max_staleness == 0 && !plan.engine.is_remote() {
        let message =
            "`generate.max_num_seqs` is 0, which follows measured speeds, but a synchronous run depends on no timing".to_owned();
        note("generate.max_num_seqs", &["flow.max_staleness"], message, "say how many, or raise flow.max_staleness");
    }
}

/// Checks the reward wherever it judges completions.
pub(super) fn rewards(plan: &Plan, note: Note) {
    if !plan.judges() {
        return;
    }
    scorers::unrewarded(plan, note);
    if let RewardRule::Parts(of) = &plan.reward.rule {
        parts(plan, of, note);
    }
    if !plan.reward.rule.asks_environment() {
        return;
    }
    if plan.pipeline.reinforces() {
        if plan.environment.is_none() {
            let message = "the reward is what an environment says, and there is no section [environment]".to_owned();
            note("environment", &["reward.kind"], message, "add [environment] with its kind, or choose another reward.kind");
        }
    } else if plan.eval.is_some() {
        // Recorded rollouts have the grades of their environment: `task.rescore` may use them.
        let word = plan.pipeline.word();
        let message = format!("the reward is what an environment says, and evaluations of pipeline = \"{word}\" have none");
        note("reward.kind", &["pipeline"], message, "choose another reward.kind");
    }
}

fn size(plan: &Plan, note: Note) {
    // A teacher judges each token, whatever its siblings earn.
    if plan.teacher.as_ref().is_some_and(|of| !of.distill.rewards) {
        return;
    }
    let dropped = plan.filter.iter().any(|filter| matches!(filter, Filter::NonzeroStd { .. }));
    if plan.generate.group_size == 1 && (plan.critic.is_some() || !plan.train.advantage.needs_siblings()) {
        if dropped {
            let message = "`generate.group_size` is 1: the filter nonzero_std would drop every group".to_owned();
            note("generate.group_size", &["filter"], message, "leave the filter out, or make it 2 or more");
        }
        let of_batch = matches!(plan.train.advantage, Advantage::ReinforcePlusPlus | Advantage::Normalized { .. });
        if of_batch && plan.critic.is_none() && plan.batch.groups == 1 {
            let message = "`batch.groups` and `generate.group_size` are 1: a single answer is the mean of its batch, its advantage is \
                           always 0, so nothing would be learnt";
            let help = "raise one of them, or set train.advantage = { kind = \"constant\", baseline = 0.5 }, or add [critic]";
            note("batch.groups", &["generate.group_size", "train.advantage"], message.to_owned(), help);
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
        let Filter::Length { min, max } = filter else { continue };
        let (key, longest) = (format!("filter[{at}].min"), plan.generate.max_new_tokens);
        if min > max {
            let message = format!("`{key}` is {min}, above its max of {max}: every group would be dropped");
            note(&key, &[], message, "exchange them");
        } else if *min > longest {
            let message = format!("`{key}` is {min}, but answers end at {longest} tokens: every group would be dropped");
            note(&key, &["generate.max_new_tokens"], message, "lower it, or raise generate.max_new_tokens");
        }
    }
}

fn parts(plan: &Plan, of: &Composition, note: Note) {
    let longest = plan.generate.max_new_tokens;
    if of.part.is_empty() {
        let message = "`reward.part` is empty: nothing would be earned".to_owned();
        note("reward.part", &["reward.kind"], message, "add [[reward.part]] with its name and kind");
    }
    let combinations = f64::from(of.levels).powi(i32::try_from(of.part.len()).unwrap_or(i32::MAX));
    if of.combine == Combine::Lexicographic && combinations > (1_u64 << 53) as f64 {
        let message =
            format!("`reward.levels` is {}: so many of {} parts are more than a number can tell apart", of.levels, of.part.len());
        note("reward.levels", &["reward.combine"], message, "have fewer levels, or fewer parts");
    }
    if (of.combine == Combine::Custom) != of.aggregator.is_some() {
        let (is, so) = if of.aggregator.is_some() { ("given", "not \"custom\"") } else { ("missing", "\"custom\"") };
        let message = format!("`reward.aggregator` is {is}, but `reward.combine` is {so}");
        let help = "name a registered aggregator, together with combine = \"custom\"";
        note("reward.aggregator", &["reward.combine"], message, help);
    }
    for (at, part) in of.part.iter().enumerate() {
        let key = |name: &str| format!("reward.part[{at}].{name}");
        if let Some(first) = of.part[..at].iter().position(|other| other.name == part.name && !part.name.is_empty()) {
            let message = format!("`{}` is {:?}, as that of part {first} is", key("name"), part.name);
            note(&key("name"), &[], message, "give every part a name of its own");
        }
        if of.combine != Combine::Sum && part.weight != 1.0 {
            let message = format!("`{}` is {:?}, but only a sum has weights", key("weight"), part.weight);
            note(&key("weight"), &["reward.combine"], message, "leave it out, or set reward.combine = \"sum\"");
        }
        match &part.rule {
            PartRule::Length { min, max } if min > max => {
                let message = format!("`{}` is {min}, above its max of {max}: no answer would earn it", key("min"));
                note(&key("min"), &[], message, "exchange them");
            }
            PartRule::Overlong { buffer } if *buffer > longest => {
                let message = format!("`{}` is {buffer}, but answers end at {longest} tokens", key("buffer"));
                note(&key("buffer"), &["generate.max_new_tokens"], message, "lower it, or raise generate.max_new_tokens");
            }
            _ => {}
        }
    }
}

fn window(plan: &Plan, note: Note) {
    let Some(window) = plan.flow.window else { return };
    let from = ["flow.max_staleness", "sync.every", "batch.groups"];
    let (least, most) = (plan.groups_per_publish(), plan.pace().widest_window() as usize);
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
    let (needed, most) = (plan.pace().choice_window() as usize, plan.pace().widest_window() as usize);
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
