//! Engines of a run: servers of `[engine]`, their clients and their weight sync.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail};
use parking_lot::Mutex;
use rollflow::data::Version;
use rollflow::engine::remote::sync::{CachePolicy, Carry, Update, WeightSyncManager};
use rollflow::engine::remote::{
    Capabilities, Fleet, FleetConfig, FleetHandle, InferenceEngine, MemberList, Members, connect, parse_address,
};
use rollflow::engine::settings::{Engine, Launch};
use rollflow::flow::WeightsTx;
use rollflow::model::{FrozenWeights, ModelConfig};
use rollflow::net::Tasks;
use rollflow::prelude::*;
use rollflow::ranks::Place;
use rollflow::recipe::{DeviceName, MemoryPlan, Net, Plan};
use rollflow::stages::sync::{Exporter, RemoteSync, SleepServers, probe_texts};
use rollflow::train::RouterReplay;
use rollflow::train::tinker::{SamplerWeights, TinkerExporter};
use rollflow::util::causes::full_message;
use rollflow::util::cores::processes_here;
use rollflow::util::secrets::masked;

use crate::assemble::policy::Reader;
use crate::assemble::rotation::Rotation;
use crate::assemble::servers::{ServerCommand, Servers, Startup};
use crate::assemble::{data, secrets};

/// Number of prompts whose beginnings probe a sync.
const PROBES: usize = 4;

/// Model folder that servers start from, within the engines' folder.
const START: &str = "start";

/// Engines of a run, which get the versions that `E` exports. Dropping it ends the servers that it
/// started.
pub struct Engines<E = Exporter> {
    section: Engine,
    handle: FleetHandle,
    exporter: Arc<E>,
    /// Demands on every server.
    needs: Arc<Mutex<Needs>>,
    net: Net,
    max_staleness: u64,
    /// Servers that come and go, until a stage follows them.
    members: Mutex<Option<Members>>,
    _servers: Option<Servers>,
}

impl Engines<Exporter> {
    /// Writes the start model into `folder`, starts the recipe's servers and waits until all are
    /// ready. Returns `None` if interrupted.
    pub fn begin(plan: &Plan, policy: &Policy, folder: &Path, startup: Startup<'_>) -> Result<Option<Self>> {
        let folder = servers_folder(&plan.engine, folder)?;
        let exporter = Arc::new(exporter(plan, policy, &folder)?);
        let servers = match plan.engine.launch {
            Launch::None => None,
            _ => {
                let Some(servers) = launch(plan, &exporter, &folder, startup)? else { return Ok(None) };
                Some(servers)
            }
        };
        let needs = Needs { rotation: Rotation::of(policy.config()), ..Needs::of(plan, plan.syncs_adapters()) };
        Engines::attached(plan, needs, exporter, servers, startup)
    }

    /// Syncs the policy's weights to the engines. Engines that fail get no work.
    pub fn give(&self, policy: &Policy, version: Version) -> Result<()> {
        let update = self.exporter.export(version, &policy.frozen())?;
        let report = tasks()?.block_on(self.manager().sync(update))?;
        for isolated in report.isolated() {
            tracing::warn!("{isolated}");
        }
        tracing::info!("Synced weights to {} engines (version {version})", report.held());
        Ok(())
    }

    /// Stage that syncs each version to the engines.
    pub fn sync(&self, to: WeightsTx<()>) -> Result<RemoteSync<FrozenWeights>> {
        let exporter = self.exporter.clone();
        Ok(self.sync_by(to, move |version, weights: &Arc<FrozenWeights>| exporter.export(version, weights)))
    }
}

impl Engines<TinkerExporter> {
    /// Engines that run already, for a trainer elsewhere. Returns `None` if interrupted.
    pub fn of_tinker(plan: &Plan, exporter: TinkerExporter, startup: Startup<'_>) -> Result<Option<Self>> {
        Engines::attached(plan, Needs::of(plan, true), Arc::new(exporter), None, startup)
    }

    /// Stage that downloads each version, and syncs it to the engines.
    pub fn sync(&self, to: WeightsTx<()>) -> RemoteSync<SamplerWeights> {
        let exporter = self.exporter.clone();
        self.sync_by(to, move |version, weights: &Arc<SamplerWeights>| exporter.export(version, weights))
    }
}

