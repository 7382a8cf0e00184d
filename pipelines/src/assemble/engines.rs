//! Engines of a run: servers of `[engine]`, their clients and their weight sync.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use rollflow::data::Version;
use rollflow::engine::remote::sync::{CachePolicy, WeightSyncManager};
use rollflow::engine::remote::{Fleet, FleetConfig, FleetHandle, InferenceEngine, connect};
use rollflow::engine::settings::{Engine, EngineKind, Launch};
use rollflow::flow::{WeightsRx, WeightsTx};
use rollflow::model::FrozenWeights;
use rollflow::net::Tasks;
use rollflow::prelude::*;
use rollflow::recipe::Net;
use rollflow::stages::sync::{Exporter, RemoteSync, probe_texts};

use crate::assemble::policy::Reader;
use crate::assemble::sections::{Rollouts, Serving};
use crate::assemble::servers::{ServerCommand, Servers, Startup};
use crate::assemble::{data, secrets};

/// Number of prompts whose beginnings probe a sync.
const PROBES: usize = 4;

/// Model folder that servers start from, within the engines' folder.
const START: &str = "start";

/// Engines of a run. Dropping it ends the servers that it started.
pub struct Engines {
    section: Engine,
    handle: FleetHandle,
    exporter: Arc<Exporter>,
    /// Shortest context of the servers, in tokens, if reported.
    context: Option<usize>,
    _servers: Option<Servers>,
}

impl Engines {
    /// Writes the start model into `folder`, starts the recipe's servers and waits until all are
    /// ready. Returns `None` if interrupted.
    pub fn begin(of: Serving, policy: &Policy, folder: &Path, startup: Startup<'_>) -> Result<Option<Self>> {
        let (Serving { engine: section, net, rollouts, .. }, folder) = (&of, of.folder(folder)?);
        let exporter = Arc::new(exporter(&of, policy, &folder)?);
        let servers = match section.launch {
            Launch::None => None,
            _ => {
                let start = folder.join(START);
                exporter.launch_folder(&start).context("writing the model that servers start from")?;
                let Some(servers) = launch(&of, &start, &folder.join("logs"), startup)? else { return Ok(None) };
                Some(servers)
            }
        };
        let engines = section.all_urls().iter().map(|url| engine(section, net, url)).collect::<Result<Vec<_>>>()?;
        let handle = FleetHandle::new(engines);
        let context = check(section, of.adapters.is_some(), rollouts.generate.max_new_tokens, &handle)?;
        Ok(Some(Engines { section: (*section).clone(), handle, exporter, context, _servers: servers }))
    }

    /// Engines and their states.
    pub fn handle(&self) -> &FleetHandle {
        &self.handle
    }

    /// Reader of prompts that fit the servers' context, which may be shorter than the model's.
    pub fn reader(&self, policy: &Policy) -> Reader {
        let mut reader = Reader::from(policy);
        reader.config.max_positions = self.context.unwrap_or(usize::MAX).min(reader.config.max_positions);
        reader
    }

    /// Limits and timeouts of the fleet.
    pub fn fleet_config(&self, policy: &Policy) -> FleetConfig {
        FleetConfig {
            cache_by_version: self.section.sync.cache == CachePolicy::Namespaced,
            vocabulary: policy.config().vocab_size,
            ..FleetConfig::default()
        }
    }

    /// Generator on the engines.
    pub fn generator(&self, policy: &Policy, weights: WeightsRx<()>) -> Generator<Fleet> {
        Generator::remote(&self.handle, self.fleet_config(policy), policy.tokenizer()).weights(weights)
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
        let export = move |version, weights: &Arc<FrozenWeights>| exporter.export(version, weights);
        Ok(RemoteSync::new(self.manager(), export, to).patience(Duration::from_secs_f64(self.section.lost_timeout)))
    }

    fn manager(&self) -> WeightSyncManager {
        WeightSyncManager { fleet: self.handle.clone(), config: self.section.sync.clone() }
    }
}

