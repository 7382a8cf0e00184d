//! `rollflow engine`: servers without a run.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use clap::{Args, Subcommand};
use rollflow::engine::remote::InferenceEngine;
use rollflow::engine::remote::sync::sync_weights_to_engines;
use rollflow::engine::settings::{Engine as Section, EngineKind, Launch as Kind};
use rollflow::flow::Interrupts;
use rollflow::prelude::Policy;
use rollflow::recipe::{Net, Plan};

use super::plans::{RecipeArgs, load};
use super::policies::policy_by;
use super::{End, choice, out};
use crate::assemble::engines;
use crate::assemble::servers::Startup;
use crate::registry::Registry;

/// Kinds of engine that are servers.
const SERVERS: &[EngineKind] = &[EngineKind::Vllm, EngineKind::Sglang, EngineKind::Rollflow, EngineKind::OpenAi];

/// Start inference servers, look at them, or give them weights.
#[derive(Args)]
pub struct Engine {
    #[command(subcommand)]
    what: What,
}

#[derive(Subcommand)]
enum What {
    Launch(Launch),
    Status(Status),
    Sync(Sync),
}

/// Start the servers of a recipe and keep them until Ctrl-C; only they are ended then.
#[derive(Args)]
struct Launch {
    #[command(flatten)]
    recipe: RecipeArgs,
    /// A model folder, a checkpoint or a run to serve; without it, the recipe's model.
    #[arg(long, value_name = "DIR")]
    model: Option<PathBuf>,
    /// Folder for the weights that servers load first, and for their logs.
    #[arg(long, value_name = "DIR", default_value = "runs/engine")]
    out: PathBuf,
}

/// Say how servers are, and what they serve.
#[derive(Args)]
struct Status {
    /// A recipe, or servers as http://host:port.
    #[arg(required = true)]
    of: Vec<String>,
    /// Kind of the servers given by URL.
    #[arg(long, value_parser = choice(SERVERS, EngineKind::word), default_value = "vllm")]
    kind: EngineKind,
    /// Override a key of the recipe, as in engine.port=8500; may be given several times.
    #[arg(long = "set", value_name = "KEY=VALUE")]
    sets: Vec<String>,
}

/// Sync the weights of a model folder, a checkpoint or a run to the servers of a recipe, and verify
/// them.
#[derive(Args)]
struct Sync {
    #[command(flatten)]
    recipe: RecipeArgs,
    /// Weights to sync.
    from: PathBuf,
    /// Version that the servers report.
    #[arg(long, default_value = "1")]
    version: u64,
    /// Folder for the weights, which the servers can read.
    #[arg(long, value_name = "DIR", default_value = "runs/engine")]
    out: PathBuf,
}

impl Engine {
    pub fn run(self, registry: &Registry) -> Result<()> {
        match self.what {
            What::Launch(of) => of.run(registry),
            What::Status(of) => of.run(registry),
            What::Sync(of) => of.run(registry),
        }
    }
}

/// The model at `path`, with any adapters that it has, or else the recipe's.
fn policy(plan: &Plan, path: Option<&Path>) -> Result<Policy> {
    path.map_or_else(|| crate::assemble::policy::policy(plan), |path| policy_by(plan, path))
}

impl Launch {
    fn run(self, registry: &Registry) -> Result<()> {
        let mut plan = load(&self.recipe, registry)?;
        plan.engine.launch = match plan.engine.kind() {
            EngineKind::Vllm => Kind::Vllm,
            EngineKind::Sglang => Kind::Sglang,
            kind => {
                bail!("engine.kind is {:?}: there is no server to start; set engine.launch = \"vllm\" or \"sglang\"", kind.word())
            }
        };
        let out = engines::servers_folder(&plan.engine, &self.out)?;
        // From here on, so that they don't outlive it, however early it is ended.
        let interrupts = Interrupts::listen().context("listening for Ctrl-C")?;
        let policy = policy(&plan, self.model.as_deref())?.merged();
        let exporter = engines::exporter(&plan, &policy, &out)?;
        let startup = Startup { report: &out::complain, interrupted: &|| interrupts.pressed() };
        let Some(servers) = engines::launch(&plan, &exporter, &out, startup)? else { return Ok(()) };
        for url in plan.engine.launched_urls() {
            out::line(&format!("ready: {url}"))?;
        }
        while !interrupts.pressed() {
            if let Some(why) = servers.ended() {
                bail!("{why}");
            }
            std::thread::sleep(Duration::from_millis(100));
        }
        Ok(())
    }
}

