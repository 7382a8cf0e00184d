//! Checks of the reference policy, and of keys that exclude each other.

use super::{Note, scorers};
use crate::algo::{Advantage, Aggregation, Dpo, LossChoice, PairLoss};
use crate::recipe::plan::{Fallback, OnStale, Pipeline, Plan};
use crate::recipe::train::Train;

/// Distances and pairs need their sections, and the sections their use.
pub(super) fn held(plan: &Plan, note: Note) {
    let Train { kl_loss, kl_reward, loss, .. } = &plan.train;
    let uses = [
        ("train.kl_loss", kl_loss.is_some()),
        ("train.kl_reward", kl_reward.is_some()),
        ("train.loss.kind", matches!(loss, LossChoice::Dpo(of) if of.needs_reference())),
    ];
    for (key, _) in uses.iter().filter(|(_, used)| *used && plan.reference.is_none()) {
        let message = format!("`{key}` looks at a reference policy, and there is no section [reference]");
        note(key, &["train.loss"], message, "add [reference] with kind = \"frozen\", \"ema\" or \"periodic\", or do without");
    }
    scorers::scorers(plan, note);
    if plan.pipeline == Pipeline::Dpo {
        return offline(plan, note);
    }
    match (loss, &plan.pairs) {
        (LossChoice::Dpo(_), None) => {
            let message = "`train.loss.kind` is \"dpo\", which learns from pairs, and there is no section [pairs]".to_owned();
            note("train.loss.kind", &["train.loss"], message, "add [pairs] with select = \"best_worst\", \"random\" or \"all\"");
        }
        (LossChoice::Dpo(of), Some(_)) => pairs(plan, of, note),
        (_, Some(_)) => {
            let message = "[pairs] holds answers against each other, but `train.loss` does not learn from pairs".to_owned();
            note("pairs", &["train.loss"], message, "set train.loss = { kind = \"dpo\" }, or remove [pairs]");
        }
        (_, None) => {}
    }
}

/// Pairs of a data set: nothing is published while they are learned from, and no completion has a reward.
fn offline(plan: &Plan, note: Note) {
    match &plan.train.loss {
        LossChoice::Dpo(of) => pairs(plan, of, note),
        _ => {
            let message =
                "`train.loss.kind` is none that learns from pairs, which are all that pipeline = \"dpo\" has".to_owned();
            note("train.loss.kind", &["pipeline"], message, "set it to \"dpo\", and choose train.loss.pair_loss");
        }
    }
    let without_use = [
        ("train.advantage", plan.train.advantage != Advantage::default()),
        ("train.target_reward", plan.train.target_reward.is_some()),
    ];
    for (key, _) in without_use.iter().filter(|(_, set)| *set) {
        let message = format!("`{key}` is set, but the completions of pipeline = \"dpo\" have no rewards");
        note(key, &["pipeline"], message, "leave it out");
    }
}

fn pairs(plan: &Plan, of: &Dpo, note: Note) {
    if of.pair_loss == PairLoss::ExoPair && of.label_smoothing == 0.0 {
        let message = "`train.loss.label_smoothing` is 0, of which `exo_pair` takes the logarithm".to_owned();
        note("train.loss.label_smoothing", &["train.loss"], message, "make it above 0; 1e-3 is common");
    }
    if of.pair_loss == PairLoss::Robust && of.label_smoothing >= 0.5 {
        let message = format!("`train.loss.label_smoothing` is {}: `robust` has nothing left to learn", of.label_smoothing);
        note("train.loss.label_smoothing", &["train.loss"], message, "make it below 0.5");
    }
    let Train { kl_loss, kl_reward, entropy_coef, top_entropy, off_policy_threshold, loss_aggregation, .. } = &plan.train;
    let no_ratio = "a loss of pairs has no ratio to the policy that sampled";
    let whole = "a loss of pairs judges whole answers";
    let without_use = [
        ("train.kl_loss", kl_loss.is_some(), "a loss of pairs is held to the reference by its own beta"),
        ("train.kl_reward", kl_reward.is_some(), "a loss of pairs asks which answer earned more, not how much"),
        ("teacher", plan.teacher.is_some(), "a loss of pairs reads no advantages"),
        ("critic", plan.critic.is_some(), "a loss of pairs reads no advantages"),
        ("train.entropy_coef", *entropy_coef != 0.0, "a loss of pairs has no such term"),
        ("train.top_entropy", *top_entropy < 1.0, whole),
        ("train.off_policy_threshold", off_policy_threshold.is_some(), no_ratio),
        ("train.correction", plan.train.correction.is_some(), no_ratio),
        ("train.reject", !plan.train.reject.is_empty(), no_ratio),
        ("train.proximal", plan.train.proximal.is_some(), no_ratio),
        ("train.loss_aggregation", *loss_aggregation != Aggregation::default(), "all pairs of a step count alike"),
        ("train.mask_truncated", plan.train.mask_truncated, whole),
        ("flow.on_stale", plan.flow.on_stale == OnStale::Mask, whole),
        ("generate.mask_older_versions", plan.generate.mask_older_versions, whole),
        ("filter_fallback", plan.filter_fallback == Fallback::Keep, "a group without a pair teaches nothing"),
    ];
    for (key, _, why) in without_use.iter().filter(|(_, set, _)| *set) {
        let message = format!("`{key}` is set to what `train.loss.kind = \"dpo\"` can't use: {why}");
        note(key, &["train.loss"], message, "leave it out");
    }
}