impl<E> Engines<E> {
    fn attached(
        plan: &Plan,
        mut needs: Needs,
        exporter: Arc<E>,
        servers: Option<Servers>,
        startup: Startup<'_>,
    ) -> Result<Option<Self>> {
        let Plan { engine: section, net, .. } = plan;
        let engines = section.all_urls().iter().map(|url| engine(section, net, url)).collect::<Result<Vec<_>>>()?;
        let handle = FleetHandle::new(engines);
        needs.check(&handle)?;
        let engines = Engines {
            section: section.clone(),
            handle,
            exporter,
            needs: Arc::new(Mutex::new(needs)),
            net: net.clone(),
            max_staleness: plan.flow.max_staleness,
            members: Mutex::new(None),
            _servers: servers,
        };
        Ok(engines.wait_for_members(startup)?.then_some(engines))
    }

    /// Waits until a server of `engine.members` is there, unless others are. Returns false if
    /// interrupted.
    fn wait_for_members(&self, startup: Startup<'_>) -> Result<bool> {
        let Some(mut members) = self.members()? else { return Ok(true) };
        let (tasks, until) = (tasks()?, Instant::now() + seconds(self.section.start_timeout));
        let list = self.section.members.as_deref().unwrap_or_default();
        let mut told = false;
        loop {
            tasks.block_on(members.look());
            if !self.handle.places().is_empty() {
                break;
            }
            if !std::mem::replace(&mut told, true) {
                (startup.report)(&format!("waiting for servers of {list} (engine.members)"));
            }
            if (startup.interrupted)() {
                return Ok(false);
            }
            if Instant::now() > until {
                let (seconds, why) = (self.section.start_timeout, members.complaint());
                let why = if why.is_empty() { "it names none".to_owned() } else { why };
                bail!("no server of {list} (engine.members) within {seconds} s (engine.start_timeout): {why}");
            }
            std::thread::sleep(Duration::from_millis(500));
        }
        // Prompts are chosen by the shortest context of now.
        self.needs.lock().check(&self.handle)?;
        *self.members.lock() = Some(members);
        Ok(true)
    }

    /// The servers of `engine.members`, none of which has joined yet.
    fn members(&self) -> Result<Option<Members>> {
        let Some(list) = &self.section.members else { return Ok(None) };
        let list = list.parse().map_err(|why| anyhow!("engine.members is {list:?}: {why}"))?;
        let drain = seconds(self.section.drain_timeout);
        let (section, net, needs) = (self.section.clone(), self.net.clone(), self.needs.clone());
        let connect = move |url: &str| engine(&section, &net, url).map_err(|error| full_message(error.as_ref()));
        let accept = move |engine: &dyn InferenceEngine, found: &Capabilities| {
            needs.lock().missing(&engine.name(), found).map_or(Ok(()), Err)
        };
        Ok(Some(Members::new(&self.handle, list, drain, connect, accept)))
    }

    /// Engines and their states.
    pub fn handle(&self) -> &FleetHandle {
        &self.handle
    }

    /// Reader of prompts that fit the servers' context, which may be shorter than the model's.
    pub fn reader(&self, of: impl Into<Reader>) -> Reader {
        let mut reader = of.into();
        reader.config.max_positions = self.needs.lock().context.unwrap_or(usize::MAX).min(reader.config.max_positions);
        reader
    }

    /// Limits and timeouts of the fleet, for this model.
    pub fn fleet_config(&self, model: &ModelConfig) -> FleetConfig {
        FleetConfig {
            cache_by_version: self.section.sync.cache == CachePolicy::Namespaced,
            hedge_after: self.section.hedge_after.map(seconds),
            sync_timeout: self.section.sync.longest(),
            // Servers that are lost make no token.
            fleet_timeout: FleetConfig::default().fleet_timeout.max(seconds(self.section.lost_timeout)),
            vocabulary: model.vocab_size,
            routes: model.route_shape().filter(|_| self.needs.lock().routes),
            ..FleetConfig::default()
        }
    }

    /// Stage that puts the engines to sleep before a step, if they are to (`engine.sleep`).
    pub fn sleep(&self) -> Option<SleepServers> {
        self.section.sync.sleep.then(|| SleepServers::new(self.manager()))
    }

    /// Generator of an evaluation on the engines: no trainer uses experts or log-probabilities of its tokens.
    pub fn evaluator(&self, reader: &Reader) -> Generator<Fleet> {
        let config = FleetConfig { routes: None, log_probs: false, ..self.fleet_config(&reader.config) };
        Generator::remote(&self.handle, config, &reader.tokenizer)
    }

    /// Generator on the engines.
    pub fn generator(&self, reader: &Reader) -> Generator<Fleet> {
        Generator::remote(&self.handle, self.fleet_config(&reader.config), &reader.tokenizer)
    }

