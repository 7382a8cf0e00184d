//! Checks of `[engine]` alone and with other sections, and of the devices of a run.

use super::Note;
use crate::engine::remote::sync::{CachePolicy, Carry};
use crate::engine::remote::{MemberList, PauseMode, parse_address};
use crate::engine::settings::{Engine, EngineKind, Launch};
use crate::recipe::lora::Target;
use crate::recipe::model::DeviceName;
use crate::recipe::plan::Plan;
use crate::train::RouterReplay;
use crate::util::secrets::masked;

pub(super) fn engines(plan: &Plan, note: Note) {
    let engine = &plan.engine;
    if !engine.is_remote() {
        if !engine.urls.is_empty() {
            let message = "`engine.urls` names servers, but `engine.kind` is \"local\"".to_owned();
            note("engine.urls", &["engine.kind"], message, "set engine.kind = \"rollflow\", \"vllm\", \"sglang\" or \"openai\"");
        }
        if engine.sync.sleep {
            let message = "`engine.sleep` is true, but `engine.kind` is \"local\", which has no servers".to_owned();
            note("engine.sleep", &["engine.kind"], message, "leave it out");
        }
        if engine.members.is_some() {
            let message = "`engine.members` names servers, but `engine.kind` is \"local\"".to_owned();
            note("engine.members", &["engine.kind"], message, "set engine.kind = \"rollflow\", \"vllm\" or \"sglang\"");
        }
        return;
    }
    let (kind, launch) = (engine.kind().word(), engine.launch.word());
    if engine.launch != Launch::None && kind != launch {
        let message = format!("`engine.launch` is \"{launch}\", but `engine.kind` is \"{kind}\"");
        note("engine.launch", &["engine.kind"], message, "leave one of them out");
    }
    if let Some(Err(why)) = engine.members.as_ref().map(|members| members.parse::<MemberList>()) {
        let message = format!("`engine.members` is {:?}: {why}", engine.members.as_deref().unwrap_or_default());
        note("engine.members", &[], message, "such as \"members.txt\" or \"dns://engines.lab:30000\"");
    }
    if engine.all_urls().is_empty() && engine.members.is_none() {
        let message = format!("`engine.kind` is \"{kind}\", and there is no server");
        note(
            "engine.urls",
            &["engine.kind"],
            message,
            "name servers, such as [\"http://127.0.0.1:8000\"], or set engine.members or engine.launch",
        );
    }
    for (at, url) in engine.urls.iter().enumerate() {
        if let Err(why) = parse_address(url, engine.kind()) {
            let message = format!("`engine.urls[{at}]` is {:?}: {why}", masked(url));
            let help = "write it as http://host:port or https://host, after a kind and `+` if it is another than engine.kind";
            note(&format!("engine.urls[{at}]"), &[], message, help);
        }
    }
    let url = |given: &str| parse_address(given, engine.kind()).map(|(_, url)| url.trim_end_matches('/').to_owned()).ok();
    let started: Vec<_> = engine.launched_urls().iter().map(|started| url(started)).collect();
    let urls: Vec<_> = engine.urls.iter().map(|given| url(given)).collect();
    for (at, found) in urls.iter().enumerate().filter(|(_, found)| found.is_some()) {
        if urls[..at].contains(found) || started.contains(found) {
            let by = if urls[..at].contains(found) { "is there before" } else { "the run starts (engine.launch)" };
            let message = format!("`engine.urls[{at}]` is {:?}, a server that {by}", masked(&engine.urls[at]));
            note(
                &format!("engine.urls[{at}]"),
                &[],
                message,
                "name each server once: two members at one address load weights over each other's",
            );
        }
    }
    if engine.port.saturating_add(engine.replicas) > 65_536 {
        let message = format!("`engine.replicas` is {}, more than there are ports from {} on", engine.replicas, engine.port);
        note("engine.replicas", &["engine.port"], message, "lower engine.port");
    }
    let replays = plan.pipeline.reinforces() && plan.train.router_replay != RouterReplay::Off;
    let without = engine.kinds().into_iter().find(|kind| !matches!(kind, EngineKind::Rollflow | EngineKind::Sglang));
    if let Some(kind) = without.filter(|_| replays) {
        let message =
            format!("`train.router_replay` needs the experts of each token, which are not read from \"{}\" servers", kind.word());
        note("train.router_replay", &["engine.kind"], message, "leave it out, or generate by \"rollflow\" or \"sglang\"");
    }
    if engine.kinds().contains(&EngineKind::Sglang) && plan.pipeline.reinforces() {
        let generate = &plan.generate;
        let given = [("top_p", generate.top_p < 1.0), ("top_k", generate.top_k > 0), ("min_p", generate.min_p > 0.0)];
        for (word, _) in given.into_iter().filter(|(_, given)| *given) {
            let key = format!("generate.{word}");
            let message = format!("`{key}` is set, but \"sglang\" servers report log-probabilities from before truncation");
            note(&key, &["engine.kind"], message, "leave it out, or generate by \"rollflow\" or \"vllm\"");
        }
    }
    launched(engine, note);
    sleep(plan, note);
    from_memory(plan, note);
    for (at, pair) in engine.env.iter().enumerate().filter(|(_, pair)| !pair.contains('=')) {
        note(&format!("engine.env[{at}]"), &[], format!("`engine.env[{at}]` is {pair:?}"), "write it as NAME=value");
    }
    engine.kinds().into_iter().for_each(|kind| policies(engine, kind, note));
    if engine.sync.cache == CachePolicy::Flush && engine.sync.pause == PauseMode::Keep {
        let message = "`engine.cache` is \"flush\", but with engine.pause = \"keep\" requests still use what would be forgotten";
        note("engine.cache", &["engine.pause"], message.to_owned(), "use \"namespaced\", or another engine.pause");
    }
    if engine.kinds().contains(&EngineKind::OpenAi) && plan.pipeline.reinforces() {
        let message = "`engine.kind` is \"openai\": such a server can't be given weights, so what it samples would be ever older";
        note("engine.kind", &["pipeline"], message.to_owned(), "use \"rollflow\", \"vllm\" or \"sglang\"");
    }
    if plan.syncs_adapters() {
        adapters(engine, note);
        let of_mixtures = [Target::Experts, Target::Routers];
        let named = plan.lora.iter().flat_map(|lora| &lora.targets).find(|target| of_mixtures.contains(target));
        if let Some(named) = named.filter(|_| engine.kinds().iter().any(|kind| *kind != EngineKind::Rollflow)) {
            let message =
                format!("`lora.targets` has {:?}, whose adapters vLLM and SGLang do not load in PEFT's form", named.word());
            note("lora.targets", &["lora.sync", "engine.kind"], message, "set lora.sync = \"merged\"");
        }
    }
}

