//! Checks of the policies that score rollouts: the reference policy and the teacher.

use super::Note;
use crate::algo::Advantage;
use crate::engine::remote::parse_address;
use crate::engine::settings::EngineKind;
use crate::net::check_url;
use crate::recipe::generate::Filter;
use crate::recipe::plan::{Pipeline, Plan};
use crate::recipe::reference_policy::{ReferencePolicy, SourcePolicy, Teacher};
use crate::recipe::reward::RewardRule;
use crate::recipe::trainer::TrainerBackend;
use crate::util::secrets::masked;

pub(super) fn scorers(plan: &Plan, note: Note) {
    for (section, policy) in plan.scoring_policies() {
        follows(plan, section, policy, note);
        addresses(plan, section, policy, note);
        if let ReferencePolicy::BySource { part } = policy {
            by_source(plan, section, part, note);
        }
    }
    match &plan.teacher {
        Some(of) => teacher(plan, of, note),
        None if plan.pipeline == Pipeline::Distill => {
            let help = "add [teacher] with a kind, such as kind = \"frozen\" and the path of its folder";
            note("teacher", &["pipeline"], "pipeline = \"distill\" has no section [teacher]".to_owned(), help);
        }
        None => {}
    }
}

fn follows(plan: &Plan, section: &str, policy: &ReferencePolicy, note: Note) {
    if !policy.follows() {
        return;
    }
    if plan.lora.as_ref().is_some_and(|lora| !lora.merges()) {
        let message = format!("`lora.sync` is \"adapter\", but [{section}] follows the policy by keeping whole weights");
        note("lora.sync", &["reference", "teacher"], message, &format!("leave it out, or set {section}.kind = \"frozen\""));
    }
    if !plan.pipeline.reinforces() {
        let (key, word) = (format!("{section}.kind"), plan.pipeline.word());
        let message = format!("`{key}` follows published weights, and pipeline = \"{word}\" publishes none");
        note(&key, &["pipeline"], message, "set it to \"frozen\"");
    }
}

fn addresses(plan: &Plan, section: &str, policy: &ReferencePolicy, note: Note) {
    for (key, of) in policy.parts(section) {
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
        if plan.generate.scoring_temperature() != 1.0 {
            let message =
                format!("`generate.temperature` is {}, and the server of [{section}] scores at 1", plan.generate.temperature);
            let help = "set it to 1, or load that model in this process";
            note("generate.temperature", &["reference.kind", "teacher.kind"], message, help);
        }
    }
}

/// Parts for data sets that no task has, and data sets without a part.
fn by_source(plan: &Plan, section: &str, parts: &[SourcePolicy], note: Note) {
    // Held-out pairs are scored, too.
    let eval = plan.eval.as_ref().filter(|eval| plan.pipeline == Pipeline::Dpo && eval.every > 0);
    let tasks = [Some(&plan.task), eval.and_then(|eval| eval.task.as_ref())];
    let sources: Vec<_> = tasks.into_iter().flatten().map(|task| task.data.sources()).collect();
    let unnamed = sources.iter().any(Vec::is_empty);
    let names: Vec<String> = sources.iter().flatten().map(|source| source.spec().name()).collect();
    for (at, part) in parts.iter().enumerate() {
        for name in part.sources.iter().filter(|name| !names.contains(name)) {
            let key = format!("{section}.part[{at}].sources");
            let known =
                if names.is_empty() { "the task has no data sets".to_owned() } else { format!("they are: {}", names.join(", ")) };
            note(&key, &["task"], format!("`{key}` names {name:?}, which is no data set of the task"), &known);
        }
    }
    let others = parts.iter().any(|part| part.sources.is_empty());
    let has = |name: &&String| others || parts.iter().any(|part| part.sources.contains(name));
    let without: Vec<&str> = names.iter().filter(|name| !has(name)).map(String::as_str).collect();
    if !without.is_empty() || (unnamed && !others) {
        let key = format!("{section}.part");
        let message = format!("`{key}`: none scores {}", if unnamed { "a task without data sets" } else { "every data set" });
        let which = if unnamed { String::new() } else { format!("name {}, or ", without.join(", ")) };
        note(&key, &["task"], message, &format!("{which}add a part without sources, for all others"));
    }
}