    fn sync_by<W: Send + Sync + 'static, X: Into<Box<dyn std::error::Error + Send + Sync>>>(
        &self,
        to: WeightsTx<()>,
        export: impl Fn(Version, &Arc<W>) -> Result<Update, X> + Send + Sync + 'static,
    ) -> RemoteSync<W> {
        let sync = RemoteSync::new(self.manager(), export, to).patience(seconds(self.section.lost_timeout));
        match self.members.lock().take() {
            Some(members) => sync.members(members),
            None => sync,
        }
    }

    fn manager(&self) -> WeightSyncManager {
        let config = self.section.sync.clone();
        WeightSyncManager { fleet: self.handle.clone(), config, max_lag: self.max_staleness }
    }
}

/// Texts by which engines are verified: beginnings of the first prompts.
pub fn probes(plan: &Plan, reader: &Reader) -> Result<Vec<Vec<u32>>> {
    let prompts = data::first_prompts(plan, PROBES, reader)?;
    let prompts = prompts.iter().map(|prompt| reader.tokenizer.encode_prompt(prompt)).collect::<Result<Vec<_>, _>>()?;
    Ok(probe_texts(&prompts, reader.config.vocab_size))
}

/// Folder of what servers load: `engine.folder`, or else `default`, as an absolute path.
pub fn servers_folder(of: &Engine, default: &Path) -> Result<PathBuf> {
    std::path::absolute(of.folder.as_deref().unwrap_or(default)).context("the servers' folder (engine.folder)")
}

/// Creates the exporter of policy versions to `folder`.
pub fn exporter(plan: &Plan, policy: &Policy, folder: &Path) -> Result<Exporter> {
    let (section, texts) = (&plan.engine, probes(plan, &policy.into())?);
    // With adapters, neither embedding nor head is reloaded.
    let untie = section.unties() && !plan.syncs_adapters();
    let tolerance = section.tolerance.unwrap_or(plan.model.precision().server_agreement());
    let exporter = Exporter::new(policy, &folder.join("versions"), section.keep, texts, tolerance);
    let exporter = exporter.with_context(|| format!("making {} (engine.folder)", folder.display()))?.untie(untie);
    let exporter = match plan.transfer_format() {
        Some(format) => exporter.dtype(format).from_memory(),
        None => section.dtype.into_iter().fold(exporter, Exporter::dtype),
    };
    Ok(match plan.store.weights(plan.net.ca_file.as_deref())? {
        Some(publisher) => exporter.through(publisher, section.launched_urls()),
        None => exporter,
    })
}

/// Writes the start model into `folder`, starts the recipe's servers on it and waits until all are
/// ready. Returns `None` if interrupted, after the servers have ended.
pub fn launch(plan: &Plan, exporter: &Exporter, folder: &Path, startup: Startup<'_>) -> Result<Option<Servers>> {
    let (Plan { engine: section, net, .. }, own) = (plan, memory_here(plan)?);
    let (start, logs) = (&folder.join(START), &folder.join("logs"));
    exporter.launch_folder(start).context("writing the model that servers start from")?;
    let lora = (plan.lora.as_ref().filter(|_| plan.syncs_adapters()), plan.flow.max_staleness);
    let commands = ServerCommand::of(section, plan.model.precision(), lora, replays_routes(plan), &own, start)?;
    for command in &commands {
        (startup.report)(&format!("starting {} at {}; its log is in {}", command.kind.word(), command.url(), logs.display()));
    }
    let limit = seconds(section.start_timeout);
    let tasks = tasks()?;
    let healthy = |url: &str| {
        let Ok(engine) = engine(section, net, url) else { return false };
        let limit = Duration::from_secs(2);
        tasks.block_on(async { tokio::time::timeout(limit, engine.healthy(limit)).await.is_ok_and(|healthy| healthy.is_ok()) })
    };
    Servers::start(&commands, logs, limit, section.restarts, healthy, startup.interrupted)
}

/// Memory of this process and of other ranks on the GPUs of this host, which servers may share. Empty
/// without a GPU: such a run leaves all of them to its servers, and its model need not be here.
fn memory_here(plan: &Plan) -> Result<Vec<MemoryPlan>> {
    if plan.devices().iter().all(|(_, device)| *device == DeviceName::Cpu) {
        return Ok(Vec::new());
    }
    let (own, visible) = (MemoryPlan::of(plan)?, std::env::var("CUDA_VISIBLE_DEVICES").ok());
    Ok(match (plan.model.device, Place::of_environment()?) {
        (DeviceName::Cuda(first), Some(place)) => with_ranks(own, place.other_gpus(first, visible.as_deref(), processes_here())),
        _ => own,
    })
}

