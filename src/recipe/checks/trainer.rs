//! Checks of `[trainer]`: what a trainer with the Tinker API can't do, by name.

use rollflow_tinker::message::LoraConfig;

use super::Note;
use super::unused::changed;
use crate::engine::settings::Launch;
use crate::net::check_url;
use crate::recipe::lora::{BaseFormat, Lora, Target};
use crate::recipe::plan::{Pipeline, Plan};
use crate::recipe::reference_policy::ReferencePolicy;
use crate::recipe::train::Optimization;
use crate::recipe::trainer::TrainerBackend;
use crate::train::RouterReplay;
use crate::util::secrets::masked;

pub(super) fn trainer(plan: &Plan, note: Note) {
    let place = &plan.trainer;
    if place.backend == TrainerBackend::Local {
        for key in changed(place) {
            let message = format!("`trainer.{key}` has no effect: this process trains");
            note(&format!("trainer.{key}"), &["trainer.backend"], message, "set trainer.backend = \"tinker\", or leave it out");
        }
        return;
    }
    let mut refuse = |key: &str, wrong: bool, message: &str, help: &str| {
        if wrong {
            note(key, &["trainer.backend"], format!("`{key}`: {message}"), help);
        }
    };
    match place.url.as_deref().map(|url| (url, check_url(url))) {
        None => refuse("trainer.url", true, "there is no server", "give its address, such as \"http://127.0.0.1:8000\""),
        Some((url, Err(why))) => {
            refuse("trainer.url", true, &format!("{:?}: {why}", masked(url)), "write it as http://host:port")
        }
        Some((_, Ok(()))) => {}
    }
    let other = !matches!(plan.pipeline, Pipeline::Grpo | Pipeline::Distill);
    let help = "set pipeline = \"grpo\" or \"distill\"";
    refuse("pipeline", other, "a Tinker server trains the pipelines \"grpo\" and \"distill\" alone", help);
    match &plan.lora {
        None => {
            let help = "add [lora], with its rank, or sample on the server that trains";
            refuse("lora", plan.engine.is_remote(), "the servers of [engine] load adapters", help);
        }
        Some(lora) => adapters(lora, &mut refuse),
    }
    let from_memory = plan.engine.is_remote() && plan.engine.sync.carry.is_from_memory();
    refuse("engine.carry", from_memory, "adapters that a Tinker server trains travel in folders", "leave it out");
    let missing = "a Tinker server has no such part";
    refuse("sft", plan.sft.is_some(), missing, "remove [sft], and start from a model that was trained on them");
    refuse("mix", plan.mix.is_some(), missing, "remove [mix]");
    refuse("critic", plan.critic.is_some(), missing, "remove [critic], and use advantages of the group");
    refuse(
        "ranks",
        plan.ranks != Default::default(),
        "ranks train in this process",
        "remove [ranks]; the server divides its work",
    );
    for (section, policy) in plan.scoring_policies() {
        let served = |(_, of): &(String, _)| matches!(of, ReferencePolicy::Server(_) | ReferencePolicy::Tinker(_));
        let own = !policy.parts(section).iter().all(served);
        let key = format!("{section}.kind");
        let help = format!("set {key} = \"server\" or \"tinker\", with a server that scores given tokens");
        refuse(&key, own, "this process has no model to score with", &help);
    }
    refuse("model.context", plan.model.context.is_some(), "the server chooses its context", "leave it out");
    let launched = plan.engine.launch != Launch::None;
    let running = "start the servers on the same base model, with adapters, and name them in engine.urls or engine.members";
    refuse("engine.launch", launched, "there are no weights here for servers to start from", running);
    let sampled = "the protocol has log-probabilities at temperature 1, without truncation";
    refuse("generate.temperature", plan.generate.temperature != 1.0, sampled, "set it to 1");
    refuse("generate.top_p", plan.generate.top_p < 1.0, sampled, "leave it out");
    refuse("generate.top_k", plan.generate.top_k > 0, sampled, "leave it out");
    refuse("generate.min_p", plan.generate.min_p > 0.0, sampled, "leave it out");
    refuse("generate.repetition_penalty", plan.generate.repetition_penalty != 1.0, sampled, "leave it out");
    let evaluated = plan.eval.as_ref().is_some_and(|eval| eval.temperature != 1.0 || eval.top_p < 1.0);
    refuse("eval.temperature", evaluated, sampled, "set it to 1, and leave eval.top_p out");
    let train = &plan.train;
    let whole = "a server returns the log-probability of each sampled token, and nothing of the rest of the distribution";
    refuse("train.entropy_coef", train.entropy_coef != 0.0, whole, "leave it out");
    refuse("train.top_entropy", train.top_entropy < 1.0, whole, "leave it out");
    let of_optimizer = "the protocol has no such setting of the optimizer";
    let optimization = &train.optimization;
    refuse("train.decay", optimization.decay != Default::default(), of_optimizer, "leave it out");
    refuse("train.lr_scale", optimization.lr_scale != Default::default(), of_optimizer, "leave it out");
    refuse("train.router_aux_loss", optimization.router_aux_loss != 0.0, "the protocol has no such loss", "leave it out");
    let replays = train.router_replay != RouterReplay::Off;
    refuse("train.router_replay", replays, "the protocol carries no experts of tokens", "leave it out");
    let inside = "the server decides how it computes";
    refuse("train.threads", optimization.threads.is_some(), inside, "leave it out");
    let cut = optimization.micro_batch_tokens != Optimization::default().micro_batch_tokens;
    refuse("train.micro_batch_tokens", cut, inside, "leave it out");
    refuse("train.probe", !train.probe, "generator and trainer are not compared before such a run", "leave it out");
    refuse("train.replica_devices", !optimization.replica_devices.is_empty(), inside, "leave it out");
    refuse("train.gradient_checkpointing", optimization.gradient_checkpointing, inside, "leave it out");
    refuse("train.activations_on_host", optimization.activations_on_host, inside, "leave it out");
    refuse("train.masters", optimization.masters != Default::default(), inside, "leave it out");
    refuse("train.moments", optimization.moments != Default::default(), inside, "leave it out");
    refuse("engine.sleep", plan.engine.sync.sleep, "the trainer is elsewhere", "leave it out");
    refuse("checkpoint.dtype", plan.checkpoint.dtype.is_some(), "the server keeps the weights", "leave it out");
}