/// Adapters are loaded under versioned names, which keep cached prompts apart.
fn adapters(engine: &Engine, note: Note) {
    if engine.sync.pause != PauseMode::default() {
        let message =
            format!("`engine.pause` is \"{}\", but with lora.sync = \"adapter\" no server is paused", engine.sync.pause.word());
        note("engine.pause", &["lora.sync"], message, "leave it out: answers end under the adapter that they began with");
    }
    if engine.sync.cache != CachePolicy::default() {
        let message = format!(
            "`engine.cache` is \"{}\", but with lora.sync = \"adapter\" each adapter has a cache of its own",
            engine.sync.cache.word()
        );
        note("engine.cache", &["lora.sync"], message, "leave it out");
    }
}

/// Whole models are all that servers take out of the trainer's memory, and vLLM takes them from a GPU alone.
fn from_memory(plan: &Plan, note: Note) {
    let (carry, engine) = (plan.engine.sync.carry, &plan.engine);
    if !carry.is_from_memory() {
        return;
    }
    let word = carry.word();
    if plan.syncs_adapters() {
        let message = format!("`engine.carry` is \"{word}\", but adapters (lora.sync = \"adapter\") travel in folders");
        note("engine.carry", &["lora.sync"], message, "leave it out, or set lora.sync = \"merged\"");
    }
    if plan.store.url.is_some() {
        let message = format!("`engine.carry` is \"{word}\", but `store.url` brings weights to servers");
        note("engine.carry", &["store.url"], message, "leave one of them out");
    }
    if engine.kinds().contains(&EngineKind::Vllm) && plan.model.device == DeviceName::Cpu {
        let message =
            format!("`engine.carry` is \"{word}\", by which vLLM takes weights from a GPU, and the trainer is on a processor");
        note("engine.carry", &["model.device"], message, "use \"folder\", or model.device = \"cuda\"");
    }
    if engine.launch != Launch::None {
        shared_gpu(engine, plan.model.device, note);
    }
}

/// Servers that the run starts must be on the trainer's GPU to map its memory, and on others for NCCL.
fn shared_gpu(engine: &Engine, device: DeviceName, note: Note) {
    let DeviceName::Cuda(trainers) = device else { return };
    match engine.sync.carry {
        Carry::Ipc if engine.replicas > 1 => {
            let message = format!(
                "`engine.replicas` is {}, but with engine.carry = \"ipc\" a server is on the trainer's GPU, which has room for one",
                engine.replicas
            );
            note("engine.replicas", &["engine.carry"], message, "start one, or use \"broadcast\"");
        }
        Carry::Ipc if engine.devices.iter().any(|device| *device != trainers) => {
            let message = format!(
                "`engine.devices` is {:?}, but with engine.carry = \"ipc\" the server maps memory of the trainer's GPU, cuda:{trainers}",
                engine.devices
            );
            note("engine.devices", &["engine.carry", "model.device"], message, "leave it out, or use \"broadcast\"");
        }
        Carry::Broadcast if engine.devices.contains(&trainers) => {
            let message = format!(
                "`engine.devices` names the trainer's GPU, cuda:{trainers}, and with engine.carry = \"broadcast\" NCCL joins no two processes on one"
            );
            note("engine.devices", &["engine.carry", "model.device"], message, "name others, or use \"folder\" (vLLM: \"ipc\")");
        }
        _ => {}
    }
}