/// With the plans of other ranks on these GPUs of this host, which take what the first does on its own.
fn with_ranks(mut own: Vec<MemoryPlan>, gpus: Vec<usize>) -> Vec<MemoryPlan> {
    let of = |gpu| Some(MemoryPlan { device: DeviceName::Cuda(gpu).word(), ..own.first()?.clone() });
    let others: Vec<MemoryPlan> = gpus.into_iter().filter_map(of).collect();
    own.extend(others);
    own
}

/// Returns true if the trainer needs the experts of tokens.
fn replays_routes(plan: &Plan) -> bool {
    plan.pipeline.reinforces() && plan.train.router_replay != RouterReplay::Off
}

/// A time of a recipe. More than thirty years are thirty years, which every clock can add.
pub fn seconds(of: f64) -> Duration {
    Duration::from_secs_f64(of.min(1e9))
}

/// Addresses of all servers, those of `engine.members` as they are now.
pub fn urls(of: &Engine) -> Result<Vec<String>> {
    let Some(list) = &of.members else { return Ok(of.all_urls()) };
    let parsed: MemberList = list.parse().map_err(|why| anyhow!("engine.members is {list:?}: {why}"))?;
    let found = tasks()?.block_on(parsed.addresses()).with_context(|| format!("reading {list} (engine.members)"))?;
    Ok(of.all_urls().into_iter().chain(found).collect())
}

/// Client of one server. Its address may name its kind.
pub fn engine(of: &Engine, net: &Net, url: &str) -> Result<Arc<dyn InferenceEngine>> {
    let (kind, url) = parse_address(url, of.kind()).map_err(|why| anyhow!("{}: {why}", masked(url)))?;
    let endpoint = secrets::endpoint(url, of.token_env.as_ref(), net)?;
    Ok(connect(kind, endpoint, of.model.clone())?)
}

/// What a run needs of each of its servers.
#[derive(Clone, Debug)]
struct Needs {
    adapters: bool,
    /// Whether answers must come with the experts of their tokens.
    routes: bool,
    /// Whether log-probabilities must be those after penalties, temperature and truncation.
    reshapes: bool,
    /// Whether servers must free their memory during steps.
    sleep: bool,
    /// Way of weights.
    carry: Carry,
    /// Longest completion, in tokens.
    answer: usize,
    /// Shortest context of the servers so far, in tokens, if reported.
    context: Option<usize>,
    /// How the trainer rotates positions by LongRoPE.
    rotation: Option<Rotation>,
}

impl Needs {
    fn of(plan: &Plan, adapters: bool) -> Self {
        let (sync, generate) = (&plan.engine.sync, &plan.generate);
        let (sleep, carry, answer) = (sync.sleep, sync.carry, generate.max_new_tokens);
        let routes = replays_routes(plan);
        let reshapes = plan.pipeline.reinforces() && !generate.sampling().keeps_log_probs();
        Needs { adapters, routes, reshapes, sleep, carry, answer, context: None, rotation: None }
    }

    /// Rejects servers that cannot be trained with, and finds the shortest context.
    fn check(&mut self, handle: &FleetHandle) -> Result<()> {
        let tasks = tasks()?;
        for engine in handle.engines() {
            let found = tasks.block_on(engine.probe())?;
            if let Some(why) = (Needs { context: None, ..self.clone() }).missing(&engine.name(), &found) {
                bail!("{why}");
            }
            self.context = [self.context, found.context].into_iter().flatten().min();
            tracing::info!("{}: {}, model {}", engine.name(), found.server, found.model);
        }
        Ok(())
    }