impl Status {
    fn run(self, registry: &Registry) -> Result<()> {
        let (engine, net) = match &self.of[..] {
            [recipe] if !recipe.contains("://") => {
                let args = RecipeArgs { recipe: recipe.into(), sets: self.sets };
                let plan = load(&args, registry)?;
                (plan.engine, plan.net)
            }
            urls => {
                ensure!(self.sets.is_empty(), "--set overrides keys of a recipe, and none is named");
                (Section { kind: self.kind, urls: urls.to_vec(), ..Section::default() }, Net::default())
            }
        };
        ensure!(engine.is_remote(), "the recipe generates in its own process; there is no server to look at");
        let (tasks, mut well) = (engines::tasks()?, true);
        for url in engines::urls(&engine)? {
            let engine = engines::engine(&engine, &net, &url)?;
            let told = tasks.block_on(status(engine.as_ref()));
            well &= told.is_ok();
            out::line(&told.unwrap_or_else(|error| format!("{error}")))?;
        }
        if well { Ok(()) } else { Err(End::Said(1).into()) }
    }
}

async fn status(engine: &dyn InferenceEngine) -> Result<String> {
    let limit = Duration::from_secs(20);
    engine.healthy(limit).await?;
    let found = engine.probe().await?;
    let served = match engine.weights().filter(|_| found.weights) {
        Some(control) => {
            control.served().await?.map_or("nothing that it was given".to_owned(), |label| format!("version {label}"))
        }
        None => "what it was started with".to_owned(),
    };
    let can = [
        ("spans", found.spans),
        ("weights", found.weights),
        ("checksums", found.checksums),
        ("adapters", found.adapters),
        ("routes", found.routes),
    ];
    let can: Vec<&str> = can.iter().filter(|(_, can)| *can).map(|(name, _)| *name).collect();
    let context = found.context.map_or(String::new(), |context| format!(", context {context}"));
    let lacks: String = found.lacks.iter().map(|lack| format!("\n  lacks: {lack}")).collect();
    let (name, server, model, can) = (engine.name(), found.server, found.model, can.join(", "));
    Ok(format!("{name}: {server}, model {model}{context}; serves {served}; has {can}{lacks}"))
}

impl Sync {
    fn run(self, registry: &Registry) -> Result<()> {
        let plan = load(&self.recipe, registry)?;
        let policy = policy(&plan, Some(&self.from))?;
        // Servers that take adapters were started with what is under them.
        let policy = if plan.syncs_adapters() { policy } else { policy.merged() };
        let out = engines::servers_folder(&plan.engine, &self.out)?;
        let urls = engines::urls(&plan.engine)?;
        let all = urls
            .iter()
            .map(|url| engines::engine(&plan.engine, &plan.net, url))
            .collect::<Result<Vec<Arc<dyn InferenceEngine>>>>()?;
        let update = engines::exporter(&plan, &policy, &out)?.export(self.version, &policy.frozen())?;
        let report = engines::tasks()?.block_on(sync_weights_to_engines(all, update, &plan.engine.sync))?;
        for (url, result) in urls.iter().zip(&report.engines) {
            out::line(&match result {
                Ok(times) => {
                    let times: Vec<String> = times.iter().map(|(phase, time)| format!("{phase} {time:.0?}")).collect();
                    format!("{url} holds version {} ({})", report.version, times.join(", "))
                }
                Err(isolated) => isolated.to_string(),
            })?;
        }
        if report.held() == urls.len() { Ok(()) } else { Err(End::Said(1).into()) }
    }
}