/// Servers that sleep during a step must have nothing else to do, and wake with the next version.
fn sleep(plan: &Plan, note: Note) {
    let engine = &plan.engine;
    if !engine.sync.sleep {
        return;
    }
    let (staleness, every) = (plan.flow.max_staleness, plan.sync.every);
    if staleness > 0 {
        let message = format!(
            "`engine.sleep` is for synchronous runs, and `flow.max_staleness` is {staleness}: servers generate during steps"
        );
        note("engine.sleep", &["flow.max_staleness"], message, "set flow.max_staleness = 0, or leave engine.sleep out");
    }
    if every > 1 {
        let message = format!(
            "`engine.sleep` lets servers sleep until the next version, which `sync.every` = {every} has after {every} steps"
        );
        note("engine.sleep", &["sync.every"], message, "set sync.every = 1");
    }
    if engine.kinds().contains(&EngineKind::OpenAi) {
        let message = "`engine.sleep` is true, which \"openai\" servers have no way of".to_owned();
        note("engine.sleep", &["engine.kind"], message, "leave it out");
    }
}

/// Each started server has a separate GPU.
fn launched(engine: &Engine, note: Note) {
    let devices = &engine.devices;
    if engine.launch == Launch::None {
        for (key, given) in [("engine.devices", !devices.is_empty()), ("engine.gpu_memory", engine.gpu_memory.is_some())] {
            if given {
                let message = format!("`{key}` is set, but the run starts no server");
                note(key, &["engine.launch"], message, "set engine.launch, or start your servers with it");
            }
        }
        return;
    }
    if !devices.is_empty() && devices.len() != engine.replicas {
        let message = format!("`engine.devices` names {} GPUs for {} of `engine.replicas`", devices.len(), engine.replicas);
        note("engine.devices", &["engine.replicas"], message, "name one for each");
    }
    if let Some(twice) = devices.iter().enumerate().find(|(at, device)| devices[..*at].contains(device)) {
        let message = format!("`engine.devices` names GPU {} twice: each server takes most of its GPU's memory", twice.1);
        note("engine.devices", &[], message, "name a GPU for each, or start one server");
    }
    let fixed = engine.env.iter().any(|pair| pair.starts_with("CUDA_VISIBLE_DEVICES="));
    if fixed && !devices.is_empty() {
        let message = "`engine.devices` is set together with CUDA_VISIBLE_DEVICES in `engine.env`".to_owned();
        note("engine.devices", &["engine.env"], message, "leave one of them out");
    }
}

/// Policies that servers of this kind lack.
fn policies(engine: &Engine, kind: EngineKind, note: Note) {
    let pause = engine.sync.pause;
    if matches!(
        (kind, pause),
        (EngineKind::Vllm, PauseMode::Recompute) | (EngineKind::Sglang | EngineKind::Rollflow, PauseMode::Finish)
    ) {
        let message = format!("`engine.pause` is \"{}\", which {} has no way of", pause.word(), kind.word());
        note("engine.pause", &["engine.kind"], message, "use \"keep\" or \"abort\"");
    }
    let carry = engine.sync.carry;
    let help = match (carry, kind) {
        (Carry::Stream, kind) if kind != EngineKind::Rollflow => "use \"folder\", or engine.kind = \"rollflow\"",
        (Carry::Ipc, kind) if kind != EngineKind::Vllm => "use \"broadcast\", or engine.kind = \"vllm\"",
        (Carry::Broadcast, EngineKind::OpenAi | EngineKind::Local) => "leave it out",
        _ => return,
    };
    let message = format!("`engine.carry` is \"{}\", which {} has no way of", carry.word(), kind.word());
    note("engine.carry", &["engine.kind"], message, help);
}

/// Every device that generates needs an engine, and a GPU is named once.
pub(super) fn devices(plan: &Plan, note: Note) {
    let all = plan.devices();
    for (at, (key, device)) in all.iter().enumerate().filter(|(_, (_, device))| matches!(device, DeviceName::Cuda(_))) {
        // A replica device must differ from the policy's device, which a generator may share.
        let of_policy = key.ends_with(".replica_devices").then_some(plan.model.device);
        let before = all[..at].iter().filter(|(other, _)| other == key).map(|(_, device)| *device);
        if before.chain(of_policy).any(|other| other == *device) {
            let message = format!("`{key}` names {:?}, which is in use there already", device.word());
            note(key, &["model.device"], message, "name each device once; generate.workers may be more than there are devices");
        }
    }
    let (devices, engines) = (plan.generate.devices.len(), plan.generators());
    if devices > 0 && plan.engine.is_remote() {
        let message = "`generate.devices` names devices, but servers generate".to_owned();
        note("generate.devices", &["engine"], message, "leave it out: a server chooses its own");
    } else if devices > engines {
        let message = format!("`generate.devices` names {devices} devices for {engines} of `generate.workers`");
        let help = match plan.flow.max_staleness {
            0 => "a synchronous run keeps to one engine: name one device, or make flow.max_staleness 1 or more",
            _ => "set generate.workers to as many, or to a multiple",
        };
        note("generate.devices", &["generate.workers"], message, help);
    }
}