    /// What the run needs of the engine of this name in vain.
    fn missing(&self, name: &str, found: &Capabilities) -> Option<String> {
        let flag = "--context-length (vLLM: --max-model-len)";
        if !found.weights {
            return Some(format!("{name} can't be given weights: {}", found.lacks.join("; ")));
        }
        if self.adapters && !found.adapters {
            return Some(format!(
                "{name} takes no adapters: start it with --enable-lora (vLLM with VLLM_ALLOW_RUNTIME_LORA_UPDATING=1, too), or leave lora.sync out"
            ));
        }
        if self.routes && !found.routes {
            return Some(format!(
                "{name} does not return the experts of its tokens: start it with --enable-return-routed-experts, or leave train.router_replay out"
            ));
        }
        if self.reshapes && found.raw_log_probs {
            return Some(format!(
                "{name} reports log-probabilities from before penalties, temperature and truncation: start it with \
                 --logprobs-mode processed_logprobs, or set generate.temperature = 1 without repetition_penalty, top_p, top_k and min_p"
            ));
        }
        if self.sleep && !found.sleeps {
            return Some(format!(
                "{name} does not free its memory when it sleeps and keep its weights: start it with --enable-memory-saver \
                 --enable-weights-cpu-backup (vLLM: --enable-sleep-mode), or leave engine.sleep out"
            ));
        }
        if self.carry.is_from_memory() && !found.transfers.contains(&self.carry) {
            let backend = if self.carry == Carry::Ipc { "ipc" } else { "nccl" };
            return Some(format!(
                "{name} takes no weights by engine.carry = \"{}\": start vLLM with --weight-transfer-config '{{\"backend\": \"{backend}\"}}'{}, \
                 or leave engine.carry out",
                self.carry.word(),
                if self.carry == Carry::Ipc { " and VLLM_ALLOW_INSECURE_SERIALIZATION=1" } else { "" }
            ));
        }
        let context = found.context?;
        if context <= self.answer {
            return Some(format!(
                "{name} reads {context} tokens, prompt and completion together, which leaves no room for a prompt with generate.max_new_tokens = {}: \
                 lower it, or start the server with a larger {flag}",
                self.answer
            ));
        }
        if let Some(why) = self.rotation.and_then(|rotation| rotation.missing(name, context, found.rotates_by_context)) {
            return Some(why);
        }
        let shortest = self.context.filter(|shortest| context < *shortest)?;
        Some(format!(
            "{name} reads {context} tokens, and the run has chosen its prompts for servers that read {shortest}: start it with a larger {flag}"
        ))
    }
}

/// Tasks for requests outside of a run.
pub fn tasks() -> Result<Tasks> {
    Tasks::new().context("starting the threads for requests")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clocks_add_a_time_of_any_length() {
        assert!([0.0, 1e18, 1e300].iter().all(|of| Instant::now().checked_add(seconds(*of)).is_some()));
        assert_eq!(seconds(0.5), Duration::from_millis(500));
    }

    #[test]
    fn servers_leave_the_gpus_of_other_ranks_to_them() {
        let plan = |gpu| MemoryPlan { device: DeviceName::Cuda(gpu).word(), parts: Vec::new(), has: None };
        let own = with_ranks(vec![plan(0)], vec![1, 2, 3]);
        let gpus: Vec<usize> = own.iter().filter_map(MemoryPlan::gpu).collect();
        let engine = Engine { launch: Launch::Vllm, replicas: 4, ..Engine::default() };
        assert_eq!((gpus.clone(), engine.gpus(8, &gpus)), (vec![0, 1, 2, 3], vec![4, 5, 6, 7]));
        assert!(with_ranks(Vec::new(), vec![1]).is_empty(), "a run without servers plans nothing");
    }

    fn needs() -> Needs {
        let carry = Carry::Folder;
        Needs { adapters: false, routes: false, reshapes: false, sleep: false, carry, answer: 512, context: None, rotation: None }
    }

    #[test]
    fn a_server_without_the_runs_way_of_weights_is_refused() {
        let found = |transfers| Capabilities { weights: true, transfers, ..Capabilities::default() };
        let broadcasts = Needs { carry: Carry::Broadcast, ..needs() };
        let refused = broadcasts.missing("a", &found(vec![Carry::Ipc])).unwrap_or_default();
        assert!(refused.contains("{\"backend\": \"nccl\"}"), "{refused}");
        assert_eq!(broadcasts.missing("a", &found(vec![Carry::Broadcast])), None);
        assert_eq!(needs().missing("a", &found(Vec::new())), None);
    }

    /// The ratio of a loss compares the trainer with what tokens were drawn from.
    #[test]
    fn a_server_whose_log_probabilities_are_not_of_what_it_samples_from_is_refused() {
        let found = |raw_log_probs| Capabilities { weights: true, raw_log_probs, ..Capabilities::default() };
        let reshapes = Needs { reshapes: true, ..needs() };
        let refused = reshapes.missing("a", &found(true)).unwrap_or_default();
        assert!(refused.contains("--logprobs-mode processed_logprobs"), "{refused}");
        assert_eq!((reshapes.missing("a", &found(false)), needs().missing("a", &found(true))), (None, None));
    }

    #[test]
    fn a_server_that_would_lose_its_weights_asleep_is_refused_with_the_flags_to_start_it_with() {
        let found = |sleeps| Capabilities { weights: true, sleeps, ..Capabilities::default() };
        let sleeps = Needs { sleep: true, ..needs() };
        let refused = sleeps.missing("a", &found(false)).unwrap_or_default();
        assert!(refused.contains("--enable-memory-saver --enable-weights-cpu-backup"), "{refused}");
        assert_eq!(sleeps.missing("a", &found(true)), None);
    }
}