/// Creates the exporter of policy versions to `folder`.
pub fn exporter(of: &Serving, policy: &Policy, folder: &Path) -> Result<Exporter> {
    let Rollouts { task, chat, generate, model, seed, .. } = of.rollouts;
    let prompts = data::first_prompts(task, chat, seed, PROBES, &policy.into(), generate.max_new_tokens)?;
    let prompts = prompts.iter().map(|prompt| policy.tokenizer().encode_prompt(prompt)).collect::<Result<Vec<_>, _>>()?;
    let texts = probe_texts(&prompts, policy.config().vocab_size);
    // With adapters, neither embedding nor head is reloaded.
    let untie = of.engine.unties() && of.adapters.is_none();
    let tolerance = of.engine.tolerance.unwrap_or(model.precision().server_agreement());
    let exporter = Exporter::new(policy, &folder.join("versions"), of.engine.keep, texts, tolerance);
    let exporter = exporter.with_context(|| format!("making {} (engine.folder)", folder.display()))?.untie(untie);
    Ok(match of.store.weights(of.net.ca_file.as_deref())? {
        Some(publisher) => exporter.through(publisher, of.engine.launched_urls()),
        None => exporter,
    })
}

/// Starts the recipe's servers on the model in `start` and waits until all are ready. Returns
/// `None` if interrupted, after the servers have ended.
pub fn launch(of: &Serving, start: &Path, logs: &Path, startup: Startup<'_>) -> Result<Option<Servers>> {
    let Serving { engine: section, net, adapters, max_staleness, own, .. } = of;
    let precision = of.rollouts.model.precision();
    let commands = ServerCommand::of(section, precision, *adapters, *max_staleness, own, start)?;
    for command in &commands {
        (startup.report)(&format!("starting {} at {}; its log is in {}", command.kind.word(), command.url(), logs.display()));
    }
    let limit = Duration::from_secs_f64(section.start_timeout);
    let tasks = tasks()?;
    let healthy = |url: &str| {
        let Ok(engine) = engine(section, net, url) else { return false };
        let limit = Duration::from_secs(2);
        tasks.block_on(async { tokio::time::timeout(limit, engine.healthy(limit)).await.is_ok_and(|healthy| healthy.is_ok()) })
    };
    Servers::start(&commands, logs, limit, section.restarts, healthy, startup.interrupted)
}

/// Client of one server.
pub fn engine(of: &Engine, net: &Net, url: &str) -> Result<Arc<dyn InferenceEngine>> {
    let endpoint = secrets::endpoint(url, of.token_env.as_ref(), net)?;
    Ok(connect(of.kind(), endpoint, of.model.clone())?)
}

/// Rejects servers that cannot be trained with. Returns the shortest reported context, in tokens.
fn check(section: &Engine, adapters: bool, answer: usize, handle: &FleetHandle) -> Result<Option<usize>> {
    let (tasks, mut shortest) = (tasks()?, None);
    for engine in handle.engines() {
        let found = tasks.block_on(engine.probe())?;
        if !found.weights {
            bail!("{} can't be given weights: {}", engine.name(), found.lacks.join("; "));
        }
        if adapters && !found.adapters {
            bail!(
                "{} takes no adapters: start it with --enable-lora (vLLM with VLLM_ALLOW_RUNTIME_LORA_UPDATING=1, too), or leave lora.sync out",
                engine.name()
            );
        }
        if let Some(context) = found.context {
            if context <= answer {
                bail!(
                    "{} reads {context} tokens, prompt and completion together, which leaves no room for a prompt with generate.max_new_tokens = {answer}: \
                     lower it, or start the server with a larger {}",
                    engine.name(),
                    if section.kind() == EngineKind::Vllm { "--max-model-len" } else { "--context-length" }
                );
            }
            shortest = Some(shortest.map_or(context, |shortest: usize| shortest.min(context)));
        }
        tracing::info!("{}: {}, model {}", engine.name(), found.server, found.model);
    }
    Ok(shortest)
}

/// Tasks for requests outside of a run.
pub fn tasks() -> Result<Tasks> {
    Tasks::new().context("starting the threads for requests")
}