/// The protocol switches adapters of attention and of feed-forward layers.
fn adapters(lora: &Lora, refuse: &mut dyn FnMut(&str, bool, &str, &str)) {
    let scale = format!("{}; servers of the protocol use {}", lora.alpha, LoraConfig::ALPHA);
    refuse("lora.alpha", lora.alpha != LoraConfig::ALPHA, &scale, "leave it out");
    refuse("lora.base", lora.base != BaseFormat::Stored, "the server holds the base weights", "leave it out");
    let groups = "the protocol gives adapters to all projections of the attention, of the feed-forward layers, or of both";
    let help = "leave it out, or name q_proj, k_proj, v_proj and o_proj, or gate_proj, up_proj and down_proj";
    refuse("lora.targets", lora.groups().is_none(), groups, help);
}

impl Lora {
    /// Whether attention and feed-forward layers get adapters; `None` if parts of one do.
    pub fn groups(&self) -> Option<(bool, bool)> {
        if self.targets.contains(&Target::AllLinear) {
            return Some((true, true));
        }
        let of = |all: &[Target]| match all.iter().filter(|target| self.targets.contains(target)).count() {
            0 => Some(false),
            count if count == all.len() => Some(true),
            _ => None,
        };
        let alone = [
            Target::Qkv,
            Target::GateUp,
            Target::DeltaQkv,
            Target::DeltaGate,
            Target::DeltaShare,
            Target::DeltaDecay,
            Target::DeltaOutput,
            Target::Experts,
            Target::Routers,
        ];
        let packed = alone.iter().any(|target| self.targets.contains(target));
        let (attention, mlp) =
            (of(&[Target::Q, Target::K, Target::V, Target::O])?, of(&[Target::Gate, Target::Up, Target::Down])?);
        (!packed).then_some((attention, mlp))
    }
}
