//! Checks between the keys of `[train]` and of `[critic]`.

use super::{Note, known, schedule};
use crate::algo::{Advantage, Divergence, Level, LossChoice, Over, Proximal};
use crate::model::Dtype;
use crate::recipe::plan::{Fallback, Pipeline, Plan};
use crate::recipe::train::{Critic, Train};
use crate::train::{LrScale, MasterFormat};

pub(super) fn training(plan: &Plan, note: Note) {
    let train = &plan.train;
    let warm_up = plan.critic.as_ref().map_or(0, |critic| critic.warmup_steps);
    let own_steps = known(train.steps, train.epochs).saturating_sub(warm_up);
    let mut of_policy = |key: &str, from: &[&'static str], message: String, help: &str| {
        let after = if warm_up > 0 { format!(" after the critic's {warm_up} (critic.warmup_steps)") } else { String::new() };
        note(key, from, message + &after, help);
    };
    schedule("train", own_steps, &train.optimization.schedule, &mut of_policy);
    loss(train, note);
    corrections(train, note);
    rejections(train, note);
    minibatches(plan, note);
    critic(plan, note);
    if train.mask_truncated && plan.filter_fallback == Fallback::Keep {
        let message = "`train.mask_truncated` leaves nothing to learn of groups of truncated completions, which `filter_fallback = \"keep\"` keeps";
        note("train.mask_truncated", &["filter_fallback"], message.to_owned(), "leave one of them out");
    }
}

/// Reports factors for parts that no trainer of this section has. Parts that depend on the model's
/// folder are checked when it is trained.
pub(super) fn lr_scale(plan: &Plan, note: Note) {
    for (section, optimization) in plan.optimizations() {
        // A critic has no adapters: all of its weights are trained.
        let (scores, adapted) = (["critic", "reward_model"].contains(&section), plan.lora.is_some());
        let lora = adapted && section != "critic";
        let LrScale { embeddings, head, adapters, score_head } = optimization.lr_scale;
        let frozen = "with [lora] adapters alone are trained, and a score head";
        let whole = if adapted { "a critic is trained without adapters" } else { "there is no [lora]" };
        let factors = [
            ("embeddings", embeddings, lora.then_some(frozen)),
            ("head", head, if scores { Some("its head gives one number: use score_head") } else { lora.then_some(frozen) }),
            ("adapters", adapters, (!lora).then_some(whole)),
            ("score_head", score_head, (!scores).then_some("a language model has no score head")),
        ];
        for (key, factor, why) in factors {
            if let Some(why) = why.filter(|_| factor != 1.0) {
                let key = format!("{section}.lr_scale.{key}");
                let message = format!("`{key}` is {factor}, but it would change nothing: {why}");
                note(&key, &["lora"], message, "remove it");
            }
        }
    }
}

/// Reports parameters in bf16 where nothing, or something else, would be in bf16.
pub(super) fn masters(plan: &Plan, note: Note) {
    let dtype = plan.model.precision();
    for (section, _) in plan.optimizations().filter(|(_, of)| of.masters == MasterFormat::Bf16) {
        let key = format!("{section}.masters");
        if dtype != Dtype::Bf16 {
            let message = format!("`{key}` is \"bf16\", but the run computes in {}", dtype.word());
            note(&key, &["model.dtype", "model.device"], message, "set model.dtype = \"bf16\", or leave it out");
        } else if plan.lora.is_some() && section != "critic" {
            let message = format!("`{key}` is \"bf16\", but with [lora] adapters are trained, which are small and in f32");
            note(&key, &["lora"], message, "leave it out");
        }
    }
}

fn minibatches(plan: &Plan, note: Note) {
    let (count, groups) = (plan.train.minibatches, plan.batch.groups);
    if count > groups && groups > 0 {
        let message = format!("`train.minibatches` is {count}, but a step has {groups} groups: some would be empty");
        note("train.minibatches", &["batch.groups"], message, "lower it; groups stay together");
    }
    if count > 1 && (plan.pairs.is_some() || plan.pipeline == Pipeline::Dpo) {
        let message = format!("`train.minibatches` is {count}, but pairs are laid out over a whole batch");
        note("train.minibatches", &["pairs"], message, "leave it out, or lower batch.groups");
    }
}

fn critic(plan: &Plan, note: Note) {
    let Some(Critic { warmup_steps, optimization, .. }) = &plan.critic else { return };
    let steps = known(plan.train.steps, plan.train.epochs);
    if plan.train.advantage != Advantage::default() {
        let message =
            "`train.advantage` compares whole answers, but with [critic] advantages are against its values, token by token";
        note("train.advantage", &["critic"], message.to_owned(), "remove one of both");
    }
    if *warmup_steps >= steps {
        let message =
            format!("`critic.warmup_steps` is {warmup_steps}, and there are only {steps} steps: the policy would never learn");
        note("critic.warmup_steps", &["train.steps"], message, "make it shorter than the run");
    }
    schedule("critic", steps, &optimization.schedule, note);
}