/// Keys of one way of distillation that have no effect in the other, and parts that exclude it.
fn teacher(plan: &Plan, of: &Teacher, note: Note) {
    let distill = &of.distill;
    let mut refuse = |key: &str, wrong: bool, why: &str, help: &str| {
        if wrong {
            note(key, &["teacher"], format!("`{key}`: {why}"), help);
        }
    };
    refuse("critic", plan.critic.is_some(), "a critic sets advantages, and so does [teacher]", "leave out one of them");
    let opened = of.hint.is_some() && plan.environment.is_some();
    let why = "the hint replaces the policy's prompt, and an environment opens and continues the conversation otherwise";
    refuse("teacher.hint", opened, why, "leave it out, or train without [environment]");
    let over_tokens = distill.top_k == 0;
    let why = "sampled tokens alone give the reverse divergence, with `beta` 1";
    refuse("teacher.beta", over_tokens && distill.beta != 1.0, why, "set teacher.top_k, for example to 64");
    let why = "a divergence of distributions concerns one token, without a discount";
    refuse("teacher.discount", !over_tokens && distill.discount > 0.0, why, "leave it out, or set top_k = 0");
    let whole = plan.train.library_loss().and_then(Result::ok).is_some_and(|loss| loss.whole_batch());
    let why = "the loss compares the tokens of a whole batch, which a divergence of distributions does not";
    refuse("teacher.top_k", !over_tokens && whole, why, "choose another train.loss, and set train.top_entropy = 1");
    let tinker = plan.trainer.backend == TrainerBackend::Tinker;
    let why = "a Tinker server trains by the log-probability of one token per position";
    refuse("teacher.top_k", !over_tokens && tinker, why, "leave it out");
    let rewarded = plan.reward.rule != RewardRule::None;
    let why = "there is no reward (reward.kind = \"none\")";
    refuse("teacher.rewards", distill.rewards && !rewarded, why, "add [reward] with a kind, or leave it out");
    let why = "the advantages of rewards are not trained on";
    let help = "leave it out (in the same [[change]] if one sets teacher.rewards), or set teacher.rewards = true";
    let compares = plan.train.advantage != Advantage::default();
    refuse("train.advantage", compares && !distill.rewards, why, help);
    refuse("train.kl_reward", plan.train.kl_reward.is_some() && rewarded && !distill.rewards, why, help);
}

/// Sections that need rewards, where there are none. Only for plans whose completions are judged.
pub(super) fn unrewarded(plan: &Plan, note: Note) {
    if plan.reward.rule != RewardRule::None {
        return;
    }
    let uses = [
        ("reward.kind", plan.teacher.is_none() && plan.pipeline.reinforces(), "nothing else says what to learn"),
        ("filter", plan.filter.iter().any(Filter::compares_rewards), "this filter looks at them"),
        ("curriculum", plan.curriculum.is_some(), "it goes by pass rates"),
        ("train.target_reward", plan.train.target_reward.is_some(), "no step reaches it"),
        ("train.kl_reward", plan.train.kl_reward.is_some(), "it is subtracted from rewards"),
        ("task.rescore", plan.rescores(), "[reward] scores recorded completions"),
        ("eval", plan.eval.is_some(), "completions of an evaluation are judged by [reward]"),
    ];
    for (key, _, why) in uses.iter().filter(|(_, used, _)| *used) {
        let message = format!("`{key}`: there is no reward (reward.kind = \"none\"), and {why}");
        note(key, &["reward.kind", "pipeline"], message, "add [reward] with another kind, or leave it out");
    }
}
