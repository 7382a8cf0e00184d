//! Checks of the reference policy, and of keys that exclude each other.

use super::Note;
use crate::algo::{Advantage, Aggregation, Dpo, LossChoice, PairLoss};
use crate::engine::remote::parse_address;
use crate::engine::settings::EngineKind;
use crate::net::check_url;
use crate::recipe::plan::{Fallback, OnStale, Pipeline, Plan};
use crate::recipe::reference_policy::{ReferencePolicy, SourceTeacher};
use crate::recipe::train::Train;
use crate::recipe::trainer::TrainerBackend;
use crate::stages::train::Distill;
use crate::util::secrets::masked;

/// Distances and pairs need their sections, and the sections their use.
pub(super) fn held(plan: &Plan, note: Note) {
    let Train { kl_loss, kl_reward, distill, loss, .. } = &plan.train;
    let uses = [
        ("train.kl_loss", kl_loss.is_some()),
        ("train.kl_reward", kl_reward.is_some()),
        ("train.distill", distill.is_some()),
        ("train.loss.kind", matches!(loss, LossChoice::Dpo(of) if of.needs_reference())),
    ];
    for (key, _) in uses.iter().filter(|(_, used)| *used && plan.reference.is_none()) {
        let message = format!("`{key}` looks at a reference policy, and there is no section [reference]");
        note(key, &["train.loss"], message, "add [reference] with kind = \"frozen\", \"ema\" or \"periodic\", or do without");
    }
    if let (Some(lora), Some(reference)) = (&plan.lora, &plan.reference)
        && !lora.merges()
        && reference.policy.follows()
    {
        let message = "`lora.sync` is \"adapter\", but a reference that follows the policy keeps whole weights".to_owned();
        note("lora.sync", &["reference"], message, "leave it out, or make the reference \"frozen\"");
    }
    if !plan.pipeline.reinforces() && plan.reference.as_ref().is_some_and(|reference| reference.policy.follows()) {
        let message =
            format!("`reference.kind` follows published weights, and pipeline = \"{}\" publishes none", plan.pipeline.word());
        note("reference.kind", &["pipeline"], message, "set it to \"frozen\"");
    }
    for (key, of) in plan.reference.iter().flat_map(|of| of.policy.parts()) {
        let (url, wrong) = match &of {
            ReferencePolicy::Server(of) => {
                (&of.url, parse_address(&of.url, EngineKind::Rollflow).err().map(|why| why.to_string()))
            }
            ReferencePolicy::Tinker(of) => (&of.url, check_url(&of.url).err().map(|why| why.to_string())),
            _ => continue,
        };
        if let Some(why) = wrong {
            let key = format!("{key}.url");
            note(&key, &[], format!("`{key}` is {:?}: {why}", masked(url)), "write it as http://host:port");
        }
        if plan.generate.temperature != 1.0 {
            let message = format!("`generate.temperature` is {}, and a server scores at 1", plan.generate.temperature);
            note("generate.temperature", &["reference.kind"], message, "set it to 1, or load the reference in this process");
        }
    }
    let in_pairs = plan.pipeline == Pipeline::Dpo || plan.pairs.is_some();
    if in_pairs && plan.reference.as_ref().is_some_and(|reference| reference.hint.is_some()) {
        let message = "`reference.hint`: pairs are compared with the reference on the same prompt".to_owned();
        note("reference.hint", &["pipeline", "pairs"], message, "leave it out");
    }
    if distill.is_some() && plan.critic.is_some() {
        let message = "`train.distill` sets advantages, and so does [critic]".to_owned();
        note("train.distill", &["critic"], message, "leave out one of them");
    }
    if let Some(ReferencePolicy::BySource { teacher }) = plan.reference.as_ref().map(|of| &of.policy) {
        teachers(plan, teacher, note);
    }
    if let Some(distill) = distill {
        distilled(plan, distill, note);
    }
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

/// Teachers of data sets that the task does not have, and data sets without a teacher.
fn teachers(plan: &Plan, teachers: &[SourceTeacher], note: Note) {
    let names: Vec<String> = plan.task.data.sources().iter().map(|source| source.spec().name()).collect();
    for (at, teacher) in teachers.iter().enumerate() {
        for name in teacher.sources.iter().filter(|name| !names.contains(name)) {
            let key = format!("reference.teacher[{at}].sources");
            let known =
                if names.is_empty() { "the task has no data sets".to_owned() } else { format!("they are: {}", names.join(", ")) };
            note(&key, &["task"], format!("`{key}` names {name:?}, which is no data set of the task"), &known);
        }
    }
    let others = teachers.iter().any(|teacher| teacher.sources.is_empty());
    let has = |name: &&String| others || teachers.iter().any(|teacher| teacher.sources.contains(name));
    let without: Vec<&str> = names.iter().filter(|name| !has(name)).map(String::as_str).collect();
    if !without.is_empty() || (names.is_empty() && !others) {
        let message =
            format!("`reference.teacher`: no teacher scores {}", if names.is_empty() { "the task" } else { "every data set" });
        let which = if without.is_empty() { String::new() } else { format!("name {}, or ", without.join(", ")) };
        note("reference.teacher", &["task"], message, &format!("{which}add a teacher without sources, for all others"));
    }
}

/// Keys of one way of distillation that have no effect in the other, and losses that exclude one.
fn distilled(plan: &Plan, distill: &Distill, note: Note) {
    let mut refuse = |key: &str, wrong: bool, why: &str, help: &str| {
        if wrong {
            note(key, &["train.distill"], format!("`{key}`: {why}"), help);
        }
    };
    let over_tokens = distill.top_k == 0;
    let why = "sampled tokens alone give the reverse divergence, with `beta` 1";
    refuse("train.distill.beta", over_tokens && distill.beta != 1.0, why, "set train.distill.top_k, for example to 64");
    let why = "a divergence of distributions concerns one token, without a discount";
    refuse("train.distill.discount", !over_tokens && distill.discount > 0.0, why, "leave it out, or set top_k = 0");
    let whole = plan.train.library_loss().and_then(Result::ok).is_some_and(|loss| loss.whole_batch());
    let why = "this loss compares the tokens of a whole batch, which a divergence of distributions does not";
    refuse("train.distill.top_k", !over_tokens && whole, why, "choose another train.loss, and set train.top_entropy = 1");
    let tinker = plan.trainer.backend == TrainerBackend::Tinker;
    let why = "a Tinker server trains by the log-probability of one token per position";
    refuse("train.distill.top_k", !over_tokens && tinker, why, "leave it out");
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
    let Train { kl_loss, kl_reward, distill, entropy_coef, top_entropy, off_policy_threshold, loss_aggregation, .. } =
        &plan.train;
    let no_ratio = "a loss of pairs has no ratio to the policy that sampled";
    let whole = "a loss of pairs judges whole answers";
    let without_use = [
        ("train.kl_loss", kl_loss.is_some(), "a loss of pairs is held to the reference by its own beta"),
        ("train.kl_reward", kl_reward.is_some(), "a loss of pairs asks which answer earned more, not how much"),
        ("train.distill", distill.is_some(), "a loss of pairs reads no advantages"),
        ("train.entropy_coef", *entropy_coef != 0.0, "a loss of pairs has no such term"),
        ("train.top_entropy", *top_entropy < 1.0, whole),
        ("train.off_policy_threshold", off_policy_threshold.is_some(), no_ratio),
        ("train.correction", plan.train.correction.is_some(), no_ratio),
        ("train.reject", !plan.train.reject.is_empty(), no_ratio),
        ("train.proximal", plan.train.proximal.is_some(), no_ratio),
        ("train.loss_aggregation", *loss_aggregation != Aggregation::default(), "all pairs of a step count alike"),
        ("flow.on_stale", plan.flow.on_stale == OnStale::Mask, whole),
        ("generate.mask_older_versions", plan.generate.mask_older_versions, whole),
        ("filter_fallback", plan.filter_fallback == Fallback::Keep, "a group without a pair teaches nothing"),
    ];
    for (key, _, why) in without_use.iter().filter(|(_, set, _)| *set) {
        let message = format!("`{key}` is set to what `train.loss.kind = \"dpo\"` can't use: {why}");
        note(key, &["train.loss"], message, "leave it out");
    }
}