fn loss(train: &Train, note: Note) {
    match &train.loss {
        LossChoice::GeoMean(_) => {
            let kind = "`train.loss.kind` is \"geo_mean\", whose ratios and advantages are means over whole answers";
            if train.top_entropy < 1.0 {
                let message = format!("{kind}: `train.top_entropy` of {} can leave no token out", train.top_entropy);
                note("train.top_entropy", &["train.loss"], message, "leave it out, or choose another loss");
            }
            if train.off_policy_threshold.is_some() {
                let message = format!("{kind}: `train.off_policy_threshold` can leave no token out");
                note("train.off_policy_threshold", &["train.loss"], message, "use [[train.reject]], or choose another loss");
            }
        }
        LossChoice::Custom(_) => {
            let ignored = [
                ("kl_loss", train.kl_loss.is_some()),
                ("entropy_coef", train.entropy_coef != 0.0),
                ("top_entropy", train.top_entropy < 1.0),
                ("off_policy_threshold", train.off_policy_threshold.is_some()),
            ];
            for (key, _) in ignored.into_iter().filter(|(_, set)| *set) {
                let key = format!("train.{key}");
                let message = format!("`{key}` is set, but `train.loss.kind` is \"custom\": such a loss sees to that itself");
                note(&key, &["train.loss"], message, "leave it out, and make it a parameter of the loss");
            }
        }
        LossChoice::ClipCov(of) if of.min >= of.max => {
            let message =
                format!("`train.loss.min` is {}, not below its max of {}: no covariance is between them", of.min, of.max);
            note("train.loss.min", &["train.loss"], message, "exchange them");
        }
        _ => {}
    }
}

fn corrections(train: &Train, note: Note) {
    if train.correction.is_some() && train.proximal == Some(Proximal::Behaviour) {
        let message = "`train.proximal` is \"behaviour\": ratios are importance weights already, and those of train.correction would all be 1";
        let help = "leave it out, or make it \"recompute\" or \"loglinear\"; to mask alone, use [[train.reject]]";
        note("train.proximal", &["train.correction"], message.to_owned(), help);
    }
    if let Some([(low, min), (high, max)]) = train.correction.bounds() {
        let masks = train.correction.importance().is_some_and(|weights| weights.mask);
        if min > max {
            let message = format!("`train.correction.{low}` is {min}, above its {high} of {max}: no ratio is between them");
            note(&format!("train.correction.{low}"), &["train.correction"], message, "exchange them");
        } else if masks && (min > 1.0 || max < 1.0) {
            let (key, bound, side) = if min > 1.0 { (low, min, "above") } else { (high, max, "below") };
            let message =
                format!("`train.correction.{key}` is {bound}, {side} 1, the ratio of a token on policy: it would have no weight");
            let help = format!("make {low} at most 1, and {high} at least 1");
            note(&format!("train.correction.{key}"), &["train.correction"], message, &help);
        }
    }
    let level = train.correction.importance().map_or(Level::Token, |weights| weights.level);
    if matches!(train.loss, LossChoice::Vespo(_)) && level != Level::Token {
        let message = format!(
            "`train.correction.level` is \"{}\", but \"vespo\" multiplies the weights of a completion's tokens itself",
            level.word()
        );
        note("train.correction.level", &["train.loss"], message, "make it \"token\", as TRL requires");
    }
    if let (Some(warn), Some(halt)) = (train.gap_warn, train.gap_halt)
        && warn > halt
    {
        let message = format!("`train.gap_warn` is {warn}, above train.gap_halt of {halt}: the run would end unwarned");
        note("train.gap_warn", &["train.gap_halt"], message, "make it smaller than train.gap_halt");
    }
}

fn rejections(train: &Train, note: Note) {
    for (at, reject) in train.reject.iter().enumerate() {
        let key = |name: &str| format!("train.reject[{at}].{name}");
        let signed = reject.divergence == Divergence::K1;
        if signed && reject.over == Over::Max {
            let message = format!("`{}` is \"max\", but k1 is signed: the largest says nothing of the smallest", key("over"));
            note(&key("over"), &[], message, "use divergence = \"k2\" or \"k3\", or over = \"token\"");
        }
        match reject.min {
            Some(_) if !signed => {
                let message = format!("`{}` bounds k1 alone; k2 and k3 are never below 0", key("min"));
                note(&key("min"), &[], message, "remove it");
            }
            Some(min) if min > reject.max => {
                let message = format!("`{}` is {min}, above its max of {}: everything would be rejected", key("min"), reject.max);
                note(&key("min"), &[], message, "exchange them");
            }
            Some(min) if min > 1.0 || reject.max < 1.0 => {
                let (name, bound, side) = if min > 1.0 { ("min", min, "above") } else { ("max", reject.max, "below") };
                let message =
                    format!("`{}` is {bound}, {side} 1, the ratio of a token on policy: it would be rejected", key(name));
                note(&key(name), &[], message, "make min at most 1, and max at least 1");
            }
            None if signed && reject.max <= 1.0 => {
                let so = match reject.max < 1.0 {
                    true => "a ratio below its lower bound of 1 / max: everything would be rejected",
                    false => "as is its lower bound of 1 / max: all but equal log-probabilities would be rejected",
                };
                let message = format!("`{}` is {}, {so}", key("max"), reject.max);
                note(&key("max"), &[], message, "make it above 1, such as 2, or give min");
            }
            _ => {}
        }
    }
}
